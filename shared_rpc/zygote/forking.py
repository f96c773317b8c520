"""Forks of this process: children of the process that asks for them, or of a watcher."""

from __future__ import annotations

import errno
import gc
import os
import resource
import select
import signal
import socket
import sys
import warnings
from contextlib import suppress
from typing import NoReturn

from shared_rpc.zygote.child import close_all_but, set_title
from shared_rpc.zygote.messages import Ended, ForkRefused, packed
from shared_rpc.zygote.process import die_with_parent, has_ended

__all__ = ["fork", "fork_for_subreaper", "fork_watched"]


def fork() -> int:
    """Fork; return the process id in the parent, 0 in the child.

    :raises OSError: if the system has no room for another process.
    """
    with warnings.catch_warnings():
        # From 3.12 on, Python warns if a process has native threads too; see safety.unsafe() for why those are harmless.
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def fork_for_subreaper() -> int:
    """Fork a process that is a child of the nearest ancestor that is a subreaper; without one, of the system's first process.

    That is how a program gets a child which it can wait for, whose exit status reaches it whatever becomes of the zygote, and
    that can be made to end with it; see PR_SET_CHILD_SUBREAPER of prctl(2). A process between the two ends at once. (clone(2)
    with CLONE_PARENT would need none, but passes by the hooks that Python and native libraries have for forks.)

    Signals are held back meanwhile, and in the new process until it lets them come.

    :returns: its process id; 0 in the process itself.
    :raises OSError: if there is no room for another process.
    """
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    reading, writing = os.pipe()
    born = False
    try:
        between = fork()
        if between == 0:
            try:
                born = _fork_between(writing)
            finally:
                if not born:
                    os._exit(1)
            return 0
        os.close(writing)
        writing = -1
        told = os.read(reading, 64)
        os.waitpid(between, 0)  # from here on the new process has its final parent
    finally:
        if not born:
            os.close(reading)
            if writing >= 0:
                os.close(writing)
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    pid, _, error = told.partition(b" ")
    if not pid.isdigit():
        raise OSError(int(error) if error.isdigit() else 0, os.strerror(int(error)) if error.isdigit() else "the fork ended")
    return int(pid)


def _fork_between(writing: int) -> bool:
    """Fork again, and end; returns True in the new process, when its parent is the one it keeps."""
    between = os.pidfd_open(os.getpid())
    try:
        pid = fork()
    except (OSError, MemoryError) as error:
        os.write(writing, f"- {getattr(error, 'errno', errno.ENOMEM)}".encode())
        return False
    if pid:
        os.write(writing, str(pid).encode())
        return os._exit(0)
    # The parent is signalled when the process has ended, and its children get their new parent before that.
    return has_ended(between)


def fork_watched(client: socket.socket) -> None:
    """Become the watcher of another fork, in a fork of the zygote; return only in that other fork, with signals blocked.

    The watcher reports the end of its child to the client, and kills the child when the client has ended: neither of them needs
    the zygote then.
    """
    # A session of its own, without a terminal: a script in another process group of the session can be stopped, see setpgid(2).
    os.setsid()
    client.setblocking(True)
    watcher = os.getpid()
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        pid = fork()
    except (OSError, MemoryError) as error:
        with suppress(OSError):
            client.sendall(packed(ForkRefused(f"cannot fork the zygote: {str(error) or 'out of memory'}")))
        os._exit(1)
    if pid == 0:
        die_with_parent(watcher)
        return
    try:
        _watch(pid, client)
    finally:
        os._exit(1)


def _watch(pid: int, client: socket.socket) -> NoReturn:
    gc.disable()  # a collection would touch every object, and so copy its page
    close_all_but([0, 1, 2, client.fileno()])
    set_title([sys.executable, "-m", "shared_rpc.zygote", "watches", str(pid)])
    # A core dump of this process is useless.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    child = os.pidfd_open(pid)
    poll = select.poll()
    poll.register(child, select.POLLIN)
    poll.register(client, 0)  # the end of the connection: what the client sends is for the child
    while True:
        for fd, _ in poll.poll():
            if fd == child:
                # Not reaped before the client knows: until then no other process has its id, or that of its group.
                how = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
                assert how is not None, "the child has ended"
                with suppress(OSError):
                    client.sendall(packed(Ended(how.si_status if how.si_code == os.CLD_EXITED else -how.si_status)))
                poll.unregister(child)
            else:
                with suppress(ProcessLookupError, PermissionError):  # it has ended, or is another user's program by now
                    os.kill(pid, signal.SIGKILL)
                os._exit(0)
