"""Reports of invalid accesses to shared host memory: writes to read-only memory, and any access to suspended memory.

The kernel ends the process by SIGSEGV, without an explanation. From the first such range on, a handler of that signal writes
the accessed memory and the stacks of the threads to standard error; then it restores the earlier handler and returns, so that
the instruction faults again and the process ends as it would have: by that signal, at that place. Other faults are left to the
earlier handler, without a report.

The handler is Python, entered by ctypes, which waits for the GIL. torch's operations release it, in their own threads too, so
it is available then. It is not if foreign code keeps it and waits for one of its threads that faults: that process hangs
instead of ending. Only a compiled handler could do better: neither libc nor Python has one that checks the address.

The handler uses the current stack: a signal stack, such as faulthandler's, is too small for Python, and since 3.14 taken for
an overflow. A thread that has overflowed its own is ended by the kernel at once.
"""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import os
import signal
from collections.abc import Callable

import msgspec

from shared_rpc.forks import fork_safe_lock


class Target(msgspec.Struct):
    """Memory that may not be accessed: ``offset`` is the accessed byte. ``vacated`` if its object is suspended."""

    memory: str
    offset: int
    vacated: bool


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
_ADVICE = (
    "  what to do: write to a copy (tensor.clone(), copy.deepcopy(module)), or share it with access='read_write'. Functions\n"
    "    that write without a name that says so, and the remedy for each, are in docs/how-to/read-only-weights.md.\n"
)
_ADVICE_VACATED = (
    "  what to do: call resume() of the object's handle before its memory is used, or use it in a block\n"
    "    'with handle.active() as value:'.\n"
)


class FaultHandler:
    """The signal's action: ours, and the previous one.

    :param find: returns the memory at an address, None for memory that may be accessed or is not shared. Takes no lock.
    """

    def __init__(self, find: Callable[[int], Target | None]) -> None:
        self._find = find
        self._function = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)(self._on_fault)
        self._address = ctypes.cast(self._function, ctypes.c_void_p).value
        #: None while our action is not installed.
        self._earlier: _SigAction | None = None
        self._turn = fork_safe_lock()
        # No handler of Python can run after Python has ended.
        atexit.register(self._remove)

    def install(self) -> None:
        """Install the handler: the first time, and after a reset to the default. A handler that replaced ours stays."""
        present = _present()
        if self._earlier is not None and present.handler is not None:  # ctypes gives None for SIG_DFL
            return
        self._earlier = present
        action = _SigAction(handler=self._address, flags=_SA_SIGINFO)
        _libc.sigaction(signal.SIGSEGV, ctypes.byref(action), None)

    def _remove(self) -> None:
        if _present().handler == self._address:
            self._restore()

    def _restore(self) -> None:
        earlier, self._earlier = self._earlier, None
        if earlier is not None:
            _libc.sigaction(signal.SIGSEGV, ctypes.byref(earlier), None)

    def _on_fault(self, number: int, info: int, context: int) -> None:
        code = ctypes.c_int.from_address(info + _CODE).value
        # The threads of one operation fault together. The process must end after the report of the first one, not before.
        ours = self._turn.acquire(timeout=_PATIENCE)
        try:
            if code == _FORBIDDEN and self._earlier is not None:
                address = ctypes.c_size_t.from_address(info + _ADDRESS).value
                target = self._find(address)
                if target is not None:
                    _report(target, address)
        finally:
            self._restore()
            if ours:
                self._turn.release()
            if code <= 0:  # a sent signal is not raised again by the faulting instruction
                _raise(signal.SIGSEGV)


def _present() -> _SigAction:
    present = _SigAction()
    _libc.sigaction(signal.SIGSEGV, None, ctypes.byref(present))
    return present


def _report(target: Target, address: int) -> None:
    did = "touched memory of a suspended object" if target.vacated else "wrote to memory that is shared with access='read'"
    _write(
        f"shared_rpc: process {os.getpid()} {did}, and is killed by SIGSEGV\n"
        f"  target: byte {target.offset} of {target.memory}; address {address:#x}\n"
        f"{_ADVICE_VACATED if target.vacated else _ADVICE}"
    )
    # Of all threads: one without Python, such as torch's own, works for one of the others.
    faulthandler.dump_traceback(_STDERR)


def _write(text: str) -> None:
    data = text.encode(errors="replace")
    while data:
        data = data[os.write(_STDERR, data) :]
