"""What sessions use for the short-lived memory of their calls, in the process that runs the endpoints."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress

import msgspec

from shared_rpc.errors import ProtocolError, SegmentNotFound
from shared_rpc.memory.borrowing import Borrower
from shared_rpc.memory.pool import Pool, PoolOptions
from shared_rpc.memory.segments import Segment, SegmentInfo, new_segment_id
from shared_rpc.reaper import REAPER

__all__ = ["Lane", "Lanes"]

#: Arenas of one client; one that doubles its pool comes to a dozen.
_MAX_ARENAS = 64


class Lane:
    """One session's pool of results, and what its client lends for arguments.

    :param session: its id, for errors and the log.
    """

    def __init__(self, session: str, options: PoolOptions) -> None:
        self.results = Pool(options, f"the pool for results of session {session}")
        #: Chunks of the client's pool.
        self.borrower = Borrower(self._chunk_dropped)
        #: Chunks of the results' pool that came back as arguments.
        self.own = Borrower(self._own_dropped)
        self._arenas: dict[str, Segment] = {}
        #: Results that wait for room in the pool: what belongs to whom, and what to do when there may be some.
        self._parked: deque[tuple[object, Callable[[], None]]] = deque()
        #: Who waits for chunks of the client's own: called from another thread.
        self._wanted: deque[Callable[[], None]] = deque()
        self._looking = False
        #: The server's loop, once something is parked.
        self._loop: asyncio.AbstractEventLoop | None = None

    def settle(self) -> None:
        """See what the endpoints have done with. A safe point, in the thread of one of them."""
        self.borrower.settle()
        self.own.settle()
        self._give_own()

    def reclaim(self) -> bool:
        """Free what came back as arguments and is not used any more, after waiting for the GPU; whether that was anything."""
        self.own.wait()
        return self._give_own()

    def _give_own(self) -> bool:
        freed = bool(self.results.give(self.own.returned()))
        if freed and self._parked and self._loop is not None:
            with suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._retry)
        return freed

    def _own_dropped(self) -> None:
        # Runs in a finaliser.
        if self._parked:
            REAPER.submit(self.reclaim)

    # Arguments.

    def take_arena(self, info: SegmentInfo, fd: int) -> Segment:
        """A client's new arena: another descriptor of it. The one that came belongs to the lane.

        Its id is made here, so that no client can pass its memory off as another segment.
        """
        segment = Segment(msgspec.structs.replace(info, id=new_segment_id()), fd)
        # Several connections may bring the same one, and the first is good for all.
        if self._arenas.setdefault(info.id, segment) is not segment:
            segment.close()
        if len(self._arenas) > _MAX_ARENAS:
            self._arenas.pop(info.id).close()
            raise ProtocolError(f"a client with more than {_MAX_ARENAS} arenas")
        return self.arena(info.id)

    def arena(self, segment_id: str) -> Segment:
        """Another descriptor of an arena that came before.

        :raises SegmentNotFound: if none of that id did.
        """
        known = self._arenas.get(segment_id)
        if known is None:
            raise SegmentNotFound(f"the session has no arena {segment_id[:100]}", [segment_id[:100]])
        return known.duplicate()

    def await_chunks(self, told: Callable[[], None]) -> None:
        """Have ``told`` called, from another thread, when there are chunks for :meth:`Borrower.returned`, or may be."""
        self._wanted.append(told)
        REAPER.start()
        if not self._looking:
            self._looking = True
            REAPER.submit(self._look)

    def forget(self, told: Callable[[], None]) -> None:
        """Nobody waits any more."""
        with suppress(ValueError):  # told already
            self._wanted.remove(told)

    def freed(self) -> list[int]:
        """The chunks to give back now. Those who wait for some are told too: they are the same client's."""
        chunks = self.borrower.returned()
        while chunks and self._wanted:
            self._wanted.popleft()()
        return chunks

    def _chunk_dropped(self) -> None:
        # Runs in a finaliser.
        if self._wanted and not self._looking:
            self._looking = True
            REAPER.submit(self._look)

    def _look(self) -> None:
        self._looking = False
        self.borrower.wait()
        if self.borrower.has_returned:
            with suppress(IndexError):  # the loop's thread may take some
                while True:
                    self._wanted.popleft()()

    # Results, on the server's loop.

    def give(self, numbers: Sequence[int]) -> None:
        """The client has done with these chunks, or they were never sent."""
        if self.results.give(numbers):
            self._retry()

    def _retry(self) -> None:
        parked, self._parked = self._parked, deque()
        for _, retry in parked:
            retry()

    def park(self, result: object, retry: Callable[[], None], frees: int) -> None:
        """Have ``retry`` called when chunks have come back since there were ``frees``, see :attr:`Pool.frees`."""
        self._loop = asyncio.get_running_loop()
        self._parked.append((result, retry))
        if self.results.frees != frees:  # an endpoint's thread was first, and saw nobody here
            self._loop.call_soon(self._retry)

    def unpark(self, result: object) -> bool:
        """Nobody waits for a result any more; False if it is not parked."""
        found = [entry for entry in self._parked if entry[0] is result]
        for entry in found:
            self._parked.remove(entry)
        return bool(found)

    def close(self) -> None:
        """The session ended."""
        self._parked.clear()
        self._wanted.clear()
        self.borrower.close()
        self.own.close()
        for segment in self._arenas.values():
            segment.close()
        self._arenas.clear()
        # On a GPU it waits for the device.
        REAPER.start()
        REAPER.submit(self.results.close)


class Lanes:
    """The lanes of all sessions that have one."""

    def __init__(self, options: PoolOptions | None = None) -> None:
        self.options = options or PoolOptions()
        self._lanes: dict[str, Lane] = {}

    def of(self, session: str) -> Lane:
        """A session's lane, made when it is first needed."""
        lane = self._lanes.get(session)
        if lane is None:
            lane = self._lanes[session] = Lane(session, self.options)
        return lane

    def find(self, session: str) -> Lane | None:
        """A session's lane, if it has one."""
        return self._lanes.get(session)

    def end(self, session: str) -> None:
        """The session ended: all that it had goes back."""
        lane = self._lanes.pop(session, None)
        if lane is not None:
            lane.close()

    def facts(self) -> dict[str, int]:
        """Bytes that pools for results have, and chunks of them that clients have not given back."""
        lanes = tuple(self._lanes.values())
        return {
            "nbytes": sum(lane.results.nbytes for lane in lanes),
            "chunks": sum(lane.results.used for lane in lanes),
        }

    def close(self) -> None:
        """The server ends."""
        for session in tuple(self._lanes):
            self.end(session)
