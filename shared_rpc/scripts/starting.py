"""The start of a zygote, once for all that want it."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import NamedTuple

from shared_rpc.errors import ConfigurationError
from shared_rpc.protocol.election import Election
from shared_rpc.protocol.own_files import open_own
from shared_rpc.scripts.key import interpreter_options, is_relative
from shared_rpc.server.listener import check_directory
from shared_rpc.settings import ScriptSettings
from shared_rpc.zygote.title import ROOM

__all__ = ["NoZygote", "Starting", "log_path", "unfit_path"]

#: Seconds for which a zygote is not started again after its imports made it unfit for forks.
_BELIEVED = 600.0
#: Bytes of the reason.
_REASON = 4096

#: The working directory, first on Python's path by default, must not provide modules to a zygote. Only this code is on the
#: stack below a script in a fork.
_CODE = """\
import sys
if not sys.flags.safe_path:
    del sys.path[0]
from shared_rpc.scripts.zygote import main
script = main()
if script is not None:
    script.run()
"""


class NoZygote(Exception):
    """Lack of a zygote, with the reason."""


def log_path(path: str) -> str:
    """Return the path of the log of the zygote that listens at ``path``."""
    return f"{path}.log"


def unfit_path(path: str) -> str:
    """Return the path of the file that says why a zygote at ``path`` must not be forked."""
    return f"{path}.unfit"


class Starting(NamedTuple):
    """A wish for a zygote that listens at ``path``.

    :param variables: the environment of a zygote that is started.
    :param fds: descriptors of this process that a new one would inherit, and the zygote must not.
    :param connect: returns a connection to the zygote, or None.
    :param pause: waits for a moment.
    """

    path: str
    settings: ScriptSettings
    variables: Mapping[str, str]
    fds: list[int]
    connect: Callable[[], socket.socket | None]
    pause: Callable[[], None]
    deadline: float

    def connection(self) -> socket.socket:
        """Return a connection to a zygote, which this process has started or another one.

        :raises NoZygote: if there is none.
        """
        try:
            check_directory(os.path.dirname(self.path))
            election = Election(self.path)
        except (ConfigurationError, OSError) as error:
            raise NoZygote(str(error)) from None
        try:
            while time.monotonic() < self.deadline:
                won = election.acquire()
                if not won:
                    self.pause()
                connection = self.connect()
                if connection is None and won:
                    self._start(election)
                    connection = self.connect()
                if connection is not None:
                    return connection
                if won:
                    raise NoZygote(f"the zygote ended at once: see {log_path(self.path)}")
            raise NoZygote(
                f"another process began to start a zygote at {self.path}, which does not listen in time: see "
                f"{log_path(self.path)}"
            )
        finally:
            election.close()

    def _start(self, election: Election) -> None:
        if reason := election.failure() or _believed(self.path):
            raise NoZygote(reason)
        reading, writing = os.pipe()
        try:
            options = {"path": self.path, "lock": election.fd, "told": writing, **self.settings._asdict()}
            options["stay"] = is_relative(self.variables.get("PYTHONPATH", ""))
            self._spawn([*interpreter_options(), "-c", _CODE, json.dumps(options), ROOM], election.fd, writing)
        except (ConfigurationError, OSError) as error:
            os.close(reading)
            raise NoZygote(f"cannot start a zygote: {error}") from None
        finally:
            os.close(writing)
        try:
            told = self._told(reading)
        finally:
            os.close(reading)
        if told != "listens":
            reason = told or f"the zygote ended before it listened: see {log_path(self.path)}"
            election.record_failure(reason)
            raise NoZygote(reason)

    def _spawn(self, words: list[str], lock: int, told: int) -> None:
        """Start a process that has of this one's descriptors two, and its signals as by default."""
        log = open_own(log_path(self.path), os.O_WRONLY)
        null = -1
        try:
            os.ftruncate(log, 0)
            null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
            os.set_inheritable(lock, True)
            os.set_inheritable(told, True)
            actions: list[tuple[int, ...]] = [(os.POSIX_SPAWN_CLOSE, fd) for fd in self.fds if fd > 2]
            actions += [(os.POSIX_SPAWN_DUP2, fd, number) for number, fd in ((0, null), (1, log), (2, log))]
            pid = os.posix_spawn(
                sys.executable,
                [sys.executable, *words],
                dict(self.variables),
                file_actions=actions,
                # A process group of its own: signals of the terminal are not for the zygote, from its first moment on.
                setpgroup=0,
                setsigmask=(),
                setsigdef=signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP},
            )
        finally:
            os.set_inheritable(lock, False)
            for fd in (null, log):
                if fd >= 0:
                    os.close(fd)
        os.waitpid(pid, 0)  # the zygote continues in a child

    def _told(self, reading: int) -> str:
        """Return the zygote's message; empty if it ends without one."""
        os.set_blocking(reading, False)
        text = b""
        while time.monotonic() < self.deadline:
            with suppress(BlockingIOError):
                data = os.read(reading, 4096)
                if not data:
                    return text.decode(errors="replace")
                text += data
                continue
            self.pause()
        return "the zygote did not listen in time"


def _believed(path: str) -> str:
    """Return why a zygote of this key must not be forked, as was found out not long ago."""
    try:
        fd = open_own(unfit_path(path), os.O_RDONLY, create=False)
    except (ConfigurationError, OSError):  # there is none, or it is another user's, whose word is not taken
        return ""
    try:
        recent = time.time() - os.fstat(fd).st_mtime < _BELIEVED
        return os.read(fd, _REASON).decode(errors="replace") if recent else ""
    finally:
        os.close(fd)
