"""Descriptors that a test can tell from all others of its process."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from tests.kit.processes import links_of

_NAME = "counted"


def new_fd() -> int:
    """Open a file that no other descriptor is of."""
    return os.memfd_create(_NAME, os.MFD_CLOEXEC)


@contextmanager
def nothing_leaks() -> Iterator[None]:
    """Fail where one of :func:`new_fd` is left open; closing one twice fails by itself."""

    def count() -> int:  # by name: what other tests left behind may be closed at any moment
        return sum(link.startswith(f"/memfd:{_NAME} ") for link in links_of())

    before = count()
    yield
    assert count() == before
