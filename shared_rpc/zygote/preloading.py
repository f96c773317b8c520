"""Imports of a zygote: in the order in which a process that needed them had made them."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from shared_rpc.settings import change_environment, environment
from shared_rpc.zygote.installed import file_of, names_in
from shared_rpc.zygote.messages import Step

__all__ = ["Files", "Preloaded", "preload", "shadowed"]


@dataclass
class Preloaded:
    """The outcome of imports.

    :param dropped: modules that could not be imported, and why.
    :param variables: variables that modules set when they were imported, None for removed ones.
    :param spoiled: why the process cannot be forked any more; empty if it can be.
    :param module: the one whose import was the reason.
    """

    dropped: dict[str, str] = field(default_factory=dict)
    variables: dict[str, str | None] = field(default_factory=dict)
    spoiled: str = ""
    module: str = ""


def preload(steps: Sequence[Step], folders: Iterable[str], check: Callable[[], str]) -> Preloaded:
    """Take the steps.

    :param folders: directories whose modules are not imported.
    :param check: returns after each import why the process cannot be forked any more.
    """
    done = Preloaded()
    path = sys.path[:]
    left_out = {os.path.realpath(folder) for folder in folders}
    sys.path[:] = [entry for entry in path if os.path.realpath(entry) not in left_out]
    safe = sys.path[:]
    try:
        for step in steps:
            if isinstance(step, dict):
                change_environment(step)
                continue
            if step in sys.modules:
                continue
            before = environment()
            try:
                importlib.import_module(step)
            except BaseException as error:  # any exception is the module's, SystemExit too
                done.dropped[step] = f"{type(error).__name__}: {error}"
            done.variables |= _changes(before, environment())
            done.spoiled = check()
            if done.spoiled:
                done.module = step
                break
        return done
    finally:
        # Entries that the imports have added to the path stay.
        sys.path[:] = [*path, *(entry for entry in sys.path if entry not in safe)]


def _changes(before: dict[str, str], after: dict[str, str]) -> dict[str, str | None]:
    return {name: after.get(name) for name in {*before, *after} if before.get(name) != after.get(name)}


def shadowed(folders: Iterable[str]) -> str:
    """Return a file that a new process would import in place of a module that is imported; empty for none.

    :param folders: directories, in the order in which they are looked through.
    """
    found: set[str] = set()
    for folder in folders:
        try:
            entries = os.listdir(folder or ".")
        except OSError:
            continue
        for entry in entries:
            name, _, suffix = entry.partition(".")
            module = sys.modules.get(name)
            if module is None or name == "__main__" or name in found:
                continue
            path = os.path.join(folder, entry)
            is_module = suffix == "py" or suffix.endswith("so") or os.path.isfile(os.path.join(path, "__init__.py"))
            if not is_module:
                continue
            if not _is_of(module, path):
                return path
            found.add(name)
    return ""


def _is_of(module: object, path: str) -> bool:
    file = file_of(module)
    return bool(file) and f"{os.path.realpath(file)}/".startswith(f"{os.path.realpath(path)}/")


class Files:
    """The files of all modules that are imported, as they were."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[int, int, int]] = {}
        for module in list(sys.modules.values()):
            for name in {file_of(module), getattr(names_in(module).get("__spec__"), "origin", None)}:
                if isinstance(name, str) and os.path.isabs(name) and (facts := _facts(name)) is not None:
                    self._known[name] = facts

    def changed(self) -> str:
        """Return a file that has changed; empty for none."""
        return next((name for name, facts in self._known.items() if _facts(name) != facts), "")


def _facts(name: str) -> tuple[int, int, int] | None:
    try:
        status = os.stat(name)
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino
