"""Freeing of memory of dropped and evicted objects, and those who wait for it."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from shared_rpc.memory.closing import CLOSER
from shared_rpc.memory.inventory import free_bytes

__all__ = ["lacks_room", "until_freed", "wait_for_room"]


def lacks_room() -> bool:
    """Return whether memory is being freed without which new memory may be refused: any of a GPU's, which is allocated as a
    whole, or more of the host's than is free.
    """
    if not CLOSER:
        return False
    left = dict(CLOSER.left())
    on_host = left.pop("cpu", 0)
    return bool(left) or on_host > (free_bytes("cpu") or 0)


def wait_for_room() -> None:
    """Wait until the memory of objects dropped so far is free, where :func:`lacks_room`. Not for a loop."""
    if lacks_room():
        CLOSER.wait()


async def until_freed() -> None:
    """Wait, on a loop, until all that was dropped so far is free: whoever asked for that may allocate now."""
    if not CLOSER:
        return
    loop, freed = asyncio.get_running_loop(), asyncio.Event()

    def wake() -> None:
        with suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(freed.set)

    CLOSER.notify(wake)
    await freed.wait()
