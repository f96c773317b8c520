"""Segments whose memory belongs to the process that made it: the common part of CUDA's legacy IPC and its pools.

The descriptor is an export descriptor (see :mod:`shared_rpc.memory.backends.liveness`). Every mapping, including the maker's,
keeps a copy of it until it is unmapped, so that the maker detects the end of the last user, for whatever reason, and frees the
memory only then. Consumers must not open memory twice: the driver returns the same address again, and its pools unmap it for
both with the first free. So a table maps each segment once in a process, and counts.
"""

from __future__ import annotations

import os
import secrets
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar

import msgspec

from shared_rpc.errors import CapabilityError
from shared_rpc.forks import after_fork, fork_safe_lock
from shared_rpc.memory.backends import liveness
from shared_rpc.memory.backends.fd_server import TOKEN_BYTES
from shared_rpc.memory.segments import Segment, new_segment_id
from shared_rpc.protocol.records import Access, Mechanism, SegmentInfo


class ExportDescriptor(msgspec.Struct, frozen=True, array_like=True):
    """Serialised export: the data for opening another process's memory.

    ``pid`` is its maker's, ``handle`` the driver's, and ``fd_server`` the address at which the maker sends a descriptor for
    ``token``, if the mechanism has one.
    """

    mechanism: Mechanism
    device: str
    nbytes: int
    pid: int
    token: bytes
    handle: bytes
    fd_server: str = ""


_decoder = msgspec.msgpack.Decoder(ExportDescriptor)


def export_descriptor_of(fd: int) -> ExportDescriptor:
    """Return the contents of the descriptor of such a segment.

    :raises CapabilityError: if it is not such a descriptor.
    """
    try:
        exported = _decoder.decode(liveness.read(fd))
    except msgspec.DecodeError as error:
        raise CapabilityError(f"cannot read the export descriptor ({error}): use one release on both sides") from error
    if len(exported.token) != TOKEN_BYTES:
        raise CapabilityError("the export descriptor has no valid token: use one release on both sides")
    return exported


@dataclass(eq=False)
class Memory:
    """Memory of the driver in this process, made or opened here; ``pool`` is its pool, if any."""

    address: int
    handle: bytes = b""
    pool: object = None


@dataclass(eq=False)
class _Use:
    """A segment in this process: one copy of the descriptor for each mapping of it."""

    token: bytes
    memory: Memory
    copies: list[int] = field(default_factory=list)


class ExporterOwnedBackend(ABC):
    """A :class:`~shared_rpc.memory.segments.Backend` for memory that ends with its maker.

    A subclass makes, frees, opens and closes memory; only one of these functions runs at a time.
    """

    mechanism: ClassVar[Mechanism]
    #: Advice for errors if this mechanism does not work.
    cure: ClassVar[str]
    granularity = 2 << 20
    uuid: str

    def __init__(self) -> None:
        self._lock = fork_safe_lock()
        self._made: dict[bytes, Memory] = {}
        #: Unused memory to free once the GPU can be waited for.
        self._to_free: list[tuple[bytes, Memory]] = []
        self._uses: dict[bytes, _Use] = {}
        self._by_address: dict[int, _Use] = {}
        after_fork(self._after_fork)

    @abstractmethod
    def make(self, nbytes: int, token: bytes) -> Memory:
        """Allocate zeroed memory, complete on return.

        :raises CapabilityError: if there is too little.
        """

    @abstractmethod
    def free(self, token: bytes, memory: Memory) -> None:
        """Free memory of :meth:`make`."""

    @abstractmethod
    def open(self, exported: ExportDescriptor) -> Memory:
        """Open memory of another process, alive or not.

        :raises CapabilityError: if the driver refuses.
        """

    @abstractmethod
    def close(self, memory: Memory) -> None:
        """Undo :meth:`open`."""

    @abstractmethod
    def synchronize(self) -> bool:
        """Wait for the device, see :class:`~shared_rpc.memory.segments.Backend`."""

    @property
    def fd_server(self) -> str:
        """The address of this process's descriptor server; ``""`` if the mechanism needs none."""
        return ""

    def create(self, nbytes: int) -> Segment:
        """Allocate zeroed memory of this process. It is freed when no copy of the descriptor is left in any process."""
        self._free_waiting()
        size = -(-nbytes // self.granularity) * self.granularity
        token = secrets.token_bytes(TOKEN_BYTES)
        with self._lock:
            memory = self._made[token] = self.make(size, token)
            try:
                exported = ExportDescriptor(self.mechanism, self.uuid, size, os.getpid(), token, memory.handle, self.fd_server)
                fd = liveness.issue(msgspec.msgpack.encode(exported), partial(self._unused, token))
            except BaseException:
                del self._made[token]
                self.free(token, memory)
                raise
        return Segment.owning(SegmentInfo(new_segment_id(), size, self.uuid, mechanism=self.mechanism), fd)

    vacates = replaces = False

    def map(self, fd: int, nbytes: int, access: Access, at: int | None = None) -> int:
        """Return the address of the memory here, one for all mappings of a segment. ``access="read"`` is not enforced.

        :raises CapabilityError: if the descriptor is of another mechanism, its memory is smaller, or its maker has ended.
        """
        if at is not None:
            raise CapabilityError(self._no_ranges())
        exported = export_descriptor_of(fd)
        if (exported.mechanism, exported.device) != (self.mechanism, self.uuid):
            raise CapabilityError(
                f"the descriptor is of memory on {exported.device} by the mechanism {exported.mechanism!r}, but was announced "
                f"as memory on {self.uuid} by {self.mechanism!r}"
            )
        if exported.nbytes < nbytes:
            raise CapabilityError(f"the segment has {exported.nbytes} bytes, but {nbytes} were announced")
        with self._lock:
            use = self._uses.get(exported.token)
            copy = os.dup(fd)
            if use is None:
                try:
                    use = self._begin(fd, exported)
                except BaseException:
                    os.close(copy)
                    raise
                self._uses[exported.token] = self._by_address[use.memory.address] = use
            use.copies.append(copy)
            return use.memory.address

    def _begin(self, fd: int, exported: ExportDescriptor) -> _Use:
        made = self._made.get(exported.token)
        if made is not None:
            # The driver opens no handle in the process that exported it.
            return _Use(exported.token, made)
        if not liveness.maker_lives(fd):
            raise CapabilityError(
                f"the process that made the memory (pid {exported.pid}) has ended, and memory of the mechanism "
                f"{self.mechanism!r} ends with its maker: call the endpoint again once the server is back; "
                f"Provider(mechanism='vmm') makes memory that outlives its maker"
            )
        try:
            return _Use(exported.token, self.open(exported))
        except CapabilityError as error:
            raise CapabilityError(
                f"cannot open {exported.nbytes} bytes on GPU {self.uuid}, shared by pid {exported.pid} with the mechanism "
                f"{self.mechanism!r}: {error}; {self.cure}"
            ) from error

    def unmap(self, address: int, nbytes: int) -> None:
        """Undo one :meth:`map`; the last one closes the memory here, and only then the copy of the descriptor."""
        with self._lock:
            use = self._by_address[address]
            copy = use.copies.pop()
            try:
                if not use.copies:
                    del self._uses[use.token], self._by_address[address]
                    if use.token not in self._made:
                        self.close(use.memory)
            finally:
                os.close(copy)
        self._free_waiting()

    def vacate(self, address: int, nbytes: int) -> None:
        """Raise: the driver chooses the address each time that memory is opened.

        :raises CapabilityError: always.
        """
        raise CapabilityError(self._no_ranges())

    free_range = vacate

    def _no_ranges(self) -> str:
        return (
            f"memory on GPU {self.uuid} that is shared by the mechanism {self.mechanism!r} cannot be unmapped and mapped again "
            f"at its address, because the driver chooses the address: Provider(mechanism='vmm') makes memory that can"
        )

    def _unused(self, token: bytes) -> None:
        """Free the memory: no copy of the descriptor is left anywhere."""
        with self._lock:
            self._to_free.append((token, self._made.pop(token)))
        self._free_waiting()

    def _free_waiting(self) -> None:
        # Freeing waits for the GPU, like unmapping: during a capture, a later call frees the memory.
        if not self._to_free or not self.synchronize():
            return
        with self._lock:
            waiting, self._to_free = self._to_free, []
            for token, memory in waiting:
                self.free(token, memory)

    def _after_fork(self) -> None:
        # CUDA does not work in a forked child, and its copies would keep the memory until its end.
        for use in self._uses.values():
            for copy in use.copies:
                os.close(copy)
        self._made, self._to_free, self._uses, self._by_address = {}, [], {}, {}
