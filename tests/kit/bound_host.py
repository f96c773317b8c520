"""Bound segments without a GPU: host memory that is opened through its maker's descriptor server, as a pool is."""

from __future__ import annotations

import os

from shared_rpc.memory.backends.exporter_owned import ExportDescriptor, ExporterOwnedBackend, Memory
from shared_rpc.memory.backends.fd_server import FD_SERVER, fetch
from shared_rpc.memory.backends.host import HOST
from shared_rpc.protocol.records import Access


class BoundHost(ExporterOwnedBackend):
    """What CUDA's pools promise, over memfds: a descriptor and a handle are needed to open what is another process's."""

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
        """Where memfds are handed out."""
        return FD_SERVER.address

    def make(self, nbytes: int, token: bytes) -> Memory:
        """A memfd, mapped here; the descriptor server has its descriptor."""
        with HOST.create(nbytes) as segment:
            address = HOST.map(segment.fileno(), nbytes, "read_write")
            FD_SERVER.register(token, os.dup(segment.fileno()))
        return Memory(address, handle=str(nbytes).encode())

    def free(self, token: bytes, memory: Memory) -> None:
        """Unmap it here, and take it off the descriptor server."""
        FD_SERVER.withdraw(token)
        self.freed.append(memory.address)
        HOST.unmap(memory.address, int(memory.handle))

    def open(self, exported: ExportDescriptor) -> Memory:
        """Ask the descriptor server, and map what it hands out."""
        fd = fetch(exported.fd_server, exported.token)
        try:
            return Memory(HOST.map(fd, int(exported.handle), "read_write"), exported.handle)
        finally:
            os.close(fd)

    def close(self, memory: Memory) -> None:
        """Unmap."""
        HOST.unmap(memory.address, int(memory.handle))

    def seal(self, fd: int, access: Access = "read") -> None:
        """Nothing can be refused."""

    def synchronize(self) -> bool:
        """As the test says."""
        return self.waits_for

    def view(self, address: int, nbytes: int) -> memoryview:
        """The bytes themselves."""
        return HOST.view(address, nbytes)


BACKEND = BoundHost()
