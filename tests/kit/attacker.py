"""Attackers: a piece of Python that runs as another user of the host, or in a container's namespaces as this user."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.kit.processes import Child

__all__ = ["STRANGER", "as_uid", "common_directory", "in_namespaces", "needs_another_uid", "needs_namespaces"]

#: A uid without an account, which is not the kernel's overflow uid either.
STRANGER = 23456

_DROP = """\
import encodings.idna, logging, os, sys, tests.kit.raw
os.setgroups([])
os.setresgid({uid}, {uid}, {uid})
os.setresuid({uid}, {uid}, {uid})
"""

_CONTAINER = ("unshare", "--user", "--map-current-user", "--pid", "--fork", "--kill-child", "--mount", "--mount-proc")


def _can_unshare() -> bool:
    if shutil.which("unshare") is None:
        return False
    return subprocess.run([*_CONTAINER, "true"], capture_output=True, check=False).returncode == 0


needs_another_uid = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")
needs_namespaces = pytest.mark.skipif(not _can_unshare(), reason="this machine does not allow user, pid and mount namespaces")


def as_uid(
    code: str,
    *arguments: str,
    before: str = "",
    uid: int = STRANGER,
    environ: dict[str, str] | None = None,
    cwd: Path | None = None,
) -> Child:
    """Run code as another user. See :func:`common_directory` for files that it is to reach.

    :param before: code that runs as this user, for imports: the other one may not be able to read where the interpreter lies.
    """
    code = "\n".join([textwrap.dedent(before), _DROP.format(uid=uid), textwrap.dedent(code)])
    return Child("-c", code, *arguments, environ=environ, cwd=cwd)


def in_namespaces(code: str, *arguments: str, environ: dict[str, str] | None = None, cwd: Path | None = None) -> Child:
    """Run code as this user, in user, pid and mount namespaces of its own with its own /proc: another container."""
    return Child("-c", textwrap.dedent(code), *arguments, environ=environ, cwd=cwd, before=_CONTAINER)


@contextmanager
def common_directory(mode: int = 0o1777) -> Iterator[Path]:
    """Make a directory that all users reach: sticky and writable for everybody, as /tmp is, or with another mode."""
    directory = Path(tempfile.mkdtemp())
    directory.chmod(mode)
    try:
        yield directory
    finally:
        shutil.rmtree(directory)
