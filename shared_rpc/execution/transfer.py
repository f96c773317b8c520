"""The short-lived memory of a session's calls, in the process that runs the endpoints."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from shared_rpc.execution.session_transfer import SessionTransfer, Transfers
from shared_rpc.lifecycle.finalizer import FINALIZER
from shared_rpc.memory.chunk_references import ChunkReferences
from shared_rpc.memory.pool import Pool, PoolOptions
from shared_rpc.memory.records import ChunkSink
from shared_rpc.protocol.infos import PoolInfo


def transfers_of(options: PoolOptions | None = None) -> Transfers[ServerTransfer]:
    """Return the transfers of a server whose endpoints run in its own process."""
    chosen = options or PoolOptions()
    return Transfers(lambda session: ServerTransfer(chosen))


class ServerTransfer(SessionTransfer):
    """The memory of one session, in the process that runs the endpoints."""

    def __init__(self, options: PoolOptions) -> None:
        super().__init__()
        self.results = Pool(options)
        #: References to chunks of the client's pool.
        self.references = ChunkReferences()
        #: In a worker, the ids of the pool's arenas whose descriptors the broker has.
        self.sent: set[str] = set()

    def poll(self) -> None:
        """Poll the chunks used by endpoints. A safe point, in the thread of an endpoint."""
        self.references.poll()

    # Arguments.

    def lent(self, chunks: Sequence[int]) -> dict[int, ChunkSink]:
        return dict.fromkeys(chunks, self.references)

    def returned(self) -> list[int]:
        return self.references.pop_returned()

    def release(self, numbers: Iterable[int]) -> None:
        self.references.release(numbers)

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
