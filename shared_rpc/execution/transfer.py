"""The short-lived memory of a session's calls, in the process that runs the endpoints."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

from shared_rpc.execution.session_transfer import SessionTransfer, Transfers
from shared_rpc.lifecycle.finalizer import FINALIZER
from shared_rpc.memory.chunk_references import ChunkReferences
from shared_rpc.memory.pool import Pool, PoolOptions
from shared_rpc.memory.records import ChunkSink
from shared_rpc.memory.segments import Segment
from shared_rpc.protocol.infos import PoolInfo

#: Seconds between polls of a GPU that cannot be waited for, because one of its streams is being captured.
_AGAIN = 0.05


def transfers_of(options: PoolOptions | None = None) -> Transfers[ServerTransfer]:
    """Return the transfers of a server whose endpoints run in its own process."""
    chosen = options or PoolOptions()
    return Transfers(lambda session: ServerTransfer(session, chosen))


class ServerTransfer(SessionTransfer):
    """The memory of one session, in the process that runs the endpoints.

    :param session: its id, for errors and the log.
    """

    def __init__(self, session: str, options: PoolOptions) -> None:
        super().__init__()
        self.results = Pool(options, f"the pool for results of session {session}")
        #: References to chunks of the client's pool.
        self.references = ChunkReferences(self._chunk_dropped)
        #: References to chunks of the results' pool that came back as arguments.
        self.own = ChunkReferences(self._own_dropped)
        #: In a worker, the ids of the pool's arenas whose descriptors the broker has.
        self.sent: set[str] = set()
        #: Results that wait for memory of the pool: the owner of each, and a function to call when chunks were freed.
        self._parked: dict[object, Callable[[], None]] = {}
        self._polling = False
        #: The server's loop, once a result is parked.
        self._loop: asyncio.AbstractEventLoop | None = None

    def poll(self) -> None:
        """Poll the chunks used by endpoints. A safe point, in the thread of an endpoint."""
        self.references.poll()
        if self.references.free:
            self._notify_subscribers()
        if self.own.dropped or self.own.fenced or self.own.free:
            self.own.poll()
            self._give_own()

    def reclaim(self) -> bool:
        """Free unused chunks that came back as arguments, after waiting for the GPU; return True if there were any."""
        self.own.drain()
        return self._give_own()

    def _give_own(self) -> bool:
        freed = bool(self.results.release(self.own.pop_returned()))
        if freed and self._parked and self._loop is not None:
            with suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._retry)
        return freed

    def _own_dropped(self) -> None:
        # Runs in a finaliser.
        if self._parked:
            FINALIZER.submit(self._reclaim_awaited)

    def _reclaim_awaited(self) -> None:
        if not self.reclaim() and self._parked and (self.own.dropped or self.own.fenced):
            FINALIZER.submit(self._reclaim_awaited, after=_AGAIN)

    # Arguments.

    def lent(self, chunks: Sequence[int]) -> dict[int, ChunkSink]:
        return dict.fromkeys(chunks, self.references)

    def retain(self, chunks: Sequence[int]) -> dict[int, ChunkSink] | None:
        held = set(chunks)
        return dict.fromkeys(held, self.own) if self.results.retain(held) else None

    def result_segment(self, segment_id: str) -> Segment | None:
        return self.results.segment(segment_id)

    def await_chunks(self, notify: Callable[[], None]) -> None:
        """Call ``notify`` once, from another thread, when there are chunks to return."""
        self._subscribers[notify] = None
        FINALIZER.start()
        if not self._polling:
            self._polling = True
            FINALIZER.submit(self._poll_references)

    def returned(self) -> list[int]:
        return self.references.pop_returned()

    def put_back(self, chunks: Iterable[int]) -> None:
        self.references.release(chunks)

    def _chunk_dropped(self) -> None:
        # Runs in a finaliser.
        if self._subscribers and not self._polling:
            self._polling = True
            FINALIZER.submit(self._poll_references)

    def _poll_references(self) -> None:
        self._polling = False
        self.references.drain()
        if self.references.free:
            self._notify_subscribers()
        elif self._subscribers and (self.references.dropped or self.references.fenced):
            self._polling = True
            FINALIZER.submit(self._poll_references, after=_AGAIN)

    # Results, on the server's loop.

    def info(self) -> PoolInfo:
        return {"nbytes": self.results.nbytes, "chunks": self.results.used}

    def release_results(self, chunks: Sequence[int]) -> None:
        if self.results.release(chunks):
            self._retry()

    def _retry(self) -> None:
        parked, self._parked = self._parked, {}
        for retry in parked.values():
            retry()

    def park(self, result: object, retry: Callable[[], None], frees: int) -> None:
        """Call ``retry`` when chunks have come back after the first ``frees``, see :attr:`Pool.frees`."""
        self._loop = asyncio.get_running_loop()
        self._parked[result] = retry
        if self.results.frees != frees:  # an endpoint's thread has freed chunks before the result was parked
            self._loop.call_soon(self._retry)
        elif self.own.dropped or self.own.fenced:
            self._own_dropped()  # since the last poll, when no result was parked

    def unpark(self, result: object) -> bool:
        """Forget a result without waiters; return False if it is not parked."""
        return self._parked.pop(result, None) is not None

    def close(self) -> None:
        super().close()
        self._parked.clear()
        self.references.close()
        self.own.close()
        # This waits for the device, if it is a GPU.
        FINALIZER.start()
        FINALIZER.submit(self.results.close)
