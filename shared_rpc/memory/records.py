"""Encoded values: skeletons, tables, and the segments that they own."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from typing import Any, Protocol

import msgspec

from shared_rpc.memory.segments import Descriptor, Segment, refer
from shared_rpc.protocol.records import EMPTY_TABLE, NO_ARGS, NO_KWARGS


class ChunkSink(Protocol):
    """Takes back the chunks of a message."""

    def release(self, numbers: Iterable[int]) -> None:
        """Take back unused chunks."""


class Record(msgspec.Struct, eq=False):
    """An encoded value.

    :param skeleton: the pickled value without its tensors and storages.
    :param table: the :class:`TensorTable` in MessagePack.
    :param segments: the memory; the record owns these descriptors and closes them in :meth:`close`.
    :param nbytes: shared bytes: of all distinct storages and of buffers.
    :param device: the id of their device; by default that of the first segment, or the host.
    :param chunks: the numbers of its chunks in a pool; such a record is for one reader, which returns them.
    :param private_nbytes: bytes copied by every process that rebuilds the value; by default those of the skeleton.
    """

    skeleton: bytes
    table: bytes
    segments: Sequence[Segment]
    nbytes: int
    device: str = ""
    chunks: Sequence[int] = ()
    private_nbytes: int = -1

    def __post_init__(self) -> None:
        self.segments = tuple(self.segments)
        if not self.device:
            self.device = self.segments[0].info.device if self.segments else "cpu"
        if self.private_nbytes < 0:
            self.private_nbytes = len(self.skeleton)

    def body(self, known: Container[str]) -> tuple[dict[str, Any], tuple[Descriptor, ...]]:
        """Return the fields of a :class:`~shared_rpc.protocol.messages.RecordBody`, and the descriptors to send with it.

        :param known: the ids of the segments that the reader has.
        """
        refs, owners = refer(self.segments, known)
        return {"table": msgspec.Raw(self.table), "segments": refs, "chunks": list(self.chunks)}, owners

    def close(self) -> None:
        """Close the descriptors. Mappings of the memory, here and elsewhere, stay valid."""
        for segment in self.segments:
            segment.descriptor = None


class Arguments(msgspec.Struct):
    """Arguments of a call, and their memory.

    ``args`` and ``kwargs`` are plain data in MessagePack, see :func:`shared_rpc.protocol.values.encode_call`: a process that
    forwards a call does not decode them.

    This object owns the segments' descriptors. ``chunks`` are those of the caller's pool. In the reading process, ``pooled``
    has the sink that takes back each chunk: a :class:`ChunkReferences` if that maps them.

    ``session``: the owner of the memory, which differs from the run's if the call became a task. ``nbytes``: bytes of the
    message that carried them, without the memory.
    """

    args: msgspec.Raw = msgspec.field(default_factory=lambda: NO_ARGS)
    kwargs: msgspec.Raw = msgspec.field(default_factory=lambda: NO_KWARGS)
    table: bytes = EMPTY_TABLE
    skeletons: list[bytes] = msgspec.field(default_factory=list)
    segments: list[Segment] = msgspec.field(default_factory=list)
    chunks: Sequence[int] = ()
    session: str = ""
    pooled: dict[int, ChunkSink] = msgspec.field(default_factory=dict)
    nbytes: int = 0

    def body(self) -> dict[str, Any]:
        """Return the fields of a :class:`~shared_rpc.protocol.messages.Call`, except ``segments``."""
        return {
            "args": self.args,
            "kwargs": self.kwargs,
            "table": msgspec.Raw(self.table),
            "skeletons": [len(skeleton) for skeleton in self.skeletons],
            "chunks": list(self.chunks),
        }

    def detach_pooled(self) -> dict[int, ChunkSink]:
        """Return ``pooled``, which the caller must release from now on."""
        pooled, self.pooled = self.pooled, {}
        return pooled

    def close(self) -> None:
        """Close the descriptors, and release unused chunks."""
        for segment in self.segments:
            segment.descriptor = None
        if self.pooled:
            for chunk, references in self.detach_pooled().items():
                references.release([chunk])
