"""The short-lived memory of a session's calls, in the process that runs the endpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from shared_rpc.execution.session_transfer import SessionTransfer, Transfers
from shared_rpc.lifecycle.finalizer import FINALIZER
from shared_rpc.memory.chunk_references import ChunkReferences
from shared_rpc.memory.pool import Pool, PoolOptions
from shared_rpc.memory.records import ChunkSink
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
        #: In a worker, the ids of the pool's arenas whose descriptors the broker has.
        self.sent: set[str] = set()
        self._polling = False

    def poll(self) -> None:
        """Poll the chunks used by endpoints. A safe point, in the thread of an endpoint."""
        self.references.poll()
        if self.references.free:
            self._notify_subscribers()

    # Arguments.

    def lent(self, chunks: Sequence[int]) -> dict[int, ChunkSink]:
        return dict.fromkeys(chunks, self.references)

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
        self.results.release(chunks)

    def close(self) -> None:
        super().close()
        self.references.close()
        # This waits for the device, if it is a GPU.
        FINALIZER.start()
        FINALIZER.submit(self.results.close)
