"""Detached processes that listen at a socket: one is started for all processes that need it, and awaited."""

from __future__ import annotations

import logging
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress

from shared_rpc.errors import ConnectError
from shared_rpc.protocol.election import Election
from shared_rpc.protocol.options import ServeOptions
from shared_rpc.protocol.own_files import check_directory, open_own
from shared_rpc.settings import SOCKET_PATH_LIMIT, inheritable, program, server_environment

_log = logging.getLogger("shared_rpc.server")

#: A detached process writes two lines into a pipe: its process id; and this word, or the reason why it does not listen.
LISTENING = "listening"
#: Seconds between two checks for a listener started by another process.
_LOOK = 0.02
#: Bytes of a log, above which the next process starts a new one.
_LOG_LIMIT = 1 << 20
#: Maximum lines, and total characters, of a log quoted in an error.
_LINES, _CHARACTERS = 60, 8000


def log_path(path: str) -> str:
    """Return the log of a process started for the socket ``path``; the previous log is ``….log.1``."""
    return f"{path}.log"


def listens(path: str) -> bool:
    """Return True if a process listens at a path; False for one that is too long for a socket."""
    if len(os.fsencode(path)) > SOCKET_PATH_LIMIT:
        return False
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC) as probe:
        try:
            probe.connect(path)
        except BlockingIOError:  # its backlog is full
            return True
        except OSError as error:
            if error.errno is None:  # a signal handler's own
                raise
            return False
        return True


def start_once(path: str, start: Callable[[Election], None], until: float) -> bool:
    """Return once a process listens at ``path``, started by ``start`` or on behalf of another process.

    :param start: called with the lock. It raises ConnectError, and records its failure, if the process does not listen.
    :param until: the end of the wait for another process that has the lock, on the clock of time.monotonic().
    :returns: False if the wait timed out.
    :raises ConnectError: from ``start``, or with the reason of an awaited start that failed.
    :raises ConfigurationError: if the directory, or another user's lock, is in the way.
    """
    check_directory(os.path.dirname(path))
    with closing(Election(path)) as election:
        while not listens(path):
            if election.acquire():
                # The previous holder of the lock may have made one listen since the last check.
                if not listens(path):
                    if reason := election.failure():
                        raise ConnectError(reason)
                    start(election)
                return True
            if time.monotonic() > until:
                return False
            time.sleep(_LOOK)
    return True


def start_detached(
    path: str,
    words: Callable[[int, int], Sequence[str]],
    lock: int,
    variables: Mapping[str, str],
    until: float,
) -> tuple[int, str | None]:
    """Start a process that detaches its own child; return the child's pid and its report.

    It inherits this process's lock, and of its other descriptors a pipe for the report; signals have their default action.

    :param words: returns the command line after the interpreter's name, for the numbers that the descriptors of the lock and
        of the pipe have there.
    :param until: the end of the wait for the report, on the clock of time.monotonic().
    :returns: 0 for an unknown id; :data:`LISTENING`, or the reason why it does not listen, empty if it has ended without
        one, and None if it has not reported in time.
    :raises ConfigurationError, OSError: if it cannot be started.
    """
    with suppress(OSError):
        if os.lstat(log_path(path)).st_size > _LOG_LIMIT:
            os.replace(log_path(path), f"{log_path(path)}.1")
    log = open_own(log_path(path), os.O_WRONLY | os.O_APPEND)
    null = reading = writing = -1
    try:
        null = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        reading, writing = os.pipe()
        # Duplicated to new numbers, they are inherited by this process alone.
        number = max(map(int, os.listdir("/proc/self/fd"))) + 1
        command = [sys.executable, *words(number, number + 1)]
        os.write(log, f"--- {time.strftime('%Y-%m-%d %H:%M:%S')} pid {os.getpid()} starts: {' '.join(command)}\n".encode())
        actions: list[tuple[int, ...]] = [(os.POSIX_SPAWN_CLOSE, fd) for fd in inheritable() if fd > 2]
        copies = {0: null, 1: log, 2: log, number: lock, number + 1: writing}
        actions += [(os.POSIX_SPAWN_DUP2, fd, copy) for copy, fd in copies.items()]
        pid = os.posix_spawn(
            sys.executable,
            command,
            dict(variables),
            file_actions=actions,
            # Its own process group: signals of the terminal must not reach it, from its start on.
            setpgroup=0,
            setsigmask=(),
            setsigdef=signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP},
        )
        os.close(writing)
        writing = -1
        text, in_time = _reported(reading, until)
        with suppress(ChildProcessError):
            os.waitpid(pid, 0)
    finally:
        for fd in (log, null, reading, writing):
            if fd >= 0:
                os.close(fd)
    daemon, _, report = text.partition("\n")
    return int(daemon) if daemon.isdigit() else 0, report if in_time else None


def daemonize(lock: int, pipe: int) -> Callable[[str], None]:
    """Continue as a daemon process, before there are threads; return a function that reports success or the reason of failure.

    The started process ends: otherwise the daemon would become a zombie eventually, and belong to a process tree that some
    tools end as a whole.

    :param lock: a descriptor that stays open until the end.
    :param pipe: for the report; it ends with the process, and like the lock is not inherited by children.
    """
    if os.fork():
        os._exit(0)
    os.setsid()
    for fd in (lock, pipe):
        os.set_inheritable(fd, False)

    def report(text: str) -> None:
        with suppress(OSError):  # the process that started the daemon has ended
            os.write(pipe, text.encode(errors="replace"))
        os.close(pipe)

    with suppress(OSError):
        os.write(pipe, f"{os.getpid()}\n".encode())
    return report


def _reported(reading: int, until: float) -> tuple[str, bool]:
    """Return the report of a process, and True if it is complete."""
    ready = select.poll()
    ready.register(reading, select.POLLIN)
    text = b""
    while ready.poll(min(max(until - time.monotonic(), 0.0), 86400.0) * 1000):
        data = os.read(reading, 4096)
        if not data:
            return text.decode(errors="replace"), True
        text += data
    return text.decode(errors="replace"), False


class ServerStarter:
    """Starts a server for a client when no process listens at its socket.

    :param target: returns the app, on demand; see :func:`shared_rpc.provider.spawn.target_of`.
    :param options: of the server.
    """

    def __init__(self, target: Callable[[], str], options: ServeOptions) -> None:
        self._target = target
        self._options = options

    def __call__(self, path: str, patience: float, deadline: float) -> None:
        """Return once a server listens at ``path``, started here or on behalf of another process.

        :param patience: seconds for a server to listen after its start; and for another process to start one.
        :param deadline: the end of the wait in any case, on the clock of time.monotonic().
        :raises ConnectError: if none listens by then, and if the server ended instead, with its last output.
        :raises ConfigurationError: if there is no file to serve, or another user's lock or log is in the way.
        """
        until = min(deadline, time.monotonic() + patience)
        if not start_once(path, lambda election: self._start(path, election, patience, deadline), until):
            raise ConnectError(
                f"no server listens at {path}: another process began to start one, which did not listen within "
                f"{patience:g} s (server_startup_timeout). See {log_path(path)}"
            )

    def _start(self, path: str, election: Election, patience: float, deadline: float) -> None:
        words = program("shared_rpc.broker", self._target(), *self._options.words)[1:]
        begin = time.monotonic()
        until = min(deadline, begin + patience)
        pid, report = start_detached(
            path,
            lambda lock, pipe: [*words, "--detach", str(lock), "--report", str(pipe)],
            election.fd,
            server_environment(),
            until,
        )
        _log.info("started a server for %s: pid %s, log %s", path, pid or None, log_path(path))
        # A server that ends because another one listens is no failure.
        if listens(path):
            return
        if report is None:
            raise ConnectError(
                f"the server for {path} (pid {pid}) was started {time.monotonic() - begin:.1f} s ago and does not listen yet. "
                f"Call again, or raise server_startup_timeout ({patience:g} s). The end of its log, {log_path(path)}:\n"
                f"{_last_lines(path)}"
            )
        how = "listens elsewhere" if report == LISTENING else "ended before it listened"
        reason = (
            f"the server for {path} {how}. It was started with: {' '.join([sys.executable, *words])}. "
            f"The end of its log, {log_path(path)}:\n{_last_lines(path)}"
        )
        election.record_failure(reason)
        raise ConnectError(reason)


def _last_lines(path: str) -> str:
    """Return the end of a process's output, without the line of its command."""
    with open(log_path(path), encoding="utf-8", errors="replace") as log:
        lines = log.read().splitlines()
    begin = max((number for number, line in enumerate(lines) if line.startswith("--- ")), default=-1)
    return "\n".join(lines[begin + 1 :][-_LINES:])[-_CHARACTERS:]
