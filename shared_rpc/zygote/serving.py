"""The loop of a zygote."""

from __future__ import annotations

import fcntl
import gc
import os
import select
import signal
import socket
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from shared_rpc.lifecycle import collector
from shared_rpc.protocol.peers import is_own, peer_of
from shared_rpc.settings import change_environment, environment
from shared_rpc.zygote.child import Identity, become, open_descriptors, own_path, run_program, shadowed_by
from shared_rpc.zygote.forking import fork, fork_for_subreaper, fork_watched
from shared_rpc.zygote.framing import GO, GREETING, Incoming, Lost
from shared_rpc.zygote.installed import file_of, is_installed
from shared_rpc.zygote.messages import (
    Answer,
    Fork,
    Forked,
    ForkRefused,
    Preload,
    Ready,
    Request,
    StopListening,
    Unfit,
    ZygoteState,
    packed,
    requests,
)
from shared_rpc.zygote.preloading import Files, preload, shadowed
from shared_rpc.zygote.process import pss_of
from shared_rpc.zygote.safety import try_fork, unsafe

__all__ = ["Born", "Zygote"]

#: Makes torch ask the management library, not CUDA, whether there is a GPU: several libraries ask when they are imported.
_ASK_NVML = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
#: Seconds for a message to arrive completely on a connection to a zygote that listens.
_PATIENCE = 10.0
#: Seconds between two checks that the socket's file still exists.
_LOOK = 2.0


@dataclass(frozen=True)
class Born:
    """A fork that is no process of its own yet.

    :param fds: descriptors of the request; the last one is that of the working directory.
    :param variables: the environment, with what imports have changed in it.
    :param kept: descriptors that stay open though the request did not bring them.
    :param mask: signals that are to be blocked in it.
    :param client: in a watched process the connection to the client, which lets it begin.
    """

    request: Fork
    fds: list[int]
    variables: dict[str, str]
    path: list[str]
    kept: list[int]
    mask: list[int]
    client: socket.socket | None = None

    def run(self) -> NoReturn:
        """Be the process that was asked for, to its end."""
        if self.client is None:
            self._become([])
        else:
            # Above the numbers of its own descriptors.
            moved = fcntl.fcntl(self.client, fcntl.F_DUPFD_CLOEXEC, max([*self.request.fds, 2]) + 1)
            self.client.detach()
            with socket.socket(fileno=moved) as client:
                try:
                    self._become([moved])
                except BaseException as error:
                    text = str(error) if isinstance(error, _Refusal) else f"{type(error).__name__}: {error}"
                    _refuse(client, text)
                client.sendall(packed(Forked(os.getpid())))
                if client.recv(1) != GO:
                    os._exit(1)
        run_program(self.request.words)

    def _become(self, kept: list[int]) -> None:
        request = self.request
        *fds, folder = self.fds
        os.fchdir(folder)
        # A program that is not watched has the path of its zygote, which was started like it.
        own = own_path(request.words) if self.client is not None else []
        if name := shadowed_by(own):
            raise _Refusal(f"the script's path has another {name} than the zygote has imported")
        words = request.words
        become(
            Identity(
                fds=request.fds,
                argv=["-m", *words[2:]] if words[0] == "-m" else words,
                variables=self.variables,
                path=[*own, *self.path],
                umask=request.umask,
                limits=request.limits,
                ignored=request.ignored,
                options=request.options,
                title=words,
                inherited=request.variables,
            ),
            fds,
            [*kept, *self.kept],
            self.mask if request.blocked is None else request.blocked,
        )


class _Refusal(Exception):
    """A reason why a program cannot be run here as the interpreter would."""


def _refuse(client: socket.socket, why: str) -> NoReturn:
    with suppress(OSError):
        client.sendall(packed(ForkRefused(why)))
    os._exit(1)


@dataclass
class _Connection:
    """A connection whose next message is awaited, until a time."""

    socket: socket.socket
    until: float
    incoming: Incoming[Request] = field(default_factory=requests)

    def close(self) -> None:
        """Hang up."""
        self.incoming.close()
        self.socket.close()


class Zygote:
    """A process that is forked. In the main thread of a process that has no other, and nothing open that it need not.

    The steps of a :class:`Preload` that change the environment are for what is imported after them, and undone in the forks.

    :param path: the ``sys.path`` of forks; of those that are watched, without that of their program.
    :param connection: to the only client of a zygote that does not listen.
    """

    def __init__(self, path: list[str], connection: socket.socket | None = None) -> None:
        self._path = path
        #: Descriptors that imports have opened.
        self._kept = _of_libraries()
        #: The environment at the beginning, and with the changes of the imports.
        self._inherited = environment()
        self._variables = environment()
        self._fds = frozenset(open_descriptors())
        self._mask = [int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, ())]
        self._files: Files | None = None
        self._connections: dict[int, _Connection] = {}
        if connection is not None:
            self._connections[connection.fileno()] = _Connection(connection, float("inf"))
        self._listening: _Listening | None = None

    def prepare(self, request: Preload) -> Ready | Unfit:
        """Import the requested modules, and find out whether this process can be forked then."""
        change_environment(_ASK_NVML)
        if why := unsafe(self._fds):
            return Unfit(why)
        begin = sys.path[:]
        with collector.paused():
            done = preload(request.steps, request.folders, lambda: unsafe(self._fds))
        if done.spoiled:
            why = f"importing {done.module} makes the process unfit for forks: {done.spoiled}"
            return Unfit(why, done.module)
        changed = self._variables | done.variables
        self._variables = {name: value for name, value in changed.items() if value is not None}
        self._path += [entry for entry in sys.path if entry not in begin]
        for name in request.own:
            if name in sys.modules:
                return Unfit(f"the imports have a module {name!r}, and the app has another one")
        for name in request.needed:
            if name in done.dropped:
                return Unfit(f"cannot import {name}: {done.dropped[name]}")
        if request.needed and (why := _changeable()):
            return Unfit(why)
        sys.stdout.flush()
        sys.stderr.flush()
        gc.collect()
        # A collection in a fork would touch every object, and so copy its page.
        gc.freeze()
        if why := try_fork() or unsafe(self._fds):
            return Unfit(why)
        self._kept = sorted({*self._kept, *({*open_descriptors()} - self._fds)})
        self._files = Files()
        return Ready([name for name, imported in sys.modules.items() if imported is not None], done.dropped)

    def listen(self, path: str, lock: int, preloaded: list[str], idle_exit: float) -> None:
        """Accept connections at a path, from processes of this user.

        :param lock: a descriptor that is closed when the zygote listens no more.
        :param preloaded: names of modules, for people.
        :param idle_exit: seconds without a request, until one says something else.
        :raises ConfigurationError: if the path cannot be used.
        """
        self._listening = _Listening(path, lock, preloaded, idle_exit)

    def serve(self) -> Born | None:
        """Answer requests until nobody can ask any more. Returns in each fork; and None in the zygote, at the end."""
        while self._listening is not None or self._connections:
            poll = select.poll()
            listener = self._listening.socket.fileno() if self._listening is not None else -1
            for fd in (*self._connections, *([listener] if listener >= 0 else [])):
                poll.register(fd, select.POLLIN)
            for fd, _ in poll.poll(self._timeout()):
                if fd == listener:
                    self._accept()
                elif fd in self._connections:
                    born = self._hear(self._connections[fd])
                    if born is not None:
                        return born
            self._look()
        return None

    def _timeout(self) -> float | None:
        if self._listening is None:
            return None
        now = time.monotonic()
        due = min(self._listening.until, now + _LOOK, *(one.until for one in self._connections.values()))
        return max(due - now, 0.0) * 1000

    def _look(self) -> None:
        """End idle connections, watchers that have ended, and an idle zygote."""
        if self._listening is None:
            return
        now = time.monotonic()
        for fd, connection in list(self._connections.items()):
            if now >= connection.until:
                self._connections.pop(fd).close()
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if self._listening.replaced or (now >= self._listening.until and not self._connections):
            self._end()

    def _end(self) -> None:
        """Listen no more, so that another one may."""
        if self._listening is not None:
            self._listening.close()
            self._listening = None

    def _accept(self) -> None:
        assert self._listening is not None, "it listens"
        with suppress(OSError):
            sock = self._listening.socket.accept()[0]
            if not is_own(peer_of(sock).uid):
                sock.close()
                return
            sock.setblocking(False)
            sock.send(GREETING)
            self._connections[sock.fileno()] = _Connection(sock, time.monotonic() + _PATIENCE)

    def _hear(self, connection: _Connection) -> Born | None:
        stays = connection.until == float("inf")
        try:
            received = connection.incoming.receive(connection.socket)
        except BlockingIOError:
            return None
        except (Lost, OSError, ValueError):
            self._connections.pop(connection.socket.fileno()).close()
            return None
        if received is None:
            return None
        if not stays:
            del self._connections[connection.socket.fileno()]
        request, fds = received
        answer = self._answer(connection.socket, request, fds)
        if isinstance(answer, Born):
            return answer
        for fd in fds:
            os.close(fd)
        with suppress(OSError):
            if answer is not None:
                connection.socket.sendall(packed(answer))
        if isinstance(answer, Unfit):
            self._connections.clear()
        elif isinstance(request, StopListening):
            connection.socket.detach()  # it ends with the process
        elif not stays:
            connection.close()
        return None

    def _answer(self, sock: socket.socket, request: Request, fds: list[int]) -> Answer | Born | None:
        if isinstance(request, Preload):
            return self.prepare(request)
        if isinstance(request, Fork):
            return self._begin(sock, request, fds)
        state = self._listening.state() if self._listening is not None else None
        if isinstance(request, StopListening):
            self._end()
        return state

    def _refusal(self, request: Fork, fds: list[int]) -> ForkRefused | None:
        """Return why the process would not be as a new one, or cannot be."""
        if len(fds) != len(request.fds) + 1:
            return ForkRefused(f"received {len(fds)} descriptors instead of the announced {len(request.fds) + 1}")
        if taken := sorted({*request.fds} & {*self._kept}):
            return ForkRefused(f"a library in the zygote uses descriptor {taken[0]}, which the new process needs")
        if self._files is None:
            return ForkRefused("the zygote has no imports yet")
        if name := self._files.changed():
            return ForkRefused(f"{name} has changed", stale=True)
        if name := shadowed(request.folders):
            return ForkRefused(f"the app's path has another {name} than the zygote has imported")
        return None

    def _begin(self, sock: socket.socket, request: Fork, fds: list[int]) -> Answer | Born | None:
        if refused := self._refusal(request, fds):
            if refused.stale:
                self._end()
            return refused
        if self._listening is not None:
            self._listening.note(request)
        try:
            pid = fork() if request.watched else fork_for_subreaper()
        except (OSError, MemoryError) as error:
            return ForkRefused(f"cannot fork the zygote (pid {os.getpid()}): {str(error) or 'out of memory'}")
        if pid:
            return None if request.watched else Forked(pid)
        if request.watched:
            fork_watched(sock)
        # The sockets have their descriptors closed with all others.
        for connection in self._connections.values():
            connection.socket.detach()
        if self._listening is not None:
            self._listening.socket.detach()
        client = sock if request.watched else None
        return Born(request, fds, self._variables_of(request), self._path, self._kept, self._mask, client)

    def _variables_of(self, request: Fork) -> dict[str, str]:
        """Return the environment of a fork: that of the request, with what imports would have changed in it too."""
        variables = dict(request.variables)
        for name in {*self._inherited, *self._variables}:
            if variables.get(name) == self._inherited.get(name) != self._variables.get(name):
                variables.pop(name, None)
                if name in self._variables:
                    variables[name] = self._variables[name]
        return variables


class _Listening:
    """The socket of a zygote that serves all processes of its user, and its time.

    :raises ConfigurationError: if the path cannot be used.
    """

    def __init__(self, path: str, lock: int, preloaded: list[str], idle_exit: float) -> None:
        from shared_rpc.server.listener import bind_socket

        self.socket = bind_socket(path)
        self._path = path
        self._lock = lock
        self._preloaded = preloaded
        self._idle_exit = idle_exit
        self._inode = os.lstat(path).st_ino
        self._begun = self._last = time.monotonic()
        #: When the zygote ends without another request: the first one has at least as long as its client needs to connect.
        self.until = self._begun + max(idle_exit, _PATIENCE)
        self._runs = 0

    @property
    def replaced(self) -> bool:
        """Whether the socket's file is there no more, or another one's."""
        try:
            return os.lstat(self._path).st_ino != self._inode
        except OSError:
            return True

    def note(self, request: Fork) -> None:
        """Count a process."""
        self._runs += 1
        self._last = time.monotonic()
        if request.idle_exit is not None:
            self._idle_exit = request.idle_exit
        self.until = self._last + self._idle_exit

    def state(self) -> ZygoteState:
        """Describe the zygote."""
        now = time.monotonic()
        return ZygoteState(
            kind="zygote",
            pid=os.getpid(),
            socket_path=self._path,
            key=Path(self._path).stem.rpartition("-")[2],
            preload=self._preloaded,
            runs=self._runs,
            idle=now - self._last,
            idle_exit=self._idle_exit,
            uptime=now - self._begun,
            pss=pss_of(),
        )

    def close(self) -> None:
        """Remove the socket."""
        from shared_rpc.server.listener import remove_socket

        remove_socket(self._path, self._inode)
        self.socket.close()
        os.close(self._lock)


def _changeable() -> str:
    """Return why an import may change at any time, without the zygote's client asking for it; empty if none does."""
    own = os.path.dirname(os.path.dirname(__file__))  # this library
    for name, module in list(sys.modules.items()):
        file = file_of(module)
        if os.path.isabs(file) and not file.startswith(own + os.sep) and not is_installed(file):
            return (
                f"the module {name} is not an installed package (its directory in sys.path has no *.dist-info) and may change "
                f"at any time: {file}"
            )
    return ""


def _of_libraries() -> list[int]:
    """Return the descriptors of shared libraries: libffi of 3.5 maps its own file whenever it needs trampolines."""
    names = {fd: os.path.basename(os.readlink(f"/proc/self/fd/{fd}")) for fd in open_descriptors()}
    return [fd for fd, name in names.items() if ".so." in name or name.endswith(".so")]
