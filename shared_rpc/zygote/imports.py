"""Imports of a zygote: those of an earlier process, of installed code only, and changes on disk."""

from __future__ import annotations

import functools
import importlib
import os
import pkgutil
import site
import sys
import sysconfig
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from shared_rpc.settings import environment

#: Names of directories to which pip and Debian install packages.
_PACKAGES = frozenset({"site-packages", "dist-packages"})


def is_installed(path: str) -> bool:
    """Return True if a path is the interpreter's own or a directory of installed packages, or lies below one.

    Installed code does not change while a zygote that has imported it runs. Such a directory is named ``site-packages`` or
    ``dist-packages``, or is an entry of ``sys.path`` with the metadata of distributions (``*.dist-info``), like the target of
    ``pip install --target``.
    """
    return not _PACKAGES.isdisjoint(path.split(os.sep)) or f"{path}/".startswith(_folders())


@functools.cache
def _folders() -> tuple[str, ...]:
    paths = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    paths |= {*site.getsitepackages(), site.getusersitepackages(), *filter(None, sysconfig.get_config_vars("DESTSHARED"))}
    paths |= {entry for entry in sys.path if os.path.basename(entry) in _PACKAGES or _has_metadata(entry)}
    paths.add(f"{sys.base_prefix}/{sys.platlibdir}/python{sys.version_info.major}{sys.version_info.minor}.zip")
    return tuple(sorted({f"{form}/" for path in paths for form in (path, os.path.realpath(path))}))


def _has_metadata(entry: str) -> bool:
    if not os.path.isabs(entry):
        return False  # the working directory
    with suppress(OSError):
        return any(name.endswith(".dist-info") for name in os.listdir(entry))
    return False


def names_in(module: object) -> dict[str, Any]:
    """Return the globals of an entry of ``sys.modules``, without reading attributes, which would import a lazy module."""
    try:
        names = object.__getattribute__(module, "__dict__")
    except AttributeError:
        return {}
    return names if type(names) is dict else {}


def file_of(module: object) -> str:
    """Return the file of an entry of ``sys.modules``; empty if it has none."""
    file = names_in(module).get("__file__")
    return file if type(file) is str else ""


def changes_since(before: Mapping[str, str]) -> dict[str, str | None]:
    """Return the environment variables that have changed since, None for removed ones."""
    after = environment()
    return {name: after.get(name) for name in {*before, *after} if before.get(name) != after.get(name)}


def imported() -> tuple[list[str], list[str]]:
    """Return the names of imported modules, in the order in which their imports began: installed ones, and the user's own.

    Every worker imports this library's own modules, wherever they lie: they count as installed.
    """
    installed, own = [], []
    for name, module in list(sys.modules.items()):
        # Some modules have other names as well, or are created by other modules.
        if getattr(names_in(module).get("__spec__"), "name", None) != name or name in ("__main__", "__mp_main__"):
            continue
        if name.partition(".")[0] == "shared_rpc" or is_installed(file_of(module)):
            installed.append(name)
        elif file_of(module):
            own.append(name)
    return installed, own


class Unfit(Exception):
    """The reason why this process must not be forked any more, and the module whose import was the cause, if any."""

    def __init__(self, why: str, module: str = "") -> None:
        super().__init__(why)
        self.module = module


def preload(names: Sequence[str], check: Callable[[], str]) -> dict[str, str]:
    """Import modules, none from the user's directories, whose files change at any time.

    :param check: called after each import, returns the reason why the process can no longer be forked, or an empty text.
    :returns: modules that could not be imported, and the errors.
    :raises Unfit: for such a reason.
    """
    dropped: dict[str, str] = {}
    path = sys.path[:]
    sys.path[:] = safe = [entry for entry in path if is_installed(entry)]
    try:
        for name in names:
            if name in sys.modules:
                continue
            try:
                importlib.import_module(name)
            except BaseException as error:  # any exception is the module's, including SystemExit
                dropped[name] = f"{type(error).__name__}: {error}"
            if why := check():
                raise Unfit(f"importing {name} makes the process unfit for forks: {why}", name)
        return dropped
    finally:
        # Entries that the imports have added to the path stay.
        sys.path[:] = [*path, *(entry for entry in sys.path if entry not in safe)]


def shadowed(folders: Iterable[str]) -> str:
    """Return a file that a new process would import in place of an imported module; empty for none.

    :param folders: directories and archives in search order.
    """
    found: set[str] = set()
    for folder in folders:
        try:
            entries = os.listdir(folder or ".")
        except NotADirectoryError:  # an archive
            entries = [f"{module.name}.py" for module in pkgutil.iter_modules([folder])]
        except OSError:
            continue
        for entry in entries:
            name, _, suffix = entry.partition(".")
            module = sys.modules.get(name)
            if module is None or name == "__main__" or name in found:
                continue
            path = os.path.join(folder, entry)
            if suffix != "py" and not suffix.endswith("so") and not os.path.isfile(os.path.join(path, "__init__.py")):
                continue
            file = file_of(module)
            if not file or not f"{os.path.realpath(file)}/".startswith(f"{os.path.realpath(path)}/"):
                return path
            found.add(name)
    return ""


class Files:
    """Snapshot of the files of all imported modules."""

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
