"""Processes forked by zygotes, and their watchers.

``python -m shared_rpc.zygote.process PARENT PROGRAM [ARGUMENTS]`` runs a program that ends with the process that started it.
"""

from __future__ import annotations

import ctypes
import gc
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import warnings
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from shared_rpc.zygote.child import close_all_but, set_title
from shared_rpc.zygote.wire import code_of_ended, framed, send

_PR_SET_PDEATHSIG = 1
_PAGE = os.sysconf("SC_PAGE_SIZE")


def fork() -> int:
    """Fork; return the process id in the parent, 0 in the child.

    :raises OSError: if the system refuses another process.
    """
    with warnings.catch_warnings():
        # From 3.12 on, Python warns if a process has native threads too; see safety.unsafe() for why those are harmless.
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def fork_watched(client: socket.socket) -> None:
    """In a fork of the zygote, fork again and become the watcher; return only in that second fork, with signals blocked.

    The watcher reports the end of its child to the client, and kills the child when the client has ended: neither of them needs
    the zygote then.
    """
    # Its own session, without a terminal: a script in another process group of the session can be stopped, see setpgid(2).
    os.setsid()
    client.settimeout(None)
    watcher = os.getpid()
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        pid = fork()
    except (OSError, MemoryError) as error:
        refuse(client, f"cannot fork the zygote: {str(error) or 'out of memory'}")
        os._exit(1)
    if pid == 0:
        die_with_parent(watcher)
        os.setpgid(0, 0)
        return
    try:
        _watch(pid, client)
    finally:
        os._exit(1)


def refuse(client: socket.socket, why: str, stale: bool = False) -> None:
    """Refuse a request for a process."""
    with suppress(OSError):
        send(client, framed({"type": "ForkRefused", "why": why, "stale": stale}))


def _watch(pid: int, client: socket.socket) -> NoReturn:
    gc.disable()  # a collection would touch every object, and so copy its page
    os.chdir("/")
    close_all_but([0, 1, 2, client.fileno()])
    set_title([sys.executable, "-m", "shared_rpc.zygote", "watches", str(pid)])
    # A core dump of this process is useless.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    child = os.pidfd_open(pid)
    poll = select.poll()
    poll.register(child, select.POLLIN)
    poll.register(client, 0)  # only the end of the connection: the client's data is for the child
    while True:
        for fd, _ in poll.poll():
            if fd == child:
                # Not reaped before the client is notified: until then no other process has its id, or that of its group.
                how = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
                assert how is not None, "the child has ended"
                code = how.si_status if how.si_code == os.CLD_EXITED else -how.si_status
                with suppress(OSError):
                    send(client, framed({"type": "Ended", "code": code}))
                poll.unregister(child)
            else:
                with suppress(ProcessLookupError, PermissionError):  # it has ended, or is another user's program by now
                    os.kill(pid, signal.SIGKILL)
                os._exit(0)


class WatchedProcess:
    """A process forked by a zygote, with the methods of :class:`subprocess.Popen` that a broker uses.

    :param connection: to the watcher. It is readable once the process has ended.
    """

    def __init__(self, pid: int, connection: socket.socket) -> None:
        self.pid = pid
        #: As in :class:`subprocess.Popen`; None until the process is reaped.
        self.returncode: int | None = None
        self._connection = connection

    def fileno(self) -> int:
        """Return the descriptor that is readable once the process has ended."""
        return self._connection.fileno()

    def kill(self) -> None:
        """Send SIGKILL, unless the process was reaped: until then no other process can have its id."""
        if self.returncode is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end of the process.

        :raises subprocess.TimeoutExpired: after ``timeout`` seconds.
        """
        if self.returncode is None:
            if timeout is not None and not is_readable(self.fileno(), timeout):
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
            self._connection.settimeout(None)
            with self._connection:
                self.returncode = code_of_ended(self._connection)
        return self.returncode


def is_readable(fd: int, seconds: float | None = None) -> bool:
    """Wait until a descriptor is readable, for a pidfd until the process has ended. Return False after ``seconds``."""
    ready = select.poll()
    ready.register(fd, select.POLLIN)
    return bool(ready.poll(seconds * 1000 if seconds is not None else None))


def resident_bytes(pid: int) -> int:
    """Return the resident host memory of a process in bytes; 0 if it has ended."""
    with suppress(OSError, IndexError):
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE
    return 0


def die_with_parent(parent: int) -> None:
    """Have the kernel send SIGKILL when the thread that is the parent of this process ends; see prctl(2).

    :param parent: the process id of the parent; if that has already ended, this process ends now.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


if __name__ == "__main__":
    # The kernel keeps this setting while another program replaces this process.
    die_with_parent(int(sys.argv[1]))
    try:
        os.execvp(sys.argv[2], sys.argv[2:])
    except OSError as error:
        sys.exit(f"shared-rpc: cannot start {sys.argv[2]}: {error}")
