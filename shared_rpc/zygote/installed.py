"""The rule for installed code, which does not change while a zygote that has imported it lives."""

from __future__ import annotations

import functools
import os
import site
import sys
import sysconfig

__all__ = ["is_installed"]

#: Names of directories to which pip and Debian install packages.
_PACKAGES = frozenset({"site-packages", "dist-packages"})


def is_installed(path: str) -> bool:
    """Return whether a path is the interpreter's own or a directory of installed packages, or lies below one."""
    return not _PACKAGES.isdisjoint(path.split(os.sep)) or f"{path}/".startswith(_folders())


@functools.cache
def _folders() -> tuple[str, ...]:
    paths = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    paths |= {*site.getsitepackages(), site.getusersitepackages(), *filter(None, sysconfig.get_config_vars("DESTSHARED"))}
    paths |= {entry for entry in sys.path if os.path.basename(entry) in _PACKAGES}
    paths.add(f"{sys.base_prefix}/{sys.platlibdir}/python{sys.version_info.major}{sys.version_info.minor}.zip")
    return tuple(sorted({f"{form}/" for path in paths for form in (path, os.path.realpath(path))}))
