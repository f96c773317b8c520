"""The commands that move objects between tiers."""

from __future__ import annotations

import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Annotated, Literal

import typer

from shared_rpc.cli.discovery import the_server
from shared_rpc.cli.options import BasePath, Json, Socket
from shared_rpc.cli.rendering import bars, listing, origin, size, span
from shared_rpc.errors import ConfigurationError, one_line
from shared_rpc.operations.client import Client
from shared_rpc.protocol.infos import MoveInfo

#: Seconds between two polls of a move, for its bar.
_LOOK = 0.2

Target = Annotated[str, typer.Argument(metavar="OBJECT|ENDPOINT", help="An object's id or cache key, or an endpoint.")]


def evict(
    target: Target,
    to: Annotated[Literal["host", "file"] | None, typer.Option("--to", help="The tier; the next lower one by default.")] = None,
    socket: Socket = None,
    base_path: BasePath = None,
    json: Json = False,
) -> None:
    """Move an object, or all objects of an endpoint, from their device to a lower tier. Active objects stay."""
    with the_server(socket, base_path) as client:
        chosen = _target(client, target)
        moves = _moved(client, lambda: client.evict(chosen, to))
    _show(moves, "freed>", json)


def restore(target: Target, socket: Socket = None, base_path: BasePath = None, json: Json = False) -> None:
    """Move an object, or all objects of an endpoint, back to their device, for all processes."""
    with the_server(socket, base_path) as client:
        chosen = _target(client, target)
        moves = _moved(client, lambda: client.restore(chosen))
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


def _moved(client: Client, move: Callable[[], list[MoveInfo]]) -> list[MoveInfo]:
    """Move objects; on a terminal with a bar for each active move."""
    from rich.console import Console

    console = Console(stderr=True)
    if not (console.is_terminal and sys.stdout.isatty()):
        return move()
    from rich.progress import DownloadColumn, TaskID

    known: dict[str, TaskID] = {}
    with ThreadPoolExecutor(1) as threads, bars(console, DownloadColumn(binary_units=True)) as shown:
        moving = threads.submit(move)
        while not wait([moving], timeout=_LOOK).done:
            for item in client.list_objects():
                if "moving" in item:
                    if item["object_id"] not in known:
                        known[item["object_id"]] = shown.add_task(f"{one_line(origin(item))} to {item['moving']['to']}")
                    done, total = item["moving"]["done"], item["moving"]["total"]
                    shown.update(known[item["object_id"]], completed=done, total=total)
        return moving.result()


def _show(moves: list[MoveInfo], column: str, json: bool) -> None:
    if not moves and not json:
        print("nothing is to be moved")
        return
    columns: dict[str, Callable[[MoveInfo], object]] = {
        "object": lambda move: move["object_id"],
        "of": lambda move: move["cache_key"] or move["endpoint"] or "buffer",
        "tier": lambda move: move["tier"],
        column: lambda move: size(move["nbytes"]),
        "copied>": lambda move: size(move["copied"]),
        "took>": lambda move: span(move["seconds"]),
    }
    listing("", moves, columns, json)
