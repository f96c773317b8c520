"""The import of the app in a worker, whose imports are reported so that the next worker starts with them."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from types import ModuleType
from typing import NoReturn

from shared_rpc.protocol.worker import Imports
from shared_rpc.settings import environment, program
from shared_rpc.zygote.child import inherited
from shared_rpc.zygote.imports import changes_since, file_of, is_installed, names_in

_log = logging.getLogger("shared_rpc.worker")
_PACKAGE = "shared_rpc"


class Beginning:
    """The import of the app in this process, a new one or a fork of one that already has the app's imports.

    :param words: the command line after the module's name.
    """

    def __init__(self, words: Sequence[str] = ()) -> None:
        self._words = list(words)
        self._folder = os.open(".", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        self._before = environment()

    def check(self, may_restart: bool) -> None:
        """Restart as a new process if this one is a fork and the app, while loading, has set environment variables: the
        inherited imports may depend on them.

        :param may_restart: False once messages were sent to the broker, which cannot be withdrawn.
        """
        changed = changes_since(self._before)
        if "--forked" in self._words and changed:
            if may_restart:
                self._begin_again()
            _log.warning(
                "the app sets %s, but this worker (pid %d) is a fork of a process that has the app's imports already: for "
                "imports that read it, run 'shared-rpc reload'",
                ", ".join(sorted(changed)),
                os.getpid(),
            )
        os.close(self._folder)

    def imports(self) -> Imports:
        """Return the imports of the app, and the variables set by them."""
        installed, own = [], []
        for name, module in list(sys.modules.items()):
            if not _is_real(name, module):
                continue
            if _is_installed(name, module):
                installed.append(name)
            elif file_of(module):
                own.append(name)
        return Imports(installed, own, *_folders(), changes_since(self._before))

    def _begin_again(self) -> NoReturn:
        """Replace this process by a new one with the same id, descriptors and parent."""
        words = [word for word in self._words if word != "--forked"]
        with suppress(OSError):
            os.fchdir(self._folder)
        sys.stdout.flush()
        sys.stderr.flush()
        os.set_inheritable(int(words[words.index("--fd") + 1]), True)
        os.execve(sys.executable, program("shared_rpc.worker", *words), inherited)


def _is_real(name: str, module: object) -> bool:
    """Return True if importing a name yields that module: some have other names as well, or are created by other modules."""
    return getattr(names_in(module).get("__spec__"), "name", None) == name and name not in ("__main__", "__mp_main__")


def _is_installed(name: str, module: ModuleType) -> bool:
    # Every worker imports this library's own modules, wherever they lie.
    return name.partition(".")[0] == _PACKAGE or is_installed(file_of(module))


def _folders() -> tuple[list[str], list[str]]:
    """Return the user's directories on Python's module path: all, and those before the interpreter's."""
    path = [os.path.abspath(entry) for entry in sys.path]
    installed = [is_installed(entry) for entry in path]
    own = [entry for entry, theirs in zip(path, installed, strict=True) if not theirs and os.path.isdir(entry)]
    front = path[: installed.index(True)] if True in installed else path
    return own, [entry for entry in own if entry in front]
