"""The short-lived memory of a client's calls, in one session."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence

from shared_rpc.errors import SharedRPCError
from shared_rpc.lifecycle.finalizer import FINALIZER, weakly
from shared_rpc.memory.chunk_references import ChunkReferences
from shared_rpc.memory.mapping import MAPPINGS
from shared_rpc.memory.pool import Pool, PoolOptions
from shared_rpc.memory.segments import Segment
from shared_rpc.protocol import messages as m
from shared_rpc.protocol.frames import Frame
from shared_rpc.protocol.records import SegmentInfo

#: Seconds without a request after which a separate message returns chunks, and between two polls of a GPU that uses some.
_IDLE = 0.05


class TransferClosed(Exception):
    """The error for a request of a session that has ended, to be repeated in the next one."""


class ClientTransfer:
    """The pool for arguments, and the used chunks of the server's pool of results.

    :param flush: returns chunks to the server, in this object's session; from another thread. An error means that the
        server does not have them.
    """

    def __init__(self, options: PoolOptions, flush: Callable[[ClientTransfer, list[int]], object]) -> None:
        self.arguments = Pool(options)
        self.references = ChunkReferences(weakly(self._chunk_dropped))
        self._flush = flush
        #: The server's arenas. Their descriptors are sent once, perhaps in a reply that is processed after the next one.
        self._spare: dict[str, Segment] = {}
        #: True if another thread will return chunks soon.
        self._scheduled = False
        #: The time at which a request last returned chunks (time.monotonic()).
        self._last_return = 0.0
        self.closed = False

    def returned(self) -> list[int]:
        """Return the chunks known to be unused by this process, for a request that returns them."""
        self._last_return = time.monotonic()
        self.poll(check_only=True)
        return self.references.pop_returned() if self.references.free else []

    def poll(self, *, check_only: bool = False) -> None:
        """Find the chunks that this process no longer uses: a safe point, best called when there is nothing to do but wait.

        :param check_only: see :meth:`ChunkReferences.poll`.
        """
        references = self.references
        if references.dropped or references.fenced:
            references.poll(check_only=check_only)
            if references.fenced and not self._scheduled:
                FINALIZER.start()
                self._schedule()

    def learn(self, message: m.Message, frame: Frame) -> None:
        """Record the arenas of a reply, which may be processed after a later reply."""
        if not isinstance(message, m.Result) or len(message.segments) != len(frame.fds) + len(message.kept):
            return
        fds = iter(frame.fds)
        for number, info in enumerate(message.segments):
            fd = next(fds) if number not in message.kept else -1
            if fd >= 0 and info.arena and info.id not in self._spare:
                self._keep_spare(Segment.owning(info, os.dup(fd)))

    def _keep_spare(self, arena: Segment) -> None:
        self._spare[arena.info.id] = arena
        if self.closed:  # by another thread
            self._close_spare(arena.info.id)

    def _close_spare(self, segment_id: str) -> None:
        segment = self._spare.pop(segment_id, None)
        if segment is not None:  # no other thread does it
            segment.close()

    def segments(self, infos: Sequence[SegmentInfo], kept: Sequence[int], fds: list[int]) -> list[Segment]:
        """Make a reply's segments, which own the descriptors of the list, except kept segments, which arrived before.

        A segment of an ended session has no descriptor.
        """
        found: list[Segment] = []
        for number, info in enumerate(infos):
            if number not in kept:
                found.append(Segment(info))
                found[-1].adopt(fds)
                if info.arena and info.id not in self._spare:
                    self._keep_spare(found[-1].duplicate())
            else:
                spare = self._spare.get(info.id)
                found.append(Segment(info, spare.descriptor if spare is not None else None))
        return found

    def discard(self, message: m.Message, frame: Frame) -> None:
        """Process the memory of an abandoned reply."""
        if not isinstance(message, m.Result) or len(message.segments) != len(frame.fds) + len(message.kept):
            return
        for segment in self.segments(message.segments, message.kept, frame.fds):
            segment.close()
        self.arguments.release(message.freed)
        self.references.release(message.chunks)

    def _chunk_dropped(self) -> None:
        # Runs in a finaliser.
        if not self._scheduled and not self.closed:
            self._schedule()

    def _schedule(self) -> None:
        self._scheduled = True
        FINALIZER.submit(self._return_chunks, after=_IDLE)

    def _return_chunks(self) -> None:
        """Return unused chunks, unless the next request probably comes at once and takes them along."""
        self._scheduled = False
        if self.closed:
            return
        if time.monotonic() - self._last_return >= _IDLE:
            self.references.poll(background=True)
            numbers = self.references.pop_returned()
            if numbers:
                try:
                    self._flush(self, numbers)
                except (TransferClosed, SharedRPCError, OSError):
                    self.references.requeue(numbers)  # for the next request
            if not self.references.fenced:
                return
        self._schedule()

    def close(self) -> None:
        """End with the session. Memory is freed when neither side has a tensor over it."""
        self.closed = True
        self.references.close()
        for segment_id in tuple(self._spare):  # another thread may continue an interrupted close()
            self._close_spare(segment_id)
        self.arguments.close()
        MAPPINGS.release_slabs()
