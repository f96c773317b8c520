"""Memory without tensors: the out-of-band buffers of numpy arrays and other objects with pickle protocol 5.

It is copied into host segments once, and every process that rebuilds the value maps these copy-on-write (read-only, if the
endpoint shares for reading): the array is writable like a pickled one, its writes are private to the process, and unwritten
pages exist once. The endpoint's own array stays in its memory: an array cannot be rebound.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Sequence

from shared_rpc.errors import CapabilityError, CodecError
from shared_rpc.memory.backends.host import HOST, write_exactly
from shared_rpc.memory.layout import pack
from shared_rpc.memory.mapping import MAPPINGS, Mapping
from shared_rpc.memory.segments import Segment
from shared_rpc.protocol.records import Access, BufferEntry, TensorTable

#: Bytes. A smaller buffer is pickled: copying it takes a microsecond, while a segment of any size takes some microseconds, and
#: each accessed page a page fault.
_LEAST = 16 << 10


class PickledBuffers:
    """Buffers found by pickling so far, in the order in which unpickling will need them."""

    def __init__(self) -> None:
        self.views: list[memoryview] = []

    def accept(self, buffer: pickle.PickleBuffer) -> bool:
        """Return True if a buffer must be pickled after all, like pickle's ``buffer_callback``."""
        view = buffer.raw()
        if view.nbytes < _LEAST:
            return True
        self.views.append(view)
        return False

    @property
    def nbytes(self) -> int:
        """The bytes of all buffers."""
        return sum(view.nbytes for view in self.views)


def place(buffers: PickledBuffers, access: Access, first: int) -> tuple[list[Segment], list[BufferEntry]]:
    """Copy buffers into new segments, owned by the caller; return these, and the place of each buffer.

    :param access: that of the endpoint.
    :param first: the number of the first segment.
    :raises CapabilityError: if there is too little memory.
    """
    sizes, places = pack([view.nbytes for view in buffers.views])
    segments: list[Segment] = []
    entries: list[BufferEntry] = []
    try:
        for nbytes in sizes:
            segments.append(HOST.create(nbytes))
        for view, (number, offset) in zip(buffers.views, places, strict=True):
            _write(segments[number].fileno(), view, offset)
            entries.append(BufferEntry(first + number, offset, view.nbytes))
        for segment in segments:
            HOST.seal(segment.fileno())  # no process can write to it any more
        return [segment.duplicate("read" if access == "read" else "copy") for segment in segments], entries
    finally:
        for segment in segments:
            segment.close()


def _write(fd: int, view: memoryview, offset: int) -> None:
    try:
        write_exactly(fd, view, offset)
    except OSError as error:
        if error.errno is None:  # a signal handler's own
            raise
        raise CapabilityError(f"cannot write {view.nbytes} bytes to a host segment in pid {os.getpid()}: {error}") from error


def buffers_of(table: TensorTable, mappings: Sequence[Mapping], object_id: str = "") -> list[memoryview]:
    """Return the buffers of a table over the segments' mappings. Each mapping is kept while a buffer in it is in use.

    :param object_id: see :meth:`MappingTable.keep_for`.
    :raises CodecError: if an entry leaves its segment.
    """
    return [_view(entry, mappings, object_id) for entry in table.buffers]


def _view(entry: BufferEntry, mappings: Sequence[Mapping], object_id: str) -> memoryview:
    mapping = mappings[entry.segment] if 0 <= entry.segment < len(mappings) else None
    if mapping is None or mapping.info.mechanism != "memfd":
        raise CodecError(f"a buffer of {entry.nbytes} bytes is not within its segment, number {entry.segment}")
    view = HOST.view(mapping.address_of(entry.offset, entry.nbytes, "buffer"), entry.nbytes)
    # All views of the buffer, including arrays, refer to this object.
    MAPPINGS.keep_for([(mapping, view.obj)], object_id)
    return view.toreadonly() if mapping.info.access == "read" else view
