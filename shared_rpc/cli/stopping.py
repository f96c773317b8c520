"""``shared-rpc stop``."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from shared_rpc import Client
from shared_rpc.cli.discovery import live_servers, the_server
from shared_rpc.cli.options import BasePath, Json, Misuse, Socket
from shared_rpc.cli.rendering import as_json, complain, several, size
from shared_rpc.errors import SharedRPCError
from shared_rpc.protocol.infos import StopInfo
from shared_rpc.scripts.listing import stop_zygotes


def stop(
    socket: Socket = None,
    base_path: BasePath = None,
    every: Annotated[bool, typer.Option("--all", help="All live servers of this user, and all zygotes.")] = False,
    if_idle: Annotated[
        bool, typer.Option("--if-idle", help="Only if no other client has a connection, a lease or a task.")
    ] = False,
    json: Json = False,
) -> None:
    """Stop a server, wait until it has exited, and print what it held. Clients keep their memory."""
    if every and socket is not None:
        raise Misuse("--all and --socket contradict each other: use one of them")
    ended: list[StopInfo | dict[str, Any]] = []
    failed = False

    def passed_over(why: str) -> None:
        nonlocal failed
        failed = True
        complain(why)

    if every:
        with live_servers(base_path) as clients:
            # A server with several sockets ends as a whole.
            for client in {client.get_server_info()["pid"]: client for client in clients}.values():
                try:
                    ended.append(_stop(client, if_idle, json))
                except SharedRPCError as error:
                    passed_over(f"{client.socket_path}: {error}")
        for zygote in stop_zygotes(base_path, passed_over):
            ended.append(zygote)
            if not json:
                print(f"stopped the zygote at {zygote['socket_path']} (pid {zygote['pid']})")
    else:
        with the_server(socket, base_path) as client:
            ended.append(_stop(client, if_idle, json))
    if json:
        as_json(ended)
    elif not ended and not failed:
        print("no server is alive")
    if failed:
        raise typer.Exit(1)


def _stop(client: Client, if_idle: bool, quiet: bool) -> StopInfo:
    held = client.stop_server(if_idle)
    if not quiet:
        counts = {"client": held["clients"], "lease": held["leases"], "task": held["tasks"]}
        used = [several(count, name) for name, count in counts.items() if count]
        print(
            f"stopped pid {held['pid']} at {', '.join(held['socket_paths'])}: it held {several(held['objects'], 'object')}, "
            f"{size(held['nbytes'])}; used by others: {', '.join(used) or 'nothing'}"
        )
    return held
