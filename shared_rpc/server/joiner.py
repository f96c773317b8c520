"""The joiner: a process that makes a server part of a cluster. The server starts and restarts it, and ends it when it stops
itself.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import logging
import os
import shlex
import shutil
import subprocess
import time
from typing import IO

from shared_rpc.errors import ConfigurationError
from shared_rpc.execution.child import Backoff, Child
from shared_rpc.forks import after_fork
from shared_rpc.protocol.infos import JoinerInfo
from shared_rpc.settings import CLUSTER_NAME, program, source_environment

_log = logging.getLogger("shared_rpc.server")

#: Seconds before the first restart, and the maximum of later pauses.
_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 30.0
#: Lifetime in seconds that counts as success: the next restart is a first one again.
_LONG = 60.0
#: Seconds between SIGTERM and SIGKILL.
_GRACE = 0.3


def check_cluster(cluster: str) -> list[str]:
    """Return the command line of the joiner for the option ``cluster``, apart from ``--socket PATH``.

    The joiner of a named cluster is the program that an installed distribution declares as the entry point ``join`` of the
    group ``shared_rpc.cluster``.

    :param cluster: a cluster's name, or the command line of a program, which has a slash or a space.
    :raises ConfigurationError: if no installed distribution joins clusters, or there is no such program.
    """
    if CLUSTER_NAME.fullmatch(cluster):
        # The module is not imported here: that takes a second.
        found = importlib.metadata.entry_points(group="shared_rpc.cluster", name="join")
        if not found:
            raise ConfigurationError(
                f"cluster={cluster!r} needs a distribution that joins clusters: pip install 'shared-rpc[ray]'. For a "
                f"program of your own use its command line, with a slash or a space"
            )
        return program(next(iter(found)).module, "--name", cluster)
    try:
        words = shlex.split(cluster)
    except ValueError as error:
        raise ConfigurationError(f"cluster={cluster!r} is no command line: {error}") from error
    if not words or shutil.which(words[0]) is None:
        raise ConfigurationError(
            f"cluster={cluster!r}: use a cluster's name, or the command line of a program that can be started"
        )
    return words


class Joiner:
    """Supervises the process that joins a server to its cluster. On the server's loop, in a thread that lives until
    :meth:`close`: the kernel ends a child with the thread that started it.

    :param cluster: see :func:`check_cluster`.
    :param path: the server's socket.
    :raises ConfigurationError: like :func:`check_cluster`.
    """

    def __init__(self, cluster: str, path: str) -> None:
        self.cluster = cluster
        self._words = [*check_cluster(cluster), "--socket", path]
        self._stopping = False
        self._child: Child | None = None
        #: The joiner's output.
        self._output: IO[bytes] | None = None
        self._pauses = Backoff(_FIRST_PAUSE, _LONGEST_PAUSE, _LONG)
        self._begun = 0.0
        self._starts = 0
        self._token = ""
        self._problem = ""
        after_fork(self._abandon)

    def start(self, token: str) -> None:
        """Start the joiner, on the loop.

        :param token: proves to the server that it started the process.
        """
        self._token = token
        self._start()

    def ask_to_stop(self) -> None:
        """Send SIGTERM and stop restarting. Returns at once; see :meth:`close`."""
        self._stopping = True
        if self._child is not None:
            self._child.terminate()

    def close(self) -> None:
        """Wait for the process to end after :meth:`ask_to_stop`, and kill it after a grace period."""
        child, self._child = self._child, None
        if child is not None:
            child.end(time.monotonic() + _GRACE)

    def info(self) -> JoinerInfo:
        """Describe the joiner."""
        return {
            "pid": self._child.pid if self._child is not None else None,
            "starts": self._starts,
            "problem": self._problem,
        }

    def _start(self) -> None:
        if self._stopping:
            return
        self._begun = time.monotonic()
        try:
            process = subprocess.Popen(
                program("shared_rpc.zygote.process", str(os.getpid()), *self._words),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                bufsize=0,
                start_new_session=True,
                env=source_environment(self._token),
            )
            self._output = process.stdout
            self._child = Child(process, process.stdout, self._ended)
        except (OSError, RuntimeError) as error:
            self._start_again(f"cannot start the joiner of the cluster: {error}")
        else:
            self._starts += 1

    def _ended(self) -> None:
        child, self._child = self._child, None
        assert child is not None, "it was started"
        last = child.last_output().rsplit("\n", 1)[-1]
        self._start_again(f"the joiner of the cluster (pid {child.pid}) {child.how()}{f': {last}' if last else ''}")

    def _start_again(self, problem: str) -> None:
        if self._stopping:
            return
        self._problem = problem
        self._pauses.note(time.monotonic() - self._begun)
        _log.error("%s; the next one is started in %g s", problem, self._pauses.pause)
        asyncio.get_running_loop().call_later(self._pauses.pause, self._start)

    def _abandon(self) -> None:
        """Close the copy of the pipe in a forked child: the joiner is the parent's."""
        self._child = None
        if self._output is not None:
            self._output.close()
