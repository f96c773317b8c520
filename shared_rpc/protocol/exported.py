"""Exported records: the description of a record outside its server, and the messages about them."""

from __future__ import annotations

from typing import Annotated

import msgspec

from shared_rpc.errors import RecordError
from shared_rpc.protocol.generations import Generation
from shared_rpc.protocol.messages import Call, Message, Query
from shared_rpc.protocol.records import NO_ARGS, NO_KWARGS, Access, SegmentInfo

#: The version of the header format, raised with every change.
FORMAT = 2
#: Maximum number of segments of a record: less than one frame's descriptors.
MOST_SEGMENTS = 1000


class _Format(msgspec.Struct):
    """The one field of a header that every format has."""

    format: int


class RecordHeader(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Description of a record outside its server: everything except the bytes of its segments. Plain data.

    ``endpoint``, ``cache_key`` and ``generation`` are those of the object, ``fingerprint`` that of the endpoint's code, ``""``
    if that has changed since. ``python`` (such as ``"3.13"``), ``torch`` and ``shared_rpc`` are the versions that made the
    skeleton, a pickle. ``device`` is ``"cpu"`` or a GPU's UUID. ``nbytes`` and ``private_nbytes`` are as
    in ``ObjectInfo``. ``table`` is a tensor table over ``segments``.
    """

    format: int
    endpoint: str
    cache_key: str | None
    generation: int
    fingerprint: str
    python: str
    torch: str
    shared_rpc: str
    device: str
    nbytes: int
    private_nbytes: int
    skeleton: bytes
    table: bytes
    segments: Annotated[tuple[SegmentInfo, ...], msgspec.Meta(max_length=MOST_SEGMENTS)]

    @property
    def access(self) -> Access:
        """The access mode of the endpoint, as in :meth:`Provider.share`."""
        return "read" if any(info.access == "read" for info in self.segments) else "read_write"

    def to_bytes(self) -> bytes:
        """Return the header as bytes for :meth:`from_bytes`."""
        return msgspec.msgpack.encode(self)

    @classmethod
    def from_bytes(cls, data: bytes | memoryview) -> RecordHeader:
        """Parse a header. Nothing is unpickled.

        :raises RecordError: if it is invalid, or of another format.
        """
        try:
            found = msgspec.msgpack.decode(data, type=_Format).format
            if found != FORMAT:
                raise RecordError(
                    f"the record has format {found}, and this release of shared-rpc reads format {FORMAT}: use one release on "
                    f"both sides",
                    reason="version",
                )
            return msgspec.msgpack.decode(data, type=RecordHeader)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise RecordError(f"cannot read the header of a record: {error}", reason="malformed") from error


class SlabPart(msgspec.Struct, frozen=True, array_like=True):
    """The part of a slab, from ``offset`` on, that is a segment of an exported record."""

    slab: SegmentInfo
    offset: int


class ExportObject(Message):
    """Request for :class:`Exported`: the record of an object, with a lease."""

    object_id: str


class Exported(Message):
    """Exported record: the payload is its header, the descriptors of its segments are in the frame. The session has a lease
    on it.

    ``parts`` are, by the numbers of the segments, those that are parts of slabs; then the slab's descriptor is in the frame.
    """

    object_id: str
    generation: int
    parts: dict[int, SlabPart] = msgspec.field(default_factory=dict)


class CheckRecord(Query[list[str]]):
    """Query whether a record can be adopted, with its header as payload; the answer is an error, or the devices on which to
    create the buffers for its segments.

    With ``called``, it is checked as the result of this call, or with ``endpoint`` ``""`` of the call from which it was
    exported; otherwise only independently of a call.
    """

    called: bool = False
    endpoint: str = ""
    args: msgspec.Raw = NO_ARGS
    kwargs: msgspec.Raw = NO_KWARGS


class Adopt(Message):
    """Request to make a record an object. The payload is its header; ``buffers`` have the bytes of its segments, in order.

    The session holds the buffers; their memory becomes the object's, and other processes can no longer get them. ``endpoint``
    and the arguments are as in :class:`CheckRecord`. The answer is :class:`~shared_rpc.protocol.generations.Refreshed`, or
    :class:`Candidate` if the object is not to be ``current``.
    """

    buffers: Annotated[list[str], msgspec.Meta(max_length=MOST_SEGMENTS)]
    endpoint: str = ""
    args: msgspec.Raw = NO_ARGS
    kwargs: msgspec.Raw = NO_KWARGS
    current: bool = True


class PrepareCandidate(Call):
    """Call that builds the next generation of its object without making it current; the answer is :class:`Candidate`.

    ``sealed``: the requester forwards an exception of the endpoint without unpickling it.
    """

    sealed: bool = False


class Candidate(Message):
    """A generation that is not current, on which the session has a lease."""

    generation: Generation


class PromoteCandidate(Message):
    """Request to make a candidate the current generation; :class:`~shared_rpc.protocol.generations.Refreshed` answers."""

    object_id: str
