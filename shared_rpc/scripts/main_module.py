"""The script itself: a fork that becomes what ``python script.py`` would have been."""

from __future__ import annotations

import ctypes
import os
import pkgutil
import signal
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn
from zipimport import zipimporter

import msgspec

from shared_rpc.scripts.options import Script
from shared_rpc.zygote.child import Identity, become, new_main, run_module
from shared_rpc.zygote.preloading import shadowed
from shared_rpc.zygote.process import die_with_parent
from shared_rpc.zygote.serving import Zygote

__all__ = ["Refusal", "ScriptFork", "ScriptRequest"]


class ScriptRequest(msgspec.Struct):
    """A request to run a script, with all that the script is to inherit from the command.

    :param name: see :class:`Script`, for the next two also.
    :param options: those of the command's interpreter.
    :param variables: its environment.
    :param fds: the numbers of the descriptors that come with the message; the last one is that of the working directory.
    """

    name: str
    arguments: list[str]
    module: bool
    options: list[str]
    variables: dict[str, str]
    fds: list[int]
    umask: int
    limits: dict[int, tuple[int, int]]
    ignored: list[int]
    blocked: list[int]
    idle_exit: float


class Refusal(Exception):
    """A reason why a script cannot be run here as the interpreter would."""


class ScriptFork:
    """A script on its way.

    :param request: the command's.
    """

    def __init__(self, zygote: Zygote, request: ScriptRequest) -> None:
        self._zygote = zygote
        self._request = request
        self.script = Script(request.name, tuple(request.arguments), request.module)
        #: The script's full path as the interpreter makes it, for ``__file__``.
        self._path = ""
        self._file: int | None = None
        self._is_archive = False

    @property
    def highest(self) -> int:
        """The highest number of a descriptor that the script has."""
        return max([*self._request.fds, 2])

    def become(self, watcher: int, kept: int, fds: list[int]) -> None:
        """Take on all that the command has; what cannot be is found here, before anything has run.

        :param watcher: the parent; this process ends with it.
        :param kept: a descriptor that stays open, beyond :attr:`highest`.
        :param fds: descriptors, the last one of the working directory.
        :raises Refusal: if the interpreter itself must run it.
        """
        die_with_parent(watcher)
        *fds, folder = fds
        numbers = self._request.fds
        if len(numbers) != len(fds):
            raise Refusal(f"received {len(fds)} descriptors instead of the announced {len(numbers)}")
        os.fchdir(folder)
        options = self._request.options
        self._path = _absolute(self.script.name)
        own = [] if sys.flags.safe_path else self._own_path()
        if name := shadowed(own) or self._shadowed_by_archive():
            raise Refusal(f"the script's path has another {name} than the zygote has imported")
        become(
            Identity(
                fds=numbers,
                argv=["-m" if self.script.module else self.script.name, *self.script.arguments],
                variables=self._variables(),
                inherited=self._request.variables,
                path=[*own, *self._zygote.path],
                umask=self._request.umask,
                limits=self._request.limits,
                ignored=self._request.ignored,
                title=[*options, *self.script.words],
            ),
            fds,
            [kept, *self._zygote.kept],
            self._request.blocked,
        )
        sys.orig_argv[:] = [sys.executable, *options, *self.script.words]
        if not self.script.module:
            self._is_archive = pkgutil.get_importer(self._path) is not None
            if not self._is_archive:
                self._open()

    def _variables(self) -> dict[str, str]:
        """Return the command's environment, with what an import would have changed in it too."""
        variables = dict(self._request.variables)
        before, after = self._zygote.inherited, self._zygote.variables
        for name in {*before, *after}:
            if variables.get(name) == before.get(name) != after.get(name):
                variables.pop(name, None)
                if name in after:
                    variables[name] = after[name]
        return variables

    def _own_path(self) -> list[str]:
        """Return what the interpreter puts before all other directories of modules: nothing where it cannot know that."""
        if self.script.module:
            try:
                return [os.getcwd()]
            except OSError:
                return []
        if pkgutil.get_importer(self._path) is not None:
            return [self._path]
        try:
            return [os.path.dirname(os.path.realpath(self.script.name, strict=True))]
        except OSError:
            return [os.path.dirname(self.script.name)]

    def _shadowed_by_archive(self) -> str:
        """Return a module of the archive, where the script is one, that a new process would import from there."""
        importer = pkgutil.get_importer(self._path) if not self.script.module else None
        if not isinstance(importer, zipimporter):
            return ""
        names = {name.partition(".")[0] for name in sys.modules} - {"__main__"}
        return next((f"{name} in {self._path}" for name in sorted(names) if importer.find_spec(name) is not None), "")

    def _open(self) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        libc.fopen.restype = ctypes.c_void_p
        self._file = libc.fopen(os.fsencode(self._path), b"rbe")
        if not self._file:
            raise Refusal(f"cannot open {self._path}: {os.strerror(ctypes.get_errno())}")

    def run(self) -> NoReturn:
        """Run it, to the end of this process; called at the bottom of the stack."""
        if self.script.module:
            run_module(self.script.name)
        if self._is_archive:
            run_module("__main__", False)
        # To leave the zygote's frames, an exception is raised that no code catches. The interpreter shows it by a hook with an
        # empty stack, and this hook formats a text of two parts: the first part empties the main module, the second one runs
        # the script. All frames in between are C frames, so the script's are the only Python frames.
        sys.excepthook = partial("{!s}{!s}".format, _text(_new_main), _text(partial("".join, filter(self._runner(), [None]))))
        raise _Begin

    def _runner(self) -> Any:
        # The function behind "python script.py", exported since long before 3.11, and in 3.14: it names the module's file,
        # reads compiled files and shows errors. filter() adds the last argument: None, for no compiler options.
        run = ctypes.pythonapi.PyRun_SimpleFileExFlags
        run.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int, ctypes.c_void_p]
        run.restype = _end
        return partial(run, self._file, os.fsencode(self._path), 1)


def _absolute(path: str) -> str:
    """Return a path with the working directory before it, and otherwise unchanged."""
    try:
        return path if os.path.isabs(path) else os.getcwd() if path == "." else f"{os.getcwd()}/{path}"
    except OSError:  # the directory has been removed
        return path


class _Begin(BaseException):
    """Leaves the zygote's frames."""


def _text(function: Callable[[], str]) -> object:
    """Return an object whose text is what a function returns, without a frame between."""
    return type("Text", (), {"__str__": staticmethod(function)})()


def _new_main() -> str:
    for name in ("last_type", "last_value", "last_traceback", "last_exc"):
        if hasattr(sys, name):
            delattr(sys, name)
    sys.excepthook = sys.__excepthook__
    new_main()
    return ""


def _end(code: int) -> NoReturn:
    """End when the script has ended: it failed where the code is not 0, and the error has been shown."""
    if code and getattr(sys, "last_type", None) is KeyboardInterrupt:
        # The interpreter then ends by the signal, when everything is torn down. exit(3) calls this with its exit code.
        libc = ctypes.CDLL(None)
        libc.on_exit(getattr(libc, "raise"), None)
        raise SystemExit(int(signal.SIGINT))
    raise SystemExit(1 if code else 0)
