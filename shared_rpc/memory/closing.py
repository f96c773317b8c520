"""Closing of large memory on behalf of latency-critical threads.

Memory is freed by the close(2) of its last descriptor, in the calling thread: a tenth of a second and more for each GiB of
host memory. A server's loop would answer no client during that time, so another thread closes such descriptors.

A dropped object counts as free at once; before its memory is reused, :meth:`Closer.wait` waits for the actual free.
"""

from __future__ import annotations

import os
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import msgspec

from shared_rpc.forks import after_fork
from shared_rpc.lifecycle.finalizer import FinalizerThread
from shared_rpc.protocol.frames import close_all

#: Bytes of memory above which closing takes longer than waking another thread for it.
LARGE = 1 << 20


class _Thread(threading.local):
    """Facts of the current thread. Reading one calls no function, before which a signal handler could run."""

    #: True if it must not block, see :meth:`Closer.spare_this_thread`.
    spared = False


THREAD = _Thread()


class _Closing(msgspec.Struct):
    """A descriptor to be closed. ``file`` is the device and the inode of its file."""

    number: int
    file: tuple[int, int]
    nbytes: int
    device: str


class Closer:
    """The thread that closes, and its pending descriptors."""

    def __init__(self) -> None:
        self._thread = FinalizerThread("shared-rpc-closer")
        #: Closes descriptors from other processes, which may block without limit.
        self._discarder = FinalizerThread("shared-rpc-discarder")
        self._discarded: deque[int] = deque()
        #: The first one is being closed.
        self._left: deque[_Closing] = deque()
        after_fork(self._after_fork)

    @contextmanager
    def spare_this_thread(self) -> Iterator[None]:
        """While the block runs, close large memory of this thread in another thread; wait for it at the end of the block."""
        self._thread.start()
        self._discarder.start()
        THREAD.spared = True
        try:
            yield
        finally:
            THREAD.spared = False
            self.wait()

    def submit(self, number: int, nbytes: int, device: str) -> None:
        """Queue a descriptor of memory for closing. Safe in a finaliser."""
        status = os.fstat(number)
        self._left.append(_Closing(number, (status.st_dev, status.st_ino), nbytes, device))
        self._thread.submit(self._close_first)

    def _close_first(self) -> None:
        try:
            os.close(self._left[0].number)
        finally:
            self._left.popleft()

    def discard(self, fds: list[int]) -> None:
        """Close descriptors of unknown files, removing each from the list; not in a latency-critical thread.

        The last close(2) of large memory takes long, and that of a file served by a process waits for that process.
        """
        if not THREAD.spared:
            close_all(fds)
        while fds:
            self._discarded.append(fds.pop())
            self._discarder.submit(self._close_discarded)

    def _close_discarded(self) -> None:
        os.close(self._discarded.popleft())

    def left(self) -> dict[str, int]:
        """Sum the bytes of pending frees, by device."""
        nbytes: Counter[str] = Counter()
        for closing in tuple(self._left):
            nbytes[closing.device] += closing.nbytes
        return nbytes

    def __len__(self) -> int:
        """Return the number of descriptors still to be closed."""
        return len(self._left)

    def wait(self) -> None:
        """Wait until everything submitted so far is closed."""
        if self._left:
            closed = threading.Event()
            self.notify(closed.set)
            closed.wait()

    def notify(self, function: Callable[[], object]) -> None:
        """Call a function, in the closing thread, when everything submitted so far is closed."""
        self._thread.start()
        self._thread.submit(function)

    def _after_fork(self) -> None:
        # The child's copies would keep the memory. The first one may be closed already, and its number another file's.
        THREAD.spared = False
        close_all(list(self._discarded))
        self._discarded.clear()
        left, self._left = self._left, deque()
        for closing in left:
            with suppress(OSError):
                status = os.fstat(closing.number)
                if (status.st_dev, status.st_ino) == closing.file:
                    os.close(closing.number)


CLOSER = Closer()
