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

from shared_rpc.protocol.peers import peer_of
from shared_rpc.scripts.front import CONTINUED, ended, stopped
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
            _Watcher(pid, ours, connection).watch()
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


class _Watcher:
    """The watching of a script, to its end and this process's.

    :param script: the script's end of a socket pair.
    :param connection: to the command.
    """

    def __init__(self, pid: int, script: socket.socket, connection: socket.socket) -> None:
        self._pid = pid
        self._script = script
        self._connection = connection
        #: 0 where it cannot be known.
        self._command = peer_of(connection).pid
        self._begun = False
        #: Whether the command has been told that the script is stopped, and has not continued it.
        self._stopped = False

    def watch(self) -> NoReturn:
        """Watch."""
        gc.disable()  # a collection would touch every object, and so copy its page
        script, command = self._script.fileno(), self._connection.fileno()
        close_all_but([0, 1, 2, script, command])
        set_title([sys.executable, "-m", "shared_rpc.scripts.watcher", str(self._pid)])
        # The zygote's limits are not the command's; and a core dump of this process is useless.
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        reading, writing = os.pipe()
        os.set_blocking(writing, False)
        os.set_blocking(reading, False)
        self._connection.setblocking(False)
        self._script.setblocking(False)
        signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
        poll = select.poll()
        for fd in (script, command, reading):
            poll.register(fd, select.POLLIN)
        while True:
            for fd, _ in poll.poll():
                if fd == reading:
                    with suppress(BlockingIOError):
                        os.read(reading, 4096)
                elif fd == script:
                    if not self._relay():
                        poll.unregister(fd)
                elif not self._obey():
                    with suppress(PermissionError):
                        os.kill(self._pid, signal.SIGKILL)
                    os._exit(0)
            self._look()

    def _relay(self) -> bool:
        """Report to the command whether the script can begin; return False if it cannot."""
        try:
            word = self._script.recv(4096)
        except BlockingIOError:
            return True
        if word == _READY:
            self._tell(packed({"pid": self._pid}))
        elif word:
            self._tell(packed({"refused": word.decode(errors="replace")}))
        return bool(word)

    def _obey(self) -> bool:
        """Process messages of the command; return False if it has ended."""
        try:
            data = self._connection.recv(4096)
        except BlockingIOError:
            return True
        except OSError:
            return False
        if not data:
            return False
        if not self._begun:
            self._begun = True
            data = data[2:]
            with suppress(OSError):
                self._script.sendall(_BEGIN)
        # Two bytes are sent together, and so arrive together; see unix(7).
        for number, group in zip(data[::2], data[1::2], strict=False):
            with suppress(ProcessLookupError, PermissionError):  # the script has ended, or has become another user's program
                (os.killpg if group else os.kill)(self._pid, number)
            if number == signal.SIGCONT:
                self._stopped = False
                self._tell(CONTINUED)
        return True

    def _look(self) -> None:
        """Report the script's state."""
        while True:
            found, status = os.waitpid(self._pid, os.WNOHANG | os.WUNTRACED | os.WCONTINUED)
            if not found:
                return
            if os.WIFSTOPPED(status):
                self._stopped = True
                self._tell(stopped(os.WSTOPSIG(status)))
            elif os.WIFCONTINUED(status):
                self._continue_command()
            else:
                if self._begun:
                    self._tell(ended(status))
                    self._continue_command()
                else:  # otherwise the command becomes the script itself
                    self._relay()
                os._exit(0)

    def _continue_command(self) -> None:
        """Have the command go on if it has stopped with the script, and somebody else has continued or ended that."""
        if self._stopped and self._command:
            with suppress(OSError):  # the command has ended: the next check notices
                os.kill(self._command, signal.SIGCONT)
        self._stopped = False

    def _tell(self, data: bytes) -> None:
        with suppress(OSError):  # the command has ended: the next check notices
            self._connection.send(data)
