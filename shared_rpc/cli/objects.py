"""The command for objects, and its subcommands."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Annotated, Literal

import typer

from shared_rpc.cli.discovery import the_server
from shared_rpc.cli.options import Arguments, BasePath, Json, Misuse, Socket, as_misuse, is_list, keywords
from shared_rpc.cli.rendering import ago, as_json, command_of, copies_of, listing, origin, several, size, span, tier_of
from shared_rpc.errors import ConfigurationError, one_line
from shared_rpc.operations.client import Client
from shared_rpc.protocol.infos import HolderInfo, ListedObjectInfo, MoveInfo

#: Maximum seconds for a move of an object, or of all objects of an endpoint, to a slow disk.
_MOVING = 3600.0

Target = Annotated[str, typer.Argument(metavar="OBJECT|ENDPOINT", help="An object's id or cache key, or an endpoint.")]
File = Annotated[str, typer.Argument(metavar="FILE", help="The file of the record.")]


def objects(context: typer.Context, socket: Socket = None, base_path: BasePath = None, json: Json = False) -> None:
    """List the objects of a server, with the processes that hold them; its commands change them."""
    if not is_list(context):
        return
    with the_server(socket, base_path) as client:
        items = client.list_objects()
    columns: dict[str, Callable[[ListedObjectInfo], object]] = {
        "object": lambda item: item["object_id"],
        "of": origin,
        "size>": lambda item: size(item["nbytes"]),
        "private>": lambda item: size(item["private_nbytes"]),
        "device": lambda item: item["device"],
        "tier": tier_of,
        "copies?": copies_of,
        "generation>": lambda item: item["generation"],
        "cached": lambda item: "yes" if item["cached"] and item["kind"] == "result" else "no",
        "active>": lambda item: item["active"],
        "held by": lambda item: ", ".join(map(_holder, item["holders"])) or "none",
        "age>": lambda item: ago(item["created_at"]),
        "last used>": lambda item: ago(item["last_accessed_at"]),
    }
    listing("", items, columns, json)


def _holder(holder: HolderInfo) -> str:
    if holder["kind"] == "task":
        return f"task {holder['session']}, not fetched"
    pid = holder["pid"]
    command = one_line(command_of(pid))
    if not command:
        return str(pid)
    return f"{pid} ({command if len(command) <= 40 else command[:39] + '…'})"


def invalidate(
    endpoint: str,
    arguments: Annotated[Arguments, typer.Argument(help="key=value for one call; none for the whole endpoint")] = None,
    socket: Socket = None,
    base_path: BasePath = None,
    json: Json = False,
) -> None:
    """Drop cached results; clients keep those that they hold."""
    kwargs = keywords(arguments)
    with the_server(socket, base_path) as client, as_misuse():
        count = client.invalidate_call_cache(endpoint, **kwargs) if kwargs else client.invalidate_endpoint_cache(endpoint)
    if json:
        as_json({"endpoint": endpoint, "invalidated": count})
    else:
        print(f"{several(count, 'cached result')} of {endpoint} dropped")


def evict(
    target: Target,
    to: Annotated[Literal["host", "file"] | None, typer.Option("--to", help="The tier; the next lower one by default.")] = None,
    socket: Socket = None,
    base_path: BasePath = None,
    json: Json = False,
) -> None:
    """Move an object, or all objects of an endpoint, from their device to a lower tier. Active objects stay."""
    with the_server(socket, base_path, timeout=_MOVING) as client:
        moves = client.evict(_target(client, target), to)
    _show(moves, "freed>", json)


def restore(target: Target, socket: Socket = None, base_path: BasePath = None, json: Json = False) -> None:
    """Move an object, or all objects of an endpoint, back to their device, for all processes."""
    with the_server(socket, base_path, timeout=_MOVING) as client:
        moves = client.restore(_target(client, target))
    _show(moves, "taken>", json)


def object_of(client: Client, name: str) -> str:
    """Return the id of an object given by its cache key; any other name is unchanged."""
    cached = [info["object_id"] for info in client.list_objects() if info["cached"] and info["cache_key"] == name]
    return cached[0] if cached else name


def _target(client: Client, name: str) -> str:
    """Return the id of the object, or the name of the endpoint, for a name.

    :raises ConfigurationError: if there is neither.
    """
    chosen = object_of(client, name)
    if chosen not in client.list_endpoints() and all(info["object_id"] != chosen for info in client.list_objects()):
        raise ConfigurationError(f"there is no object and no endpoint {name!r}: see 'shared-rpc objects'")
    return chosen


def _show(moves: list[MoveInfo], column: str, json: bool) -> None:
    columns: dict[str, Callable[[MoveInfo], object]] = {
        "object": lambda move: move["object_id"],
        "of": lambda move: move["cache_key"] or move["endpoint"] or "buffer",
        "tier": lambda move: move["tier"],
        column: lambda move: size(move["nbytes"]),
        "copied>": lambda move: size(move["copied"]),
        "took>": lambda move: span(move["seconds"]),
    }
    listing("", moves, columns, json)


def export_object(
    object_id: Annotated[str, typer.Argument(metavar="OBJECT", help="The object's id or cache key.")],
    file: File,
    socket: Socket = None,
    base_path: BasePath = None,
    json: Json = False,
) -> None:
    """Write an object to a file; 'shared-rpc objects import' restores it without building it."""
    from shared_rpc.extras import record_file

    begin = time.perf_counter()
    with the_server(socket, base_path, timeout=_MOVING) as client:
        chosen = object_of(client, object_id)
        header = record_file.save(client, chosen, file)
    if json:
        facts = {"endpoint": header.endpoint, "cache_key": header.cache_key, "generation": header.generation}
        as_json({"object_id": chosen, "file": file, "nbytes": header.nbytes, **facts})
    else:
        took = time.perf_counter() - begin
        print(f"{one_line(header.cache_key or header.endpoint)} ({size(header.nbytes)}) written to {file} in {took:.2f} s")


def import_file(
    file: File,
    arguments: Annotated[Arguments, typer.Argument(help="key=value for the call, with --endpoint")] = None,
    endpoint: Annotated[
        str | None,
        typer.Option("--endpoint", help="The endpoint of the call; by default that of the exported object."),
    ] = None,
    socket: Socket = None,
    base_path: BasePath = None,
    json: Json = False,
) -> None:
    """Make the object in a file the cached result of its call, as if the server had built it."""
    from shared_rpc.extras.record_file import FileRecord

    kwargs = keywords(arguments)
    if kwargs and endpoint is None:
        raise Misuse("arguments are those of a call: name its endpoint with --endpoint")
    begin = time.perf_counter()
    with FileRecord(file) as record, the_server(socket, base_path, timeout=_MOVING) as client, as_misuse():
        made = client.adopt(record, endpoint, **kwargs)
    if json:
        as_json({name: getattr(made, name) for name in ("object_id", "endpoint", "cache_key", "generation", "nbytes")})
    else:
        took = time.perf_counter() - begin
        print(f"{one_line(made.cache_key)} ({size(made.nbytes)}) is generation {made.generation}, read in {took:.2f} s")
