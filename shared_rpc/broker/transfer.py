"""A session's short-lived memory as tracked by a broker: numbers of chunks, and the workers that have them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from shared_rpc.broker.worker import Worker
from shared_rpc.execution.transfer import SessionTransfer
from shared_rpc.memory.records import ChunkSink, Record
from shared_rpc.memory.segments import Segment
from shared_rpc.protocol import worker as w
from shared_rpc.protocol.infos import PoolInfo


class ForwardedTransfer(SessionTransfer):
    """Memory mapped by workers. When a worker ends, the kernel ends its use of the memory.

    :param key: the provider's key; ``session`` is the session's id.
    """

    def __init__(self, key: str, session: str) -> None:
        super().__init__()
        self.key = key
        self.session = session
        #: Chunks of the client's pools, by the worker that has them.
        self._lent: dict[int, Worker] = {}
        self._returned: list[int] = []
        #: Chunks of results, by the worker that owns their pool.
        self._results: dict[int, Worker] = {}
        #: Arenas of these pools, by segment id.
        self._segments: dict[str, tuple[Segment, Worker]] = {}
        #: Workers that have had runs of the session.
        self._workers: set[Worker] = set()

    # Chunks sent to a worker, and returned by it.

    def sent(self, worker: Worker, chunks: Iterable[int]) -> None:
        """Record that a worker has chunks of the client's, and is aware of the session."""
        self._workers.add(worker)
        self._lent.update(dict.fromkeys(chunks, worker))

    def not_begun(self, chunks: Iterable[int]) -> None:
        """Record that chunks move to another worker because their run had not begun."""
        for chunk in chunks:
            self._lent.pop(chunk, None)

    def came_back(self, worker: Worker, chunks: Sequence[int]) -> None:
        """Take back chunks of the client from a worker."""
        for chunk in chunks:
            if self._lent.get(chunk) is worker:
                del self._lent[chunk]
                self._returned.append(chunk)

    def made(self, worker: Worker, record: Record) -> None:
        """Record that a result lies in chunks of a worker's pool."""
        self._results.update(dict.fromkeys(record.chunks, worker))
        for segment in record.segments:
            if segment.info.arena and segment.info.id not in self._segments:
                self._segments[segment.info.id] = segment.duplicate(), worker

    def lost(self, worker: Worker) -> None:
        """Free the client's chunks of an ended worker. The worker's own pool now belongs to its readers."""
        self._workers.discard(worker)
        self.came_back(worker, [chunk for chunk, has in self._lent.items() if has is worker])
        self._results = {chunk: has for chunk, has in self._results.items() if has is not worker}
        for segment_id in [segment_id for segment_id, (_, has) in self._segments.items() if has is worker]:
            self._segments.pop(segment_id)[0].close()

    # Requests of the core.

    def lent(self, chunks: Sequence[int]) -> dict[int, ChunkSink]:
        """Return the sinks of the chunks in a call."""
        return dict.fromkeys(chunks, self)

    def result_segment(self, segment_id: str) -> Segment | None:
        """Return an arena of the workers' pools; None for an unknown id."""
        found = self._segments.get(segment_id)
        return found[0] if found is not None else None

    def release_results(self, chunks: Sequence[int]) -> None:
        """Release chunks of results, in the workers that have them."""
        owners: dict[Worker, list[int]] = {}
        for chunk in chunks:
            worker = self._results.pop(chunk, None)
            if worker is not None:
                owners.setdefault(worker, []).append(chunk)
        for worker, numbers in owners.items():
            worker.send(w.ReleaseChunks(self.key, self.session, numbers))

    def returned(self) -> list[int]:
        """Pop the client's chunks that were returned."""
        chunks, self._returned = self._returned, []
        return chunks

    def release(self, numbers: Iterable[int]) -> None:
        """Queue chunks for the next reply, such as chunks that no worker received."""
        self._returned += numbers

    def info(self) -> PoolInfo:
        """Describe the workers' pools for the session's results."""
        nbytes = sum(segment.info.nbytes for segment, _ in self._segments.values())
        return {"nbytes": nbytes, "chunks": len(self._results)}

    def close(self) -> None:
        """Release all memory of the session, here and in its workers."""
        super().close()
        for worker in self._workers:
            worker.send(w.SessionEnded(self.key, self.session))
            worker.arenas.pop(self.session, None)
        for segment, _ in self._segments.values():
            segment.close()
        self._segments.clear()
