"""Device memory whose operations block, for tests."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any

from shared_rpc.execution.device_memory import DeviceMemory
from shared_rpc.memory.copies import LowerCopy
from shared_rpc.memory.segments import Segment
from tests.kit.processes import eventually


class BlockingMemory:
    """A :class:`DeviceMemory` whose methods return when the work is done.

    :param loop: the memory's loop, which runs in another thread; by default a new one.
    """

    def __init__(self, memory: DeviceMemory, loop: asyncio.AbstractEventLoop | None = None) -> None:
        self.memory = memory
        if loop is None:
            loop = asyncio.new_event_loop()
            threading.Thread(target=loop.run_forever, daemon=True).start()
        self._loop = loop

    def lower(self, *args: Any, **kwargs: Any) -> list[LowerCopy]:
        """Copy segments to a lower tier."""
        return self._result(self.memory.lower(*args, **kwargs))

    def raise_(self, *args: Any) -> list[Segment]:
        """Raise copies to segments."""
        return self._result(self.memory.raise_(*args))

    def allocate(self, device: str, nbytes: int) -> Segment:
        """Allocate zeroed memory."""
        return self._result(self.memory.allocate(device, nbytes))

    def cancelled(self, *args: Any) -> list[int]:
        """Cancel a :meth:`lower` at its first step; return the bytes that each of its steps reported."""
        done: list[int] = []
        tasks: list[asyncio.Task[list[LowerCopy]]] = []
        over = threading.Event()

        def progress(count: int, of: int) -> None:
            done.append(count)
            self._loop.call_soon_threadsafe(tasks[0].cancel)
            assert over.wait(30)

        async def begin() -> None:
            # On the loop, before the task begins: its first step may precede this coroutine's result.
            tasks.append(asyncio.create_task(self.memory.lower(*args, progress=progress)))
            tasks[0].add_done_callback(lambda _: over.set())

        self._result(begin())
        eventually(lambda: over.is_set() and not self.memory._threads.busy)
        assert tasks[0].cancelled()
        return done

    def _result(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(60)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.memory, name)
