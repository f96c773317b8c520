"""The rule for installed code, which does not change while a zygote that has imported it lives."""

from __future__ import annotations

import functools
import os
import site
import sys
import sysconfig
from contextlib import suppress
from typing import Any

__all__ = ["file_of", "is_installed", "names_in"]

#: Names of directories to which pip and Debian install packages.
_PACKAGES = frozenset({"site-packages", "dist-packages"})


def is_installed(path: str) -> bool:
    """Return whether a path is the interpreter's own or a directory of installed packages, or lies below one.

    Such a directory is named ``site-packages`` or ``dist-packages``, or is an entry of ``sys.path`` that holds the metadata of
    distributions (``*.dist-info``), as ``pip install --target`` makes it.
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
    """Return the global names of an entry of ``sys.modules``. Reading an attribute of a lazy module would import it."""
    try:
        names = object.__getattribute__(module, "__dict__")
    except AttributeError:
        return {}
    return names if type(names) is dict else {}


def file_of(module: object) -> str:
    """Return the file of an entry of ``sys.modules``; empty if it has none."""
    file = names_in(module).get("__file__")
    return file if type(file) is str else ""
