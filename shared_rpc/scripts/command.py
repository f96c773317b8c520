"""The command: it has a zygote begin the script, or becomes the script itself."""

from __future__ import annotations

import os
import resource
import select
import socket
import sys
import time
from contextlib import suppress
from typing import Any, NoReturn

from shared_rpc.errors import ConfigurationError, one_line
from shared_rpc.protocol.peers import foreign_owner, is_own, named, peer_of
from shared_rpc.scripts.front import GO, Signals, is_in_background, stand_for
from shared_rpc.scripts.key import interpreter_options, key_of, limits
from shared_rpc.scripts.options import Script, parse
from shared_rpc.scripts.wire import packed, parts, unpacked
from shared_rpc.settings import ScriptSettings, environment, resolve_base_path, script_settings
from shared_rpc.zygote.framing import Incoming, Lost

__all__ = ["launch", "run_directly", "zygote_path"]

#: Seconds for a listening zygote's answer. It forks one script after another, in some ten milliseconds each.
_PATIENCE = 20.0
#: Seconds for a zygote to import torch and the other modules that it was given.
_START = 120.0
#: Seconds between two checks of conditions that send no signal.
_LOOK = 0.02


class _Unavailable(Exception):
    """No zygote can begin the script: the reason."""


class _Gone(Exception):
    """An end of the zygote, past or announced: another zygote may run the script."""


def run_directly(words: list[str]) -> None:
    """Run the script of the words behind ``run``. Returns only if they need an explanation."""
    script = parse(words)
    if script is not None:
        launch(script)


def zygote_path(base_path: str, key: str) -> str:
    """Return the path where the zygote of a key listens."""
    return f"{base_path}-{key}.zygote"


def launch(script: Script) -> NoReturn:
    """Run a script, and end as it does."""
    signals = Signals()
    environ = environment()
    try:
        _check(script)
        run = _Run(script, signals, environ)
        connection = run.begin()
    except Exception as why:  # any failure: the script must not suffer from it
        if not isinstance(why, _Unavailable):
            why = _Unavailable(f"{type(why).__name__}: {why}")
        if str(why) and sys.stderr is not None:
            with suppress(OSError):
                print(f"shared-rpc: runs without a zygote: {one_line(str(why))}", file=sys.stderr, flush=True)
        signals.restore()
        _become(script)
    stand_for(connection, signals, run.fds)


def _check(script: Script) -> None:
    """Find cases that only the interpreter itself can handle, or reports better."""
    if not script.module:
        if script.name == "-":
            raise _Unavailable("a program from standard input has no path")
        if not os.access(script.name, os.R_OK):
            raise _Unavailable  # the interpreter has its own message
    if sys.flags.inspect or sys.flags.interactive:
        raise _Unavailable("the interpreter becomes interactive after the script (-i, PYTHONINSPECT)")
    if not sys.executable:
        raise _Unavailable("the interpreter does not know its own path")
    if is_in_background():
        raise _Unavailable(
            "the terminal belongs to another job: if the script does not read it, start the script with '< /dev/null'"
        )


def _become(script: Script) -> NoReturn:

    words = [sys.executable or "python3", *interpreter_options(), *script.words]
    try:
        os.execvp(words[0], words)
    except OSError as error:
        print(f"shared-rpc: {words[0]}: {error.strerror}", file=sys.stderr)
        os._exit(126)


class _Run:
    """One script on its way to its beginning."""

    def __init__(self, script: Script, signals: Signals, environ: dict[str, str]) -> None:
        self.fds = _inheritable()
        _fill_gaps()
        self._script = script
        self._signals = signals
        self._environ = environ
        try:
            settings = script_settings(environ)
        except ConfigurationError as error:
            raise _Unavailable(str(error)) from None
        self._settings = ScriptSettings(
            (*settings.preload, *script.preload), settings.idle_exit if script.idle_exit is None else script.idle_exit
        )
        self._path = zygote_path(resolve_base_path(None, environ), key_of(environ, self._settings.preload))

    def begin(self) -> socket.socket:
        """Have the script begin: the connection to its watcher."""
        # A zygote that ends just now is replaced; if zygotes end repeatedly, the script runs without one.
        for _ in range(3):
            try:
                return self._ask(self._connect())
            except _Gone as error:
                reason = error
        raise _Unavailable(f"the zygotes at {self._path} end: {reason}")

    def _connect(self) -> socket.socket:
        connection = _connected(self._path)
        if connection is None:
            from shared_rpc.scripts.starting import NoZygote, Starting

            try:
                connection = Starting(
                    self._path,
                    self._settings,
                    self._environ,
                    self.fds,
                    lambda: _connected(self._path),
                    lambda: self._signals.attend(_LOOK),
                    time.monotonic() + _START,
                ).connection()
            except NoZygote as error:
                raise _Unavailable(str(error)) from None
        try:
            self._check_peer(connection)
        except BaseException:
            connection.close()
            raise
        return connection

    def _check_peer(self, connection: socket.socket) -> None:
        peer = peer_of(connection)
        if not is_own(peer.uid):
            raise _Unavailable(f"pid {peer.pid} of another user ({named(peer.uid)}) listens at {self._path}")

    def _ask(self, connection: socket.socket) -> socket.socket:
        folder = os.open(".", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            message = packed(
                {
                    "do": "run",
                    "name": self._script.name,
                    "arguments": self._script.arguments,
                    "module": self._script.module,
                    "options": interpreter_options(),
                    "variables": self._environ,
                    "fds": self.fds,
                    "umask": _umask(),
                    "limits": {limit: resource.getrlimit(limit) for limit in limits()},
                    "ignored": self._signals.ignored,
                    "blocked": self._signals.blocked,
                    "idle_exit": self._settings.idle_exit,
                }
            )
            self._exchange(connection, [])  # the greeting
            answer = self._exchange(connection, parts(message, [*self.fds, folder]))
        except (Lost, ConnectionError) as error:
            connection.close()
            raise _Gone(str(error)) from None
        except BaseException:
            connection.close()
            raise
        finally:
            os.close(folder)
        if "refused" in answer:
            connection.close()
            raise (_Gone if answer.get("stale") else _Unavailable)(answer["refused"])
        connection.setblocking(True)
        try:
            connection.sendall(GO)
        except ConnectionError as error:
            raise _Gone(str(error)) from None
        return connection

    def _exchange(self, connection: socket.socket, pieces: list[tuple[bytes, list[int]]]) -> dict[str, Any]:
        """Send a message, and wait for the answer; a zygote that is stopped has none."""
        deadline = time.monotonic() + _PATIENCE
        pid = peer_of(connection).pid
        connection.setblocking(False)
        incoming = Incoming(unpacked)
        poll = select.poll()
        try:
            while True:
                poll.register(connection, select.POLLIN | (select.POLLOUT if pieces else 0))
                if not poll.poll(_LOOK * 1000):
                    self._signals.attend()
                    if _is_stopped(pid):
                        raise _Unavailable(
                            f"the zygote (pid {pid}) is stopped: resume it with 'kill -CONT {pid}', or end it with -KILL"
                        )
                    if time.monotonic() > deadline:
                        raise _Unavailable(f"the zygote (pid {pid}) did not answer within {_PATIENCE:g} s")
                with suppress(BlockingIOError):
                    if pieces:
                        data, fds = pieces[0]
                        sent = socket.send_fds(connection, [data], fds) if fds else connection.send(data)
                        pieces[:1] = [(data[sent:], [])] if sent < len(data) else []
                with suppress(BlockingIOError):
                    received = incoming.receive(connection)
                    if received is not None:
                        return received[0]
        finally:
            incoming.close()


def _connected(path: str) -> socket.socket | None:
    """Return a connection to the process that listens there, None if none does."""
    if os.path.islink(path) and (owner := foreign_owner(path)) is not None:
        raise _Unavailable(f"{path} is a link of another user ({named(owner)})")
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        # The kernel waits for a full backlog; it admits thousands.
        connection.settimeout(_PATIENCE)
        connection.connect(path)
    except (FileNotFoundError, ConnectionRefusedError, NotADirectoryError):
        connection.close()
        return None
    except OSError as error:
        connection.close()
        raise _Unavailable(f"cannot connect to {path}: {error}") from None
    return connection


def _inheritable() -> list[int]:
    """Return the descriptors that a program which this process became would have."""
    found = []
    for fd in sorted(map(int, os.listdir("/proc/self/fd"))):
        with suppress(OSError):  # the descriptor of the listing itself
            if os.get_inheritable(fd):
                found.append(fd)
    return found


def _fill_gaps() -> None:
    """Have nothing that is opened from here on be taken for a standard stream, where one of them is closed."""
    fd = -1
    while fd <= 2:
        fd = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    os.close(fd)


def _umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def _is_stopped(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] in (b"T", b"t")
    except (OSError, IndexError):
        return False
