"""Host memory: anonymous files (memfd_create(2)) that are mapped with mmap(2).

``mmap.mmap`` of the standard library keeps its own descriptor for every mapping; libc's does not.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
from collections.abc import Callable

from shared_rpc.errors import CapabilityError
from shared_rpc.memory.segments import Segment, new_segment_id
from shared_rpc.protocol.records import Access, SegmentInfo

# asm-generic/mman-common.h; Python's mmap lacks it.
_MAP_NORESERVE = 0x4000
# linux/mman.h and asm-generic/mman-common.h, for given addresses; Python's mmap lacks them.
_MAP_FIXED = 0x10
_MREMAP_MAYMOVE, _MREMAP_FIXED = 1, 2
_PROT_NONE = 0
# linux/fcntl.h; Python's fcntl has it from 3.13 on.
_F_SEAL_FUTURE_WRITE = 0x10

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.mremap.restype = ctypes.c_void_p
_libc.mremap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]
_MAP_FAILED = ctypes.c_void_p(-1).value


def _checked(address: int | None, what: str) -> int:
    """Return the address of a mapping.

    :raises CapabilityError: if it failed.
    """
    if address is not None and address != _MAP_FAILED:
        return address
    code = ctypes.get_errno()
    if code == errno.EPERM:
        raise CapabilityError("the segment is shared read-only: map it with access='read'")
    raise CapabilityError(f"cannot {what}: {os.strerror(code)}")


def _done() -> bool:
    return True


class MemfdBackend:
    """Segments in host memory."""

    granularity = mmap.PAGESIZE

    def create(self, nbytes: int) -> Segment:
        """Allocate zeroed host memory; its size is sealed, so that no process can truncate it under a reader (SIGBUS)."""
        size = -(-nbytes // self.granularity) * self.granularity
        info = SegmentInfo(id=new_segment_id(), nbytes=size, device="cpu")
        name = f"shared-rpc-{info.id}"
        try:
            segment = Segment.owning(info, os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
        except OSError as error:
            raise CapabilityError(f"cannot make a host segment of {size} bytes in pid {os.getpid()}: {error}") from error
        try:
            os.ftruncate(segment.fileno(), size)
            fcntl.fcntl(segment.fileno(), fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        except OSError as error:
            segment.close()
            raise CapabilityError(f"cannot make a host segment of {size} bytes: {error}") from error
        return segment

    @staticmethod
    def check(fd: int, nbytes: int) -> None:
        """Check that a descriptor is memory of at least ``nbytes`` bytes, permanently.

        :raises CapabilityError: if it is not.
        """
        try:
            seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        except OSError:
            seals = 0
        if not seals & fcntl.F_SEAL_SHRINK:
            # Another holder of the descriptor could truncate it, and the next read here would end this process (SIGBUS).
            raise CapabilityError("the segment's descriptor is no memfd sealed against shrinking")
        if os.fstatvfs(fd).f_bsize != mmap.PAGESIZE:
            # Another holder could punch a hole (fallocate(2)): zeros in ordinary pages, but SIGBUS in those of hugetlbfs.
            raise CapabilityError("the segment's descriptor is a memfd of huge pages (MFD_HUGETLB): use one of ordinary pages")
        actual = os.fstat(fd).st_size
        if actual < nbytes:
            raise CapabilityError(f"the segment's descriptor has {actual} bytes, but {nbytes} were announced")

    vacates = replaces = True

    def map(self, fd: int, nbytes: int, access: Access, at: int | None = None) -> int:
        """Map ``nbytes`` bytes of ``fd``, shared; with ``access="copy"`` each page until it is written to.

        :raises CapabilityError: if the descriptor is smaller than that, or sealed against writing.
        """
        self.check(fd, nbytes)
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if access != "read" else 0)
        # Copies of pages are rare: memory for all of them is not reserved, and a mapping is not refused for lack of it.
        flags = mmap.MAP_PRIVATE | _MAP_NORESERVE if access == "copy" else mmap.MAP_SHARED
        address = _checked(_libc.mmap(None, nbytes, protection, flags, fd, 0), f"map {nbytes} bytes of host memory")
        if at is None:
            return address
        # Mapped elsewhere and moved: a failed mmap(2) with MAP_FIXED may have unmapped the earlier mapping, and left a hole.
        try:
            moved = _libc.mremap(address, nbytes, nbytes, _MREMAP_MAYMOVE | _MREMAP_FIXED, at)
            return _checked(moved, f"map {nbytes} bytes of host memory at {at:#x}")
        except CapabilityError:
            self.unmap(address, nbytes)
            raise

    def vacate(self, address: int, nbytes: int) -> None:
        """Replace the mapping by inaccessible pages, which use no memory."""
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE | _MAP_FIXED
        _checked(_libc.mmap(address, nbytes, _PROT_NONE, flags, -1, 0), f"unmap {nbytes} bytes at {address:#x}")

    def free_range(self, address: int, nbytes: int) -> None:
        """Unmap those pages."""
        self.unmap(address, nbytes)

    def seal(self, fd: int, access: Access = "read") -> None:
        """Forbid later seals, and unless ``access`` is ``"read_write"`` later writable mappings and write(2), including holes
        (F_SEAL_FUTURE_WRITE, Linux 5.1).
        """
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SEAL | (_F_SEAL_FUTURE_WRITE if access != "read_write" else 0))

    unmaps_in_background = True

    def synchronize(self) -> bool:
        """Return True: nothing is queued on the host."""
        return True

    def copy(self, target: int, source: int, nbytes: int, stream: int = 0) -> None:
        """Copy by memmove(3)."""
        ctypes.memmove(target, source, nbytes)

    def wait(self, stream: int = 0, seconds: float | None = None) -> bool:
        """Return True: nothing is queued on the host."""
        return True

    def fence(self) -> Callable[[], bool]:
        """Return a fence that has passed."""
        return _done

    def unmap(self, address: int, nbytes: int) -> None:
        """Unmap by munmap(2)."""
        if _libc.munmap(address, nbytes) != 0:
            raise OSError(ctypes.get_errno(), f"munmap({address:#x}, {nbytes})")

    def view(self, address: int, nbytes: int) -> memoryview:
        """Return the bytes themselves; writing to a read-only mapping ends the process with SIGSEGV."""
        return memoryview((ctypes.c_ubyte * nbytes).from_address(address)).cast("B")


HOST = MemfdBackend()


def write_exactly(fd: int, piece: memoryview, offset: int) -> None:
    """Write all bytes to host memory or a file, without page faults and while other threads run."""
    done = 0
    while done < len(piece):
        done += os.pwrite(fd, piece[done:], offset + done)
