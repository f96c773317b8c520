"""Client processes that violate a guarantee of sharing, for tests of the verification."""

from __future__ import annotations

import copy
import os
import signal
import time
from typing import Any

from shared_rpc.extras.verification.app import Subject


class Copying(Subject):
    """Attaches to a copy of the model."""

    def acquire(self, endpoint: str, nbytes: int, seed: int) -> Any:
        """See :class:`Subject`."""
        handle = super().acquire(endpoint, nbytes, seed)
        handle._value = copy.deepcopy(handle.value)
        return handle


class Leaking(Subject):
    """Keeps a descriptor, a megabyte and the handle of every attach."""

    def __init__(self, server: str) -> None:
        super().__init__(server)
        self._kept: list[Any] = []

    def release(self, handle: Any) -> None:
        """See :class:`Subject`."""
        self._kept.append((handle, os.urandom(1 << 20), os.dup(0)))


class Changeable(Subject):
    """Computes another digest each time."""

    def digest(self, **alone: Any) -> str:
        """See :class:`Subject`."""
        return super().digest(**alone) + str(time.monotonic_ns())


class Haunting(Subject):
    """Leaves a forked child that has the memory mapped."""

    def acquire(self, endpoint: str, nbytes: int, seed: int) -> Any:
        """See :class:`Subject`."""
        handle = super().acquire(endpoint, nbytes, seed)
        if os.fork() == 0:
            signal.pause()
        return handle


class Careless(Subject):
    """Attaches to the writable model in place of the protected one."""

    def acquire(self, endpoint: str, nbytes: int, seed: int) -> Any:
        """See :class:`Subject`."""
        return super().acquire("model", nbytes, seed)
