"""The event loop of a server or a worker."""

from __future__ import annotations

import importlib.util
from collections.abc import Awaitable, Callable

import anyio

__all__ = ["run_loop"]

#: Whether uvloop is installed.
USES_UVLOOP = importlib.util.find_spec("uvloop") is not None


def run_loop(main: Callable[[], Awaitable[None]]) -> None:
    """Run a coroutine function in a new event loop of this thread: uvloop's where it is installed."""
    anyio.run(main, backend="asyncio", backend_options={"use_uvloop": USES_UVLOOP})
