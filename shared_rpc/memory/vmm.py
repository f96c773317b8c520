"""GPU memory: allocations of CUDA's virtual memory management, exported as POSIX file descriptors.

An allocation made this way belongs to no process: it lives as long as a descriptor, an imported handle or a
mapping does. See the CUDA Driver API, "Virtual Memory Management".
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from cuda.bindings import driver

from shared_rpc.errors import CapabilityError
from shared_rpc.memory.segments import Access, Segment, SegmentInfo, new_segment_id

__all__ = ["DeviceBytes", "VmmBackend", "gpu", "peer_capable", "supports_vmm", "uuid_of", "visible_gpus"]

_FD = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
_ACCESS = {
    "read_write": driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
    "read": driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READ,
}


#: Streams of one priority in torch's pool (c10/cuda/CUDAStream.cpp).
_TORCH_POOL = 32


class _DriverError(RuntimeError):
    def __init__(self, code: Any) -> None:
        name = driver.cuGetErrorName(code)[1]
        super().__init__(name.decode() if name else str(code))
        self.code = code


def _check(result: tuple[Any, ...]) -> Any:
    """The values of a driver call, or :class:`_DriverError`."""
    if result[0] != driver.CUresult.CUDA_SUCCESS:
        raise _DriverError(result[0])
    return result[1] if len(result) == 2 else result[1:]


@functools.cache
def visible_gpus() -> tuple[str, ...]:
    """UUIDs of the GPUs this process sees, in the order of their ordinals; empty where there is no driver."""
    try:
        _check(driver.cuInit(0))
        count = _check(driver.cuDeviceGetCount())
    except (_DriverError, RuntimeError):
        return ()
    return tuple(uuid_of(ordinal) for ordinal in range(count))


def uuid_of(ordinal: int) -> str:
    """``"GPU-xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx"`` of a visible GPU, as nvidia-smi prints it."""
    _check(driver.cuInit(0))
    digits = bytes(_check(driver.cuDeviceGetUuid(_check(driver.cuDeviceGet(ordinal)))).bytes).hex()
    return f"GPU-{digits[:8]}-{digits[8:12]}-{digits[12:16]}-{digits[16:20]}-{digits[20:]}"


def supports_vmm(ordinal: int) -> tuple[bool, bool]:
    """Whether the GPU has virtual memory management, and whether its allocations export as descriptors."""
    attribute = driver.CUdevice_attribute
    device = _check(driver.cuDeviceGet(ordinal))
    vmm = attribute.CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
    fds = attribute.CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED
    return (
        bool(_check(driver.cuDeviceGetAttribute(vmm, device))),
        bool(_check(driver.cuDeviceGetAttribute(fds, device))),
    )


def peer_capable(ordinal: int, other: int) -> bool:
    """Whether one visible GPU can reach another's memory."""
    return bool(_check(driver.cuDeviceCanAccessPeer(_check(driver.cuDeviceGet(ordinal)), _check(driver.cuDeviceGet(other)))))


@functools.cache
def gpu(uuid: str) -> VmmBackend:
    """The backend of the GPU with that UUID.

    A GPU that this process does not see is reached as a peer, through the first GPU that it does see.

    :raises CapabilityError: if this process sees no GPU at all.
    """
    seen = visible_gpus()
    if not seen:
        raise CapabilityError(
            f"the memory is on GPU {uuid} and this process sees no GPU: check CUDA_VISIBLE_DEVICES and the driver"
        )
    return VmmBackend(uuid, seen.index(uuid) if uuid in seen else 0)


@dataclass(frozen=True)
class DeviceBytes:
    """GPU memory as ``uint8``, for anything that reads ``__cuda_array_interface__``."""

    address: int
    nbytes: int

    @property
    def __cuda_array_interface__(self) -> dict[str, object]:
        return {"shape": (self.nbytes,), "typestr": "|u1", "data": (self.address, False), "version": 3, "stream": None}


class _Event:
    """A point in the work of the GPU whose context is current."""

    def __init__(self) -> None:
        self.handle = _check(driver.cuEventCreate(driver.CUevent_flags.CU_EVENT_DISABLE_TIMING))

    def passed(self) -> bool:
        """Whether the GPU has come so far; also where its context is broken, and will not do any more."""
        # Asking would invalidate captures of other threads, unless this one says that it means no harm.
        mode = _check(driver.cuThreadExchangeStreamCaptureMode(driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED))
        try:
            return bool(driver.cuEventQuery(self.handle)[0] != driver.CUresult.CUDA_ERROR_NOT_READY)
        finally:
            _check(driver.cuThreadExchangeStreamCaptureMode(mode))

    def __del__(self) -> None:
        driver.cuEventDestroy(self.handle)


class VmmBackend:
    """Segments on one GPU.

    ``ordinal`` is the GPU whose address space is used here: the GPU itself where it is visible, else a peer.
    """

    def __init__(self, uuid: str, ordinal: int) -> None:
        self.uuid = uuid
        self.ordinal = ordinal
        self._pool: tuple[int, ...] = ()
        self._device = _check(driver.cuDeviceGet(ordinal))
        self.granularity = int(
            _check(
                driver.cuMemGetAllocationGranularity(
                    self._allocation(),
                    driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM,
                )
            )
        )

    @functools.cached_property
    def _context(self) -> Any:
        """Retained for the life of the process: it is the context torch uses, and mappings need one to be current.

        Allocating needs none, so a process that only makes memory and hands it out has no context, which takes hundreds of MiB.
        """
        return _check(driver.cuDevicePrimaryCtxRetain(self._device))

    @property
    def name(self) -> str:
        """The GPU's model."""
        return bytes(_check(driver.cuDeviceGetName(256, self._device))).split(b"\0")[0].decode(errors="replace").strip()

    @property
    def total(self) -> int:
        """Bytes of memory that the GPU has."""
        return int(_check(driver.cuDeviceTotalMem(self._device)))

    def free(self) -> int | None:
        """Bytes of memory that nobody uses; None where the driver does not tell, as in a process without a context."""
        try:
            _, active = _check(driver.cuDevicePrimaryCtxGetState(self._device))
            if not active:
                return None
            with self._current():
                return int(_check(driver.cuMemGetInfo())[0])
        except _DriverError:
            return None

    def _location(self) -> Any:
        location = driver.CUmemLocation()
        location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        location.id = self.ordinal
        return location

    def _allocation(self) -> Any:
        allocation = driver.CUmemAllocationProp()
        allocation.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        allocation.requestedHandleTypes = _FD
        allocation.location = self._location()
        return allocation

    @contextmanager
    def _current(self) -> Iterator[None]:
        _check(driver.cuCtxPushCurrent(self._context))
        try:
            yield
        finally:
            _check(driver.cuCtxPopCurrent())

    def create(self, nbytes: int) -> Segment:
        """New GPU memory. The driver zeroes it."""
        if visible_gpus()[self.ordinal] != self.uuid:
            raise CapabilityError(f"GPU {self.uuid} is not visible to this process, so it cannot allocate there")
        size = -(-nbytes // self.granularity) * self.granularity
        try:
            handle = _check(driver.cuMemCreate(size, self._allocation(), 0))
        except _DriverError as error:
            raise CapabilityError(f"cannot allocate {size} bytes on GPU {self.uuid}: {error}") from error
        try:
            fd = int(_check(driver.cuMemExportToShareableHandle(handle, _FD, 0)))
        finally:
            # The descriptor holds the memory from here on.
            _check(driver.cuMemRelease(handle))
        os.set_inheritable(fd, False)
        return Segment(SegmentInfo(id=new_segment_id(), nbytes=size, device=self.uuid), fd)

    def map(self, fd: int, nbytes: int, access: Access) -> int:
        """Import the allocation behind ``fd`` and map it for this backend's GPU."""
        address = handle = None
        with self._current():
            try:
                handle = _check(driver.cuMemImportFromShareableHandle(fd, _FD))
                address = _check(driver.cuMemAddressReserve(nbytes, 0, 0, 0))
                _check(driver.cuMemMap(address, nbytes, 0, handle, 0))
                try:
                    self._allow(address, nbytes, access)
                except _DriverError:
                    _check(driver.cuMemUnmap(address, nbytes))
                    raise
            except _DriverError as error:
                if address is not None:
                    _check(driver.cuMemAddressFree(address, nbytes))
                raise CapabilityError(
                    f"cannot map {nbytes} bytes that live on GPU {self.uuid} for GPU "
                    f"{visible_gpus()[self.ordinal]} of this process: {error}"
                ) from error
            finally:
                if handle is not None:
                    # The mapping holds the memory from here on.
                    _check(driver.cuMemRelease(handle))
        return int(address)

    def _allow(self, address: Any, nbytes: int, access: Access) -> None:
        descriptor = driver.CUmemAccessDesc()
        descriptor.location = self._location()
        descriptor.flags = _ACCESS[access]
        _check(driver.cuMemSetAccess(address, nbytes, [descriptor], 1))

    def seal(self, fd: int) -> None:
        """CUDA has no seal: a consumer maps read-only because it was told to."""

    unmaps_in_background = False

    def synchronize(self) -> bool:
        """Wait for all work of this process on the GPU: unmapping under a kernel is an illegal access.

        Waiting for a context while one of its streams is being captured fails and invalidates the capture, whichever
        thread waits (measured on CUDA 13, in every capture mode). So torch's streams are looked at first.
        """
        try:
            with self._current():
                if any(self._captures(stream) for stream in self._torch_streams()):
                    return False
                _check(driver.cuCtxSynchronize())
        except _DriverError:
            return False  # the context is broken, by a kernel of the user's perhaps: its memory goes with the process
        return True

    def copy(self, target: int, source: int, nbytes: int, stream: int = 0) -> None:
        """Queued on the stream."""
        _check(driver.cuCtxPushCurrent(self._context))
        try:
            _check(driver.cuMemcpyDtoDAsync(target, source, nbytes, driver.CUstream(stream)))
        finally:
            _check(driver.cuCtxPopCurrent())

    def wait(self, stream: int = 0) -> None:
        """Only this stream's work, and for stream 0 that of those that wait for one another with it."""
        _check(driver.cuCtxPushCurrent(self._context))
        try:
            _check(driver.cuStreamSynchronize(driver.CUstream(stream)))
        finally:
            _check(driver.cuCtxPopCurrent())

    def fence(self) -> Callable[[], bool] | None:
        """Mark what this process has queued on the GPU, on whichever stream (cuCtxRecordEvent, CUDA 12.5)."""
        try:
            with self._current():
                if any(self._captures(stream) for stream in self._torch_streams()):
                    return None
                event = _Event()
                _check(driver.cuCtxRecordEvent(self._context, event.handle))
        except _DriverError:
            return None  # an older driver, or a broken context
        return event.passed

    @staticmethod
    def _captures(stream: int) -> bool:
        none = driver.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_NONE
        return bool(_check(driver.cuStreamIsCapturing(driver.CUstream(stream))) != none)

    def _torch_streams(self) -> tuple[int, ...]:
        """The handles of torch's streams on this GPU; captures run on one of its pool. Empty where torch is not used."""
        torch = sys.modules.get("torch")
        if torch is None or not torch.cuda.is_initialized():
            return ()
        if not self._pool:
            # torch hands out the streams of its pool in turn, so as many requests leave the turn where it was.
            lowest, highest = torch.cuda.Stream.priority_range()
            self._pool = tuple(
                torch.cuda.Stream(self.ordinal, priority=priority).cuda_stream
                for priority in range(highest, lowest + 1)
                for _ in range(_TORCH_POOL)
            )
        current = torch.cuda.current_stream(self.ordinal).cuda_stream
        return (*self._pool, current) if current else self._pool

    def unmap(self, address: int, nbytes: int) -> None:
        """Unmap and give the address range back."""
        with self._current():
            _check(driver.cuMemUnmap(address, nbytes))
            _check(driver.cuMemAddressFree(address, nbytes))

    def view(self, address: int, nbytes: int) -> DeviceBytes:
        """The bytes as a CUDA array."""
        return DeviceBytes(address, nbytes)
