"""Serving until a signal requests the end.

The rule for signals, in every process that serves: *a signal wakes the main thread through a descriptor, and is handled by that
thread's wait, never by a handler.*

- The kernel delivers a signal to any thread that does not block it. Of two simultaneous signals the second one wakes another
  thread than the first, and whichever runs first takes both; a main thread that waits for a lock is then not interrupted, and
  CPython runs handlers in the main thread alone. The descriptor of :func:`signal.set_wakeup_fd` is written to in whichever
  thread has the signal.
- A handler runs between any two instructions of the main thread, which may hold a lock that the handler would wait for.
  Starting a thread takes one.

And for the forks of such a process: *a signal sent to a child before it has its own handlers stays pending until then.* With
the parent's handlers it would have no effect. A pool of multiprocessing sends SIGTERM to workers that may just have been
forked, and waits for them to end.
"""

from __future__ import annotations

import atexit
import os
import select
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from typing import Any

from shared_rpc.errors import ConfigurationError
from shared_rpc.forks import after_fork, fork_safe_lock
from shared_rpc.lifecycle.ending import end_within

#: Signals that may have a handler here.
_NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
#: Seconds for threads and exit callbacks when a process that has served ends.
_GRACE = 5.0


class End:
    """A request to end this process. The main thread waits for it, and handles signals while it waits."""

    def __init__(self) -> None:
        self._asked = False
        #: Numbers of received signals, until the wait processes them.
        self._noted: deque[int] = deque()
        self._reading, self._writing = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._lock = fork_safe_lock()
        self._closed = False
        self._on_hangup: Callable[[], None] | None = None

    def set(self) -> None:
        """Request the end; from any thread, but not from a signal handler."""
        self._asked = True
        self._wake()

    def wait(self, until: Future[Any] | None = None) -> None:
        """Return when the end has been requested, or a future is done. In the main thread only."""
        if until is not None:
            until.add_done_callback(lambda _: self._wake())
        ready = select.poll()
        ready.register(self._reading, select.POLLIN)
        self._handle_signals()
        while not self._asked and (until is None or not until.done()):
            ready.poll()
            with suppress(BlockingIOError):
                os.read(self._reading, 4096)
            self._handle_signals()

    def _wake(self) -> None:
        with self._lock, suppress(BlockingIOError):  # a full pipe wakes the reader as well
            if not self._closed:
                os.write(self._writing, b"\0")

    def _handle_signals(self) -> None:
        while self._noted:
            if self._noted.popleft() != signal.SIGHUP:
                self._asked = True
            elif self._on_hangup is not None and not self._asked:
                threading.Thread(target=self._on_hangup, daemon=True).start()

    @contextmanager
    def _receiving(self, on_hangup: Callable[[], None] | None) -> Iterator[None]:
        """Receive signals while the block runs."""
        self._on_hangup = on_hangup
        # Other bytes in the pipe, from the app's handlers, only wake the main thread.
        before = signal.set_wakeup_fd(self._writing, warn_on_full_buffer=False)
        try:
            yield
        finally:
            try:
                signal.set_wakeup_fd(before)
            except (OSError, ValueError):  # the descriptor has been closed since
                signal.set_wakeup_fd(-1)
            self.close()

    def _note(self, number: int, _: object) -> None:
        self._noted.append(number)

    def close(self) -> None:
        """Close the descriptors. :meth:`set` does nothing from then on."""
        with self._lock:
            if not self._closed:
                self._closed = True
                os.close(self._reading)
                os.close(self._writing)


def wait_for_signal(
    begin: Callable[[], object],
    on_hangup: Callable[[], None] | None = None,
    asked: End | None = None,
    end: Callable[[], object] | None = None,
    *,
    last: bool = False,
) -> None:
    """Return when this process gets SIGINT or SIGTERM. In the main thread only.

    :param on_hangup: called in its own thread for every SIGHUP; by default that ends the process.
    :param asked: another thread's request to end the wait.
    :param begin: called first, when a signal already ends the wait instead of the process, so that everything it starts can
        be stopped. If it returns None, there is nothing to wait for. Long waits in it must use ``asked.wait()``.
    :param end: called after the wait, or when ``begin`` has failed, while further signals have no effect: a second Ctrl-C does
        not interrupt the end.
    :param last: True if the process ends after this, unless there was nothing to wait for. Then signals have no effect any
        more, and threads or exit callbacks that delay the end are cut off after some seconds.
    """
    if threading.current_thread() is not threading.main_thread():
        raise ConfigurationError("start(blocking=True) waits for signals: call it in the main thread")
    asked = asked or End()
    numbers = [number for number in _NUMBERS if number != signal.SIGHUP or on_hangup is not None]
    code = 1
    with asked._receiving(on_hangup):
        try:
            _install(numbers, asked)
            try:
                if begin() is not None:
                    asked.wait()
                else:
                    last = False
                code = 0
            finally:
                if end is not None:
                    end()
        finally:
            if last:
                _end_undisturbed(code)
            else:
                _uninstall()


#: Earlier handlers by signal number, until they are restored.
_earlier: dict[int, Any] = {}
#: The receiver of signals during a wait.
_receiver: End | None = None


def _install(numbers: Iterable[int], receiver: End) -> None:
    global _receiver
    _receiver = receiver
    for number in numbers:
        _earlier[number] = signal.getsignal(number)
        signal.signal(number, receiver._note)


def _uninstall() -> None:
    global _receiver
    for number in tuple(_earlier):
        earlier = _earlier.pop(number)
        # None: the handler of a native library is unknown to Python.
        signal.signal(number, earlier if earlier is not None else signal.SIG_DFL)
    _receiver = None


def _end_undisturbed(code: int) -> None:
    """End the process within some seconds, ignoring Ctrl-C."""
    for number in _earlier:
        signal.signal(number, _do_nothing)
    end_within(_GRACE, code, "asked to end" if code == 0 else "failed")


def _do_nothing(*_: object) -> None:
    """Do nothing. Unlike SIG_IGN, this is not inherited by the programs that exit callbacks start."""


@atexit.register
def _ignore_signals() -> None:
    """Ignore signals after the other exit callbacks: the interpreter restores the defaults of handlers when it is finalised."""
    for number in _NUMBERS:
        if signal.getsignal(number) is _do_nothing:
            signal.signal(number, signal.SIG_IGN)


@after_fork
def _restore_signals() -> None:
    """Let SIGTERM, such as from the pools of multiprocessing, and Ctrl-C end a child forked by an endpoint. Its signals are not
    its parent's.
    """
    if _receiver is not None:
        signal.set_wakeup_fd(-1)
        _receiver.close()
    _uninstall()


class _Masks(threading.local):
    """Signal masks from before the forks begun by this thread: a callback in a child may fork too."""

    def __init__(self) -> None:
        self.earlier: list[set[signal.Signals | int]] = []


_masks = _Masks()


def _block_signals() -> None:
    # In any thread but the main one no Python handler runs, and the main one may just be setting its handlers. In that one,
    # block only signals with the handlers above: the exception of an app's own handler would be lost in here.
    main = threading.get_ident() == threading.main_thread().ident
    _masks.earlier.append(signal.pthread_sigmask(signal.SIG_BLOCK, tuple(_earlier) if main else _NUMBERS))


def _unblock_signals() -> None:
    if _masks.earlier:  # otherwise a signal handler raised before the fork
        signal.pthread_sigmask(signal.SIG_SETMASK, _masks.earlier.pop())


def _unblock_in_child() -> None:
    try:
        _unblock_signals()
    except KeyboardInterrupt:  # no code could catch it here: the child's own code, which could, has not begun
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.raise_signal(signal.SIGINT)


# After those of shared_rpc.forks in a child.
os.register_at_fork(before=_block_signals, after_in_parent=_unblock_signals, after_in_child=_unblock_in_child)
