"""Descriptors that a test can distinguish from all others of its process."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from tests.kit.processes import links_of

_NAME = "counted"


def new_fd() -> int:
    """Open a file that has no other descriptor."""
    return os.memfd_create(_NAME, os.MFD_CLOEXEC)


@contextmanager
def nothing_leaks() -> Iterator[None]:
    """Fail if a descriptor of :func:`new_fd` is left open; closing one twice fails by itself."""

    def count() -> int:  # by name: descriptors that other tests left behind may be closed at any moment
        return sum(link.startswith(f"/memfd:{_NAME} ") for link in links_of())

    before = count()
    yield
    assert count() == before
