"""Memory ordered by the broker: a worker, which has the GPU drivers, allocates and copies it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

from shared_rpc.errors import CapabilityError, SharedRPCError, to_wire
from shared_rpc.execution.device_memory import DeviceMemory
from shared_rpc.memory.copies import CopyOrder
from shared_rpc.memory.segments import Segment
from shared_rpc.protocol import messages as m
from shared_rpc.protocol import worker as w
from shared_rpc.protocol.frames import Frame
from shared_rpc.protocol.messages import Message
from shared_rpc.protocol.records import SegmentInfo

#: An answer, and the segments whose descriptors are sent with it and then closed.
_Answer = tuple[Message, Sequence[Segment]]


class OrderedMemory(DeviceMemory):
    """The broker's requests for memory. On the worker's loop.

    Host memory stays mapped until :class:`~shared_rpc.protocol.worker.ForgetCopies`.

    :param send: sends a message, its request id, a payload and descriptors, which are duplicated; on the loop only.
    :param on_loop: schedules a call on the loop, from any thread.
    """

    def __init__(self, send: Callable[..., None], on_loop: Callable[[Callable[[], None]], None]) -> None:
        super().__init__("cpu")
        self._send = send
        self._on_loop = on_loop
        #: Unanswered requests, by number.
        self._requests: dict[int, asyncio.Task[None]] = {}

    @property
    def handlers(self) -> Mapping[type[Message], Callable[[Frame, Any], None]]:
        """The handlers of the broker's messages about memory."""
        return {
            w.Allocate: lambda frame, message: self._begin(frame.request_id, self._allocate(message)),
            w.FreeBytes: lambda frame, message: self._begin(frame.request_id, self._free(message)),
            w.CopySegments: self._begin_copy,
            w.ForgetCopies: lambda frame, message: self.forget(message.copies),
        }

    def stop(self, number: int) -> None:
        """Stop the work for a request, which is still answered."""
        task = self._requests.get(number)
        if task is not None:
            asyncio.get_running_loop().call_soon(task.cancel)  # after its first step: its clean-up runs only then

    def _begin(self, number: int, work: Coroutine[Any, Any, _Answer]) -> None:
        task = self._requests[number] = asyncio.get_running_loop().create_task(self._answer(number, work))
        task.add_done_callback(lambda _: self._requests.pop(number, None))

    async def _answer(self, number: int, work: Coroutine[Any, Any, _Answer]) -> None:
        try:
            self._reply(number, *(await work))
        except (Exception, asyncio.CancelledError) as error:
            text = f"the worker (pid {os.getpid()}) cannot make or send memory: {type(error).__name__}: {error}"
            self._send(m.Error(*to_wire(error if isinstance(error, SharedRPCError) else CapabilityError(text))), number)

    def _reply(self, number: int, message: Message, segments: Sequence[Segment]) -> None:
        try:
            self._send(message, number, b"", tuple([segment.owner for segment in segments]))
        except (SharedRPCError, OSError):
            self.forget([segment.info.id for segment in segments])
            raise
        finally:
            for segment in segments:
                segment.close()

    async def _allocate(self, message: w.Allocate) -> _Answer:
        segment = await self.allocate(message.device, message.nbytes)
        return w.Allocated(segment.info), [segment]

    async def _free(self, message: w.FreeBytes) -> _Answer:
        return w.Allocated(free=await self.free(message.device)), []

    def _begin_copy(self, frame: Frame, message: w.CopySegments) -> None:
        self._begin(frame.request_id, self._copy(frame.request_id, _ordered(message, frame.detach_fds())))

    async def _copy(self, number: int, orders: Sequence[CopyOrder]) -> _Answer:
        def report(done: int, total: int) -> None:
            self._on_loop(lambda: self._send(w.CopyProgress(done), number))

        try:
            made = await self.copy(orders, report)
        finally:
            for order in orders:
                order.close()
        new: list[Segment] = []
        for order, one in zip(orders, made, strict=True):
            if order.target is None:
                new.append(one.segment)
            else:
                one.segment.close()
        return w.SegmentsCopied([one.segment.info for one in made], [one.digest for one in made]), new

    def _watch(self, order: CopyOrder, made: Segment) -> None:
        """Do nothing: the broker reports the end of a copy."""


def _ordered(message: w.CopySegments, fds: list[int]) -> list[CopyOrder]:
    """Return the orders of a message; their segments own the descriptors."""
    left = iter(fds)

    def owned(info: SegmentInfo) -> Segment:
        return Segment.owning(info, next(left))

    sources = [owned(info) for info in message.sources]
    targets = [owned(info) if number in message.targets else None for number, info in enumerate(message.wanted)]
    return [CopyOrder(*parts) for parts in zip(sources, message.wanted, message.digests, targets, strict=True)]
