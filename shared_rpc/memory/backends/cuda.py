"""The CUDA driver, independent of sharing mechanisms: GPUs and their names, the context, streams and captures.

Only :class:`CudaBackend` makes a context: it retains the primary one.
"""

from __future__ import annotations

import ctypes
import functools
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from cuda.bindings import driver

from shared_rpc.errors import CapabilityError
from shared_rpc.protocol.records import Access

#: Streams of one priority in torch's pool (c10/cuda/CUDAStream.cpp).
_TORCH_POOL = 32
#: Bytes of CUipcMemHandle and of CUmemPoolPtrExportData (cuda.h).
_OPAQUE = 64
POSIX_FD = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
# As names of this module: looking up an enum's members takes longer than some of the calls.
_SUCCESS, _NOT_READY = driver.CUresult.CUDA_SUCCESS, driver.CUresult.CUDA_ERROR_NOT_READY
_CAPTURES_NOT = driver.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_NONE


class DriverError(RuntimeError):
    """A failed driver call; ``code`` is its CUresult."""

    def __init__(self, code: Any) -> None:
        name = driver.cuGetErrorName(code)[1]
        super().__init__(name.decode() if name else str(code))
        self.code = code


def check(result: tuple[Any, ...]) -> Any:
    """Return the values of a driver call, or raise :class:`DriverError`."""
    if result[0] != _SUCCESS:
        raise DriverError(result[0])
    return result[1] if len(result) == 2 else result[1:]


@functools.cache
def visible_gpus() -> tuple[str, ...]:
    """Return the UUIDs of the visible GPUs, in the order of their ordinals; none without a driver."""
    try:
        check(driver.cuInit(0))
        count = check(driver.cuDeviceGetCount())
    except (DriverError, RuntimeError):
        return ()
    return tuple(uuid_of(ordinal) for ordinal in range(count))


def uuid_of(ordinal: int) -> str:
    """Return ``"GPU-xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx"`` of a visible GPU, as nvidia-smi prints it."""
    check(driver.cuInit(0))
    digits = bytes(check(driver.cuDeviceGetUuid(check(driver.cuDeviceGet(ordinal)))).bytes).hex()
    return f"GPU-{digits[:8]}-{digits[8:12]}-{digits[12:16]}-{digits[16:20]}-{digits[20:]}"


def ordinal_of(uuid: str) -> int:
    """Return the GPU of this process that can access the memory of the GPU with that UUID: itself if visible, else the first.

    :raises CapabilityError: if no GPU is visible.
    """
    seen = visible_gpus()
    if not seen:
        raise CapabilityError(
            f"the memory is on GPU {uuid}, but this process sees no GPU: check CUDA_VISIBLE_DEVICES and the driver"
        )
    return seen.index(uuid) if uuid in seen else 0


def attribute(ordinal: int, name: str) -> int:
    """Return ``CU_DEVICE_ATTRIBUTE_<name>`` of a visible GPU; 0 if it is unknown to old bindings or an old driver."""
    known = getattr(driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}", None)
    if known is None:
        return 0
    try:
        return int(check(driver.cuDeviceGetAttribute(known, check(driver.cuDeviceGet(ordinal)))))
    except DriverError:
        return 0


@functools.cache
def under_mps(ordinal: int) -> bool:
    """Return True if this process shares its context of a visible GPU with others, by NVIDIA's Multi-Process Service.

    The driver reports it (CU_DEVICE_ATTRIBUTE_MPS_ENABLED, cuda.h).
    """
    return bool(attribute(ordinal, "MPS_ENABLED"))


def peer_capable(ordinal: int, other: int) -> bool:
    """Return True if one visible GPU can access another's memory."""
    return bool(check(driver.cuDeviceCanAccessPeer(check(driver.cuDeviceGet(ordinal)), check(driver.cuDeviceGet(other)))))


def location_of(ordinal: int) -> Any:
    """Return the driver's description of a visible GPU as a location."""
    location = driver.CUmemLocation()
    location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    location.id = ordinal
    return location


def access_for(ordinal: int, access: Access = "read_write") -> Any:
    """Return the driver's description of a visible GPU's access to memory."""
    flags = driver.CUmemAccess_flags
    right = driver.CUmemAccessDesc()
    right.location = location_of(ordinal)
    right.flags = flags.CU_MEM_ACCESS_FLAGS_PROT_READ if access == "read" else flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    return right


def opaque_bytes(handle: Any) -> bytes:
    """Return the bytes of a CUipcMemHandle or CUmemPoolPtrExportData: some bindings have no attribute for them."""
    return ctypes.string_at(int(handle.getPtr()), _OPAQUE)


def opaque(handle: Any, data: bytes) -> Any:
    """Fill ``handle`` with the bytes of :func:`opaque_bytes`, and return it.

    :raises CapabilityError: if it has another size.
    """
    if len(data) != _OPAQUE:
        raise CapabilityError(f"an IPC handle of {len(data)} bytes instead of {_OPAQUE}: use one release on both sides")
    ctypes.memmove(int(handle.getPtr()), data, _OPAQUE)
    return handle


@contextmanager
def relaxed_captures() -> Iterator[None]:
    """Let this thread allocate and free in the block although another one captures a CUDA graph.

    Allocating is forbidden to every thread during a capture in the global mode, which is torch's; the work in the block is
    on no captured stream.
    """
    mode = check(driver.cuThreadExchangeStreamCaptureMode(driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED))
    try:
        yield
    finally:
        check(driver.cuThreadExchangeStreamCaptureMode(mode))


class _Event:
    """A point in the work of the GPU whose context is current."""

    def __init__(self) -> None:
        self.handle = check(driver.cuEventCreate(driver.CUevent_flags.CU_EVENT_DISABLE_TIMING))

    def passed(self) -> bool:
        """Return True once the GPU has reached it; also if the context is broken, because no work remains then."""
        with relaxed_captures():  # the query would invalidate captures of other threads
            return bool(driver.cuEventQuery(self.handle)[0] != _NOT_READY)

    def __del__(self) -> None:
        driver.cuEventDestroy(self.handle)


class CudaBackend:
    """One GPU in this process: the part common to all mechanisms.

    ``uuid`` is the GPU of the memory. ``ordinal`` is the GPU whose address space is used here: the GPU itself if it is visible,
    else a peer.
    """

    unmaps_in_background = False

    def __init__(self, uuid: str) -> None:
        self.uuid = uuid
        self.ordinal = ordinal_of(uuid)
        self._pool: tuple[Any, ...] = ()
        self._device = check(driver.cuDeviceGet(self.ordinal))

    @functools.cached_property
    def _context(self) -> Any:
        """The context that torch uses, retained for the life of the process: mappings need one to be current.

        Allocating needs none, so a process that only allocates and sends memory has no context, which takes hundreds of MiB.
        """
        return check(driver.cuDevicePrimaryCtxRetain(self._device))

    @property
    def name(self) -> str:
        """The GPU's model."""
        return bytes(check(driver.cuDeviceGetName(256, self._device))).split(b"\0")[0].decode(errors="replace").strip()

    @property
    def total(self) -> int:
        """The total bytes of the GPU's memory."""
        return int(check(driver.cuDeviceTotalMem(self._device)))

    def free_bytes(self) -> int | None:
        """Return the bytes of free memory; None if the driver does not report them, for example without a context."""
        try:
            _, active = check(driver.cuDevicePrimaryCtxGetState(self._device))
            if not active:
                return None
            with self.current():
                return int(check(driver.cuMemGetInfo())[0])
        except DriverError:
            return None

    @functools.cached_property
    def peers(self) -> tuple[int, ...]:
        """Ordinals of the other visible GPUs that can access the memory, as reported by the driver."""
        others = (other for other in range(len(visible_gpus())) if other != self.ordinal)
        return tuple(other for other in others if peer_capable(other, self.ordinal))

    @contextmanager
    def current(self) -> Iterator[None]:
        """Make the context current in this thread for the block."""
        check(driver.cuCtxPushCurrent(self._context))
        try:
            yield
        finally:
            check(driver.cuCtxPopCurrent())

    def require_visible(self) -> None:
        """Check that this process may allocate on the GPU.

        :raises CapabilityError: if the GPU is only accessible as a peer.
        """
        if visible_gpus()[self.ordinal] != self.uuid:
            raise CapabilityError(f"GPU {self.uuid} is not visible to this process: check CUDA_VISIBLE_DEVICES")

    def seal(self, fd: int, access: Access = "read") -> None:
        """Do nothing: CUDA has no seals. A consumer maps read-only if the segment's info says so and its driver can."""

    def synchronize(self) -> bool:
        """Wait for all work of this process on the GPU: unmapping under a kernel is an illegal access.

        Waiting for a context while one of its streams is being captured fails and invalidates the capture, in any thread
        (measured on CUDA 13, in every capture mode). So torch's streams are checked first.
        """
        try:
            with self.current():
                if self._capturing():
                    return False
                check(driver.cuCtxSynchronize())
        except DriverError:
            return False  # the context is broken, perhaps by a user's kernel: its memory ends with the process
        return True

    def copy(self, target: int, source: int, nbytes: int, stream: int = 0) -> None:
        """Queue the copy on the stream."""
        check(driver.cuCtxPushCurrent(self._context))
        try:
            check(driver.cuMemcpyDtoDAsync(target, source, nbytes, driver.CUstream(stream)))
        finally:
            check(driver.cuCtxPopCurrent())

    def wait(self, stream: int = 0, seconds: float | None = None) -> bool:
        """Wait for this stream's work only; for stream 0 also for the streams that synchronise with it."""
        handle = driver.CUstream(stream)
        check(driver.cuCtxPushCurrent(self._context))
        try:
            if seconds is None:
                check(driver.cuStreamSynchronize(handle))
                return True
            until = time.perf_counter() + seconds
            with relaxed_captures():  # the query would invalidate captures of other threads
                while (result := driver.cuStreamQuery(handle))[0] == _NOT_READY:
                    if time.perf_counter() > until:
                        return False
            check(result)
            return True
        finally:
            check(driver.cuCtxPopCurrent())

    def fence(self) -> Callable[[], bool] | None:
        """Mark this process's queued work on the GPU, on all streams (cuCtxRecordEvent, CUDA 12.5)."""
        try:
            with self.current():
                if self._capturing():
                    return None
                event = _Event()
                check(driver.cuCtxRecordEvent(self._context, event.handle))
        except (DriverError, AttributeError):
            return None  # older driver or bindings, or a broken context
        return event.passed

    def _capturing(self) -> bool:
        """Return True if one of torch's streams is being captured. Over a hundred calls, so each is kept cheap."""
        captured = driver.cuStreamIsCapturing
        for stream in self._torch_streams():
            code, status = captured(stream)
            if status != _CAPTURES_NOT or code != _SUCCESS:
                check((code,))
                return True
        return False

    def _torch_streams(self) -> tuple[Any, ...]:
        """Return torch's streams on this GPU; captures run on one of its pool. Empty if torch is not used."""
        torch = sys.modules.get("torch")
        if torch is None or not torch.cuda.is_initialized():
            return ()
        if not self._pool:
            # torch returns the streams of its pool in turn, so this many requests restore its position. Priorities that it does
            # not distinguish share their streams.
            lowest, highest = torch.cuda.Stream.priority_range()
            handles = dict.fromkeys(
                torch.cuda.Stream(self.ordinal, priority=priority).cuda_stream
                for priority in range(highest, lowest + 1)
                for _ in range(_TORCH_POOL)
            )
            self._pool = tuple(driver.CUstream(handle) for handle in handles)
        current = torch.cuda.current_stream(self.ordinal).cuda_stream
        return (*self._pool, driver.CUstream(current)) if current else self._pool
