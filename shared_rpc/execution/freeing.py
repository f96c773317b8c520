"""Freeing of memory of dropped and evicted objects, and those who wait for it."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from shared_rpc.memory.closing import CLOSER
from shared_rpc.memory.inventory import free_bytes


def frees_are_pending() -> bool:
    """Return True if an allocation may fail because frees are pending: any of a GPU's memory, which is allocated as a whole, or
    more of the host's than is free.
    """
    if not CLOSER:
        return False
    left = dict(CLOSER.left())
    on_host = left.pop("cpu", 0)
    return bool(left) or on_host > (free_bytes("cpu") or 0)


async def until_freed() -> None:
    """Wait until all memory that was dropped so far is free. It is the one place where a request waits for that."""
    if not CLOSER:
        return
    loop, freed = asyncio.get_running_loop(), asyncio.Event()

    def wake() -> None:
        with suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(freed.set)

    CLOSER.notify(wake)
    await freed.wait()
