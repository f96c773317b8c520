"""Report of invalid accesses to shared host memory: writes to read-only memory, and accesses to that of a suspended object.

The kernel ends the process by SIGSEGV, without an explanation. From the first such range on, a handler of that signal writes
the accessed memory and the place in the code to standard error; then it restores the earlier handler and returns, so that the
instruction faults again and the process ends as it would have: by that signal, at that place. Other faults are left to the
earlier handler, without a report.

The handler is Python, entered by ctypes, which waits for the GIL. torch's operations release it, in their own threads too, so
it is available then. It is not if foreign code keeps it and waits for one of its threads that faults: that process hangs
instead of ending. Only a compiled handler could do better: neither libc nor Python has one that checks the address.

The handler uses the present stack: a signal stack, such as faulthandler's, is too small for Python, and since 3.14 taken for
an overflow. A thread that has overflowed its own is ended by the kernel at once.
"""

from __future__ import annotations

import atexit
import bisect
import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import NamedTuple

from shared_rpc.forks import fork_safe_lock
from shared_rpc.lifecycle import finalizer


class WatchedRange(NamedTuple):
    """Read-only memory of this process: ``nbytes`` bytes at ``address``, and a function that describes it.

    With ``vacated`` it must not be accessed at all, until its object is resumed.
    """

    address: int
    nbytes: int
    what: Callable[[], str]
    vacated: bool = False


#: By address. Replaced and never changed: a thread may fault while it replaces the table.
_places: tuple[WatchedRange, ...] = ()
_changing = fork_safe_lock()


def _address_of(place: WatchedRange) -> int:
    return place.address


def watch(place: WatchedRange) -> None:
    """Report faults in the range from now on, with the latest description."""
    global _places
    with _changing:
        others = tuple(other for other in _places if other.address != place.address)
        index = bisect.bisect_left(others, place.address, key=_address_of)
        _places = (*others[:index], place, *others[index:])
        _HANDLER.install()


def unwatch(address: int) -> None:
    """Stop reporting faults in a range."""
    global _places
    with _changing:
        _places = tuple(place for place in _places if place.address != address)


def _place_of(address: int) -> WatchedRange | None:
    places = _places
    index = bisect.bisect_right(places, address, key=_address_of) - 1
    if index < 0 or address >= places[index].address + places[index].nbytes:
        return None
    return places[index]


class _SigAction(ctypes.Structure):
    """``struct sigaction`` of glibc and musl on 64-bit Linux: the mask has 1,024 bits there."""

    _fields_ = (
        ("handler", ctypes.c_void_p),
        ("mask", ctypes.c_ulong * 16),
        ("flags", ctypes.c_int),
        ("restorer", ctypes.c_void_p),
    )


_libc = ctypes.CDLL(None, use_errno=True)
_libc.sigaction.argtypes = [ctypes.c_int, ctypes.POINTER(_SigAction), ctypes.POINTER(_SigAction)]
_raise = _libc["raise"]
_SA_SIGINFO = 4
#: siginfo_t of 64-bit Linux: si_code, then from the kernel si_addr.
_CODE, _ADDRESS = 8, 16
#: Mapped without permission (SEGV_ACCERR), like a vacated range.
_FORBIDDEN = 2
#: Seconds for which other faulting threads wait for the report of the first one.
_PATIENCE = 5.0
_STDERR = 2
#: A thread of this package that never writes to shared memory.
_FINALIZER = finalizer.__file__
#: Maximum number of reported frames of a thread.
_FRAMES = 64
_ADVICE = (
    "  what to do: write to a copy (tensor.clone(), copy.deepcopy(module)), or share it with access='read_write'. Functions\n"
    "    that write without a name that says so, and the remedy for each, are in docs/how-to/read-only-weights.md.\n"
)
_ADVICE_VACATED = (
    "  what to do: call resume() of the object's handle before its memory is used, or use it in a block\n"
    "    'with handle.active() as value:'.\n"
)


class _Handler:
    """The signal's action: ours, and the previous one."""

    def __init__(self) -> None:
        self._function = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)(self._on_fault)
        self._address = ctypes.cast(self._function, ctypes.c_void_p).value
        #: None before :meth:`install`.
        self._earlier: _SigAction | None = None
        self._in_place = False
        self._turn = fork_safe_lock()

    def install(self) -> None:
        """Install the handler: the first time, and after a reset to the default. A handler that replaced ours stays."""
        present = _SigAction()
        _libc.sigaction(signal.SIGSEGV, None, ctypes.byref(present))
        if self._earlier is None:
            # No handler of Python can run after Python has ended.
            atexit.register(self.remove)
        elif present.handler is not None:  # ctypes gives None for SIG_DFL
            return
        self._earlier = present
        self._in_place = True
        action = _SigAction(handler=self._address, flags=_SA_SIGINFO)
        _libc.sigaction(signal.SIGSEGV, ctypes.byref(action), None)

    def remove(self) -> None:
        """Restore the previous action, if the present one is ours."""
        present = _SigAction()
        _libc.sigaction(signal.SIGSEGV, None, ctypes.byref(present))
        if present.handler == self._address:
            self._restore()

    def _restore(self) -> None:
        assert self._earlier is not None, "install() has set it"
        self._in_place = False
        _libc.sigaction(signal.SIGSEGV, ctypes.byref(self._earlier), None)

    def _on_fault(self, number: int, info: int, context: int) -> None:
        # The threads of one operation fault together. The process must end after the report of the first one, not before.
        ours = self._turn.acquire(timeout=_PATIENCE)
        try:
            if self._in_place:
                _handle(info)
        finally:
            self._restore()
            if ours:
                self._turn.release()
            if _code_of(info) <= 0:  # a sent signal is not raised again by the faulting instruction
                _raise(signal.SIGSEGV)


def _code_of(info: int) -> int:
    return ctypes.c_int.from_address(info + _CODE).value


def _handle(info: int) -> None:
    if _code_of(info) == _FORBIDDEN:
        address = ctypes.c_size_t.from_address(info + _ADDRESS).value
        place = _place_of(address)
        if place is not None:
            _write(_report(place, address))


def _report(place: WatchedRange, address: int) -> str:
    did = "touched memory of a suspended object" if place.vacated else "wrote to memory that is shared with access='read'"
    return (
        f"shared_rpc: process {os.getpid()} {did}, and ends by SIGSEGV\n"
        f"  target: byte {address - place.address} of {place.what()}; address {address:#x}\n"
        f"  by (most recent call first):\n{''.join(_where())}{_ADVICE_VACATED if place.vacated else _ADVICE}"
    )


def _where() -> Iterator[str]:
    """Yield the Python stack of this thread; if it has none, those of all threads, one of which waits for it."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code.co_filename == __file__:
        frame = frame.f_back
    if frame is not None:
        yield from _lines(frame)
        return
    yield "    a thread without Python; the others are in\n"
    for ident, other in sys._current_frames().items():
        if ident != threading.get_ident() and other.f_code.co_filename != _FINALIZER:
            yield f"    thread {ident:#x}\n"
            yield from _lines(other)


def _lines(frame: FrameType | None) -> Iterator[str]:
    for _ in range(_FRAMES):
        if frame is None:
            return
        yield f'    File "{frame.f_code.co_filename}", line {frame.f_lineno} in {frame.f_code.co_name}\n'
        frame = frame.f_back
    yield "    ...\n"


def _write(text: str) -> None:
    data = text.encode(errors="replace")
    while data:
        data = data[os.write(_STDERR, data) :]


_HANDLER = _Handler()
