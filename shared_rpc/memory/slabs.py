"""Slabs: segments shared by small results.

A separate segment costs a result a file descriptor in the server, a mapping in each process that has it, and on a GPU 2 MiB.
Small results are put into slabs instead, one after the other. A slab's memory is not reused after a result in it has ended; all
of it is freed with the last result in it, once the next slab has been begun.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from shared_rpc.errors import CapabilityError
from shared_rpc.memory.layout import aligned, pack
from shared_rpc.memory.mapping import MAPPINGS, MappingHold
from shared_rpc.protocol.records import Access

#: Maximum bytes of a result in a slab; tensors that each process copies do not count.
LARGEST = 1 << 20
#: Bytes of the first slab of a device and an access, which is the minimum allocation of a GPU's driver; the size doubles with
#: each further one, up to the last number.
_FIRST, _LAST = 2 << 20, 32 << 20


class _Slab(msgspec.Struct, eq=False):
    hold: MappingHold
    used: int = 0


class Slabs:
    """The slabs that one process fills. Not thread-safe."""

    def __init__(self) -> None:
        self._slabs: dict[tuple[str, Access], _Slab] = {}
        self._closed = False

    def place(self, device: str, access: Access, sizes: Sequence[int]) -> tuple[MappingHold, list[int]]:
        """Return a slab, and the offsets in it for blocks of these sizes, of at most :data:`LARGEST` together.

        The returned hold keeps the slab mapped until tensors in it do.

        :param access: for all results in the slab.
        :raises CapabilityError: if the device has too little memory for another slab.
        """
        [nbytes], places = pack(sizes)
        slab = self._slabs.get((device, access))
        if slab is None or slab.used + nbytes > slab.hold.mapping.info.nbytes or slab.hold.mapping.descriptor is None:
            size = _FIRST if slab is None else min(2 * slab.hold.mapping.info.nbytes, _LAST)
            slab = _Slab(self._made(device, access, size))
            if not self._closed:
                self._slabs[device, access] = slab
        start, slab.used = slab.used, aligned(slab.used + nbytes)
        return slab.hold, [start + place.offset for place in places]

    def _made(self, device: str, access: Access, size: int) -> MappingHold:
        try:
            with MAPPINGS.create(size, device, slab=True) as mapping:
                mapping.publish(access)
                return MAPPINGS.hold(mapping)
        except CapabilityError:
            if size == _FIRST:
                raise
            return self._made(device, access, _FIRST)

    def close(self) -> None:
        """Release all slabs: their memory is freed with the results in them."""
        self._closed = True
        self._slabs.clear()
