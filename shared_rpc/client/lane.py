"""What a client uses for the short-lived memory of its calls, in one session."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from shared_rpc.errors import SharedRPCError
from shared_rpc.memory.borrowing import Borrower
from shared_rpc.memory.pool import Pool, PoolOptions
from shared_rpc.memory.segments import Segment, SegmentInfo
from shared_rpc.reaper import REAPER
from shared_rpc.wire import messages as m
from shared_rpc.wire.frames import Frame

__all__ = ["Lane", "LaneClosed"]

#: Seconds after which chunks are given back that no request has taken along.
_IDLE = 0.05


class LaneClosed(Exception):
    """The session that a request was made for has ended: it is to be made anew for the one that began."""


class Lane:
    """The pool for arguments, and the chunks of the server's pool that results lie in.

    :param flush: tells the server of chunks, from another thread.
    """

    def __init__(self, options: PoolOptions, flush: Callable[[list[int]], None]) -> None:
        self.arguments = Pool(options, "this client's pool for arguments")
        self.borrower = Borrower(self._chunk_dropped)
        self._flush = flush
        #: Arenas of the server's that came with replies which nobody took.
        self._spare: dict[str, Segment] = {}
        self._flushing = False
        #: Whether the server waits for memory.
        self._starved = False
        self.closed = False

    def to_give_back(self) -> list[int]:
        """The chunks that this process has done with. A safe point; who asks must tell the server of them."""
        self.borrower.settle()
        return self.borrower.returned()

    def starved(self) -> m.Free:
        """What to tell a server that needs memory, now and for as long as the call takes; waits for the GPU."""
        self._starved = True
        self.borrower.wait()
        return m.Free(self.borrower.returned())

    def segments(self, infos: Sequence[SegmentInfo], kept: Sequence[int], fds: Sequence[int]) -> list[Segment]:
        """A reply's segments. They own the descriptors that came; those that are kept have been mapped before, or lie here."""
        self._starved = False
        sent = iter(fds)
        found: list[Segment] = []
        for number, info in enumerate(infos):
            spare = self._spare.get(info.id) if number in kept else None
            if spare is not None:
                found.append(spare.duplicate())
            else:
                found.append(Segment(info, -1 if number in kept else next(sent)))
        return found

    def discard(self, message: m.Message, frame: Frame) -> None:
        """A result came, and nobody takes it. Its descriptors of arenas will not come again."""
        if not isinstance(message, m.Result) or len(message.segments) != len(frame.fds) + len(message.kept):
            return
        for number, segment in enumerate(self.segments(message.segments, message.kept, frame.take_fds())):
            if number in message.arenas and not segment.closed and segment.info.id not in self._spare:
                self._spare[segment.info.id] = segment
            else:
                segment.close()
        self.arguments.give(message.freed)
        self.borrower.unused(message.chunks)

    def _chunk_dropped(self) -> None:
        # Runs in a finaliser.
        if self._starved:
            REAPER.submit(self._flush_now)
        elif not self._flushing and not self.closed:
            self._flushing = True
            REAPER.submit(self._flush_now, after=_IDLE)

    def _flush_now(self) -> None:
        self._flushing = False
        if self._starved:
            self.borrower.wait()
        else:
            self.borrower.settle(background=True)
        numbers = [] if self.closed else self.borrower.returned()
        if numbers:
            try:
                self._flush(numbers)
            except (SharedRPCError, OSError):
                self.borrower.put_back(numbers)  # for the next request, if there is one

    def close(self) -> None:
        """The session ended. The memory goes when neither side has a tensor over it."""
        self.closed = True
        self.borrower.close()
        for segment in self._spare.values():
            segment.close()
        self._spare.clear()
        self.arguments.close()
