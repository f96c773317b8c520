"""Tables of a value: the places of its tensors in segments. Plain data, to be sent and kept without torch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import msgspec

#: How memory is mapped: for reading and writing, for reading, or copy-on-write, with writes visible only to the writing
#: process, for host memory. Private memory is mapped for reading, and only while a process copies it.
Access = Literal["read_write", "read", "copy", "private"]
#: Which tensors of a result are the same memory in every process: all, or those used by parameters.
Tensors = Literal["all", "parameters"]
#: How memory is shared: host memory as a memfd; a GPU's by virtual memory management, legacy CUDA IPC or a pool. For copies of
#: objects outside their device: host memory from a GPU driver, and a nameless file.
Mechanism = Literal["memfd", "vmm", "ipc", "pool", "host_vmm", "file"]
#: The place of an object's bytes: on its device, in host memory (for objects of a GPU), or in a file, from the highest to the
#: lowest tier.
Tier = Literal["device", "host", "file"]
#: When an object gets a copy in a lower tier: never, on eviction, or right after the build.
HostCopy = Literal["never", "on_evict", "at_build"]
#: Mechanisms whose memory belongs to the process that made it, and ends with it.
EXPORTER_OWNED: frozenset[Mechanism] = frozenset({"ipc", "pool"})


class SegmentInfo(msgspec.Struct, frozen=True, array_like=True):
    """Description of a segment for both sides.

    ``id`` is unique on the host, ``nbytes`` the size of its mapping (a multiple of the backend's granularity), ``device``
    ``"cpu"`` or the GPU's UUID (``"GPU-…"``), ``access`` the access mode of consumers, ``mechanism`` how it is made and opened.
    ``slab``: True if it contains unrelated results, see :mod:`shared_rpc.memory.slabs`. ``arena``: True if it belongs to a
    session's pool, whose reader keeps it mapped.

    New memory with the bytes of an ended segment has the same :attr:`name`, but its own id: an incarnation.
    """

    id: str
    nbytes: int
    device: str
    access: Access = "read_write"
    mechanism: Mechanism = "memfd"
    slab: bool = False
    arena: bool = False

    @property
    def name(self) -> str:
        """The id without the number of the incarnation."""
        return self.id.partition(".")[0]

    def incarnation(self, number: int) -> SegmentInfo:
        """Return the description of another incarnation; 0 is the first one."""
        return msgspec.structs.replace(self, id=f"{self.name}.{number}" if number else self.name)


#: A segment in a message: its description if its descriptor is in the frame, or the id of one that the reader has.
SegmentRef = SegmentInfo | str


def sent_infos(segments: Iterable[SegmentRef]) -> list[SegmentInfo]:
    """Return the descriptions of the segments whose descriptors are in the frame of their message, in its order."""
    return [segment for segment in segments if not isinstance(segment, str)]


class StorageEntry(msgspec.Struct, frozen=True, array_like=True):
    """One storage: ``nbytes`` bytes at ``offset`` of segment number ``segment``; -1 for a storage of no bytes.

    ``chunk`` is the number of its chunk in a pool, 0 for none.
    """

    segment: int
    offset: int
    nbytes: int
    device: int = 0
    chunk: int = 0


class TensorEntry(msgspec.Struct, frozen=True, array_like=True):
    """One strided tensor over storage number ``storage``.

    ``dtype`` is torch's name for it (``"bfloat16"``), ``offset`` and ``strides`` count elements.
    """

    storage: int
    dtype: str
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    parameter: bool = False
    requires_grad: bool = False
    conj: bool = False
    neg: bool = False


class BufferEntry(msgspec.Struct, frozen=True, array_like=True):
    """Memory without a tensor, such as a numpy array's: ``nbytes`` bytes at ``offset`` of segment number ``segment``.

    Such a segment is in host memory, and holds nothing else.
    """

    segment: int
    offset: int
    nbytes: int


class TensorTable(msgspec.Struct, frozen=True, array_like=True):
    """All storages and tensors of a record; ``devices`` are indexed by :attr:`StorageEntry.device`.

    ``buffers`` are in the order in which the skeleton needs them.
    """

    devices: tuple[str, ...] = ()
    storages: tuple[StorageEntry, ...] = ()
    tensors: tuple[TensorEntry, ...] = ()
    buffers: tuple[BufferEntry, ...] = ()


EMPTY_TABLE = msgspec.msgpack.encode(TensorTable())

#: The arguments of a call without any.
NO_ARGS, NO_KWARGS = msgspec.Raw(msgspec.msgpack.encode([])), msgspec.Raw(msgspec.msgpack.encode({}))

#: The skeleton of a value that is tensor 0 of its table: a pickle of that persistent id.
ONE_TENSOR = b"I0\nQ."


def list_of_tensors(count: int) -> bytes:
    """Return the skeleton of a list of the first tensors of a table: PROTO, MARK, (BININT, BINPERSID) for each, LIST, STOP."""
    return b"\x80\x04(" + b"".join(b"J" + number.to_bytes(4, "little") + b"Q" for number in range(count)) + b"l."
