"""Imports of a zygote: in the order in which a process that needed them had made them."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterable, Sequence

from shared_rpc.settings import change_environment
from shared_rpc.zygote.messages import Step

__all__ = ["Files", "preload", "shadowed"]


def preload(steps: Sequence[Step], folders: Iterable[str], check: Callable[[], str]) -> tuple[dict[str, str], str, str]:
    """Take the steps.

    :param folders: directories whose modules are not imported.
    :param check: says after each import why the process cannot be forked any more.
    :returns: modules that could not be imported, and why; the module whose import spoiled the process and how, or empty texts.
    """
    dropped: dict[str, str] = {}
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
            try:
                importlib.import_module(step)
            except BaseException as error:  # whatever it is, it is the module's: SystemExit is too
                dropped[step] = f"{type(error).__name__}: {error}"
            if why := check():
                return dropped, step, why
        return dropped, "", ""
    finally:
        # What the imports have added to the path stays.
        sys.path[:] = [*path, *(entry for entry in sys.path if entry not in safe)]


def shadowed(folders: Iterable[str], names: Iterable[str]) -> str:
    """A file in one of the directories that a new process would import in place of a module that is imported; empty for none."""
    tops = {name.partition(".")[0] for name in names}
    for folder in folders:
        try:
            entries = os.listdir(folder or ".")
        except OSError:
            continue
        for entry in entries:
            name, dot, suffix = entry.partition(".")
            if name in tops and (suffix in ("py", "so") or suffix.endswith(".so") or (not dot and _is_package(folder, entry))):
                return os.path.join(folder, entry)
    return ""


def _is_package(folder: str, entry: str) -> bool:
    return os.path.isfile(os.path.join(folder, entry, "__init__.py"))


class Files:
    """The files of all modules that are imported, as they were."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[int, int, int]] = {}
        for module in list(sys.modules.values()):
            for name in {getattr(module, "__file__", None), getattr(getattr(module, "__spec__", None), "origin", None)}:
                if isinstance(name, str) and os.path.isabs(name) and (facts := _facts(name)) is not None:
                    self._known[name] = facts

    def changed(self) -> str:
        """One that is no longer what it was; empty for none."""
        return next((name for name, facts in self._known.items() if _facts(name) != facts), "")


def _facts(name: str) -> tuple[int, int, int] | None:
    try:
        status = os.stat(name)
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino
