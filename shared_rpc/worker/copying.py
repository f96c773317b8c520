"""The worker's part in moving objects between tiers: it copies segments that a GPU's driver has to do with."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from shared_rpc.errors import CapabilityError, SharedRPCError, to_wire
from shared_rpc.execution.device_memory import DeviceMemory
from shared_rpc.execution.threads import Job, WorkerThreads
from shared_rpc.memory.copies import CopyCancelled, CopyOrder, Steps
from shared_rpc.memory.mapping import MAPPINGS
from shared_rpc.memory.segments import Segment
from shared_rpc.protocol import worker as w
from shared_rpc.protocol.frames import Frame
from shared_rpc.protocol.messages import Message
from shared_rpc.protocol.records import SegmentInfo

if TYPE_CHECKING:
    from shared_rpc.memory.gpu_copies import GpuCopies


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
        orders = _ordered(message, frame.detach_fds())
        stop = self._stops[number] = threading.Event()

        def tell(done: int, total: int) -> None:
            self._on_loop(lambda: self._send(w.CopyProgress(done), number))

        def work() -> tuple[w.SegmentsCopied, list[Segment]]:
            return _answered(lambda: self._memory.gpu_copies, orders, Steps(0, tell, stop.is_set))

        def done(answer: tuple[w.SegmentsCopied, list[Segment]]) -> None:
            del self._stops[number]
            self._answer(number, *answer)

        self._threads.start(Job(work, done))

    def _answer(self, number: int, message: w.SegmentsCopied, new: Sequence[Segment]) -> None:
        try:
            self._send(message, number, b"", tuple([segment.fileno() for segment in new]))
        except (SharedRPCError, OSError) as error:
            self._unmap([segment.info.id for segment in new])
            self._send(_refusal(CapabilityError(f"cannot send {len(new)} descriptors of copies: {error}")), number)
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


def _ordered(message: w.CopySegments, fds: list[int]) -> list[CopyOrder]:
    """Return what is ordered; the segments own the descriptors."""
    left = iter(fds)

    def owned(info: SegmentInfo) -> Segment:
        return Segment.owning(info, next(left))

    sources = [owned(info) for info in message.sources]
    targets = [owned(info) if number in message.targets else None for number, info in enumerate(message.wanted)]
    return [CopyOrder(*parts) for parts in zip(sources, message.wanted, message.digests, targets, strict=True)]


def _answered(
    copies: Callable[[], GpuCopies], orders: Sequence[CopyOrder], steps: Steps
) -> tuple[w.SegmentsCopied, list[Segment]]:
    """Make the ordered segments, and close the orders'; return the answer, and the new segments, which go with it."""
    try:
        # A safe point: memory that was dropped is returned to the device before more is allocated.
        MAPPINGS.drain()
        made = copies().copy(orders, steps)
    except CopyCancelled:
        return w.SegmentsCopied([], [], stopped=True), []
    except Exception as error:
        return _refusal(error), []
    finally:
        for order in orders:
            order.source.close()
            if order.target is not None:
                order.target.close()
    answer = w.SegmentsCopied([one.segment.info for one in made], [one.digest for one in made])
    new: list[Segment] = []
    for order, one in zip(orders, made, strict=True):
        if order.target is None:
            new.append(one.segment)
        else:
            one.segment.close()
    return answer, new


def _refusal(error: Exception) -> w.SegmentsCopied:
    """Return the answer to orders of which nothing was made."""
    known = error if isinstance(error, SharedRPCError) else CapabilityError(f"{type(error).__name__}: {error}")
    code, text, detail = to_wire(known)
    return w.SegmentsCopied([], [], code, text, detail)
