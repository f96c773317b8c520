"""The command: starts the script by a zygote, or executes it in place of itself."""

from __future__ import annotations

import getopt
import os
import signal
import socket
import sys
from contextlib import suppress
from typing import NamedTuple, NoReturn

from shared_rpc.errors import ConfigurationError, ConnectError, one_line
from shared_rpc.scripts.front import ignored_signals, stand_for
from shared_rpc.scripts.key import interpreter_options, key_of
from shared_rpc.settings import ScriptSettings, environment, inheritable, resolve_base_path, script_settings
from shared_rpc.zygote.wire import Lost, ask, connect

#: Seconds for a listening zygote's answer. It forks for one script after another, in some ten milliseconds each.
_PATIENCE = 20.0


class Script(NamedTuple):
    """The program to run.

    :param name: the path of a script, of a directory or archive with a ``__main__.py``; or a module's name.
    :param arguments: the arguments after it.
    :param module: True if it is a module.
    :param preload: modules that the zygote imports besides its usual ones.
    :param idle_exit: idle seconds after which the zygote ends; None for the default.
    """

    name: str
    arguments: tuple[str, ...] = ()
    module: bool = False
    preload: tuple[str, ...] = ()
    idle_exit: float | None = None

    @property
    def words(self) -> list[str]:
        """The command line for the interpreter, after its own name and options."""
        return [*(["-m"] if self.module else []), self.name, *self.arguments]


def parse(words: list[str]) -> Script | None:
    """Parse the arguments of ``run``; None for misuse and ``--help``, which need an explanation.

    The library that parses the other commands takes too long to load.
    """
    try:
        options, program = getopt.getopt(words, "m", ["preload=", "idle-exit="])
        seconds = [float(value) for name, value in options if name == "--idle-exit"]
    except (getopt.GetoptError, ValueError):
        return None
    if not program or not all(value >= 0 for value in seconds):
        return None
    preload = tuple(value for name, value in options if name == "--preload")
    module = any(name == "-m" for name, _ in options)
    return Script(program[0], tuple(program[1:]), module, preload, seconds[-1] if seconds else None)


class _Gone(Exception):
    """An end of the zygote, past or announced: another zygote may run the script."""


def launch(script: Script) -> NoReturn:
    """Run a script, and end like it."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        _check(script)
        run = _Run(script, environment())
        connection, pid = run.begin()
    except Exception as error:  # any failure: the script must not suffer from it
        expected = isinstance(error, (ConfigurationError, ConnectError))
        why = one_line(str(error) if expected else f"{type(error).__name__}: {error}")
        if why and sys.stderr is not None:
            with suppress(OSError):
                print(f"shared-rpc: running without a zygote: {why}", file=sys.stderr, flush=True)
        _become(script)
    stand_for(connection, pid, run.fds)


def _check(script: Script) -> None:
    """Raise an error in cases that only the interpreter itself can handle, or reports better."""
    if not script.module:
        if script.name == "-" or script.name.endswith(".pyc"):
            raise ConnectError("the program is no file of Python's source code")
        if not os.access(script.name, os.R_OK):
            raise ConnectError("")  # the interpreter has its own message
    if sys.flags.inspect or sys.flags.interactive:
        raise ConnectError("the interpreter becomes interactive after the script (-i, PYTHONINSPECT)")


def _become(script: Script) -> NoReturn:
    words = [sys.executable, *interpreter_options(), *script.words]
    try:
        os.execvp(words[0], words)
    except OSError as error:
        print(f"shared-rpc: {words[0]}: {error.strerror}", file=sys.stderr)
        os._exit(126)


class _Run:
    """One script being started."""

    def __init__(self, script: Script, environ: dict[str, str]) -> None:
        self.fds = inheritable()
        _fill_gaps()
        self._script = script
        self._environ = environ
        settings = script_settings(environ)
        self._settings = ScriptSettings(
            (*settings.preload, *script.preload), settings.idle_exit if script.idle_exit is None else script.idle_exit
        )
        self._path = f"{resolve_base_path(None, environ)}-{key_of(environ, self._settings.preload)}.zygote"

    def begin(self) -> tuple[socket.socket, int]:
        """Request the script's process; return the connection to its watcher, and its process id, once it is ready to run."""
        # A zygote that is just ending is replaced; if zygotes end repeatedly, the script runs without one.
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
        raise ConnectError(f"the zygotes at {self._path} end: {reason}")

    def _connect(self) -> socket.socket:
        connection = connect(self._path, _PATIENCE)
        if connection is None:
            from shared_rpc.scripts.starting import start_zygote

            start_zygote(self._path, self._settings, self._environ)
            connection = connect(self._path, _PATIENCE)
            if connection is None:
                raise ConnectError(f"the zygote ended at once: see {self._path}.log")
        return connection

    def _ask(self, connection: socket.socket) -> int:
        folder = os.open(".", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        request = {
            "type": "Fork",
            "words": self._script.words,
            "options": interpreter_options(),
            "variables": self._environ,
            "fds": self.fds,
            "ignored": ignored_signals(),
            "blocked": [int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, ())],
            "idle_exit": self._settings.idle_exit,
        }
        try:
            answer = ask(connection, request, [*self.fds, folder])
        except TimeoutError:
            raise ConnectError(f"the zygote at {self._path} did not answer within {_PATIENCE:g} s") from None
        except (Lost, ConnectionError) as error:
            raise _Gone(str(error)) from None
        finally:
            os.close(folder)
        match answer["type"]:
            case "Forked":
                return int(answer["pid"])
            case "ForkRefused":
                raise (_Gone if answer["stale"] else ConnectError)(answer["why"])
        raise ConnectError(f"the fork ended before the script began: {answer}")


def _fill_gaps() -> None:
    """Occupy closed standard streams, so that no descriptor opened later is mistaken for one."""
    fd = -1
    while fd <= 2:
        fd = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    os.close(fd)
