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

    def attach(self, *args: Any, **options: Any) -> tuple[str, str]:
        """See :class:`Subject`."""
        attached = super().attach(*args, **options)
        self._held[-1]._value = copy.deepcopy(self._held[-1].value)
        return attached


class Leaking(Subject):
    """Keeps a descriptor, a megabyte and a handle of some attaches."""

    def __init__(self, server: str) -> None:
        super().__init__(server)
        self._kept: list[Any] = []

    def cycles(self, count: int, nbytes: int, seed: int) -> None:
        """See :class:`Subject`."""
        for _ in range(20):
            self._kept.append((self.client.call("model", nbytes, seed), os.urandom(1 << 20), os.dup(0)))
        super().cycles(count, nbytes, seed)


class Changeable(Subject):
    """Computes another digest each time."""

    def digest(self, **alone: Any) -> str:
        """See :class:`Subject`."""
        return super().digest(**alone) + str(time.monotonic_ns())


class Haunting(Subject):
    """Leaves a forked child that has the memory mapped."""

    def attach(self, *args: Any, **options: Any) -> tuple[str, str]:
        """See :class:`Subject`."""
        attached = super().attach(*args, **options)
        if os.fork() == 0:
            signal.pause()
        return attached


class Careless(Subject):
    """Attaches to the writable model in place of the protected one."""

    def attach(self, nbytes: int, seed: int, endpoint: str = "model") -> tuple[str, str]:
        """See :class:`Subject`."""
        return super().attach(nbytes, seed)
