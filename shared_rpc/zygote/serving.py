"""The loop of a zygote, and its answers to requests, each in its own fork."""

from __future__ import annotations

import fcntl
import gc
import itertools
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn, TypedDict

from shared_rpc.lifecycle import collector
from shared_rpc.protocol.peers import is_own, peer_of
from shared_rpc.settings import change_environment, environment, open_descriptors
from shared_rpc.zygote import child
from shared_rpc.zygote.child import become, own_path, run_program
from shared_rpc.zygote.imports import Files, Unfit, changes_since, is_installed, preload, shadowed
from shared_rpc.zygote.process import fork, fork_watched, refuse, resident_bytes
from shared_rpc.zygote.safety import try_fork, unsafe
from shared_rpc.zygote.wire import GO, GREETING, Lost, framed, receive, receive_fds, send

#: Makes torch check for a GPU by the management library instead of CUDA: several libraries check on import.
_ASK_NVML = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
#: Seconds for a part of a message to arrive.
_PATIENCE = 10.0
#: Seconds between two checks that the socket's file still exists.
_LOOK = 2.0


class Fork(TypedDict, total=False):
    """A request for a process, with the state to inherit from the requesting process.

    ``words`` is the command line after the interpreter and its ``options``: a script, or ``-m`` and a module, and arguments.
    ``fds`` are the numbers of the message's descriptors in the process; they must include 0, 1 and 2 for standard streams. The
    last descriptor, without a number, is the working directory's. None of the ``folders``, which come first on the process's
    module path, may have a module that the zygote imported from elsewhere. The signals ``ignored`` and ``blocked`` are so in
    the process. ``idle_exit`` is for the zygote: seconds without a request after which it ends.
    """

    words: list[str]
    options: list[str]
    variables: dict[str, str]
    fds: list[int]
    folders: list[str]
    ignored: list[int]
    blocked: list[int]
    idle_exit: float


class Control:
    """The connection of clients to a zygote: a socket pair, from which each message is a byte and a descriptor of a socket."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock

    def next(self) -> socket.socket | None:
        """Wait for a client; return None when the zygote must end."""
        _, fds, _ = receive_fds(self._socket, 1, 1)
        return socket.socket(fileno=fds[0]) if fds else None

    def leave(self) -> None:
        """Close the zygote's own descriptors, in a fork, which must not keep them open after the zygote has ended."""
        self._socket.close()

    def note(self, request: Fork) -> None:
        """Count a process in the zygote; called in a fork."""

    def end(self) -> None:
        """End the zygote, so that another one can replace it at once; called in a fork. A broker does that itself."""

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Answer a request other than one for a process; called in a fork."""
        raise Lost(f"no request: {request['type']}")


class Zygote:
    """A process to be forked. In the main thread of a process without other threads or unneeded open files."""

    def __init__(self) -> None:
        #: The ``sys.path`` of forks, without that of their program.
        self._path = sys.path[:]
        #: The user's directories before those of the interpreter.
        self._first = list(itertools.takewhile(lambda entry: not is_installed(entry), self._path))
        #: Descriptors opened by imports. Libffi 3.5 maps its own file whenever it needs trampolines.
        names = {fd: os.path.basename(os.readlink(f"/proc/self/fd/{fd}")) for fd in open_descriptors()}
        self._kept = [fd for fd, name in names.items() if ".so." in name or name.endswith(".so")]
        #: The environment at the start, and its changes by imports.
        self._inherited = environment()
        self._changed: dict[str, str | None] = {}
        self._fds = frozenset(open_descriptors())
        self._files: Files

    def prepare(self, modules: Sequence[str], own: Iterable[str] = (), needed: Iterable[str] = ()) -> dict[str, Any]:
        """Import modules, and check that this process can be forked then; return the answer to a Preload.

        :param own: names of modules that it must not have: those of the user's own code.
        :param needed: modules without which the zygote is useless.
        :raises Unfit: if it cannot be forked.
        """
        change_environment(_ASK_NVML)
        before, begin = environment(), sys.path[:]
        with collector.paused():
            dropped = preload(modules, lambda: unsafe(self._fds))
        self._changed = changes_since(before)
        self._path += [entry for entry in sys.path if entry not in begin]
        for name in {*own} & {*sys.modules}:
            raise Unfit(f"the imports have a module {name!r}, and the app has another one")
        for name in {*needed} & {*dropped}:
            raise Unfit(f"cannot import {name}: {dropped[name]}")
        sys.stdout.flush()
        sys.stderr.flush()
        gc.collect()
        # A collection in a fork would touch every object, and so copy its page.
        gc.freeze()
        if why := unsafe(self._fds) or try_fork() or unsafe(self._fds):
            raise Unfit(why)
        self._kept = sorted({*self._kept, *({*open_descriptors()} - self._fds)})
        self._files = Files()
        return {"type": "Ready", "modules": len(sys.modules), "dropped": dropped, "variables": self._changed}

    def serve(self, door: Control) -> Callable[[], NoReturn] | None:
        """Fork for each client until no more can connect. Returns the program in requested processes, None at the end."""
        # The kernel reaps watchers.
        earlier = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        while (client := door.next()) is not None:
            with client:
                try:
                    pid = fork()
                except (OSError, MemoryError) as error:
                    refuse(client, f"cannot fork the zygote (pid {os.getpid()}): {str(error) or 'out of memory'}")
                    continue
                if pid == 0:
                    signal.signal(signal.SIGCHLD, earlier if earlier is not None else signal.SIG_DFL)
                    return self._answer(client, door)
        return None

    def _answer(self, client: socket.socket, door: Control) -> Callable[[], NoReturn]:
        """Answer one request, in a fork; return the program in a second fork, which the first one watches."""
        client = socket.socket(fileno=client.detach())
        door.leave()
        try:
            client.settimeout(_PATIENCE)
            send(client, GREETING)
            message, fds = receive(client)
            if message["type"] != "Fork":
                send(client, framed(door.answer(message)))
                os._exit(0)
            request: Fork = message  # type: ignore[assignment]
            os.fchdir(fds[-1])
            self._check(request, door)
            door.note(request)
            fork_watched(client)
            return lambda: self._begin(request, fds, client)
        except _Refusal as refusal:
            refuse(client, str(refusal), refusal.stale)
        except Exception as error:  # a malformed request, or one that does not arrive
            refuse(client, f"{type(error).__name__}: {error}")
        os._exit(1)

    def _check(self, request: Fork, door: Control) -> None:
        """Refuse a process that would differ from a new one, or cannot be created."""
        if taken := sorted({*request["fds"]} & {*self._kept}):
            raise _Refusal(f"a library in the zygote uses descriptor {taken[0]}, which the new process needs")
        if name := self._files.changed():
            door.end()
            raise _Refusal(f"{name} has changed", stale=True)
        if name := shadowed([*request.get("folders", ()), *own_path(request["options"], request["words"]), *self._first]):
            raise _Refusal(f"the program's path has another {name} than the zygote has imported")

    def _begin(self, request: Fork, fds: list[int], client: socket.socket) -> NoReturn:
        """Become the requested process, and run to its end."""
        words = request["words"]
        wanted = dict(zip(request["fds"], fds[:-1], strict=True))  # the last one is the working directory's
        # Above all other numbers, out of the way.
        moved = fcntl.fcntl(client, fcntl.F_DUPFD_CLOEXEC, max([*wanted, *self._kept, 2]) + 1)
        with socket.socket(fileno=moved) as connection:
            client.detach()  # closed with all others
            try:
                child.inherited.update(request["variables"])
                become(
                    wanted,
                    argv=["-m", *words[2:]] if words[0] == "-m" else words,
                    words=words,
                    options=request["options"],
                    variables=self._variables_of(request["variables"]),
                    path=[*own_path(request["options"], words), *self._path],
                    mask=request["blocked"],
                    kept=[moved, *self._kept],
                    ignored=request.get("ignored", ()),
                )
            except BaseException as error:
                refuse(connection, f"{type(error).__name__}: {error}")
                os._exit(1)
            send(connection, framed({"type": "Forked", "pid": os.getpid()}))
            if connection.recv(1) != GO:
                os._exit(1)
        run_program(words)

    def _variables_of(self, variables: dict[str, str]) -> dict[str, str]:
        """Return the environment of a fork: that of the request, with the changes that imports would make to it."""
        made = {name: value for name, value in self._changed.items() if variables.get(name) == self._inherited.get(name)}
        return {name: value for name, value in {**variables, **made}.items() if value is not None}


class _Refusal(Exception):
    """The reason why a process would differ from a new one; ``stale`` is True if that holds for any other request too."""

    def __init__(self, why: str, stale: bool = False) -> None:
        super().__init__(why)
        self.stale = stale


class Listener(Control):
    """The socket of a zygote that serves all processes of its user, and its idle exit.

    :param path: the path of the socket.
    :param lock: a descriptor kept open while the zygote lives.
    :param preloaded: names of modules, for display.
    :param idle_exit: seconds without a request, until a request sets another value.
    :raises ConfigurationError: if the path cannot be used.
    """

    def __init__(self, path: str, lock: int, preloaded: list[str], idle_exit: float) -> None:
        from shared_rpc.server.listener import bind_socket

        super().__init__(bind_socket(path))
        self._path, self._lock, self._preloaded, self._idle_exit = path, lock, preloaded, idle_exit
        self._inode = os.lstat(path).st_ino
        self._pid = os.getpid()
        self._begun = self._last = time.monotonic()
        #: The time at which the zygote ends without another request: the first client gets at least the time to connect.
        self._until = self._begun + max(idle_exit, _PATIENCE)
        self._runs = 0
        self._news, self._noted = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)

    def next(self) -> socket.socket | None:
        """Wait for a client; return None after the idle time, or when another zygote has the socket."""
        poll = select.poll()
        for fd in (self._news, self._socket.fileno()):
            poll.register(fd, select.POLLIN)
        while True:
            left = self._until - time.monotonic()
            ready = dict(poll.poll(max(min(left, _LOOK), 0) * 1000))
            if self._news in ready:
                noted = os.read(self._news, 1 << 16).split()
                self._runs += len(noted)
                self._idle_exit, self._last = float(noted[-1]), time.monotonic()
                self._until = self._last + self._idle_exit
            if self._socket.fileno() in ready:
                with suppress(OSError):
                    client, _ = self._socket.accept()
                    if is_own(peer_of(client).uid):
                        return client
                    client.close()
            elif left <= 0 or self._replaced():
                self._remove()
                return None

    def _replaced(self) -> bool:
        try:
            return os.lstat(self._path).st_ino != self._inode
        except OSError:
            return True

    def _remove(self) -> None:
        from shared_rpc.server.listener import remove_socket

        remove_socket(self._path, self._inode)

    def leave(self) -> None:
        """Close the zygote's descriptors and its lock, in a fork."""
        super().leave()
        os.close(self._lock)

    def note(self, request: Fork) -> None:
        """Count a process, which postpones the idle exit; called in a fork."""
        os.write(self._noted, f"{request.get('idle_exit', self._idle_exit)}\n".encode())

    def end(self) -> None:
        """Remove the socket and kill the zygote; called in a fork."""
        self._remove()
        os.kill(self._pid, signal.SIGKILL)  # it has no state to lose

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Describe the zygote; times are in seconds, and ``rss`` is its resident memory in bytes."""
        if request["type"] != "TellState":
            return super().answer(request)
        now = time.monotonic()
        return {
            "type": "ZygoteState",
            "kind": "zygote",
            "pid": self._pid,
            "socket_path": self._path,
            "key": Path(self._path).stem.rpartition("-")[2],
            "preload": self._preloaded,
            "runs": self._runs,
            "idle": now - self._last,
            "idle_exit": self._idle_exit,
            "uptime": now - self._begun,
            "rss": resident_bytes(self._pid),
        }
