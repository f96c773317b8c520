"""How workers are started."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["WorkerCommand"]


@dataclass(frozen=True)
class WorkerCommand:
    """What a broker was told of its app, and passes on to its workers; None for what it leaves to the app.

    :param target: ``app.py``, ``package.module``, or either with ``:provider``.
    :param devices: the device of each worker, in turn.
    :param tell_imports: whether workers say what they import, for a zygote.
    :param quotas: as ``--quota`` has them: what they mean is resolved by a worker, which knows the devices.
    """

    target: str
    base_path: str | None = None
    socket: str | None = None
    devices: Sequence[str] = ()
    max_workers: int | None = None
    quotas: Sequence[str] = ()
    log_format: str | None = None
    log_level: str | None = None
    tell_imports: bool = False

    def device_of(self, number: int) -> str | None:
        """The device of a worker, None where the app decides."""
        return self.devices[number % len(self.devices)] if self.devices else None

    def words(self, number: int, fd: int) -> list[str]:
        """The words for a worker's command line, behind the module's name.

        :param number: which of the workers it is, from 0.
        :param fd: its end of the socket pair.
        """
        words = [self.target, "--fd", str(fd), "--parent", str(os.getpid())]
        options = {
            "--base-path": self.base_path,
            "--socket": self.socket,
            "--device": self.device_of(number),
            "--max-workers": self.max_workers,
            "--log-format": self.log_format,
            "--log-level": self.log_level,
        }
        for option, value in options.items():
            if value is not None:
                words += [option, str(value)]
        if self.devices and self.socket is None:
            words += ["--listen-device", self.devices[0]]
        for quota in self.quotas:
            words += ["--quota", quota]
        if self.tell_imports:
            words.append("--tell-imports")
        return words

    def start(self, number: int, fd: int) -> subprocess.Popen[bytes]:
        """A new worker process, in a group of its own: Ctrl-C at a terminal is for the broker. See :meth:`words`."""
        words = [sys.executable, "-m", "shared_rpc.worker", *self.words(number, fd)]
        return subprocess.Popen(
            words, pass_fds=(fd,), stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, process_group=0, bufsize=0
        )
