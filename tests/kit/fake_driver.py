"""A CUDA driver of host memory: two GPUs whose allocations are memfds, with streams that execute work immediately.

It has the functions of ``cuda.bindings.driver`` that virtual memory management and copies need. :func:`install` replaces the
driver before the library's modules of it are loaded: in a process without a GPU, or one that is not to use it.
"""

from __future__ import annotations

import ctypes
import enum
import itertools
import mmap
import os
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

from shared_rpc.memory.backends import choice, host

#: In the format of nvidia-smi.
GPUS = ("GPU-fa4e0000-0000-0000-0000-000000000000", "GPU-fa4e0000-0000-0000-0000-000000000001")
GRANULARITY = 1 << 16

_libc = host._libc
_FIXED, _NONE = 0x10, 0  # MAP_FIXED, PROT_NONE


class CUresult(enum.IntEnum):
    """The results in use."""

    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_INVALID_HANDLE = 400
    CUDA_ERROR_NOT_READY = 600
    CUDA_ERROR_NOT_SUPPORTED = 801
    CUDA_ERROR_UNKNOWN = 999


OK = (CUresult.CUDA_SUCCESS,)
INVALID = (CUresult.CUDA_ERROR_INVALID_VALUE, None)


def _enum(name: str, **values: int) -> type[enum.IntEnum]:
    return enum.IntEnum(name, values)


CUmemAllocationHandleType = _enum("CUmemAllocationHandleType", CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR=1)
CUmemAllocationType = _enum("CUmemAllocationType", CU_MEM_ALLOCATION_TYPE_PINNED=1)
CUmemLocationType = _enum("CUmemLocationType", CU_MEM_LOCATION_TYPE_DEVICE=1, CU_MEM_LOCATION_TYPE_HOST_NUMA=3)
CUmemAccess_flags = _enum("CUmemAccess_flags", CU_MEM_ACCESS_FLAGS_PROT_READ=1, CU_MEM_ACCESS_FLAGS_PROT_READWRITE=3)
CUmemAllocationGranularity_flags = _enum("CUmemAllocationGranularity_flags", CU_MEM_ALLOC_GRANULARITY_MINIMUM=0)
CUstreamCaptureStatus = _enum("CUstreamCaptureStatus", CU_STREAM_CAPTURE_STATUS_NONE=0)
CUstreamCaptureMode = _enum("CUstreamCaptureMode", CU_STREAM_CAPTURE_MODE_GLOBAL=0, CU_STREAM_CAPTURE_MODE_RELAXED=2)
CUstream_flags = _enum("CUstream_flags", CU_STREAM_DEFAULT=0, CU_STREAM_NON_BLOCKING=1)
CUevent_flags = _enum("CUevent_flags", CU_EVENT_DISABLE_TIMING=2)
CUdevice_attribute = _enum(
    "CUdevice_attribute",
    CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING=41,
    CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED=102,
    CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED=103,
    CU_DEVICE_ATTRIBUTE_MPS_ENABLED=133,
    CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID=134,
)
_ATTRIBUTES = {41: 1, 102: 1, 103: 1, 134: 0}


class CUmemAllocationProp(SimpleNamespace):
    """Properties with constant flags."""

    def __init__(self) -> None:
        super().__init__(allocFlags=SimpleNamespace(gpuDirectRDMACapable=0))


CUmemLocation = CUmemAccessDesc = SimpleNamespace
CUstream = CUdeviceptr = int


class Driver:
    """The driver's state in this process. A test may change its results.

    :ivar refuses: results of the next call of a function, by its name, in place of its action.
    """

    def __init__(self) -> None:
        self.refuses: dict[str, CUresult] = {}
        self.handles: dict[int, int] = {}
        self.mapped: dict[int, int] = {}
        self.reserved: dict[int, int] = {}
        self.pinned: dict[int, mmap.mmap] = {}
        self.registered: dict[int, int] = {}
        self.streams: set[int] = set()
        self.numbers = itertools.count(1)

    def counts(self) -> dict[str, int]:
        """Return the number of objects of each kind."""
        kinds = ("handles", "mapped", "reserved", "pinned", "registered", "streams")
        return {kind: len(getattr(self, kind)) for kind in kinds}


STATE = Driver()


def _refusable(function):
    """A function of the driver, which fails when the test has set a result."""

    def call(*arguments):
        code = STATE.refuses.get(function.__name__)
        return (code, None) if code is not None else function(*arguments)

    return call


def cuDeviceGetUuid(device):
    """Return the UUID's bytes."""
    return *OK, SimpleNamespace(bytes=bytes.fromhex(GPUS[device].removeprefix("GPU-").replace("-", "")))


def cuDeviceGetAttribute(attribute, device):
    """Support the attributes of virtual memory management only."""
    return *OK, _ATTRIBUTES.get(int(attribute), 0)


def cuGetErrorName(code):
    """Return the name in the enumeration."""
    return *OK, CUresult(code).name.encode()


@_refusable
def cuMemCreate(size, allocation, flags):
    """Allocate a memfd; handles are numbers."""
    if size > 1 << 40:
        return CUresult.CUDA_ERROR_OUT_OF_MEMORY, None
    kind = "host" if allocation.location.type == CUmemLocationType.CU_MEM_LOCATION_TYPE_HOST_NUMA else "gpu"
    fd = os.memfd_create(f"fake-{kind}", os.MFD_CLOEXEC)
    os.ftruncate(fd, size)
    return *OK, _handle(fd)


def _handle(fd):
    number = next(STATE.numbers)
    STATE.handles[number] = fd
    return number


def cuMemExportToShareableHandle(handle, kind, flags):
    """Return a new descriptor, which is inheritable like the driver's."""
    fd = os.dup(STATE.handles[handle])
    os.set_inheritable(fd, True)
    return *OK, fd


def cuMemImportFromShareableHandle(fd, kind):
    """Import an exported descriptor; refuse others."""
    try:
        if not os.readlink(f"/proc/self/fd/{int(fd)}").startswith("/memfd:fake-"):
            return INVALID
    except OSError:
        return INVALID
    return *OK, _handle(os.dup(int(fd)))


def cuMemRelease(handle):
    """Release the handle; a mapping keeps the memory."""
    os.close(STATE.handles.pop(handle))
    return OK


def cuMemAddressReserve(size, alignment, address, flags):
    """Reserve an inaccessible range."""
    start = _libc.mmap(None, size, _NONE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    STATE.reserved[start] = size
    return *OK, start


def cuMemAddressFree(address, size):
    """Free a whole range."""
    assert STATE.reserved.pop(int(address)) == size
    _libc.munmap(int(address), size)
    return OK


@_refusable
def cuMemMap(address, size, offset, handle, flags):
    """Map at the address, which must be reserved."""
    fd = STATE.handles[handle]
    if os.fstat(fd).st_size < size or size % GRANULARITY:
        return (CUresult.CUDA_ERROR_INVALID_VALUE,)
    _libc.mmap(int(address), size, _NONE, mmap.MAP_SHARED | _FIXED, fd, 0)
    STATE.mapped[int(address)] = size
    return OK


def cuMemSetAccess(address, size, rights, count):
    """Make the mapping writable where one of the rights says so."""
    assert len(rights) == count
    write = any(right.flags == CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE for right in rights)
    protection = mmap.PROT_READ | (mmap.PROT_WRITE if write else 0)
    _libc.mprotect(ctypes.c_void_p(int(address)), ctypes.c_size_t(size), protection)
    return OK


def cuMemUnmap(address, size):
    """Unmap; the range stays reserved."""
    assert STATE.mapped.pop(int(address)) == size
    _libc.mmap(int(address), size, _NONE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _FIXED, -1, 0)
    return OK


def cuStreamCreate(flags):
    """Return a new stream number."""
    number = next(STATE.numbers)
    STATE.streams.add(number)
    return *OK, number


def cuStreamDestroy(stream):
    """Destroy a stream, which must exist."""
    STATE.streams.remove(int(stream))
    return OK


@_refusable
def cuMemcpyAsync(target, source, nbytes, stream):
    """Copy immediately."""
    ctypes.memmove(int(target), int(source), nbytes)
    return OK


cuMemcpyDtoDAsync = cuMemcpyAsync


def cuMemHostAlloc(nbytes, flags):
    """Allocate memory of this process."""
    memory = mmap.mmap(-1, nbytes)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    STATE.pinned[address] = memory
    return *OK, address


def cuMemFreeHost(address):
    """Drop it; its last view frees it."""
    del STATE.pinned[address]
    return OK


def cuMemHostRegister(address, nbytes, flags):
    """Record the registration."""
    STATE.registered[address] = nbytes
    return OK


def cuMemHostUnregister(address):
    """Remove the registration, which must exist."""
    del STATE.registered[address]
    return OK


#: Functions with constant answers: there is no context to wait for, and nothing is queued or captured.
_ANSWERS = {
    "cuInit": OK,
    "cuDeviceGetCount": (*OK, len(GPUS)),
    "cuDeviceGetName": (*OK, b"fake GPU\0"),
    "cuDeviceTotalMem": (*OK, 1 << 30),
    "cuDeviceCanAccessPeer": (*OK, 0),
    "cuDevicePrimaryCtxGetState": (*OK, 0, 0),
    "cuCtxPushCurrent": OK,
    "cuCtxPopCurrent": (*OK, 0),
    "cuCtxSynchronize": OK,
    "cuMemGetAllocationGranularity": (*OK, GRANULARITY),
    "cuStreamQuery": OK,
    "cuStreamSynchronize": OK,
    "cuStreamIsCapturing": (*OK, CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_NONE),
}


#: Functions that answer with their argument: an ordinal is a device and its context.
_ECHOES = ("cuDeviceGet", "cuDevicePrimaryCtxRetain", "cuThreadExchangeStreamCaptureMode")


def module() -> types.ModuleType:
    """Return the driver as a module."""
    made = types.ModuleType("cuda.bindings.driver")
    made.__dict__.update({name: value for name, value in globals().items() if name[:2] in ("cu", "CU")})
    made.__dict__.update({name: lambda value: (*OK, value) for name in _ECHOES})
    made.__dict__.update({name: lambda *_, answer=answer: answer for name, answer in _ANSWERS.items()})
    return made


def install() -> None:
    """Install the module where the library imports the driver."""
    bindings = types.ModuleType("cuda.bindings")
    bindings.driver = module()
    cuda = types.ModuleType("cuda")
    cuda.bindings = bindings
    sys.modules.update({"cuda": cuda, "cuda.bindings": bindings, "cuda.bindings.driver": bindings.driver})


@contextmanager
def installed() -> Iterator[Driver]:
    """Make the library use this driver within the block, even if it uses another one already; yield its state."""
    global STATE
    ours = {f"shared_rpc.memory.backends.{name}" for name in ("cuda", "vmm", "host_vmm", "legacy_ipc", "pool_ipc")}
    ours |= {"shared_rpc.memory.gpu_copies", "shared_rpc.memory.gpu_streams"}

    def take_out() -> dict[str, types.ModuleType]:
        names = [name for name in sys.modules if name.partition(".")[0] == "cuda" or name in ours]
        choice._backend_for.cache_clear()
        return {name: sys.modules.pop(name) for name in names}

    before, chosen, STATE = take_out(), choice._chosen, Driver()
    choice._chosen = {}
    try:
        install()
        yield STATE
    finally:
        take_out()
        sys.modules.update(before)
        choice._chosen = chosen
