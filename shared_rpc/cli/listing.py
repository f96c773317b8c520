"""The list of servers, and the end of a command. Neither loads the parser, which takes most of the time of a short command."""

from __future__ import annotations

import io
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from shared_rpc.cli.discovery import live_servers, pass_over
from shared_rpc.cli.rendering import ago, as_json, complain, contents, listing, size
from shared_rpc.errors import SharedRPCError
from shared_rpc.scripts.listing import live_zygotes


@contextmanager
def command_line() -> Iterator[None]:
    """Run a command: an error of the library is one line on standard error, and exit code 1, or 2 for misuse. Ctrl-C and a
    closed pipe end it as they end the commands of the parser: silently.
    """
    # Characters that the terminal cannot show are replaced.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    try:
        yield
    except SharedRPCError as error:
        complain(str(error))
        raise SystemExit(getattr(error, "status", 1)) from None
    except KeyboardInterrupt:
        raise SystemExit(128 + signal.SIGINT) from None
    except BrokenPipeError:
        raise SystemExit(1) from None
    finally:
        _flush_output()


def _flush_output() -> None:
    """Flush standard output. A closed pipe is no error, now or at the interpreter's end."""
    stream = sys.__stdout__
    if stream is not None and not stream.closed:
        try:
            stream.flush()
        except BrokenPipeError:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, stream.fileno())
            os.close(null)


def print_servers(base_path: str | None, json: bool) -> None:
    """Print the live servers of this user, and the zygotes of 'shared-rpc run'."""
    with live_servers(base_path) as clients:
        infos = [client.get_server_info() for client in clients]
    zygotes = live_zygotes(base_path, pass_over)
    if json:
        as_json([*({"kind": "server", **info} for info in infos), *zygotes])
        return
    if not infos:
        print("no server is alive")
    else:
        listing(
            "",
            infos,
            {
                "socket": lambda info: info["socket_path"],
                "pid>": lambda info: info["pid"],
                "device": lambda info: info["device"],
                "endpoints": lambda info: ", ".join(info["endpoints"]),
                "objects>": contents,
                "memory>": lambda info: size(info["nbytes"]),
                "leases>": lambda info: info["leases"],
                "clients>": lambda info: info["clients"],
                "up": lambda info: ago(info["started_at"]),
            },
        )
    if zygotes:
        listing(
            "\nzygotes",
            zygotes,
            {
                "zygote": lambda one: one["key"],
                "pid>": lambda one: one["pid"],
                "has imported": lambda one: ", ".join(one["preload"]),
                "scripts>": lambda one: one["runs"],
                "memory>": lambda one: size(one["rss"]),
                "idle>": lambda one: f"{one['idle']:.0f} s",
                "ends after>": lambda one: f"{one['idle_exit']:.0f} s",
            },
        )
