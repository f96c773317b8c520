"""Bound segments without a GPU: host memory that is opened through its maker's descriptor server, like a pool."""

from __future__ import annotations

import os

from shared_rpc.memory.backends.exporter_owned import ExportDescriptor, ExporterOwnedBackend, Memory
from shared_rpc.memory.backends.fd_server import FD_SERVER, fetch
from shared_rpc.memory.backends.host import HOST
from shared_rpc.protocol.records import Access


class BoundHost(ExporterOwnedBackend):
    """The contract of CUDA's pools, with memfds: opening another process's memory takes a descriptor and a handle."""

    mechanism = "pool"
    cure = "there is none in a test"
    uuid = "GPU-of-the-host"
    unmaps_in_background = False

    def __init__(self) -> None:
        super().__init__()
        self.freed: list[int] = []
        self.waits_for = True

    @property
    def fd_server(self) -> str:
        """The descriptor server of these memfds."""
        return FD_SERVER.address

    def make(self, nbytes: int, token: bytes) -> Memory:
        """Make a memfd, map it here, and register it with the descriptor server."""
        with HOST.create(nbytes) as segment:
            address = HOST.map(segment.fileno(), nbytes, "read_write")
            FD_SERVER.register(token, os.dup(segment.fileno()))
        return Memory(address, handle=str(nbytes).encode())

    def free(self, token: bytes, memory: Memory) -> None:
        """Unmap it here, and remove it from the descriptor server."""
        FD_SERVER.withdraw(token)
        self.freed.append(memory.address)
        HOST.unmap(memory.address, int(memory.handle))

    def open(self, exported: ExportDescriptor) -> Memory:
        """Request the descriptor from its server, and map it."""
        fd = fetch(exported.fd_server, exported.token)
        try:
            return Memory(HOST.map(fd, int(exported.handle), "read_write"), exported.handle)
        finally:
            os.close(fd)

    def close(self, memory: Memory) -> None:
        """Unmap."""
        HOST.unmap(memory.address, int(memory.handle))

    def seal(self, fd: int, access: Access = "read") -> None:
        """Do nothing: pools cannot exclude writers."""

    def synchronize(self) -> bool:
        """Return the test's setting."""
        return self.waits_for


BACKEND = BoundHost()
