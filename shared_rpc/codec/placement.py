"""Moving storages into segments, so that what an endpoint returned and what clients map are the same memory.

Storages are copied segment by segment, every tensor over them is rebound to its new place, and the originals are
freed before the next segment is filled: the extra memory at any time is about one segment.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from shared_rpc.codec.skeleton import Scan, SkeletonUnpickler
from shared_rpc.codec.tensors import bytes_at, make_storage
from shared_rpc.memory.arena import pack
from shared_rpc.memory.devices import device_id
from shared_rpc.memory.mapping import MAPPINGS, Mapping
from shared_rpc.memory.segments import Access, Segment
from shared_rpc.records import StorageEntry, TensorTable

__all__ = ["Placement", "place"]

#: Bytes. From here on torch's cache gives freed memory back to the driver, or there would be none for the next segment.
_LARGE = 1 << 28


@dataclass(slots=True)
class _Block:
    """Bytes that storages share: one storage, or several that overlap."""

    address: int
    nbytes: int
    device: torch.device
    storages: list[int] = field(default_factory=list)


class Placement:
    """Where every storage of a scan lies now.

    The segments' descriptors belong to this object until they are taken with :attr:`segments` by a record. A segment that
    the reader keeps itself is there without a descriptor.

    :param reader: the id of the server that is to read it, ``""`` for anybody.
    """

    def __init__(self, scan: Scan, reader: str = "") -> None:
        self._reader = reader
        self.entries: list[StorageEntry] = [StorageEntry(-1, 0, 0)] * len(scan.storages)
        self.segments: list[Segment] = []
        self.devices: list[str] = []
        self.nbytes = 0
        self._numbers: dict[str, int] = {}

    def table(self, scan: Scan) -> TensorTable:
        """The table of the scan's tensors and their storages."""
        return TensorTable(tuple(self.devices), tuple(self.entries), tuple(scan.entries))

    def device(self, device: torch.device) -> int:
        """The number of a device in the table."""
        name = device_id(str(device))
        if name not in self.devices:
            self.devices.append(name)
        return self.devices.index(name)

    def segment(self, mapping: Mapping, access: Access) -> int:
        """The number of a mapping's segment in the record."""
        number = self._numbers.get(mapping.info.id)
        if number is None:
            number = self._numbers[mapping.info.id] = len(self.segments)
            if mapping.segment is None:
                self.segments.append(Segment(mapping.info, -1))
            else:
                self.segments.append(mapping.segment.duplicate("read" if mapping.sealed else access))
        return number

    def reaches(self, mapping: Mapping) -> bool:
        """Whether the reader can be told of a mapping's segment."""
        return mapping.segment is not None or bool(self._reader and mapping.owner == self._reader)

    def close(self) -> None:
        """Give up the descriptors."""
        for segment in self.segments:
            segment.close()


def place(scan: Scan, access: Access, *, rebind: bool, reader: str = "") -> Placement:
    """Give every storage of ``scan`` a place in a segment. All work on the memory is complete when this returns.

    A storage that lies in a segment that this process may publish, or that the reader keeps, stays where it is. With
    ``rebind`` the scan's tensors are moved; without it they are copied and stay as they are.

    :param reader: the id of the server that is to read it, ``""`` for anybody.
    :raises CapabilityError: if a device has not enough memory. Tensors already moved stay valid.
    """
    placement = Placement(scan, reader)
    try:
        with torch.inference_mode(False), torch.no_grad():
            _place(scan, placement, access, rebind)
    except BaseException:
        placement.close()
        raise
    return placement


def _place(scan: Scan, placement: Placement, access: Access, rebind: bool) -> None:
    by_device: dict[torch.device, list[_Block]] = defaultdict(list)
    for block in _blocks(scan.storages):
        placement.nbytes += block.nbytes
        found = MAPPINGS.find(block.address)
        if found is not None and placement.reaches(found[0]) and found[1] + block.nbytes <= found[0].info.nbytes:
            _note(scan, placement, block, placement.segment(found[0], access), found[1])
        else:
            by_device[block.device].append(block)
    for number, storage in enumerate(scan.storages):
        if storage.nbytes() == 0:
            placement.entries[number] = StorageEntry(-1, 0, 0, placement.device(storage.device))
    users: dict[int, list[torch.Tensor]] = defaultdict(list)
    if rebind:
        for tensor, number in scan.strided:
            users[number].append(tensor)
    for device in {storage.device for storage in scan.storages}:
        # What other streams still write must be there before it is copied or promised.
        _synchronize(device)
    for device, blocks in by_device.items():
        large = sum(block.nbytes for block in blocks) >= _LARGE
        sizes, places = pack([block.nbytes for block in blocks])
        for segment, nbytes in enumerate(sizes):
            chosen = [(block, spot.offset) for block, spot in zip(blocks, places, strict=True) if spot.segment == segment]
            with MAPPINGS.create(nbytes, device_id(str(device))) as mapping:
                _fill(mapping, chosen, device)
                number = placement.segment(mapping, access)
                for block, offset in chosen:
                    _note(scan, placement, block, number, offset)
                    if rebind:
                        _rebind(scan, users, block, mapping, offset, device)
                if access == "read":
                    mapping.seal()
            if rebind and large and device.type == "cuda":
                torch.cuda.empty_cache()
    if rebind:
        for tensor, skeleton in scan.composite:
            tensor.data = SkeletonUnpickler(skeleton, scan.plain, scan.storages).load()


def _blocks(storages: Iterable[torch.UntypedStorage]) -> list[_Block]:
    """The storages' bytes, overlapping ones joined (two storages over one numpy array, say)."""
    blocks: list[_Block] = []
    spans = [(str(s.device), s.data_ptr(), s.nbytes(), n, s.device) for n, s in enumerate(storages) if s.nbytes()]
    for _, address, nbytes, number, device in sorted(spans, key=lambda span: span[:4]):
        last = blocks[-1] if blocks else None
        if last is not None and last.device == device and address < last.address + last.nbytes:
            last.nbytes = max(last.nbytes, address + nbytes - last.address)
            last.storages.append(number)
        else:
            blocks.append(_Block(address, nbytes, device, [number]))
    # In the order the value names them: what is used together lies together.
    return sorted(blocks, key=lambda block: min(block.storages))


def _note(scan: Scan, placement: Placement, block: _Block, segment: int, offset: int) -> None:
    for number in block.storages:
        storage = scan.storages[number]
        start = offset + storage.data_ptr() - block.address
        placement.entries[number] = StorageEntry(segment, start, storage.nbytes())


def _fill(mapping: Mapping, chosen: list[tuple[_Block, int]], device: torch.device) -> None:
    for block, offset in chosen:
        target = bytes_at(mapping.address + offset, block.nbytes, device)
        target.copy_(bytes_at(block.address, block.nbytes, device), non_blocking=True)
    _synchronize(device)


def _rebind(
    scan: Scan,
    users: dict[int, list[torch.Tensor]],
    block: _Block,
    mapping: Mapping,
    offset: int,
    device: torch.device,
) -> None:
    for number in block.storages:
        old = scan.storages[number]
        new = make_storage(mapping, offset + old.data_ptr() - block.address, old.nbytes(), device)
        MAPPINGS.lend([(mapping, new)])
        scan.storages[number] = new
        for tensor in users[number]:
            _move(tensor, new)


def _move(tensor: torch.Tensor, storage: torch.UntypedStorage) -> None:
    # An inference tensor takes only data made in inference mode.
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
