"""The command about devices."""

from __future__ import annotations

from shared_rpc.cli.discovery import the_server
from shared_rpc.cli.options import BasePath, Json, Socket
from shared_rpc.cli.rendering import as_json, size, table

__all__ = ["devices"]


def devices(socket: Socket = None, base_path: BasePath = None, json: Json = False) -> None:
    """List the devices that a server has memory on, and how much of them it uses."""
    with the_server(socket, base_path) as client:
        items = client.list_devices()
    if json:
        as_json(items)
        return
    table(
        "",
        ["device", "name", "memory>", "free>", "used>", "quota>"],
        [
            (
                item["id"],
                item["name"],
                size(item["total"]),
                size(item["free"]) if item["free"] is not None else "-",
                size(item["used"]),
                size(item["limit"]) if item["limit"] is not None else "none",
            )
            for item in items
        ],
    )
