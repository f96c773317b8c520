"""GPU memory: allocations of CUDA's virtual memory management, exported as POSIX file descriptors.

Such an allocation belongs to no process: it lives as long as a descriptor, an imported handle or a mapping does. See the
CUDA Driver API, "Virtual Memory Management".
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable
from typing import Any, ClassVar

from cuda.bindings import driver

from shared_rpc.errors import CapabilityError
from shared_rpc.memory.backends.cuda import (
    POSIX_FD,
    CudaBackend,
    DriverError,
    access_for,
    attribute,
    check,
    location_of,
    under_mps,
    visible_gpus,
)
from shared_rpc.memory.segments import Segment, new_segment_id
from shared_rpc.protocol.records import Access, Mechanism, SegmentInfo

_log = logging.getLogger("shared_rpc")


@functools.cache
def _warn_of_mps(ordinal: int) -> None:
    """Warn once that a write to memory shared with ``access="read"`` ends more than this process."""
    if under_mps(ordinal):
        _log.warning(
            "this process uses GPU %d through NVIDIA's Multi-Process Service (MPS): a write to memory that is shared with "
            "access='read' ends the other processes of the service too, not this one alone; see docs/how-to/mps.md",
            ordinal,
        )


class VmmBackend(CudaBackend):
    """Segments on one GPU."""

    mechanism: ClassVar[Mechanism] = "vmm"
    #: True if the memory is the GPU's own.
    on_gpu: ClassVar[bool] = True

    def __init__(self, uuid: str) -> None:
        super().__init__(uuid)
        self._location = self.location()
        #: True if network cards can read and write the memory (GPUDirect RDMA). Allocations of virtual memory management need a
        #: flag for that, those of cudaMalloc do not; without it, registering a segment with a card (NIXL, UCX, NCCL) fails
        #: with "Bad address".
        self._rdma = self.on_gpu and bool(attribute(self.ordinal, "GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED"))
        smallest = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        self.granularity = int(
            self._with_allocation(lambda allocation: driver.cuMemGetAllocationGranularity(allocation, smallest))
        )

    def location(self) -> Any:
        """Return the driver's description of the memory's location."""
        return location_of(self.ordinal)

    @property
    def where(self) -> str:
        """The memory's location, for display."""
        return f"on GPU {self.uuid}"

    def _allocation(self, rdma: bool) -> Any:
        allocation = driver.CUmemAllocationProp()
        allocation.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        allocation.requestedHandleTypes = POSIX_FD
        allocation.location = self._location
        if rdma:
            allocation.allocFlags.gpuDirectRDMACapable = 1
        return allocation

    def _with_allocation(self, call: Callable[[Any], tuple[Any, ...]]) -> Any:
        """Return the value of a driver call that takes allocation properties.

        If the driver refuses GPUDirect RDMA although the GPU has it, for example without its kernel module, memory is allocated
        without it, from then on unless the GPU was merely full.
        """
        if self._rdma:
            try:
                return check(call(self._allocation(rdma=True)))
            except DriverError as error:
                if error.code != driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
                    self._rdma = False
        return check(call(self._allocation(rdma=False)))

    def create(self, nbytes: int) -> Segment:
        """Allocate GPU memory. The driver zeroes it."""
        self.require_visible()
        size = -(-nbytes // self.granularity) * self.granularity
        try:
            handle = self._with_allocation(lambda allocation: driver.cuMemCreate(size, allocation, 0))
        except DriverError as error:
            raise CapabilityError(f"cannot allocate {size} bytes {self.where}: {error}") from error
        try:
            fd = int(check(driver.cuMemExportToShareableHandle(handle, POSIX_FD, 0)))
        finally:
            # From here on, the descriptor keeps the memory.
            check(driver.cuMemRelease(handle))
        os.set_inheritable(fd, False)
        return Segment.owning(SegmentInfo(id=new_segment_id(), nbytes=size, device=self.uuid, mechanism=self.mechanism), fd)

    vacates = True
    replaces = False

    def map(self, fd: int, nbytes: int, access: Access, at: int | None = None) -> int:
        """Import the allocation behind ``fd`` and map it for this backend's GPU, and for its peers."""
        address = handle = None
        mapped = False
        if access == "read" and self.on_gpu:
            _warn_of_mps(self.ordinal)
        with self.current():
            try:
                handle = check(driver.cuMemImportFromShareableHandle(fd, POSIX_FD))
                address = at if at is not None else check(driver.cuMemAddressReserve(nbytes, 0, 0, 0))
                check(driver.cuMemMap(address, nbytes, 0, handle, 0))
                mapped = True
                self._allow(address, nbytes, access)
            except BaseException as error:
                if mapped:
                    check(driver.cuMemUnmap(address, nbytes))
                if address is not None and at is None:
                    check(driver.cuMemAddressFree(address, nbytes))
                if not isinstance(error, DriverError):
                    raise
                raise CapabilityError(
                    f"cannot map {nbytes} bytes {self.where} on GPU {visible_gpus()[self.ordinal]} of this process by the "
                    f"mechanism {self.mechanism!r}: {error}; compare the output of 'shared-rpc doctor' here and where the "
                    f"memory was made"
                ) from error
            finally:
                if handle is not None:
                    # From here on, the mapping keeps the memory.
                    check(driver.cuMemRelease(handle))
        return int(address)

    def _allow(self, address: Any, nbytes: int, access: Access) -> None:
        """Grant access to this backend's GPU, and to its peers, so that tensors can be copied to them."""
        check(driver.cuMemSetAccess(address, nbytes, [access_for(self.ordinal, access)], 1))
        for peer in self.peers:
            # Nothing is copied to a peer that the driver refuses (MIG, another fabric).
            driver.cuMemSetAccess(address, nbytes, [access_for(peer, access)], 1)

    def unmap(self, address: int, nbytes: int) -> None:
        """Unmap and free the address range."""
        with self.current():
            check(driver.cuMemUnmap(address, nbytes))
            check(driver.cuMemAddressFree(address, nbytes))

    def vacate(self, address: int, nbytes: int) -> None:
        """Unmap, and keep the address range: its users, such as a CUDA graph, are valid again after :meth:`map`."""
        with self.current():
            check(driver.cuMemUnmap(address, nbytes))

    def free_range(self, address: int, nbytes: int) -> None:
        """Free the address range."""
        with self.current():
            check(driver.cuMemAddressFree(address, nbytes))


class HostVmmBackend(VmmBackend):
    """Segments in host memory that one GPU copies to and from, for copies of objects: pinned, on the GPU's NUMA node.

    Host memory of the kernel (memfd_create(2)) would have to be registered with the driver in each process that copies from it,
    which takes longer than copying (measured on an H200: 0.7 s for 16 GiB of existing pages, 12.5 s for untouched
    pages).
    """

    mechanism: ClassVar[Mechanism] = "host_vmm"
    on_gpu: ClassVar[bool] = False

    def location(self) -> Any:
        """Return the driver's description of the GPU's NUMA node."""
        location = driver.CUmemLocation()
        location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_HOST_NUMA
        # Without NUMA the driver reports -1, and its node is 0.
        location.id = max(attribute(self.ordinal, "HOST_NUMA_ID"), 0)
        return location

    @property
    def where(self) -> str:
        """The memory's location, for display."""
        return f"in host memory of GPU {self.uuid}"

    def _allow(self, address: Any, nbytes: int, access: Access) -> None:
        """Grant access to the GPU and the processor: both write, whatever access was requested. Only copiers map it."""
        host = driver.CUmemAccessDesc()
        host.location = self._location
        host.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        check(driver.cuMemSetAccess(address, nbytes, [access_for(self.ordinal), host], 2))
