"""The short-lived memory of a session, as the server core needs it, wherever it is mapped."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Generic, TypeVar

import msgspec

from shared_rpc.errors import ProtocolError, SegmentNotFound
from shared_rpc.memory.records import ChunkSink
from shared_rpc.memory.segments import Segment, new_segment_id
from shared_rpc.protocol.infos import PoolInfo
from shared_rpc.protocol.records import SegmentInfo

#: The limit of arenas of one client; a pool that doubles as it grows has a dozen.
_MAX_ARENAS = 64


class SessionTransfer(ABC):
    """One session's pool of results, and its client's chunks for arguments. On the server's loop."""

    def __init__(self) -> None:
        #: The client's arenas, by the client's ids.
        self._arenas: dict[str, Segment] = {}
        #: What :meth:`await_chunks` is to call.
        self._wanted: dict[Callable[[], None], None] = {}

    def add_arena(self, info: SegmentInfo, fd: int) -> Segment:
        """Take a client's new arena, and return another descriptor of it. The received one belongs to the transfer.

        Its id is made here, so that no client can pass its memory off as another segment.
        """
        segment = Segment.owning(msgspec.structs.replace(info, id=new_segment_id()), fd, foreign=True)
        # Several connections may send the same arena: the first one counts.
        if self._arenas.setdefault(info.id, segment) is not segment:
            segment.close()
        if len(self._arenas) > _MAX_ARENAS:
            self._arenas.pop(info.id).close()
            raise ProtocolError(f"the client has sent more than {_MAX_ARENAS} arenas")
        return self.arena(info.id)

    def arena(self, segment_id: str) -> Segment:
        """Return another descriptor of an arena that came before.

        :raises SegmentNotFound: if none of that id did.
        """
        known = self._arenas.get(segment_id)
        if known is None:
            raise SegmentNotFound(f"the session has no arena {segment_id[:100]}", [segment_id[:100]])
        return Segment(known.info, known.descriptor)

    @abstractmethod
    def lent(self, chunks: Sequence[int]) -> dict[int, ChunkSink]:
        """Return the sinks to which the chunks of a call are returned."""

    @abstractmethod
    def retain(self, chunks: Sequence[int]) -> dict[int, ChunkSink] | None:
        """Hold chunks of the session's results once more that it names as arguments; None if one of them is not in use."""

    @abstractmethod
    def result_segment(self, segment_id: str) -> Segment | None:
        """Return a segment of the results' pool; it stays the pool's."""

    @abstractmethod
    def release_results(self, chunks: Sequence[int]) -> None:
        """Take back chunks of the results' pool that the client has done with, or that were never sent."""

    @abstractmethod
    def returned(self) -> list[int]:
        """Return the client's chunks to return now."""

    def freed(self) -> list[int]:
        """Return :meth:`returned`, to be sent with a reply. Waiters are notified too: they are the same client's."""
        chunks = self.returned()
        if chunks:
            self._tell()
        return chunks

    @abstractmethod
    def put_back(self, chunks: Iterable[int]) -> None:
        """Take back the chunks of :meth:`freed` that could not be sent."""

    @abstractmethod
    def await_chunks(self, notify: Callable[[], None]) -> None:
        """Call ``notify``, from any thread, when there are or may be chunks for :meth:`returned`."""

    def unsubscribe(self, notify: Callable[[], None]) -> None:
        """Forget the function given to :meth:`await_chunks`."""
        self._wanted.pop(notify, None)

    def _tell(self) -> None:
        for notify in [*self._wanted]:
            if self._wanted.pop(notify, "called") is None:  # another thread may notify too
                notify()

    @abstractmethod
    def info(self) -> PoolInfo:
        """Describe the pool for results."""

    def close(self) -> None:
        """Release everything: the session ended."""
        for segment in self._arenas.values():
            segment.close()
        self._arenas.clear()
        self._wanted.clear()


TransferT_co = TypeVar("TransferT_co", bound=SessionTransfer, covariant=True)


class Transfers(Generic[TransferT_co]):
    """The transfers of all sessions that have one.

    :param make: a new transfer for a session.
    """

    def __init__(self, make: Callable[[str], TransferT_co]) -> None:
        self._make = make
        self._transfers: dict[str, TransferT_co] = {}
        #: Returns the transfer of a session, or None.
        self.find: Callable[[str], TransferT_co | None] = self._transfers.get

    def of(self, session: str) -> TransferT_co:
        """Return a session's transfer, made when it is first needed."""
        transfer = self._transfers.get(session)
        if transfer is None:
            transfer = self._transfers[session] = self._make(session)
        return transfer

    def all(self) -> tuple[TransferT_co, ...]:
        """Return every transfer."""
        return tuple(self._transfers.values())

    def release_results(self, session: str, chunks: Sequence[int]) -> None:
        """Take back chunks of a session's results, if it has a transfer."""
        transfer = self.find(session)
        if transfer is not None:
            transfer.release_results(chunks)

    def end(self, session: str) -> None:
        """Release all that a session had: it ended."""
        transfer = self._transfers.pop(session, None)
        if transfer is not None:
            transfer.close()

    def info(self) -> PoolInfo:
        """Describe the pools for results."""
        infos = [transfer.info() for transfer in self.all()]
        return {"nbytes": sum(info["nbytes"] for info in infos), "chunks": sum(info["chunks"] for info in infos)}

    def close(self) -> None:
        """Release everything: the server ends."""
        for session in tuple(self._transfers):
            self.end(session)
