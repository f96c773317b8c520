"""The process that scripts are forks of: one for each user and key."""

from __future__ import annotations

import json
import os
import resource
import select
import signal
import socket
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

import shared_rpc
from shared_rpc.errors import ConfigurationError
from shared_rpc.protocol.own_files import open_own
from shared_rpc.protocol.peers import is_own, peer_of
from shared_rpc.scripts.main_module import ScriptFork, ScriptRequest
from shared_rpc.scripts.starting import unfit_path
from shared_rpc.scripts.watcher import begin_script
from shared_rpc.scripts.wire import GREETING, packed, unpacked
from shared_rpc.server.listener import bind_socket, remove_socket
from shared_rpc.zygote.forking import fork
from shared_rpc.zygote.framing import Incoming, Lost
from shared_rpc.zygote.installed import file_of, is_installed
from shared_rpc.zygote.messages import Preload, Unfit
from shared_rpc.zygote.process import pss_of
from shared_rpc.zygote.serving import Zygote
from shared_rpc.zygote.title import set_title

__all__ = ["main", "note_unfit"]

#: The imports of every zygote: torch, numpy, and the modules of a client. Users name further modules: a script's imports differ
#: from script to script, and some libraries start threads, or CUDA, when imported.
_MODULES = (
    *("numpy", "torch"),
    *("shared_rpc.provider.provider", "shared_rpc.operations.client", "shared_rpc.operations.async_client"),
    *("shared_rpc.codec.arguments", "shared_rpc.codec.results", "shared_rpc.lifecycle.main_end"),
    *("shared_rpc.provider.loopback", "shared_rpc.provider.spawn"),
    *("shared_rpc.extras.materialize", "shared_rpc.extras.safetensors"),
    *("shared_rpc.protocol.ticket", "shared_rpc.memory.backends.host", "shared_rpc.server.server"),
)
#: Seconds for a message to arrive completely.
_PATIENCE = 10.0
#: Seconds between two checks that the socket's file still exists.
_LOOK = 2.0


def main() -> ScriptFork | None:
    """Be a zygote, until no script was requested for long enough. Returns in every fork, with its script."""
    options = json.loads(sys.argv[1])
    if os.fork():  # before the imports, which could prevent a fork
        os._exit(0)
    os.setsid()
    if not options["stay"]:
        os.chdir("/")
    set_title([sys.executable, "-m", "shared_rpc.scripts.zygote", options["path"], *options["preload"]])
    for fd in (options["lock"], options["told"]):
        os.set_inheritable(fd, False)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    zygote = Zygote(sys.path[:])
    reason = _prepare(zygote, options["preload"])
    if reason:
        reason = f"a zygote that has imported {', '.join(['torch', *options['preload']])} cannot be forked: {reason}"
        note_unfit(options["path"], reason)
    else:
        try:
            listener = bind_socket(options["path"])
        except ConfigurationError as error:
            reason = str(error)
    with suppress(BrokenPipeError):  # the process that started the zygote has not waited
        os.write(options["told"], (reason or "listens").encode(errors="replace"))
    os.close(options["told"])
    if reason:
        return None
    with suppress(OSError):  # there is none, or it is another user's
        os.unlink(unfit_path(options["path"]))
    # The kernel reaps watchers that have ended.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    script = _Serving(zygote, listener, options).serve()
    if script is None:
        os._exit(0)  # exit callbacks of the imports are for the scripts
    return script


def _prepare(zygote: Zygote, preload: list[str]) -> str:
    """Import the modules; return why this process must not be forked; empty if it may."""
    folders = [entry for entry in sys.path if not is_installed(entry)]
    answer = zygote.prepare(Preload([*_MODULES, *preload], folders=folders))
    if isinstance(answer, Unfit):
        return answer.why
    for name in ("torch", *preload):
        if name in answer.dropped:
            return f"cannot import {name}: {answer.dropped[name]}"
    own = os.path.dirname(shared_rpc.__file__)
    for name, module in list(sys.modules.items()):
        file = file_of(module)
        if os.path.isabs(file) and not file.startswith(own + os.sep) and not is_installed(file):
            return (
                f"the module {name} is not an installed package (its directory in sys.path has no *.dist-info) and may change "
                f"at any time: {file}"
            )
    return ""


def note_unfit(path: str, reason: str) -> None:
    """Have the next commands run without a zygote at once."""
    with suppress(ConfigurationError, OSError):  # they find out by themselves then
        fd = open_own(unfit_path(path), os.O_WRONLY)
        try:
            os.ftruncate(fd, 0)
            os.write(fd, reason.encode(errors="replace"))
        finally:
            os.close(fd)


@dataclass
class _Connection:
    """A connection that has brought no request yet."""

    socket: socket.socket
    until: float
    incoming: Incoming[dict[str, Any]] = field(default_factory=lambda: Incoming(unpacked))

    def close(self) -> None:
        """Hang up."""
        self.incoming.close()
        self.socket.close()


class _Serving:
    """The loop."""

    def __init__(self, zygote: Zygote, listener: socket.socket, options: dict[str, Any]) -> None:
        self._zygote = zygote
        self._listener = listener
        self._path: str = options["path"]
        self._lock: int = options["lock"]
        self._preload: list[str] = options["preload"]
        self._idle_exit: float = options["idle_exit"]
        self._inode = os.lstat(self._path).st_ino
        self._begun = time.monotonic()
        #: When the zygote ends without another script: the first script has at least as long as its command needs to connect.
        self._until = self._begun + max(self._idle_exit, _PATIENCE)
        self._last = self._begun
        self._runs = 0
        self._connections: dict[int, _Connection] = {}

    def serve(self) -> ScriptFork | None:
        """Begin scripts. Returns in each of them; and None in the zygote, at its end."""
        while self._listener.fileno() >= 0:
            poll = select.poll()
            poll.register(self._listener, select.POLLIN)
            for fd in self._connections:
                poll.register(fd, select.POLLIN)
            for fd, _ in poll.poll(self._timeout() * 1000):
                if fd == self._listener.fileno():
                    self._accept()
                elif fd in self._connections:
                    script = self._hear(self._connections[fd])
                    if script is not None:
                        return script
            self._look()
        return None

    def _timeout(self) -> float:
        now = time.monotonic()
        due = min([self._until, now + _LOOK, *(one.until for one in self._connections.values())])
        return float(max(due - now, 0.0))

    def _look(self) -> None:
        """End idle connections, and an idle zygote."""
        now = time.monotonic()
        for fd, connection in list(self._connections.items()):
            if now >= connection.until:
                self._connections.pop(fd).close()
        try:
            replaced = os.lstat(self._path).st_ino != self._inode
        except OSError:
            replaced = True
        if replaced or (now >= self._until and not self._connections):
            self._end()

    def _end(self) -> None:
        """Listen no more, so that another one may."""
        if self._listener.fileno() >= 0:
            remove_socket(self._path, self._inode)
            self._listener.close()
            os.close(self._lock)

    def _accept(self) -> None:
        with suppress(OSError):
            sock = self._listener.accept()[0]
            if not is_own(peer_of(sock).uid):
                sock.close()
                return
            sock.setblocking(False)
            sock.send(GREETING)
            self._connections[sock.fileno()] = _Connection(sock, time.monotonic() + _PATIENCE)

    def _hear(self, connection: _Connection) -> ScriptFork | None:
        try:
            received = connection.incoming.receive(connection.socket)
        except BlockingIOError:
            return None
        except (Lost, OSError, ValueError):
            received = {}, []
        if received is None:
            return None
        del self._connections[connection.socket.fileno()]
        message, fds = received
        script = None
        try:
            with suppress(OSError, msgspec.ValidationError):
                match message.get("do"):
                    case "run":
                        script = self._run(connection.socket, message, fds)
                    case "tell":
                        connection.socket.send(packed(self._facts()))
                    case "stop":
                        self._end()
                        connection.socket.send(packed(self._facts()))
                        # The client that waits for the zygote's end sees the connection end with the process.
                        connection.socket.detach()
        finally:
            if script is None:
                connection.close()
                for fd in fds:
                    os.close(fd)
        return script

    def _run(self, sock: socket.socket, message: dict[str, Any], fds: list[int]) -> ScriptFork | None:
        request = msgspec.convert(message, ScriptRequest, strict=False)  # keys are strings in JSON
        if name := self._zygote.changed():
            self._end()
            sock.send(packed({"refused": f"{name} has changed", "stale": True}))
            return None
        self._idle_exit = request.idle_exit
        self._last = time.monotonic()
        self._until = self._last + self._idle_exit
        if taken := set(self._zygote.kept) & set(request.fds):
            sock.send(packed({"refused": f"the zygote itself uses descriptor {min(taken)}"}))
            return None
        try:
            pid = fork()
        except (OSError, MemoryError) as error:
            sock.send(packed({"refused": f"cannot fork the zygote (pid {os.getpid()}): {str(error) or 'out of memory'}"}))
            return None
        if pid:
            self._runs += 1
            return None
        script = begin_script(ScriptFork(self._zygote, request), sock, fds)
        # Their descriptors have been closed with all others.
        for other in (self._listener, sock, *(connection.socket for connection in self._connections.values())):
            other.detach()
        return script

    def _facts(self) -> dict[str, Any]:
        return {
            "kind": "zygote",
            "pid": os.getpid(),
            "socket_path": self._path,
            "key": Path(self._path).stem.rpartition("-")[2],
            "preload": ["torch", *self._preload],
            "runs": self._runs,
            "idle": time.monotonic() - self._last,
            "idle_exit": self._idle_exit,
            "uptime": time.monotonic() - self._begun,
            "pss": pss_of(),
        }
