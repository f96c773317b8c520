"""Exported records: the header of an object's record, and the bytes of its segments, mapped in this process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Self

from shared_rpc.client.handle import Lease
from shared_rpc.errors import CapabilityError, RecordError, StaleHandleError
from shared_rpc.memory.backends.host import HOST, write_exactly
from shared_rpc.memory.mapping import MAPPINGS, MappingHold
from shared_rpc.protocol.exported import RecordHeader
from shared_rpc.protocol.records import SegmentInfo

if TYPE_CHECKING:
    import torch


class SegmentBytes:
    """The bytes of one segment of a record, mapped in this process until the record is closed.

    :param info: the segment; ``nbytes`` is that of the record.
    :param hold: its mapping.
    :param writable: True if the bytes are still to be written.
    :param offset: the offset of the bytes in the mapping.
    """

    def __init__(self, info: SegmentInfo, hold: MappingHold, *, writable: bool, offset: int = 0) -> None:
        self.info = info
        self._offset = offset
        self.writable = writable
        self._hold: MappingHold | None = hold

    @property
    def nbytes(self) -> int:
        """The number of bytes."""
        return self.info.nbytes

    @property
    def address(self) -> int:
        """The address of the bytes in this process, on the segment's device.

        :raises StaleHandleError: if the record was closed.
        """
        return self._mapped().mapping.address + self._offset

    def tensor(self) -> torch.Tensor:
        """Return the bytes as a flat tensor of dtype uint8 on the segment's device, without a copy. It keeps the memory.

        The tensor of an export must not be written to: a write would be visible to all users of the object, and crashes this
        process if the memory is read-only. On a GPU all work of the object's maker is complete.

        :raises StaleHandleError: if the record was closed.
        """
        from shared_rpc.codec.storages import whole_tensor

        return whole_tensor(self._mapped().mapping, self.nbytes, self._offset)

    def buffer(self) -> memoryview:
        """Return the bytes of host memory as a buffer, without a copy and without torch; read-only for an export.

        :raises CapabilityError: for a GPU's memory: use :meth:`tensor`.
        :raises StaleHandleError: if the record was closed.
        """
        mapping = self._mapped().mapping
        if mapping.info.device != "cpu":
            raise CapabilityError(f"segment {self.info.id} is on {mapping.info.device}, where it is no buffer: use tensor()")
        view = HOST.view(self.address, self.nbytes)
        MAPPINGS.keep_for([(mapping, view.obj)])
        return view if self.writable else view.toreadonly()

    def write(self, offset: int, data: bytes | bytearray | memoryview) -> None:
        """Copy bytes into writable host memory, at an offset.

        By write(2) if the memory has a descriptor here: for untouched pages it takes half the time of stores, for which the
        kernel first clears each page in a fault.

        :raises CapabilityError: for a GPU's memory: use :meth:`tensor`.
        :raises StaleHandleError: if the record was closed.
        """
        view, into = memoryview(data).cast("B"), self.buffer()
        if offset < 0 or offset + len(view) > len(into):
            raise ValueError(f"{len(view)} bytes at {offset} are not within the {len(into)} bytes of {self!r}")
        segment = self._mapped().mapping.descriptor
        if segment is None or not self.writable:
            into[offset : offset + len(view)] = view
            return
        write_exactly(segment.fileno(), view, offset)

    def synchronize(self) -> None:
        """Wait for all work of this process on the segment's device.

        :raises CapabilityError: if a CUDA graph is being captured there.
        """
        if not self._mapped().mapping.backend.synchronize():
            raise CapabilityError(f"a CUDA graph is being captured on {self.info.device}: adopt the record before or after")

    def copy_to(self, target: SegmentBytes) -> None:
        """Copy the bytes to another segment, which may be on another device."""
        if self._mapped().mapping.info.device == target._mapped().mapping.info.device == "cpu":
            view = self.buffer()
            for start in range(0, self.nbytes, _STEP):  # a signal's handler need not wait for all of it
                target.write(start, view[start : start + _STEP])
        else:
            target.tensor().copy_(self.tensor())

    def _mapped(self) -> MappingHold:
        if self._hold is None:
            raise StaleHandleError(f"the record with segment {self.info.id} was closed", reason="released")
        return self._hold

    def _unmap(self) -> None:
        self._hold = None

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.nbytes} bytes on {self.info.device}{', writable' if self.writable else ''}>"


#: Number of bytes copied at once.
_STEP = 16 << 20


class ExportedRecord:
    """A record outside its server: its :class:`~shared_rpc.protocol.exported.RecordHeader`, and its segments' bytes.

    One from :meth:`Client.export` is for reading, and holds the object until it is closed; one from :meth:`Client.allocate` is
    to be written before :meth:`Client.adopt` takes it over. It must be closed, as by ``with``. Tensors and buffers over it stay
    valid after that.
    """

    def __init__(
        self, header: RecordHeader, segments: Sequence[SegmentBytes], leases: Sequence[Lease[Any]], *, allocated: bool
    ) -> None:
        self.header = header
        #: True if the caller may write its bytes.
        self.allocated = allocated
        self.segments = tuple(segments)
        self._leases = tuple(leases)
        self._closed = False

    @property
    def closed(self) -> bool:
        """True if it was closed or adopted."""
        return self._closed

    def copy_to(self, target: ExportedRecord) -> None:
        """Copy the bytes to an allocated copy of the record, which may be on another device."""
        for source, to in zip(self.segments, target.segments, strict=True):
            source.copy_to(to)

    def close(self) -> None:
        """Release the lease and the mappings, and free the memory of an allocated record, without a wait. Idempotent."""
        for lease in self._unmap():
            if lease._drop():
                lease._issuer._end_lease_soon(lease.object_id, lease._session)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_open(self) -> None:
        if self.closed:
            raise RecordError("the record was closed, or adopted already: export or allocate it again", reason="buffers")

    def _unmap(self) -> tuple[Lease[Any], ...]:
        self._closed = True
        for segment in self.segments:
            segment._unmap()
        return self._leases

    def __repr__(self) -> str:
        kind = "memory for " if self.allocated else ""
        return f"<{type(self).__name__} {kind}{self.header.endpoint}, {self.header.nbytes} bytes on {self.header.device}>"
