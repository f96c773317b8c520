"""Requests to one worker and their answers: runs, allocations and copies alike."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from shared_rpc.errors import WorkerCrashed, from_wire
from shared_rpc.protocol import messages as m
from shared_rpc.protocol import worker as w
from shared_rpc.protocol.frames import Frame, close_all
from shared_rpc.protocol.messages import Message
from shared_rpc.protocol.socket import FdOwner

#: The highest number of a request; numbers start at 1, and 0 marks messages outside of requests.
_LAST = (1 << 32) - 1


class _Pending(NamedTuple):
    """An unanswered request."""

    take: Callable[[Any, Frame], bool]
    lost: Callable[[WorkerCrashed], object]


class WorkerRequests:
    """The unanswered requests to one worker. On the broker's loop only.

    :param send: the :meth:`FramedStream.send` of the worker's link.
    """

    def __init__(self, send: Callable[..., None]) -> None:
        self._send = send
        self._number = 0
        self._pending: dict[int, _Pending] = {}
        #: The monotonic time of the last answer; initially of the worker's start.
        self.answered_at = time.monotonic()

    def __len__(self) -> int:
        """Return the number of unanswered requests."""
        return len(self._pending)

    def begin(
        self,
        message: Message,
        take: Callable[[Any, Frame], bool],
        lost: Callable[[WorkerCrashed], object],
        payload: bytes = b"",
        owners: tuple[FdOwner, ...] = (),
    ) -> int:
        """Send a request, and return its number.

        :param take: called with each message about it and the message's frame; returns True if that was the last one.
        :param lost: called with the reason if the worker ends first.
        :raises ProtocolError: like :meth:`FramedStream.send`.
        """
        number = self._number = self._number % _LAST + 1
        self._send(message, number, payload, owners)
        self._pending[number] = _Pending(take, lost)
        return number

    def take(self, message: Message, frame: Frame) -> None:
        """Dispatch a message to its request. The frame keeps the descriptors of a message without a request."""
        number = frame.request_id
        pending = self._pending.get(number)
        if pending is not None and pending.take(message, frame):
            self.answered_at = time.monotonic()
            self._pending.pop(number, None)

    def fail(self, crash: WorkerCrashed) -> None:
        """End all requests, after the worker has ended."""
        while self._pending:
            self._pending.pop(next(iter(self._pending))).lost(crash)

    async def request(
        self,
        message: Message,
        owners: tuple[FdOwner, ...] = (),
        *,
        progressed: Callable[[w.CopyProgress], object] = lambda news: None,
        unused: Callable[[Any], object] = lambda answer: None,
    ) -> tuple[Any, list[int]]:
        """Send a request; return its answer, and the descriptors of the answer's frame, which the caller owns.

        On cancellation the worker is asked to stop. It answers nevertheless.

        :param progressed: called with each progress report before the answer.
        :param unused: called with the answer after a cancellation; its descriptors are closed.
        :raises ProtocolError: like :meth:`FramedStream.send`.
        :raises WorkerCrashed: if the worker ends before it answers.
        :raises SharedRPCError: the worker's error.
        """
        answered: asyncio.Future[tuple[Any, list[int]]] = asyncio.get_running_loop().create_future()

        def take(message: Message, frame: Frame) -> bool:
            if answered.done():
                if not isinstance(message, (w.CopyProgress, m.Error)):
                    unused(message)
            elif isinstance(message, w.CopyProgress):
                progressed(message)
            elif isinstance(message, m.Error):
                answered.set_exception(from_wire(message.code, message.text, message.detail))
            else:
                answered.set_result((message, frame.detach_fds()))
            return not isinstance(message, w.CopyProgress)

        def lost(crash: WorkerCrashed) -> None:
            if not answered.done():
                answered.set_exception(crash)

        number = self.begin(message, take, lost, b"", owners)
        del owners  # the frames of an error may outlive the segments
        try:
            return await answered
        except asyncio.CancelledError:
            if answered.cancelled():
                self._send(w.Stop(), number)
            elif answered.exception() is None:  # the answer arrived in the same turn of the loop
                answer, received = answered.result()
                close_all(received)
                unused(answer)
            raise
