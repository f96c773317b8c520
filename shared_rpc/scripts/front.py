"""The stand-in for a script, towards the shell and the terminal that started the command.

A process cannot join the session of another one, so the script is in no group that the shell or the terminal knows. The command
is: it gets the signals that are meant for the script and passes them on, stops when the script has stopped, and ends as the
script has ended.

Two processes stop and go on, one after the other, where whoever sends the signals knows one. The rule is the kernel's for one
process: *a SIGCONT takes back every stop before it*, also one that the command has not learned of, or not carried out, yet.
"""

from __future__ import annotations

import fcntl
import os
import resource
import signal
import socket
from contextlib import suppress
from typing import NoReturn

__all__ = ["CONTINUED", "GO", "Signals", "ended", "is_in_background", "stand_for", "stopped"]

#: Messages of the command to the watcher: the number of a signal, and whether it is for the script's whole process group. 0 is
#: no signal: the script begins.
GO = bytes([0, 0])
#: Messages of the watcher: the script ended with a code, was ended by a signal, was stopped by a signal, has the command's
#: SIGCONT.
_CODE, _SIGNAL, _STOP, _CONTINUE = b"ESTC"
CONTINUED = bytes([_CONTINUE, signal.SIGCONT])

#: si_code of signals that the kernel itself sends, such as those of a terminal; kill(2) sends 0. See sigaction(2).
_SI_KERNEL = 0x80


def ended(status: int) -> bytes:
    """Return the watcher's message that the script has ended with this status of wait(2)."""
    if os.WIFSIGNALED(status):
        return bytes([_SIGNAL, os.WTERMSIG(status)])
    return bytes([_CODE, os.WEXITSTATUS(status)])


def stopped(number: int) -> bytes:
    """Return the watcher's message that the script was stopped by a signal."""
    return bytes([_STOP, number])


class Signals:
    """The signals of this process, blocked from now on: received ones are processed when there is time."""

    def __init__(self) -> None:
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        self._all = signal.valid_signals()
        #: Signals that the script begins with ignored or blocked, as if this process became the script.
        self.ignored = [int(number) for number in self._all if signal.getsignal(number) is signal.SIG_IGN]
        # The interpreter ignores these two itself.
        self.ignored = [number for number in self.ignored if number not in (signal.SIGPIPE, signal.SIGXFSZ)]
        self.blocked = [int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, self._all)]

    def restore(self) -> None:
        """Let them come again."""
        signal.pthread_sigmask(signal.SIG_SETMASK, self.blocked)

    def attend(self, seconds: float = 0.0) -> None:
        """Wait for this long, or for a signal; give it its default effect on this process."""
        info = signal.sigtimedwait(self._all, seconds)
        if info is not None:
            self.suffer(info.si_signo)

    def wait(self) -> signal.struct_siginfo:
        """Wait for a signal."""
        return signal.sigwaitinfo(self._all)

    def suffer(self, number: int) -> None:
        """Give a signal its default effect. Returns if there is none, or when a stop is over."""
        if number not in self.blocked:
            os.kill(os.getpid(), number)
            self.let(number)

    def let(self, number: int) -> None:
        """Let one that waits have its effect, if there is one."""
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [number])
        signal.pthread_sigmask(signal.SIG_BLOCK, [number])


def is_in_background() -> bool:
    """Return whether standard input is the terminal of this process's session, and another process group has it now.

    Who reads there is stopped by the kernel; a script in another session would not be.
    """
    try:
        return os.tcgetpgrp(0) != os.getpgrp()
    except OSError:
        return False


def stand_for(connection: socket.socket, signals: Signals, fds: list[int]) -> NoReturn:
    """Pass signals on to the script behind a connection, until it has ended; end as it has.

    :param fds: descriptors of the script that this process must not keep: readers wait for the script to close them.
    """
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for fd in fds:
        os.dup2(null, fd, inheritable=fd <= 2)
    # Only signals are waited for: a signal reports received data; see fcntl(2).
    connection.setblocking(False)
    fcntl.fcntl(connection, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(connection, fcntl.F_SETFL, fcntl.fcntl(connection, fcntl.F_GETFL) | fcntl.FASYNC)
    script = _Script(connection, signals)
    received = bytearray()
    while True:
        _receive(connection, received)
        while len(received) >= 2:
            kind, number = received[:2]
            del received[:2]
            if kind == _STOP:
                script.stopped(number)
            elif kind == _CONTINUE:
                script.continued()
            elif kind == _SIGNAL:
                _die(number)
            else:
                os._exit(number)
        info = signals.wait()
        if info.si_signo == signal.SIGIO and info.si_code != 0:
            continue
        # A terminal signals a whole process group, and a group that was stopped together is resumed together.
        script.send(info.si_signo, info.si_code == _SI_KERNEL or info.si_signo == signal.SIGCONT)


def _receive(connection: socket.socket, received: bytearray) -> None:
    while True:
        try:
            data = connection.recv(4096)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            if not received:
                # The watcher was killed, and the script with it.
                received += bytes([_SIGNAL, signal.SIGKILL])
            return
        received += data


class _Script:
    """The script as its stand-in knows it: what was passed on to it, and whether it is stopped."""

    def __init__(self, connection: socket.socket, signals: Signals) -> None:
        self._connection = connection
        self._signals = signals
        #: How many SIGCONTs have been passed on that the watcher has not confirmed: what it tells before is out of date.
        self._unconfirmed = 0
        self._noted = False
        # Stays for good: to give this signal its default effect drops one that waits.
        signal.signal(signal.SIGCONT, self._note)

    def _note(self, *_: object) -> None:
        self._noted = True

    def send(self, number: int, group: bool) -> None:
        """Pass a signal on, or to the script's whole process group."""
        with suppress(OSError):  # the process has just ended
            self._connection.send(bytes([number, group]))
            self._unconfirmed += number == signal.SIGCONT

    def continued(self) -> None:
        """Note that a SIGCONT has been passed on."""
        self._unconfirmed -= 1

    def stopped(self, number: int) -> None:
        """Stop as the script has, and have it go on when this process does."""
        if self._unconfirmed:
            return
        self._noted = False
        # A signal that stops drops each SIGCONT that waits: from here on they are noted instead.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCONT])
        if not self._noted:
            # SIGSTOP has its effect here. The others wait, and a SIGCONT from here on drops them.
            os.kill(os.getpid(), number)
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCONT])
        if self._noted:
            signal.sigtimedwait([number], 0)
        else:
            self._signals.let(number)
        # A process that cannot be stopped, as one without a shell, is not resumed either.
        if self._noted or signal.SIGCONT not in signal.sigpending():
            self.send(signal.SIGCONT, True)


def _die(number: int) -> NoReturn:
    """End by a signal, without leaving an image of this process beside that of the script."""
    soft, hard = resource.getrlimit(resource.RLIMIT_CORE)
    # Not 0: programs that read images from a pipe ignore a limit of 0; see core(5).
    resource.setrlimit(resource.RLIMIT_CORE, (min(soft, 1) if soft >= 0 else 1, hard))
    if number not in (signal.SIGKILL, signal.SIGSTOP):
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [number])
    # The first process of a system or container does not end by its own signals.
    os._exit(128 + number)
