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

#: Seconds between two looks at a GPU that cannot be waited for, because one of its streams is being captured.
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
        #: References to chunks of the results' pool that arrived as arguments.
        self.own = ChunkReferences(self._own_dropped)
        #: In a worker, the ids of the pool's arenas whose descriptors the broker has.
        self.sent: set[str] = set()
        #: Results that wait for memory of the pool: the owner of each, and a function to call when some may be free.
        self._parked: dict[object, Callable[[], None]] = {}
        self._looking = False
        #: The server's loop, once a result is parked.
        self._loop: asyncio.AbstractEventLoop | None = None

    def poll(self) -> None:
        """Poll the chunks that endpoints have used. A safe point, in the thread of an endpoint."""
        self.references.poll()
        if self.references.free:
            self._tell()
        if self.own.dropped or self.own.fenced or self.own.free:
            self.own.poll()
            self._give_own()

    def reclaim(self) -> bool:
        """Free chunks that came back as arguments and are unused, after waiting for the GPU; return whether there were any."""
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
        """Call ``notify``, from another thread, when there are chunks to return."""
        self._wanted[notify] = None
        FINALIZER.start()
        if not self._looking:
            self._looking = True
            FINALIZER.submit(self._look)

    def returned(self) -> list[int]:
        return self.references.pop_returned()

    def put_back(self, chunks: Iterable[int]) -> None:
        self.references.release(chunks)

    def _chunk_dropped(self) -> None:
        # Runs in a finaliser.
        if self._wanted and not self._looking:
            self._looking = True
            FINALIZER.submit(self._look)

    def _look(self) -> None:
        self._looking = False
        self.references.drain()
        if self.references.free:
            self._tell()
        elif self._wanted and (self.references.dropped or self.references.fenced):
            self._looking = True
            FINALIZER.submit(self._look, after=_AGAIN)

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
        """Have ``retry`` called when chunks have come back since there were ``frees``, see :attr:`Pool.frees`."""
        self._loop = asyncio.get_running_loop()
        self._parked[result] = retry
        if self.results.frees != frees:  # an endpoint's thread has freed chunks before the result was parked
            self._loop.call_soon(self._retry)
        elif self.own.dropped or self.own.fenced:
            self._own_dropped()  # since the last look, when no result was parked

    def unpark(self, result: object) -> bool:
        """Forget a result without waiters; False if it is not parked."""
        return self._parked.pop(result, None) is not None

    def close(self) -> None:
        super().close()
        self._parked.clear()
        self.references.close()
        self.own.close()
        # For a GPU this waits for the device.
        FINALIZER.start()
        FINALIZER.submit(self.results.close)
