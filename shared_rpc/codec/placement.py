"""Placement of a value's memory in segments, for its readers.

*Moved* memory stays in segments: storages are copied segment by segment, every tensor over them is rebound to its new place,
and the originals are freed before the next segment is filled, so the extra memory at any time is about one segment. The
endpoint's result and the clients' mappings are the same memory then. *Private* memory is copied into separate segments, of
which each reader makes another copy; its tensors stay in place. *Copied* memory, for one reader, is put into chunks of a
pool.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import msgspec
import torch

from shared_rpc.codec.blocks import Block, Span, blocks, spans, storages_of_parameters
from shared_rpc.codec.buffers import PickledBuffers, place
from shared_rpc.codec.reducers import make_storage
from shared_rpc.codec.skeleton import Scan, load
from shared_rpc.codec.storages import copy_bytes, current_stream
from shared_rpc.errors import CapabilityError
from shared_rpc.memory.backends.choice import backend_for
from shared_rpc.memory.devices import id_of
from shared_rpc.memory.layout import aligned, pack
from shared_rpc.memory.mapping import MAPPINGS, Mapping
from shared_rpc.memory.pool import Pool
from shared_rpc.memory.segments import Segment
from shared_rpc.memory.slabs import LARGEST, Slabs
from shared_rpc.protocol.records import Access, BufferEntry, StorageEntry, Tensors, TensorTable

#: Bytes. After moving this much, torch's cache is returned to the driver, which needs the memory for the next segment.
_LARGE = 1 << 28


class Placement:
    """Places of the storages of a scan.

    This object owns the segments' descriptors until they are taken with :attr:`segments`. A segment kept by the reader itself
    is listed without a descriptor.

    :param tensors: ``"parameters"`` if storages that no parameter uses are private to each process.
    :param reader: the id of the server that reads it, ``""`` for any process.
    """

    def __init__(self, scan: Scan, found: list[Span], tensors: Tensors, reader: str = "") -> None:
        self._scan = scan
        self._reader = reader
        self._of_parameters = storages_of_parameters(scan) if tensors == "parameters" else None
        self._starts = [span.start for span in found]
        self.entries: list[StorageEntry] = [StorageEntry(-1, 0, 0)] * len(scan.storages)
        self.segments: list[Segment] = []
        self.devices: list[str] = []
        self.buffers: list[BufferEntry] = []
        #: Bytes that readers map in place, and bytes that each reader copies or converts.
        self.nbytes = 0
        self.private_nbytes = 0
        #: Numbers of the used chunks of the pool.
        self.chunks: list[int] = []
        self._numbers: dict[str, int] = {}
        for span in found:
            if span.nbytes == 0:
                self.entries[span.storage] = StorageEntry(-1, 0, 0, self._device(span.device))

    def table(self) -> bytes:
        """Return the encoded table of the scan's tensors and their storages."""
        entries = self._scan.entries
        if any(self._starts):
            entries = [
                msgspec.structs.replace(entry, offset=entry.offset - start // getattr(torch, entry.dtype).itemsize)
                if (start := self._starts[entry.storage])
                else entry
                for entry in entries
            ]
        table = TensorTable(tuple(self.devices), tuple(self.entries), tuple(entries), tuple(self.buffers))
        return msgspec.msgpack.encode(table)

    def _device(self, device: torch.device) -> int:
        name = id_of(device)
        if name not in self.devices:
            self.devices.append(name)
        return self.devices.index(name)

    def segment(self, mapping: Mapping, access: Access) -> int:
        """Return the number of a mapping's segment."""
        number = self._numbers.get(mapping.info.id)
        if number is None:
            number = self._numbers[mapping.info.id] = len(self.segments)
            if mapping.descriptor is None:
                self.segments.append(Segment(mapping.info))
            else:
                mapping.publish(access)
                self.segments.append(mapping.descriptor.duplicate("read" if mapping.sealed and access != "private" else access))
        return number

    def add_buffers(self, buffers: PickledBuffers, access: Access) -> None:
        """Copy memory without tensors into separate segments."""
        segments, self.buffers = place(buffers, access, len(self.segments))
        self.segments += segments
        self.nbytes += buffers.nbytes

    def put(self, block: Block, segment: int, offset: int, chunk: int = 0) -> None:
        """Record that a block lies at ``offset`` of a segment."""
        for span in block.spans:
            self.entries[span.storage] = StorageEntry(segment, offset + span.address - block.address, span.nbytes, 0, chunk)

    def count(self, block: Block) -> None:
        """Add a block to the reported size of the value."""
        if self._is_repacked(block) or self.is_private(block):
            self.private_nbytes += block.nbytes
        else:
            self.nbytes += block.nbytes

    def is_private(self, block: Block) -> bool:
        """Return True if each reader gets its own copy of a block: no parameter uses a byte of it."""
        shared = self._of_parameters
        return shared is not None and not self._is_repacked(block) and all(span.storage not in shared for span in block.spans)

    def _is_repacked(self, block: Block) -> bool:
        return all(self._scan.storages[span.storage]._cdata in self._scan.repacked for span in block.spans)

    def stays(self, block: Block, access: Access) -> bool:
        """Record a block in memory that the reader can reference, which need not be copied; return False for any other."""
        found = MAPPINGS.find(block.address)
        if found is None or found[1] + block.nbytes > found[0].info.nbytes:
            return False
        mapping, offset = found
        known = bool(self._reader) and mapping.owner == self._reader
        if mapping.pooled or (not known and mapping.descriptor is None) or (access == "read" and mapping.may_change):
            return False
        self.put(block, self.segment(mapping, access), offset)
        return True

    def close(self) -> None:
        """Close the descriptors."""
        for segment in self.segments:
            segment.close()


def move(scan: Scan, access: Access, tensors: Tensors = "all", slabs: Slabs | None = None) -> Placement:
    """Place every storage of ``scan`` in a segment, and rebind its tensors. All work on the memory is complete on return.

    A storage in a segment that this process may publish stays in place, unless it is shared for reading and another process
    may write to it (:attr:`Mapping.may_change`). A private one is always copied into a segment, and its tensors are not
    rebound.

    :param slabs: for a small value without parameters; None for separate segments.
    :raises CapabilityError: if a device has too little memory. Tensors already moved stay valid.
    """
    found = spans(scan, exact=False)
    placement = Placement(scan, found, tensors)
    try:
        with torch.inference_mode(False), torch.no_grad():
            rest, private = _elsewhere(placement, found, access)
            _move_all(scan, placement, rest, access, slabs if _is_small(scan, rest, access) else None)
            _copy_private(placement, private)
        if scan.buffers is not None and scan.buffers.views:
            # Memory of tensors other than parameters is each reader's own, and writable.
            placement.add_buffers(scan.buffers, access if tensors == "all" else "read_write")
    except BaseException:
        placement.close()
        raise
    return placement


def copy(scan: Scan, found: list[Span], pool: Pool | None, reader: str = "", tensors: Tensors = "all") -> Placement:
    """Copy memory used by the tensors of ``scan`` into a pool, or into separate segments if it does not fit, writable for the
    reader.

    Memory in a segment that the reader can reference stays in place, unless it is to be private. The current streams' work is
    complete on return; the device's other streams are not waited for.

    :param found: the scan's exact spans.
    :param pool: None to make segments.
    :param reader: the id of the server that reads it, ``""`` for any process.
    :raises CapabilityError: if a device has too little memory, or is in the middle of a CUDA graph's capture.
    """
    if scan.kind == "cuda" and torch.cuda.is_current_stream_capturing():
        raise CapabilityError(
            "a call waits for another process and cannot be captured into a CUDA graph: capture the code around the call"
        )
    placement = Placement(scan, found, tensors, reader)
    try:
        others, private = _elsewhere(placement, found, "read_write")
        for device, blocks_there in private.items():
            others[device] += blocks_there  # the copy is the reader's own in any case
        for device, rest in others.items():
            if pool is None or not _copy_into(pool, placement, rest, device):
                for mapping, chosen in _segments(rest, device):
                    _fill(placement, mapping, chosen, "read_write")
        for device in {span.device for span in found}:
            backend_for(id_of(device)).wait(current_stream(device))
    except BaseException:
        placement.close()
        if pool is not None:
            pool.release(placement.chunks)
        raise
    return placement


_Blocks = dict[torch.device, list[Block]]


def _is_small(scan: Scan, rest: _Blocks, access: Access) -> bool:
    """Return True if a value may be put into slabs. Weights may not, because they are moved between tiers separately, nor may
    memory that each process maps or copies for itself.
    """
    return (
        access in ("read_write", "read")
        and sum(aligned(block.nbytes) for of_device in rest.values() for block in of_device) <= LARGEST
        and not any(entry.parameter for entry in scan.entries)
    )


def _elsewhere(placement: Placement, found: list[Span], access: Access) -> tuple[_Blocks, _Blocks]:
    """Return the blocks that must be copied, by device: the shared ones, and the private ones."""
    rest: _Blocks = defaultdict(list)
    private: _Blocks = defaultdict(list)
    for block in blocks(found):
        placement.count(block)
        if placement.is_private(block):
            private[block.device].append(block)
        elif not placement.stays(block, access):
            rest[block.device].append(block)
    return rest, private


def _copy_into(pool: Pool, placement: Placement, rest: list[Block], device: torch.device) -> bool:
    """Copy blocks into chunks; return False if the pool does not hold them."""
    chunks = pool.acquire(id_of(device), [block.nbytes for block in rest])
    if chunks is None:
        return False
    placement.chunks += [chunk.number for chunk in chunks]
    for block, chunk in zip(rest, chunks, strict=True):
        _fill(placement, chunk.arena.mapping, [(block, chunk.offset)], "read_write", chunk.number)
    return True


def _segments(
    rest: list[Block], device: torch.device, slabs: Slabs | None = None, access: Access = "read_write"
) -> Iterable[tuple[Mapping, list[tuple[Block, int]]]]:
    """Yield the segments for blocks, each mapped while it is filled, and the blocks at their offsets in it."""
    if slabs is not None:
        hold, offsets = slabs.place(id_of(device), access, [block.nbytes for block in rest])
        yield hold.mapping, list(zip(rest, offsets, strict=True))
        return
    sizes, places = pack([block.nbytes for block in rest])
    for segment, nbytes in enumerate(sizes):
        chosen = [(block, spot.offset) for block, spot in zip(rest, places, strict=True) if spot.segment == segment]
        with MAPPINGS.create(nbytes, id_of(device)) as mapping:
            yield mapping, chosen


def _fill(placement: Placement, mapping: Mapping, chosen: list[tuple[Block, int]], access: Access, chunk: int = 0) -> None:
    number = placement.segment(mapping, access)
    for block, offset in chosen:
        copy_bytes(mapping.backend, mapping.address + offset, block.address, block.nbytes, block.device)
        placement.put(block, number, offset, chunk)


def _copy_private(placement: Placement, private: _Blocks) -> None:
    for device, of_device in private.items():
        for mapping, chosen in _segments(of_device, device):
            _fill(placement, mapping, chosen, "private")
            _synchronize(device)


def _move_all(scan: Scan, placement: Placement, rest: _Blocks, access: Access, slabs: Slabs | None) -> None:
    users: dict[int, list[torch.Tensor]] = defaultdict(list)
    for tensor, number in scan.strided:
        users[number].append(tensor)
    for device in {storage.device for storage in scan.storages}:
        # Writes of other streams must be complete before the memory is copied or shared.
        _synchronize(device)
    for device, of_device in rest.items():
        large = sum(block.nbytes for block in of_device) >= _LARGE
        for mapping, chosen in _segments(of_device, device, slabs, access):
            _fill(placement, mapping, chosen, access)
            _synchronize(device)
            for block, offset in chosen:
                _rebind(scan, users, block, mapping, offset)
            if large and device.type == "cuda":
                torch.cuda.empty_cache()
    for tensor, skeleton in scan.composite:
        tensor.data = load(skeleton, scan.plain, scan.storages)


def _rebind(scan: Scan, users: dict[int, list[torch.Tensor]], block: Block, mapping: Mapping, offset: int) -> None:
    for span in block.spans:
        new = make_storage(mapping, offset + span.address - block.address, span.nbytes, block.device)
        MAPPINGS.keep_for([(mapping, new)])
        scan.storages[span.storage] = new
        for tensor in users[span.storage]:
            _move(tensor, new)


def _move(tensor: torch.Tensor, storage: torch.UntypedStorage) -> None:
    # An inference tensor accepts only data made in inference mode.
    with torch.inference_mode(tensor.is_inference()):
        moved = torch.empty(0, dtype=tensor.dtype, device=storage.device)
        moved.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())
        if tensor.is_conj():
            moved = moved.conj()
        if tensor.is_neg():
            moved = torch._neg_view(moved)
        tensor.data = moved


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
