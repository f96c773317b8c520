"""Client processes that do not share as they should, for a verification to notice."""

from __future__ import annotations

import copy
import os
import signal
import time
from typing import Any

from shared_rpc.extras.verification.clients import Subject


class Copying(Subject):
    """Has a copy of the model, and shows that around."""

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
    """Computes something else every time."""

    def digest(self, name: str = "model") -> str:
        """See :class:`Subject`."""
        return super().digest(name) + str(time.monotonic_ns())


class Haunting(Subject):
    """Leaves a forked child, which has the memory mapped as well."""

    def acquire(self, endpoint: str, nbytes: int, seed: int) -> Any:
        """See :class:`Subject`."""
        handle = super().acquire(endpoint, nbytes, seed)
        if os.fork() == 0:
            signal.pause()
        return handle


class Careless(Subject):
    """Attaches to what it may write to, in place of what is protected."""

    def acquire(self, endpoint: str, nbytes: int, seed: int) -> Any:
        """See :class:`Subject`."""
        return super().acquire("model", nbytes, seed)
