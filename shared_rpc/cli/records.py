"""The commands for files of records."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from shared_rpc.cli.discovery import the_server
from shared_rpc.cli.options import Arguments, BasePath, Json, Misuse, Socket, keywords
from shared_rpc.cli.rendering import as_json, size
from shared_rpc.cli.tiers import object_of
from shared_rpc.client.exported import RecordBytes
from shared_rpc.errors import ConfigurationError, one_line

File = Annotated[str, typer.Argument(metavar="FILE", help="The file of the record.")]


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
    with the_server(socket, base_path) as client:
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
    with FileRecord(file) as opened, the_server(socket, base_path) as client:
        record: RecordBytes = opened
        try:
            made = client.adopt(record, endpoint, **kwargs)
        except TypeError as error:
            raise ConfigurationError(str(error)) from error
    if json:
        as_json(
            {
                "object_id": made.object_id,
                "endpoint": made.endpoint,
                "cache_key": made.cache_key,
                "generation": made.generation,
                "nbytes": made.nbytes,
            }
        )
    else:
        took = time.perf_counter() - begin
        print(f"{one_line(made.cache_key)} ({size(made.nbytes)}) is generation {made.generation}, read in {took:.2f} s")
