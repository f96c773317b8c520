"""Represents a script to the shell and the terminal that started the command.

A process cannot join the session of another one, so the script is in no group that the shell or the terminal knows. The command
is: it forwards the script's signals, stops with it, and ends with its status.
"""

from __future__ import annotations

import fcntl
import os
import signal
import socket
from contextlib import suppress
from typing import NoReturn

from shared_rpc.zygote.wire import GO, code_of_ended

#: si_code of signals that the kernel itself sends, such as those of a terminal; kill(2) sends 0. See sigaction(2).
_SI_KERNEL = 0x80
#: Signals that stop and continue a job: for all of its processes.
_OF_JOBS = frozenset({signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU, signal.SIGCONT})


def ignored_signals() -> list[int]:
    """Return the signals that would be ignored by a program executed in this process."""
    # The interpreter ignores these two itself.
    own = (signal.SIGPIPE, signal.SIGXFSZ)
    return [int(n) for n in signal.valid_signals() if signal.getsignal(n) is signal.SIG_IGN and n not in own]


def stand_for(connection: socket.socket, pid: int, fds: list[int]) -> NoReturn:
    """Start a prepared script, forward signals until it has ended, and end with its status.

    :param connection: to its watcher.
    :param pid: the process id of the script, and of its group.
    :param fds: descriptors of the script that this process must not keep: readers wait for the script to close them.
    """
    everything = signal.valid_signals()
    signal.pthread_sigmask(signal.SIG_BLOCK, everything)
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for fd in fds:
        os.dup2(null, fd, inheritable=fd <= 2)
    connection.settimeout(None)
    with suppress(OSError):  # the watcher has just been killed
        connection.sendall(GO)
    # Only signals are waited for: a signal reports received data; see fcntl(2).
    fcntl.fcntl(connection, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(connection, fcntl.F_SETFL, fcntl.fcntl(connection, fcntl.F_GETFL) | fcntl.FASYNC)
    while True:
        with suppress(BlockingIOError):
            connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
            _end_as(connection)
        info = signal.sigwaitinfo(everything)
        number = info.si_signo
        if number == signal.SIGIO and info.si_code != 0:
            continue
        # A terminal signals a whole process group.
        _send(pid, number, info.si_code == _SI_KERNEL or number in _OF_JOBS)
        if number in _OF_JOBS and number != signal.SIGCONT:
            _take_default_action(number)
            # A process that cannot be stopped, such as one without a shell, is not resumed either.
            if signal.SIGCONT not in signal.sigpending():
                _send(pid, signal.SIGCONT, True)


def _send(pid: int, number: int, group: bool) -> None:
    with suppress(ProcessLookupError, PermissionError):  # the script has ended, or has become another user's program
        (os.killpg if group else os.kill)(pid, number)


def _take_default_action(number: int) -> None:
    """Take the default action of a blocked signal."""
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [number])
    signal.pthread_sigmask(signal.SIG_BLOCK, [number])


def _end_as(connection: socket.socket) -> NoReturn:
    """End with the status of the script."""
    code = code_of_ended(connection)
    if code >= 0:
        os._exit(code)
    if -code not in (signal.SIGKILL, signal.SIGSTOP):
        _take_default_action(-code)
    os.kill(os.getpid(), -code)
    # The first process of a system or container does not end by its own signals.
    os._exit(128 - code)
