"""The parent of a script: it reports the script's state to the command, and ends the script when the command has ended.

It is a fork of the zygote too, so that a script needs its zygote no more once it has begun.
"""

from __future__ import annotations

import fcntl
import gc
import os
import resource
import select
import signal
import socket
import sys
from contextlib import suppress
from typing import NoReturn

from shared_rpc.scripts.front import ended, stopped
from shared_rpc.scripts.main_module import Refusal, ScriptFork
from shared_rpc.scripts.wire import packed
from shared_rpc.zygote.descriptors import close_all_but
from shared_rpc.zygote.forking import fork
from shared_rpc.zygote.title import set_title

__all__ = ["begin_script"]

#: The script's message to its watcher when it can begin; any other message is the reason why it cannot.
_READY = b"+"
_BEGIN = b"!"


def begin_script(script: ScriptFork, connection: socket.socket, fds: list[int]) -> ScriptFork:
    """Fork the script: returns there, and nowhere else. In a fork of the zygote.

    :param fds: descriptors for the script.
    """
    # A session of its own, without a terminal: a script in another process group of the session can be stopped, see setpgid(2).
    os.setsid()
    watcher = os.getpid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    ours, theirs = socket.socketpair()
    try:
        pid = fork()
    except OSError as error:
        connection.sendall(packed({"refused": f"cannot fork the zygote: {error}"}))
        os._exit(1)
    if pid:
        theirs.close()
        try:
            _watch(pid, ours, connection)
        finally:
            os._exit(1)
    ours.close()
    # Above the numbers of the script's own descriptors.
    moved = fcntl.fcntl(theirs, fcntl.F_DUPFD_CLOEXEC, script.highest + 1)
    theirs.close()
    theirs = socket.socket(fileno=moved)
    try:
        script.become(watcher, moved, fds)
    except Refusal as refusal:
        _refuse(theirs, str(refusal))
    except BaseException as error:
        _refuse(theirs, f"{type(error).__name__}: {error}")
    theirs.sendall(_READY)
    if theirs.recv(1) != _BEGIN:
        os._exit(1)
    theirs.close()
    return script


def _refuse(watcher: socket.socket, why: str) -> NoReturn:
    with suppress(OSError):
        watcher.sendall(why.encode(errors="replace")[:4096] or b"?")
    os._exit(1)


def _watch(pid: int, script: socket.socket, connection: socket.socket) -> NoReturn:
    """Watch a script, to its end and this process's."""
    gc.disable()  # a collection would touch every object, and so copy its page
    close_all_but([0, 1, 2, script.fileno(), connection.fileno()])
    set_title([sys.executable, "-m", "shared_rpc.scripts.watcher", str(pid)])
    # The zygote's limits are not the command's; and a core dump of this process is useless.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    os.set_blocking(reading, False)
    connection.setblocking(False)
    script.setblocking(False)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
    poll = select.poll()
    for watched in (script.fileno(), connection.fileno(), reading):
        poll.register(watched, select.POLLIN)
    begun = False
    while True:
        for fd, _ in poll.poll():
            if fd == reading:
                with suppress(BlockingIOError):
                    os.read(reading, 4096)
            elif fd == script.fileno():
                if not _relay(script, connection, pid):
                    poll.unregister(fd)
            elif not _obey(connection, pid, script, begun):
                os.kill(pid, signal.SIGKILL)
                os._exit(0)
            else:
                begun = True
        _look(connection, pid, script, begun)


def _relay(script: socket.socket, connection: socket.socket, pid: int) -> bool:
    """Report to the command whether the script can begin; return False if it cannot."""
    try:
        word = script.recv(4096)
    except BlockingIOError:
        return True
    if word == _READY:
        _tell(connection, packed({"pid": pid}))
    elif word:
        _tell(connection, packed({"refused": word.decode(errors="replace")}))
    return bool(word)


def _obey(connection: socket.socket, pid: int, script: socket.socket, begun: bool) -> bool:
    """Process messages of the command; return False if it has ended."""
    try:
        data = connection.recv(4096)
    except BlockingIOError:
        return True
    except OSError:
        return False
    if not data:
        return False
    if not begun:
        data = data[2:]
        with suppress(OSError):
            script.sendall(_BEGIN)
    # Two bytes are sent together, and so arrive together; see unix(7).
    for number, group in zip(data[::2], data[1::2], strict=False):
        with suppress(ProcessLookupError):
            (os.killpg if group else os.kill)(pid, number)
    return True


def _look(connection: socket.socket, pid: int, script: socket.socket, begun: bool) -> None:
    """Report the script's state."""
    while True:
        found, status = os.waitpid(pid, os.WNOHANG | os.WUNTRACED)
        if not found:
            return
        if os.WIFSTOPPED(status):
            _tell(connection, stopped(os.WSTOPSIG(status)))
            continue
        if begun:
            _tell(connection, ended(status))
        else:  # otherwise the command becomes the script itself
            _relay(script, connection, pid)
        os._exit(0)


def _tell(connection: socket.socket, data: bytes) -> None:
    with suppress(OSError):  # the command has ended: the next check notices
        connection.send(data)
