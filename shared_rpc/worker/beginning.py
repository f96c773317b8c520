"""Beginnings of a worker: as a new process, or as a fork of a process with many imports."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import NoReturn

import msgspec

from shared_rpc.protocol.worker import Imports
from shared_rpc.settings import program
from shared_rpc.worker.imports import Learner
from shared_rpc.zygote.child import inherited_environment

__all__ = ["Beginning", "Supposed"]

_log = logging.getLogger("shared_rpc.worker")


class Supposed(msgspec.Struct, frozen=True):
    """Assumptions about the app that a fork's imports rest on.

    :param early: variables of the environment that the app sets before it imports something that may read them, and their
        values; None for removed ones. The imports have been made with these.
    :param late: names of variables that it sets when it has imported everything.
    """

    early: dict[str, str | None] = {}
    late: list[str] = []


class Beginning:
    """The import of the app in this process.

    :param supposed: JSON of a :class:`Supposed` in a fork, None in a new process.
    :param words: of the command line, behind the module's name.
    """

    def __init__(self, supposed: str | None, words: Sequence[str]) -> None:
        self._supposed = msgspec.json.decode(supposed, type=Supposed) if supposed is not None else None
        self._words = list(words)
        self._known = dict.fromkeys(sys.modules) if supposed is not None else {}
        self._learner = Learner()
        self._folder = os.open(".", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        self._seen: set[str] = set()

    @contextmanager
    def watching(self, may_restart: Callable[[], bool]) -> Iterator[None]:
        """Watch the environment while the app is loaded.

        A fork whose imports were made with other variables than the app sets before them begins anew, as a new process.

        :param may_restart: whether that is possible: messages to the broker cannot be taken back.
        """

        def on_change(name: str, value: str | None) -> None:
            self._seen.add(name)
            if self._supposed is None or name in self._supposed.late:
                return
            if name not in self._supposed.early or self._supposed.early[name] != value:
                self._restart(name, may_restart())

        with self._learner.watching(on_change):
            yield
        if self._supposed is not None:
            for name in self._supposed.early:
                if name not in self._seen:
                    self._restart(name, may_restart())
        os.close(self._folder)

    def imports(self) -> Imports:
        """Return the app's imports since the process was forked."""
        return self._learner.imports(self._known)

    def _restart(self, name: str, possible: bool) -> None:
        if possible:
            self._begin_anew()
        _log.warning(
            "the app changes %s before an import, but this worker (pid %d) is a fork in which the module is imported already: "
            "to use the variable, run 'shared-rpc reload'",
            name,
            os.getpid(),
        )

    def _begin_anew(self) -> NoReturn:
        """Replace this process by a new one with the same id, descriptors and parent."""
        words = self._words[:]
        at = words.index("--forked")
        del words[at : at + 2]
        with suppress(OSError):
            os.fchdir(self._folder)
        sys.stdout.flush()
        sys.stderr.flush()
        os.set_inheritable(int(words[words.index("--fd") + 1]), True)
        os.execve(sys.executable, program("shared_rpc.worker", *words), inherited_environment())
