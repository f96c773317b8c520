"""The end of the main code, after which a server continues, and any other process ends."""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any, Protocol

from shared_rpc.errors import SharedRPCError
from shared_rpc.lifecycle.ending import end_now, is_child
from shared_rpc.lifecycle.signals import wait_for_signal
from shared_rpc.server.server import Server


class Serves(Protocol):
    """A provider, which may have a server at the end of the main code."""

    def _serves_at_end(self) -> bool:
        """Return True if it continues to serve."""

    def _server_at_end(self) -> Server | None:
        """Return the server that continues, started if necessary."""

    def close(self) -> None:
        """End the provider's role."""


#: Providers that are not closed: a server's provider must outlive the names of its script.
_providers: dict[Serves, None] = {}


def register(provider: Serves) -> None:
    """Include this provider in the check at the end of the main code."""
    global _main_file
    _providers[provider] = None
    # Not at the import of this module, which may have happened in another process: one that was forked to run this script.
    _main_file = getattr(sys.modules["__main__"], "__file__", _main_file)


def unregister(provider: Serves) -> None:
    """Exclude a closed provider from the check."""
    _providers.pop(provider, None)


def _end_of_main() -> None:
    """Continue to serve if a provider does, and only then begin to end: replaces ``threading._shutdown``.

    After the end of the main code, in any way, ``Py_FinalizeEx`` calls that attribute of the module, in the main thread and
    before anything else. Until the original is called, the interpreter has not begun to shut down: imports, threads and
    registrations work as in the main code. The callbacks of ``atexit`` come after it, and those of
    ``threading._register_atexit`` are its first step; in either, ``concurrent.futures.process``, joblib and others can no
    longer be imported. Read in Python 3.11 to 3.14; children of :mod:`multiprocessing` call it too, and repeated calls are
    possible.
    """
    # Neither a child of the server nor a failed script serves; a forked child's providers are cleared.
    goes_on = not _ended.is_set() and not is_child() and not hasattr(sys, "last_value")
    _ended.set()
    try:
        if goes_on:
            _remember_main_file()
            _serve()
    except KeyboardInterrupt:  # before the wait for signals has begun: the same request to end
        close_all()
    finally:
        _wait_for_threads()


_ended = threading.Event()
#: The script's file, which Python forgets at the end of the main code.
_main_file: str | None = None
_threading: Any = threading  # private names have no annotations
_wait_for_threads: Callable[[], None] = _threading._shutdown
_threading._shutdown = _end_of_main


def _serve() -> None:
    """Serve until the process must end, if any provider continues to serve."""
    serving: list[Server] = []

    def begin() -> list[Server] | None:
        serving.extend(server for server in (provider._server_at_end() for provider in _providers) if server is not None)
        for server in serving:
            print(f"shared_rpc: serving at {server.socket_path} until SIGINT or SIGTERM", file=sys.stderr, flush=True)
        return serving or None

    def end() -> None:
        for server in serving:
            server.stop()

    try:
        if any(provider._serves_at_end() for provider in _providers):
            wait_for_signal(begin, end=end, last=True)
    except Exception as error:
        close_all()
        print(f"shared_rpc: {error}" if isinstance(error, SharedRPCError) else traceback.format_exc(), file=sys.stderr)
        end_now(1)
    # The thread of an endpoint that still runs cannot be ended, and the interpreter must not be finalised under it.
    if any(server.busy or server.running for server in serving):
        end_now(0)


def _remember_main_file() -> None:
    """Restore the main module's file: spawned children run it, and :mod:`inspect` reads the sources of its classes."""
    main = sys.modules["__main__"]
    if _main_file is not None and not hasattr(main, "__file__"):
        main.__file__ = _main_file


def close_all() -> None:
    """Close every provider of this process, so that none continues to serve after the main code."""
    for provider in list(_providers):
        provider.close()
