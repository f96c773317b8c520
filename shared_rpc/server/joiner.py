"""The joiner: a process that makes a server part of a cluster. The server starts it, again when it ends, and it ends with the
server.
"""

from __future__ import annotations

import importlib.metadata
import logging
import os
import shlex
import shutil
import signal
import subprocess
import threading
import time
from typing import IO

from shared_rpc.errors import ConfigurationError
from shared_rpc.forks import after_fork
from shared_rpc.observability.stderr import Tail
from shared_rpc.protocol.infos import JoinerInfo
from shared_rpc.settings import CLUSTER_NAME, program, source_environment

__all__ = ["Joiner", "check_cluster"]

_log = logging.getLogger("shared_rpc.server")

#: Seconds before the first restart, and the most before any.
_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 30.0
#: Seconds after which one that ends has been good for something: the next restart is a first one again.
_LONG = 60.0
#: Seconds between the request to end and SIGKILL.
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
                f"program of your own use its command line (--cluster-program)"
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
    """Supervision of the process that joins a server to its cluster, in a thread of its own.

    :param cluster: see :func:`check_cluster`.
    :param path: the server's socket.
    :raises ConfigurationError: as :func:`check_cluster`.
    """

    def __init__(self, cluster: str, path: str) -> None:
        self.cluster = cluster
        self._words = [*check_cluster(cluster), "--socket", path]
        self._stopping = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        #: Its output.
        self._output: IO[bytes] | None = None
        self._starts = 0
        self._token = ""
        self._problem = ""
        self._pid = os.getpid()
        # The kernel ends a child with the thread that started it, which is to be this one.
        self._thread = threading.Thread(target=self._run, name="shared-rpc-joiner", daemon=True)
        after_fork(self._abandon)

    def start(self, token: str) -> None:
        """Begin. Returns at once.

        :param token: proves to the server that it started the process.
        """
        self._token = token
        self._thread.start()

    def ask_to_stop(self) -> None:
        """Send the process SIGTERM, and start no other one. Returns at once; see :meth:`close`."""
        if self._pid == os.getpid():
            self._stopping.set()
            process = self._process
            if process is not None:
                process.terminate()

    def close(self) -> None:
        """Wait for the process to end, after :meth:`ask_to_stop`, and kill it if it does not soon."""
        if self._pid != os.getpid() or not self._thread.is_alive():
            return
        self._thread.join(_GRACE)
        process = self._process
        if process is not None:
            process.kill()
        self._thread.join(_GRACE)

    def info(self) -> JoinerInfo:
        """Describe it."""
        process = self._process
        return {"pid": process.pid if process is not None else None, "starts": self._starts, "problem": self._problem}

    def _run(self) -> None:
        pause = _FIRST_PAUSE
        while not self._stopping.is_set():
            begin = time.monotonic()
            problem = self._once()
            if self._stopping.is_set():
                return
            if time.monotonic() - begin >= _LONG:
                pause = _FIRST_PAUSE
            self._problem = problem
            _log.error("%s; the next one is started in %g s", problem, pause)
            self._stopping.wait(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _once(self) -> str:
        """Start the process, and wait for its end; return how it ended."""
        try:
            process = subprocess.Popen(
                program("shared_rpc.zygote.attached", str(os.getpid()), *self._words),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                bufsize=0,
                start_new_session=True,
                env=source_environment(self._token),
            )
        except OSError as error:
            return f"cannot start the joiner of the cluster: {error}"
        self._starts += 1
        assert process.stdout is not None, "its output is a pipe"
        tail = Tail(process.stdout)
        self._process, self._output = process, process.stdout
        if self._stopping.is_set():  # the request may have come before there was a process
            process.terminate()
        code = process.wait()
        self._process = self._output = None
        last = tail.text().rsplit("\n", 1)[-1]
        how = f"ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return f"the joiner of the cluster (pid {process.pid}) {how}{f': {last}' if last else ''}"

    def _abandon(self) -> None:
        """Close the copy of the pipe in a forked child: the joiner is the parent's."""
        if self._output is not None:
            self._output.close()
