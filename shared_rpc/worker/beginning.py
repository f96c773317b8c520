"""The import of the app in a worker: what it imports is reported, so that the next worker begins with that."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType, ModuleType
from typing import NoReturn

import msgspec

from shared_rpc.protocol.worker import Imports
from shared_rpc.settings import program, watched_environment
from shared_rpc.zygote.child import inherited
from shared_rpc.zygote.imports import file_of, is_installed, names_in

_log = logging.getLogger("shared_rpc.worker")
_PACKAGE = "shared_rpc"


class Beginning:
    """The import of the app in this process, as a new process or as a fork of one that has the app's imports.

    :param supposed: in a fork, JSON of the environment variables that the app is supposed to set, None for removed ones: the
        fork's imports were made with these. None in a new process.
    :param words: of the command line, behind the module's name.
    """

    def __init__(self, supposed: str | None = None, words: Sequence[str] = ()) -> None:
        self._supposed: dict[str, str | None] | None = msgspec.json.decode(supposed) if supposed is not None else None
        self._words = list(words)
        self._folder = os.open(".", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        #: For each change of a variable by the app: the modules before it, and the variable.
        self._changes: list[tuple[set[str], str, str | None]] = []

    @contextmanager
    def watching(self, may_restart: Callable[[], bool]) -> Iterator[None]:
        """Watch the environment while the app is loaded.

        A fork in which the app sets other variables than were supposed begins again, as a new process: an import that is there
        already may have read them.

        :param may_restart: returns whether that is possible: messages to the broker cannot be taken back.
        """

        def changes(name: str, value: str | None) -> None:
            if _while_installed_is_imported(sys._getframe(2)):
                return
            if self._supposed is not None and self._supposed.get(name, self) != value:
                self._restart(name, may_restart())
            self._changes.append((set(sys.modules), name, value))

        with watched_environment(changes):
            yield
        for name in set(self._supposed or ()) - {name for _, name, _ in self._changes}:
            self._restart(name, may_restart())
        os.close(self._folder)

    def imports(self) -> Imports:
        """Return the imports of the app, and the variables that it has set."""
        modules = [(name, module) for name, module in list(sys.modules.items()) if _is_real(name, module)]
        installed = {name: None for name, module in modules if _is_installed(name, module)}
        own = [name for name, module in modules if name not in installed and file_of(module)]
        steps: list[str | dict[str, str | None]] = []
        reported: set[str] = set()
        for there, variable, value in self._changes:
            steps += [name for name in installed if name in there and name not in reported]
            reported |= there
            steps.append({variable: value})
        steps += [name for name in installed if name not in reported]
        return Imports(steps, own, *_folders())

    def _restart(self, name: str, possible: bool) -> None:
        if possible:
            self._begin_again()
        _log.warning(
            "the app changes %s, but this worker (pid %d) is a fork of a process that has the app's imports already: for "
            "imports that read the variable, run 'shared-rpc reload'",
            name,
            os.getpid(),
        )

    def _begin_again(self) -> NoReturn:
        """Replace this process by a new one with the same id, descriptors and parent."""
        words = self._words[:]
        at = words.index("--forked")
        del words[at : at + 2]
        with suppress(OSError):
            os.fchdir(self._folder)
        sys.stdout.flush()
        sys.stderr.flush()
        os.set_inheritable(int(words[words.index("--fd") + 1]), True)
        os.execve(sys.executable, program("shared_rpc.worker", *words), inherited)


def _while_installed_is_imported(frame: FrameType | None) -> bool:
    """Return whether a module that is not the person's is being imported, by itself and not because it is called."""
    while frame is not None:
        if frame.f_code.co_name == "<module>":
            return is_installed(frame.f_code.co_filename)
        frame = frame.f_back
    return False


def _is_real(name: str, module: object) -> bool:
    """Return whether importing a name gives that module: some are entered under further names, or made by others."""
    return getattr(names_in(module).get("__spec__"), "name", None) == name and name not in ("__main__", "__mp_main__")


def _is_installed(name: str, module: ModuleType) -> bool:
    # Every worker imports this library's own modules, wherever they lie.
    return name.partition(".")[0] == _PACKAGE or is_installed(file_of(module))


def _folders() -> tuple[list[str], list[str]]:
    """Return the person's directories in which Python looks for modules: all, and those before the interpreter's."""
    path = [os.path.abspath(entry) for entry in sys.path]
    installed = [is_installed(entry) for entry in path]
    own = [entry for entry, theirs in zip(path, installed, strict=True) if not theirs and os.path.isdir(entry)]
    front = path[: installed.index(True)] if True in installed else path
    return own, [entry for entry in own if entry in front]
