"""The worker's part in moving objects between tiers: it copies segments that a GPU's driver has to do with."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from shared_rpc.errors import CapabilityError, SharedRPCError
from shared_rpc.memory.copies import Steps
from shared_rpc.memory.ordered_copies import answered, ordered, refusal
from shared_rpc.memory.segments import Segment
from shared_rpc.protocol import worker as w
from shared_rpc.protocol.frames import Frame
from shared_rpc.protocol.messages import Message
from shared_rpc.server.device_memory import DeviceMemory
from shared_rpc.server.threads import Job, WorkerThreads

__all__ = ["Copying"]

#: Copies at once: one object may leave a GPU while another one comes, in both directions of the bus.
_THREADS = 2


class Copying:
    """Copies that the broker orders. On the worker's loop.

    :param send: sends a message, its request id, a payload and descriptors, which are duplicated; on the loop only.
    :param on_loop: has something called on the loop, from any thread.
    """

    def __init__(self, send: Callable[..., None], on_loop: Callable[[Callable[[], None]], None]) -> None:
        self._send = send
        self._on_loop = on_loop
        self._memory = DeviceMemory("cpu")
        self._threads = WorkerThreads(_THREADS)
        #: What stops a copy, by the number of its request.
        self._stops: dict[int, threading.Event] = {}

    @property
    def handlers(self) -> Mapping[type[Message], Callable[[Frame, Any], None]]:
        """The handlers of the broker's messages about copies."""
        return {w.CopySegments: self._copy, w.StopCopy: self._stop, w.ForgetCopies: self._forget}

    def _copy(self, frame: Frame, message: w.CopySegments) -> None:
        number = frame.request_id
        orders = ordered(message, frame.detach_fds())
        stop = self._stops[number] = threading.Event()

        def tell(done: int, total: int) -> None:
            self._on_loop(lambda: self._send(w.CopyProgress(done), number))

        def work() -> tuple[w.SegmentsCopied, list[Segment]]:
            return answered(lambda: self._memory.gpu_copies, orders, Steps(0, tell, stop.is_set))

        def done(answer: tuple[w.SegmentsCopied, list[Segment]]) -> None:
            del self._stops[number]
            self._answer(number, *answer)

        self._threads.start(Job(work, done))

    def _answer(self, number: int, message: w.SegmentsCopied, new: Sequence[Segment]) -> None:
        try:
            self._send(message, number, b"", tuple([segment.fileno() for segment in new]))
        except (SharedRPCError, OSError) as error:
            self._unmap([segment.info.id for segment in new])
            self._send(refusal(CapabilityError(f"cannot send {len(new)} descriptors of copies: {error}")), number)
        finally:
            for segment in new:
                segment.close()

    def _stop(self, frame: Frame, message: w.StopCopy) -> None:
        stop = self._stops.get(frame.request_id)
        if stop is not None:
            stop.set()

    def _forget(self, frame: Frame, message: w.ForgetCopies) -> None:
        self._unmap(message.copies)

    def _unmap(self, copies: Sequence[str]) -> None:
        """Unmap in a thread, which may take long."""
        if "gpu_copies" in vars(self._memory):  # otherwise nothing was ever mapped
            threading.Thread(
                target=self._memory.gpu_copies.forget, args=(copies,), name="shared-rpc-unmapping", daemon=True
            ).start()
