"""Starting a detached server, and waiting until it listens."""

from __future__ import annotations

import logging
import os
import select
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from typing import Literal

from shared_rpc.errors import ConnectError
from shared_rpc.protocol.election import Election
from shared_rpc.protocol.own_files import open_own
from shared_rpc.server.listener import check_directory
from shared_rpc.settings import ServeOptions, program, server_environment

__all__ = ["ServerStarter", "log_path"]

_log = logging.getLogger("shared_rpc.server")

#: Seconds between two checks whether the server listens.
_LOOK = 0.02
#: Bytes of a log, above which the next server begins a new one.
_LOG_LIMIT = 1 << 20
#: Lines, and characters in all, of a log that an error quotes.
_LINES, _CHARACTERS = 60, 8000


def log_path(path: str) -> str:
    """Return the log of a server that was started for the socket ``path``; the log before that is ``….log.1``."""
    return f"{path}.log"


class ServerStarter:
    """The starter of a server, called by a client when no process listens at its socket.

    :param target: returns the app, when it is needed; see :func:`shared_rpc.provider.spawn.target.target_of`.
    :param options: of the server.
    """

    def __init__(self, target: Callable[[], str], options: ServeOptions) -> None:
        self._target = target
        self._options = options

    def __call__(self, path: str, patience: float, deadline: float) -> None:
        """Return when a server listens at ``path`` that was started here, or by another process that wanted one.

        :param patience: seconds a server has to come up, from its start; and another process to start one.
        :param deadline: when to give up in any case, in terms of time.monotonic().
        :raises ConnectError: if none listens by then, and if the server ended instead, with its last output.
        :raises ConfigurationError: if there is no file to start one for, or another user's lock or log is in the way.
        """
        until = min(deadline, time.monotonic() + patience)
        check_directory(os.path.dirname(path))
        with closing(Election(path)) as election:
            while not _listens(path):
                if election.acquire():
                    # The previous holder of the lock may have made the server listen since the last check.
                    if not _listens(path):
                        self._start(path, election, patience, deadline)
                    return
                if time.monotonic() > until:
                    raise ConnectError(
                        f"no server listens at {path}: another process began to start one, which did not listen within "
                        f"{patience:g} s (server_startup_timeout). See {log_path(path)}"
                    )
                time.sleep(_LOOK)

    def _start(self, path: str, election: Election, patience: float, deadline: float) -> None:
        reason = election.failure()
        if reason:
            raise ConnectError(reason)
        words = program("shared_rpc.broker", self._target(), *self._options.words)
        begin = time.monotonic()
        with _opened_log(path) as log:
            start = os.fstat(log).st_size
            os.write(log, f"--- {time.strftime('%Y-%m-%d %H:%M:%S')} pid {os.getpid()} starts: {' '.join(words)}\n".encode())
            process = subprocess.Popen(
                [*words, "--detach", str(election.fd)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                pass_fds=(election.fd,),
                start_new_session=True,
                env=server_environment(),
            )
        until = min(deadline, begin + patience)
        pid = _detached(process, until)
        _log.info("started a server for %s: pid %s, log %s", path, pid, log_path(path))
        state = _awaited(path, pid, until) if pid is not None else "late"
        if state == "listens":
            return
        text = _written(path, start)
        if state == "ended":
            reason = (
                f"the server for {path} ended before it listened. It was started with: {' '.join(words)}. "
                f"The end of its log, {log_path(path)}:\n{text}"
            )
            election.record_failure(reason)
            raise ConnectError(reason)
        raise ConnectError(
            f"the server for {path} (pid {pid}) was started {time.monotonic() - begin:.1f} s ago and does not listen yet. Call "
            f"again, or raise server_startup_timeout ({patience:g} s). The end of its log, {log_path(path)}:\n"
            f"{text}"
        )


def _listens(path: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC) as probe:
        try:
            probe.connect(path)
        except BlockingIOError:  # the server's backlog is full
            return True
        except OSError:
            return False
        return True


def _detached(process: subprocess.Popen[bytes], until: float) -> int | None:
    """Return the process id of the server, which the process started here writes before it ends, so that no child is left.

    It is 0 if that process ended without it, and None if it has not written it yet.
    """
    try:
        words = process.communicate(timeout=max(until - time.monotonic(), 0))[0].split()
    except subprocess.TimeoutExpired:
        assert process.stdout is not None, "standard output is a pipe"
        process.stdout.close()
        return None
    return int(words[-1]) if words and words[-1].isdigit() else 0


def _awaited(path: str, pid: int, until: float) -> Literal["listens", "ended", "late"]:
    """Wait until a server listens, the process ends, or it is too late."""
    try:
        pidfd = os.pidfd_open(pid) if pid else -1
    except ProcessLookupError:
        pidfd = -1
    try:
        ended = select.poll()
        if pidfd >= 0:
            ended.register(pidfd, select.POLLIN)
        while not _listens(path):
            if pidfd < 0 or ended.poll(_LOOK * 1000):
                # Perhaps this server ended because another one listens.
                return "listens" if _listens(path) else "ended"
            if time.monotonic() > until:
                return "late"
        return "listens"
    finally:
        if pidfd >= 0:
            os.close(pidfd)


@contextmanager
def _opened_log(path: str) -> Iterator[int]:
    """Open the log, to append to it; a new one where it has grown."""
    log = log_path(path)
    with suppress(OSError):
        if os.lstat(log).st_size > _LOG_LIMIT:
            os.replace(log, f"{log}.1")
    fd = open_own(log, os.O_WRONLY | os.O_APPEND)
    try:
        yield fd
    finally:
        os.close(fd)


def _written(path: str, start: int) -> str:
    """Return the end of a server's output since ``start``, without the line of its command."""
    with open(log_path(path), encoding="utf-8", errors="replace") as log:
        log.seek(start)
        lines = log.read().splitlines()[1:]
    return "\n".join(lines[-_LINES:])[-_CHARACTERS:]
