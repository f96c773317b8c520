"""Descriptors that a test can tell from all others of its process."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress

__all__ = ["new_fd", "nothing_leaks"]

_NAME = "counted"


def new_fd() -> int:
    """Open a file that no other descriptor is of."""
    return os.memfd_create(_NAME, os.MFD_CLOEXEC)


@contextmanager
def nothing_leaks() -> Iterator[None]:
    """Fail where one of :func:`new_fd` is left open; closing one twice fails by itself."""
    before = _open_here()
    yield
    assert _open_here() == before


def _open_here() -> int:
    # By name: what other tests left behind may be closed at any moment.
    count = 0
    for fd in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):
            count += os.readlink(f"/proc/self/fd/{fd}").startswith(f"/memfd:{_NAME} ")
    return count
