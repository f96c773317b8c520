"""Revisions: counts of writes to memory in place, in a page that is mapped with the memory.

The page holds a number of 64 bits, like a seqlock. It is odd during a write, and even otherwise; an update adds two. The
writer holds a lock of fcntl(2) (F_OFD_SETLK) on the page, which ends with its process in any way. So an odd number without a
lock is an update that was begun and never ended.

::

    offset  size
    0       8     the revision
    8       4     the pid of the last or current writer, in its own pid namespace
    12      4     1 if the last update ended without commit()

An object that is shared for reading has a page that only its server's process writes: it maps the page before sealing it, and
holds the lock, on a description that no other process gets, while the page exists. So readers can neither write to the page
nor lock it, and an odd number without a lock means that the server has ended.

Order, on every machine: all writes before an even revision was set, including the work on the GPU, are visible to readers of
that revision.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from shared_rpc.errors import CapabilityError, ConfigurationError, DeadlineExceeded, UpdateInterrupted
from shared_rpc.forks import after_fork, fork_safe_lock
from shared_rpc.memory import futex
from shared_rpc.memory.backends.choice import backend_for
from shared_rpc.memory.backends.host import HOST
from shared_rpc.memory.backends.liveness import is_locked, lock
from shared_rpc.memory.devices import torch_device
from shared_rpc.memory.segments import Descriptor, Segment, new_segment_id
from shared_rpc.protocol.records import Access, SegmentInfo

T = TypeVar("T")
V = TypeVar("V")

#: Seconds between a waiting reader's checks that the writer still runs.
SLICE = 0.05
#: Offset of the word that marks an abandoned update.
_LEFT = 12


def new_page(access: Access = "read_write") -> Segment:
    """Return a page of revision 0, which the caller owns.

    :param access: ``"read"`` if no other process may write to it: see :func:`read_only`.
    """
    futex.supported()
    page = HOST.create(HOST.granularity)
    try:
        if access == "read":
            assert page.descriptor is not None
            _mappings[page.descriptor] = _own[os.fstat(page.fileno()).st_ino] = _OwnPage(page)
            # A forked child's copy would keep the lock of a killed server.
            after_fork(page.descriptor.close)
        HOST.seal(page.fileno(), access)
    except BaseException:
        page.close()
        raise
    return page


def recovered_page(fd: int) -> Segment:
    """Return a page made by :func:`new_page` in another process. It owns the descriptor."""
    return Segment.owning(SegmentInfo(new_segment_id(), HOST.granularity, "cpu"), fd)


def read_only(page: Segment) -> Segment:
    """Return a descriptor of the same page for readers, which the caller owns."""
    info = SegmentInfo(page.info.id, page.info.nbytes, page.info.device, "read", page.info.mechanism)
    return Segment.owning(info, os.open(f"/proc/self/fd/{page.fileno()}", os.O_RDONLY | os.O_CLOEXEC))


def settled_revision(page: Segment) -> int | None:
    """Return the revision of a page, which need not be mapped here; None while a process writes to the object's memory."""
    revision = int.from_bytes(os.pread(page.fileno(), 8, 0), sys.byteorder)
    return None if revision % 2 and _has_writer(page.fileno()) else revision


def _has_writer(page: int) -> bool:
    """Return True if the update of an odd revision is active: its process is alive, and has not abandoned it."""
    if _updating.get(os.fstat(page).st_ino) is not None:  # this process's own lock does not show
        return True
    return is_locked(page) and not any(os.pread(page, 4, _LEFT))


class Page:
    """An object's revision, mapped in this process. Thread-safe. It stays mapped while this object lives.

    :param page: its segment, owned by this object from now on.
    :param memory: a segment of the object's for each device and mechanism.
    :param object_id: the object's id, for errors.
    """

    def __init__(self, page: Segment, memory: Sequence[SegmentInfo], object_id: str) -> None:
        self.object_id = object_id
        self.access = page.info.access
        self._memory = tuple(info for info in memory if info.device != "cpu")
        with page:
            futex.supported()
            if page.descriptor is None:
                raise ValueError(f"segment {page.info.id} is closed")
            self._descriptor = page.descriptor
        self._inode = os.fstat(self._descriptor.number).st_ino
        self._own = _own.get(self._inode) if self.access == "read_write" else None
        #: The address of the mapped page, valid while this object lives.
        if self._own is not None:
            self.address = self._own.address
        else:
            self.address = HOST.map(self._descriptor.number, page.info.nbytes, page.info.access)
            weakref.finalize(self, HOST.unmap, self.address, page.info.nbytes).atexit = False
        self._revision = ctypes.c_uint64.from_address(self.address)
        self._pid = ctypes.c_uint32.from_address(self.address + 8)
        self._left = ctypes.c_uint32.from_address(self.address + _LEFT)

    def fileno(self) -> int:
        """Return its descriptor, shared by all processes that have the page."""
        return self._descriptor.number

    @property
    def revision(self) -> int:
        """The current revision. Later reads of the memory are at least as new."""
        revision = int(self._revision.value)
        futex.fence()
        return revision

    def wait(self, revision: int, until: float) -> int:
        """Wait until the revision is even, and not less than that; return it.

        :param until: the deadline, on the clock of time.monotonic().
        :raises DeadlineExceeded: if that passes first.
        :raises UpdateInterrupted: if the writer has ended.
        """
        while (seen := self.wait_slice(revision, until)) is None:
            continue
        return seen

    def wait_slice(self, revision: int, until: float) -> int | None:
        """Wait briefly, like :meth:`wait`; return None if the wait must continue."""
        seen = self.revision
        if seen % 2:
            self._check_writer(seen)
        elif seen >= revision:
            return seen
        left = until - time.monotonic()
        if left <= 0:
            raise DeadlineExceeded(f"object {self.object_id} did not reach revision {revision} in time: it is at {seen}")
        futex.wait(self.address, seen, min(left, SLICE))
        return None

    def _check_writer(self, seen: int) -> None:
        self._refuse_own_update("wait for")
        if _has_writer(self._descriptor.number) or self.revision != seen:
            return
        pid = int(self._pid.value)
        raise UpdateInterrupted(
            f"an update of object {self.object_id} by pid {pid} began with revision {seen} and did not end: the process was "
            f"killed, or its block raised. The memory is partly old and partly new: update or refresh the object",
            revision=seen,
            pid=pid,
        )

    def read(self, function: Callable[[V], T], value: V, until: float) -> T:
        """Return ``function(value)`` of memory without a concurrent write: after a write, the function is called again.

        Its work queued on the current streams of the GPUs is waited for. For the other parameters see :meth:`wait`.
        """
        while True:
            before = self.wait(0, until)
            try:
                result = function(value)
                self._wait_for_streams()
            except Exception:
                # The function may have read half-written memory.
                if self._unchanged(before):
                    raise
            else:
                if self._unchanged(before):
                    return result
            if time.monotonic() >= until:
                raise DeadlineExceeded(f"object {self.object_id} was updated during every read until the timeout")

    def _unchanged(self, before: int) -> bool:
        futex.fence()
        return self.revision == before

    def _wait_for_streams(self) -> None:
        for info in self._memory:
            import torch

            if torch.cuda.is_current_stream_capturing():
                raise CapabilityError("a consistent read waits for the GPU, so it cannot be captured into a CUDA graph")
            stream = torch.cuda.current_stream(torch_device(info.device)).cuda_stream
            backend_for(info.device, info.mechanism).wait(stream)

    @contextmanager
    def update(self, until: float) -> Iterator[None]:
        """Run a block that writes to the memory. The end of another update is waited for.

        If the block raises, the update counts as interrupted.

        :param until: the end of that wait, on the clock of time.monotonic().
        :raises DeadlineExceeded: if that passes first.
        :raises CapabilityError: if the object is shared for reading only; and at the end, if the GPU cannot be waited for now.
        :raises ConfigurationError: within another update by this thread.
        """
        thread = threading.get_ident()
        while (update := self.try_begin(thread)) is None:
            self.wait_for_writer(until)
        try:
            yield
            update.commit()
        finally:
            update.end()

    def try_begin(self, thread: int | None = None) -> Update | None:
        """Begin an update; None while there is one.

        :param thread: the thread of the update; None for a coroutine, since other coroutines of its thread continue.
        """
        if self.access == "read":
            raise CapabilityError(
                f"object {self.object_id} is shared with access='read': only the server's process can update it; use "
                f"access='read_write' for clients that update"
            )
        if thread is not None:
            self._refuse_own_update("update")
        update = Update(self, thread)
        return update if update.begin() else None

    def _refuse_own_update(self, what: str) -> None:
        update = _updating.get(self._inode)
        if update is not None and update.thread == threading.get_ident():
            raise ConfigurationError(f"deadlock: this thread is updating object {self.object_id}; {what} it after the update")

    def wait_for_writer(self, until: float) -> None:
        """Wait briefly, or until the writer has ended."""
        left = until - time.monotonic()
        seen = self.revision
        if left <= 0:
            raise DeadlineExceeded(f"the update of object {self.object_id} by pid {self._pid.value} did not end in time")
        futex.wait(self.address, seen, min(left, SLICE if seen % 2 else 0.001))


class Update:
    """An update of an object by one thread, or by a coroutine. ``revision`` is its odd number.

    It excludes others by a lock of its own description of the page: locks are between descriptions, and end with the last copy
    of one. Updates of a page that other processes can only read exclude each other by the register. An update without
    references has ended, for example if a signal handler raised before its block.

    :param thread: None for a coroutine.
    """

    def __init__(self, page: Page, thread: int | None) -> None:
        self.thread = thread
        self.revision = -1
        self._page = page
        self._lock = Descriptor(-1)
        self._process = os.getpid()

    def begin(self) -> bool:
        """Begin the update; return False if there is another one."""
        page = self._page
        if page._own is None and not self._take_lock():
            return False
        with _registering:
            if _updating.setdefault(page._inode, self) is not self:
                return False
        before = page.revision
        self.revision = before + 1 if before % 2 == 0 else before + 2
        page._pid.value = os.getpid()
        page._left.value = 0
        page._revision.value = self.revision
        futex.fence()
        return True

    def _take_lock(self) -> bool:
        try:
            self._lock = Descriptor(os.open(f"/proc/self/fd/{self._page.fileno()}", os.O_RDWR | os.O_CLOEXEC))
        except OSError as error:
            raise CapabilityError(f"cannot open a second descriptor of the object's revision page in /proc: {error}") from error
        after_fork(self._lock.close)  # a child's copy would keep the lock of a killed parent
        return lock(self._lock.number)

    def commit(self) -> None:
        """Wait for the GPU, and publish the writes as the next revision.

        :raises CapabilityError: if it cannot be waited for, because a CUDA graph is being captured, or its context is broken.
        """
        if os.getpid() != self._process:  # a child process forked in the block
            return
        for info in self._page._memory:
            if not backend_for(info.device, info.mechanism).synchronize():
                raise CapabilityError(
                    f"the update of object {self._page.object_id} cannot end: the wait for GPU {info.device} failed, because "
                    f"a CUDA graph is being captured, or its context is broken. Update the object again after the capture"
                )
        futex.fence()
        self._page._revision.value = self.revision + 1

    def end(self) -> None:
        """Let others write; without an earlier :meth:`commit`, this update counts as interrupted.

        In a child forked in the block there is no lock, and nothing happens.
        """
        if os.getpid() == self._process and self._page._revision.value == self.revision:
            self._page._left.value = 1
        if _updating.get(self._page._inode) is self:
            del _updating[self._page._inode]
        if self._lock.number >= 0:
            lock(self._lock.number, kind=fcntl.F_UNLCK)  # also of copies that a process just being started may have
            self._lock.close()
        futex.wake(self._page.address)


class _OwnPage:
    """The mapping of a page that other processes can only read, and the lock that shows that this process is alive."""

    def __init__(self, page: Segment) -> None:
        self.address = HOST.map(page.fileno(), page.info.nbytes, "read_write")
        weakref.finalize(self, HOST.unmap, self.address, page.info.nbytes).atexit = False
        lock(page.fileno())


#: Updates by this process, by the inode of the page.
_updating: weakref.WeakValueDictionary[int, Update] = weakref.WeakValueDictionary()
_registering = fork_safe_lock()
#: By the descriptor while that is open, and by the inode for holders of another one of the page.
_mappings: weakref.WeakKeyDictionary[Descriptor, _OwnPage] = weakref.WeakKeyDictionary()
_own: weakref.WeakValueDictionary[int, _OwnPage] = weakref.WeakValueDictionary()


after_fork(_updating.clear)
