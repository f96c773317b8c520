"""The command: it has a zygote begin the script, or becomes the script itself."""

from __future__ import annotations

import os
import resource
import select
import signal
import socket
import sys
import time
from contextlib import suppress
from typing import Any, NoReturn

from shared_rpc.errors import ConfigurationError, one_line
from shared_rpc.protocol.peers import foreign_owner, is_own, named, peer_of
from shared_rpc.scripts.front import ignored_signals, is_in_background, stand_for
from shared_rpc.scripts.key import interpreter_options, key_of, limits
from shared_rpc.scripts.options import Script, parse
from shared_rpc.settings import ScriptSettings, environment, resolve_base_path, script_settings
from shared_rpc.zygote.framing import Incoming, Lost, framed, parts, unpacked

__all__ = ["launch", "run_directly", "zygote_path"]

#: Seconds for a listening zygote's answer. It forks one script after another, in some ten milliseconds each.
_PATIENCE = 20.0
#: Seconds between two checks whether a zygote that has not answered is stopped.
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
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        _check(script)
        run = _Run(script, environment())
        connection, pid = run.begin()
    except Exception as why:  # any failure: the script must not suffer from it
        if not isinstance(why, _Unavailable):
            why = _Unavailable(f"{type(why).__name__}: {why}")
        if str(why) and sys.stderr is not None:
            with suppress(OSError):
                print(f"shared-rpc: runs without a zygote: {one_line(str(why))}", file=sys.stderr, flush=True)
        _become(script)
    stand_for(connection, pid, run.fds)


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

    def __init__(self, script: Script, environ: dict[str, str]) -> None:
        self.fds = _inheritable()
        _fill_gaps()
        self._script = script
        self._environ = environ
        try:
            settings = script_settings(environ)
        except ConfigurationError as error:
            raise _Unavailable(str(error)) from None
        self._settings = ScriptSettings(
            (*settings.preload, *script.preload), settings.idle_exit if script.idle_exit is None else script.idle_exit
        )
        self._path = zygote_path(resolve_base_path(None, environ), key_of(environ, self._settings.preload))

    def begin(self) -> tuple[socket.socket, int]:
        """Have the script made, ready to begin: the connection to its watcher, and its process id."""
        # A zygote that ends just now is replaced; if zygotes end repeatedly, the script runs without one.
        for _ in range(3):
            connection = self._connect()
            try:
                return connection, self._ask(connection)
            except _Gone as error:
                connection.close()
                reason = error
            except BaseException:
                connection.close()
                raise
        raise _Unavailable(f"the zygotes at {self._path} end: {reason}")

    def _connect(self) -> socket.socket:
        connection = _connected(self._path)
        if connection is None:
            from shared_rpc.scripts.starting import NoZygote, start_zygote

            try:
                start_zygote(self._path, self._settings, self._environ)
            except NoZygote as error:
                raise _Unavailable(str(error)) from None
            connection = _connected(self._path)
            if connection is None:
                raise _Unavailable(f"the zygote ended at once: see {self._path}.log")
        peer = peer_of(connection)
        if not is_own(peer.uid):
            connection.close()
            raise _Unavailable(f"pid {peer.pid} of another user ({named(peer.uid)}) listens at {self._path}")
        return connection

    def _ask(self, connection: socket.socket) -> int:
        folder = os.open(".", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            message = {
                "type": "Fork",
                "words": self._script.words,
                "options": interpreter_options(),
                "variables": self._environ,
                "fds": self.fds,
                "umask": _umask(),
                "limits": {limit: resource.getrlimit(limit) for limit in limits()},
                "ignored": ignored_signals(),
                "blocked": [int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, ())],
                "watched": True,
                "idle_exit": self._settings.idle_exit,
            }
            self._exchange(connection, [])  # the greeting
            answer = self._exchange(connection, parts(framed(message), [*self.fds, folder]))
        except (Lost, ConnectionError) as error:
            raise _Gone(str(error)) from None
        finally:
            os.close(folder)
        match answer["type"]:
            case "Forked":
                return int(answer["pid"])
            case "ForkRefused":
                raise (_Gone if answer["stale"] else _Unavailable)(answer["why"])
        raise _Unavailable(f"the fork ended before the script began: {answer}")

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
