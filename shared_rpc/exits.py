"""What a process does when its main code has ended: a server goes on, everybody else ends."""

from __future__ import annotations

import concurrent.futures.thread  # noqa: F401  before the exit hook below, see _at_end_of_main()
import multiprocessing
import os
import sys
import threading
import traceback
from collections.abc import Iterable
from typing import TYPE_CHECKING, NoReturn

from shared_rpc.errors import SharedRPCError
from shared_rpc.server import Server
from shared_rpc.server.signals import wait_for_signal

if TYPE_CHECKING:
    from shared_rpc.provider import Provider

__all__ = ["close_all", "end_now_if_busy", "forget", "remember"]

#: Those that are not closed: a server's provider must live on when the names of its script are gone.
_providers: dict[Provider, None] = {}


def remember(provider: Provider) -> None:
    """Ask this provider at the end."""
    _providers[provider] = None


def forget(provider: Provider) -> None:
    """It is closed."""
    _providers.pop(provider, None)


def _at_end_of_main() -> None:
    """Ask every provider, when the script's main code ends, whether it goes on serving.

    Threading's own exit callbacks run in the main thread before anything is torn down, last registered first.
    ``concurrent.futures`` registers one that forbids new work; it is imported above so that ours runs before it, and
    endpoints that use its pools still work. ``atexit`` would be too late for them.
    """
    if multiprocessing.parent_process() is not None or hasattr(sys, "last_value"):
        return  # a child of the server, or a script that failed: it must end
    serving: list[Server] = []

    def begin() -> list[Server] | None:
        serving.extend(server for server in (provider._server_at_end() for provider in _providers) if server is not None)
        for server in serving:
            print(f"shared_rpc: serving at {server.socket_path} until SIGINT or SIGTERM", file=sys.stderr, flush=True)
        return serving or None

    try:
        if any(provider._serves_at_end() for provider in _providers):
            wait_for_signal(begin)
    except Exception as error:
        close_all()
        print(f"shared_rpc: {error}" if isinstance(error, SharedRPCError) else traceback.format_exc(), file=sys.stderr)
        _end_now(1)
    for server in serving:
        server.stop()
    end_now_if_busy(serving)


threading._register_atexit(_at_end_of_main)  # type: ignore[attr-defined]


def _after_fork() -> None:
    for provider in _providers:
        provider._after_fork()


os.register_at_fork(after_in_child=_after_fork)


def close_all() -> None:
    """Close every provider of this process, so that none goes on serving when its main code ends."""
    for provider in list(_providers):
        provider.close()


def end_now_if_busy(servers: Iterable[Server]) -> None:
    """End the process where a stopped server still runs an endpoint: its thread cannot be ended, and the interpreter
    must not be torn down under it.
    """
    if any(server.busy or server.running for server in servers):
        _end_now(0)


def _end_now(code: int) -> NoReturn:
    # From an exit callback there is no other way to set the exit code either.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
