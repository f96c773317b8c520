"""GPU memory from CUDA's stream-ordered pools: cuMemPoolCreate, cuMemPoolExportPointer and cuMemPoolImportPointer.

A pool is exported as a descriptor, and an allocation of it as 64 bytes; a consumer needs both. "The imported memory must be
freed from all importing processes before being freed in the exporting process" (CUDA Driver API, Stream Ordered Memory
Allocator): see :mod:`shared_rpc.memory.backends.exporter_owned`. Every segment has its own pool, because an exported pool
returns its memory when it is destroyed.

Known pitfalls: a second import of an allocation returns the first one's address, and the first free unmaps both; a
pool's own GPU cannot be denied writing; exporting and destroying pools in two threads at once has crashed drivers.
"""

from __future__ import annotations

import os
from typing import Any

from cuda.bindings import driver

from shared_rpc.errors import CapabilityError
from shared_rpc.memory.backends.cuda import (
    POSIX_FD,
    DriverError,
    access_for,
    check,
    location_of,
    opaque,
    opaque_bytes,
    visible_gpus,
)
from shared_rpc.memory.backends.exporter_owned import ExportDescriptor, Memory
from shared_rpc.memory.backends.fd_server import FD_SERVER, fetch
from shared_rpc.memory.backends.legacy_ipc import ExporterOwnedCudaBackend


class PoolBackend(ExporterOwnedCudaBackend):
    """Segments that are pools of one allocation."""

    mechanism = "pool"
    cure = (
        "CUDA's pools need processes of one user that see the GPU and share a network namespace; "
        "Provider(mechanism='vmm') on the server does not need them"
    )

    @property
    def fd_server(self) -> str:
        """The address of the descriptor server for this process's pools."""
        return FD_SERVER.address

    def make(self, nbytes: int, token: bytes) -> Memory:
        """Allocate and zero memory in its own pool, whose descriptor is registered at the descriptor server."""
        self.require_visible()
        with self.working():
            try:
                pool = check(driver.cuMemPoolCreate(self._properties()))
            except DriverError as error:
                raise CapabilityError(f"cannot make a pool on GPU {self.uuid} that exports descriptors: {error}") from error
            address = None
            fd = -1
            try:
                self._allow(pool)
                address = check(driver.cuMemAllocFromPoolAsync(nbytes, pool, self.stream))
                self.zero(address, nbytes)
                fd = int(check(driver.cuMemPoolExportToShareableHandle(pool, POSIX_FD, 0)))
                os.set_inheritable(fd, False)
                handle = opaque_bytes(check(driver.cuMemPoolExportPointer(address)))
                fd, left = -1, fd
                FD_SERVER.register(token, left)
            except (DriverError, CapabilityError) as error:
                if fd >= 0:
                    os.close(fd)
                self._give_up(pool, address)
                raise CapabilityError(f"cannot allocate {nbytes} bytes on GPU {self.uuid} in a pool: {error}") from error
        return Memory(int(address), handle, pool)

    def _properties(self) -> Any:
        properties = driver.CUmemPoolProps()
        properties.allocType = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.handleTypes = POSIX_FD
        properties.location = location_of(self.ordinal)
        return properties

    def _give_up(self, pool: Any, address: Any) -> None:
        if address is not None:
            check(driver.cuMemFreeAsync(address, self.stream))
            check(driver.cuStreamSynchronize(self.stream))
        check(driver.cuMemPoolDestroy(pool))

    def free(self, token: bytes, memory: Memory) -> None:
        """Withdraw the pool's descriptor, and destroy the pool."""
        FD_SERVER.withdraw(token)
        with self.working():
            self._give_up(memory.pool, driver.CUdeviceptr(memory.address))

    def open(self, exported: ExportDescriptor) -> Memory:
        """Fetch the pool's descriptor from its maker, and open its allocation."""
        data = opaque(driver.CUmemPoolPtrExportData(), exported.handle)
        fd = fetch(exported.fd_server, exported.token)
        try:
            with self.working():
                pool = check(driver.cuMemPoolImportFromShareableHandle(fd, POSIX_FD, 0))
                try:
                    self._allow(pool)
                    address = check(driver.cuMemPoolImportPointer(pool, data))
                except DriverError:
                    check(driver.cuMemPoolDestroy(pool))
                    raise
        except DriverError as error:
            raise CapabilityError(str(error)) from error
        finally:
            os.close(fd)
        return Memory(int(address), pool=pool)

    def _allow(self, pool: Any) -> None:
        """Let peers use a pool: access is granted to its own GPU, and to others explicitly, in each process separately."""
        if visible_gpus()[self.ordinal] != self.uuid:
            check(driver.cuMemPoolSetAccess(pool, [access_for(self.ordinal)], 1))
        for peer in self.peers:
            driver.cuMemPoolSetAccess(pool, [access_for(peer)], 1)

    def close(self, memory: Memory) -> None:
        """Free the imported allocation and its pool."""
        with self.working():
            self._give_up(memory.pool, driver.CUdeviceptr(memory.address))
