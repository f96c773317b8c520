"""The imports of a worker with its app, for the next worker to begin with."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import BuiltinFunctionType, FrameType, FunctionType, ModuleType

from shared_rpc.protocol.worker import Imports
from shared_rpc.settings import watched_environment
from shared_rpc.zygote.installed import file_of, is_installed, names_in

__all__ = ["Learner"]

_PACKAGE = "shared_rpc"


class Learner:
    """An observer of the app while it is loaded."""

    def __init__(self) -> None:
        #: For each change of a variable by the app: the modules before it, and the variable.
        self._changes: list[tuple[set[str], str, str | None]] = []

    @contextmanager
    def watching(self, on_change: Callable[[str, str | None], None] = lambda name, value: None) -> Iterator[None]:
        """Watch the environment while the app is loaded.

        :param on_change: called before the app changes a variable of the environment.
        """

        def changes(name: str, value: str | None) -> None:
            if not _while_installed_is_imported(sys._getframe(2)):
                on_change(name, value)
                self._changes.append((set(sys.modules), name, value))

        with watched_environment(changes):
            yield

    def imports(self, known: Mapping[str, object]) -> Imports:
        """Return the imports.

        :param known: modules that this process began with, which are not reported.
        """
        modules = [(name, module) for name, module in list(sys.modules.items()) if _is_real(name, module)]
        installed = {name: None for name, module in modules if _is_installed(name, module)}
        own = [name for name, module in modules if name not in installed and file_of(module)]
        steps: list[str | dict[str, str | None]] = []
        told = set(known)
        for there, variable, value in self._changes:
            steps += [name for name in installed if name in there and name not in told]
            told |= there
            steps.append({variable: value})
        steps += [name for name in installed if name not in told]
        folders, first = _folders()
        used = sorted(_used_by(own) & {_top(name) for name in installed})
        return Imports(steps, own, folders, first, used, whole=not known)


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
    return _top(name) == _PACKAGE or is_installed(file_of(module))


def _top(name: str) -> str:
    return name.partition(".")[0]


def _folders() -> tuple[list[str], list[str]]:
    """Return the person's directories in which Python looks for modules: all, and those before the interpreter's."""
    path = [os.path.abspath(entry) for entry in sys.path]
    installed = [is_installed(entry) for entry in path]
    own = [entry for entry, theirs in zip(path, installed, strict=True) if not theirs and os.path.isdir(entry)]
    front = path[: installed.index(True)] if True in installed else path
    return own, [entry for entry in own if entry in front]


def _used_by(own: list[str]) -> set[str]:
    """Return the packages of modules, classes and functions that are global names of modules."""
    values = [value for name in own for value in list(names_in(sys.modules[name]).values())]
    return {_top(module) for module in map(_module_of, values) if type(module) is str}


def _module_of(value: object) -> object:
    """Return the name of a value's module, from its type: ``isinstance`` and attributes evaluate a lazy proxy."""
    kind = type(value)
    if issubclass(kind, ModuleType):
        return names_in(value).get("__name__")
    if kind is FunctionType or kind is BuiltinFunctionType:
        return value.__module__
    return type.__getattribute__(value if issubclass(kind, type) else kind, "__module__")
