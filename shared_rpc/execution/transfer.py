"""The short-lived memory of a session: as seen by the server core, and in the process that runs the endpoints."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Generic, TypeVar

import msgspec

from shared_rpc.errors import ProtocolError
from shared_rpc.lifecycle.finalizer import FINALIZER
from shared_rpc.memory.chunk_references import ChunkReferences
from shared_rpc.memory.pool import Pool, PoolOptions
from shared_rpc.memory.records import ChunkSink
from shared_rpc.memory.segments import Segment, new_segment_id
from shared_rpc.protocol.infos import PoolInfo
from shared_rpc.protocol.records import SegmentInfo

#: Maximum number of arenas of one client; a pool that doubles as it grows has a dozen.
_MAX_ARENAS = 64


class SessionTransfer(ABC):
    """A session's pool of results, and its client's chunks for arguments. On the server's loop."""

    def __init__(self) -> None:
        #: The client's arenas, by the client's ids.
        self._arenas: dict[str, Segment] = {}

    def add_arena(self, info: SegmentInfo, fd: int) -> Segment:
        """Register a client's new arena, and return a duplicate of its descriptor. The transfer owns the received one.

        The arena gets a new id, so that no client can pass its memory off as another segment.
        """
        segment = Segment.owning(msgspec.structs.replace(info, id=new_segment_id()), fd, foreign=True)
        if self._arenas.setdefault(info.id, segment) is not segment:
            segment.close()
        if len(self._arenas) > _MAX_ARENAS:
            self._arenas.pop(info.id).close()
            raise ProtocolError(f"the client has sent more than {_MAX_ARENAS} arenas")
        return self._arenas[info.id].duplicate()

    def arena(self, segment_id: str) -> Segment | None:
        """Return a duplicate of a registered arena, None if there is none of that id."""
        known = self._arenas.get(segment_id)
        return known.duplicate() if known is not None else None

    @abstractmethod
    def lent(self, chunks: Sequence[int]) -> dict[int, ChunkSink]:
        """Return the sinks that take back the chunks of a call."""

    @abstractmethod
    def release_results(self, chunks: Sequence[int]) -> None:
        """Free chunks of the results' pool that the client has released, or that were never sent."""

    @abstractmethod
    def returned(self) -> list[int]:
        """Pop the client's chunks that can be returned now."""

    @abstractmethod
    def release(self, numbers: Iterable[int]) -> None:
        """Take back chunks of the client that are not used, or that :meth:`returned` gave and that could not be sent."""

    @abstractmethod
    def info(self) -> PoolInfo:
        """Describe the pool of results."""

    def close(self) -> None:
        """Release everything at the end of the session."""
        for segment in self._arenas.values():
            segment.close()
        self._arenas.clear()


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


TransferT_co = TypeVar("TransferT_co", bound=SessionTransfer, covariant=True)


class Transfers(Generic[TransferT_co]):
    """The transfers of all sessions that have one.

    :param make: creates the transfer of a session.
    """

    def __init__(self, make: Callable[[str], TransferT_co]) -> None:
        self._make = make
        self._transfers: dict[str, TransferT_co] = {}
        #: Returns the transfer of a session, or None.
        self.find: Callable[[str], TransferT_co | None] = self._transfers.get

    def of(self, session: str) -> TransferT_co:
        """Return a session's transfer, created on first use."""
        transfer = self._transfers.get(session)
        if transfer is None:
            transfer = self._transfers[session] = self._make(session)
        return transfer

    def all(self) -> tuple[TransferT_co, ...]:
        """Return every transfer."""
        return tuple(self._transfers.values())

    def returned(self, session: str) -> list[int]:
        """Pop the chunks of a session's client that can be returned now."""
        transfer = self.find(session)
        return transfer.returned() if transfer is not None else []

    def release_results(self, session: str, chunks: Sequence[int]) -> None:
        """Free chunks of a session's results, if it has a transfer."""
        transfer = self.find(session)
        if transfer is not None:
            transfer.release_results(chunks)

    def end(self, session: str) -> None:
        """Release all memory of a session at its end."""
        transfer = self._transfers.pop(session, None)
        if transfer is not None:
            transfer.close()

    def info(self) -> PoolInfo:
        """Describe the pools of results."""
        infos = [transfer.info() for transfer in self.all()]
        return {"nbytes": sum(info["nbytes"] for info in infos), "chunks": sum(info["chunks"] for info in infos)}

    def close(self) -> None:
        """Release everything at the end of the server."""
        for session in tuple(self._transfers):
            self.end(session)
