"""GPU memory by CUDA's first interprocess interface: cuMemAlloc, cuIpcGetMemHandle and cuIpcOpenMemHandle.

For GPUs and drivers without virtual memory management. The memory belongs to the process that made it, consumers can always
write to it, and one process has it at one address. "Calling cuMemFree on an exported memory region before calling
cuIpcCloseMemHandle in the importing context will result in undefined behavior" (CUDA Driver API, Memory Management);
:mod:`shared_rpc.memory.backends.exporter_owned` prevents that.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from cuda.bindings import driver

from shared_rpc.errors import CapabilityError
from shared_rpc.memory.backends.cuda import CudaBackend, DriverError, check, opaque, opaque_bytes, relaxed_captures
from shared_rpc.memory.backends.exporter_owned import ExportDescriptor, ExporterOwnedBackend, Memory

_LAZY_PEERS = driver.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS


class ExporterOwnedCudaBackend(CudaBackend, ExporterOwnedBackend):
    """GPU memory that is bound to this process, with its own stream, so that no other one is waited for."""

    def __init__(self, uuid: str) -> None:
        CudaBackend.__init__(self, uuid)
        ExporterOwnedBackend.__init__(self)

    @functools.cached_property
    def stream(self) -> Any:
        """The stream on which memory is zeroed."""
        return check(driver.cuStreamCreate(int(driver.CUstream_flags.CU_STREAM_NON_BLOCKING)))

    @contextmanager
    def working(self) -> Iterator[None]:
        """Run driver calls that allocate or free, even while a graph is captured."""
        with self.current(), relaxed_captures():
            yield

    def zero(self, address: Any, nbytes: int) -> None:
        """Zero the memory, and wait for it."""
        check(driver.cuMemsetD8Async(address, 0, nbytes, self.stream))
        check(driver.cuStreamSynchronize(self.stream))


class IpcBackend(ExporterOwnedCudaBackend):
    """Segments that are separate allocations, with a handle from the driver."""

    mechanism = "ipc"
    cure = (
        "legacy CUDA IPC needs processes that see the GPU and, in containers, share a pid and IPC namespace "
        "(--pid and --ipc); Provider(mechanism='vmm') on the server does not need them"
    )

    def make(self, nbytes: int, token: bytes) -> Memory:
        """Allocate and zero memory, and create its handle."""
        self.require_visible()
        with self.working():
            try:
                address = check(driver.cuMemAlloc(nbytes))
            except DriverError as error:
                raise CapabilityError(f"cannot allocate {nbytes} bytes on GPU {self.uuid}: {error}") from error
            try:
                self.zero(address, nbytes)
                handle = opaque_bytes(check(driver.cuIpcGetMemHandle(address)))
            except DriverError as error:
                check(driver.cuMemFree(address))
                raise CapabilityError(f"GPU {self.uuid} cannot share memory by the mechanism 'ipc': {error}") from error
        return Memory(int(address), handle)

    def free(self, token: bytes, memory: Memory) -> None:
        """Free the allocation."""
        with self.working():
            check(driver.cuMemFree(memory.address))

    def open(self, exported: ExportDescriptor) -> Memory:
        """Open the handle."""
        handle = opaque(driver.CUipcMemHandle(), exported.handle)
        with self.working():
            try:
                return Memory(int(check(driver.cuIpcOpenMemHandle(handle, int(_LAZY_PEERS)))))
            except DriverError as error:
                raise CapabilityError(str(error)) from error

    def close(self, memory: Memory) -> None:
        """Close the memory that the handle opened."""
        with self.working():
            check(driver.cuIpcCloseMemHandle(memory.address))
