"""The command line of workers."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass, field, replace

from shared_rpc.settings import ServeOptions, program

#: The word in place of a target that starts a worker without an app.
BARE = "--bare"


@dataclass(frozen=True)
class WorkerCommand:
    """The command line of a broker's workers.

    :param target: ``app.py``, ``package.module``, or either with ``:provider``.
    """

    target: str
    options: ServeOptions = field(default_factory=ServeOptions)

    @property
    def bare(self) -> WorkerCommand:
        """The command line of a worker without the app."""
        return replace(self, target=BARE)

    def words(self, number: int, fd: int) -> list[str]:
        """Return the words for a worker's command line, behind the module's name.

        :param number: which of the workers it is, from 0.
        :param fd: its end of the socket pair.
        """
        words = [self.target, "--fd", str(fd), "--parent", str(os.getpid()), "--number", str(number)]
        return [*words, *self.options.words]

    def start(self, number: int, fd: int) -> subprocess.Popen[bytes]:
        """Start a worker in a process group of its own: Ctrl-C at a terminal is for the broker. See :meth:`words`."""
        words = program("shared_rpc.worker", *self.words(number, fd))
        return subprocess.Popen(
            words, pass_fds=(fd,), stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, process_group=0, bufsize=0
        )
