"""Clients that do not share as they should, for a verification to notice."""

from __future__ import annotations

import copy
import os
import signal
import time
from typing import Any

from shared_rpc import Client
from shared_rpc.verification.subject import Subject


class Copying(Subject):
    """Has a copy of the model, and shows that around."""

    def attach(self, client: Client, endpoint: str, nbytes: int, seed: int) -> Any:
        """See :class:`Subject`."""
        handle = super().attach(client, endpoint, nbytes, seed)
        handle._value = copy.deepcopy(handle.value)
        return handle


class Leaking(Subject):
    """Keeps a descriptor of every attach."""

    def release(self, handle: Any) -> None:
        """See :class:`Subject`."""
        super().release(handle)
        os.dup(0)


class Holding(Subject):
    """Keeps every lease, and all that goes with it."""

    def __init__(self) -> None:
        self._kept: list[Any] = []

    def release(self, handle: Any) -> None:
        """See :class:`Subject`."""
        self._kept.append(handle)


class Changeable(Subject):
    """Computes something else every time."""

    def digest(self, handle: Any) -> str:
        """See :class:`Subject`."""
        return super().digest(handle) + str(time.monotonic_ns())


class Haunting(Subject):
    """Leaves a forked child, which has the memory mapped as well."""

    def attach(self, client: Client, endpoint: str, nbytes: int, seed: int) -> Any:
        """See :class:`Subject`."""
        handle = super().attach(client, endpoint, nbytes, seed)
        if os.fork() == 0:
            signal.pause()
        return handle


class Breaking(Subject):
    """Cannot attach to what is protected."""

    def attach(self, client: Client, endpoint: str, nbytes: int, seed: int) -> Any:
        """See :class:`Subject`."""
        if endpoint == "protected":
            raise RuntimeError("no such luck")
        return super().attach(client, endpoint, nbytes, seed)


class Careless(Subject):
    """Attaches to what it may write to, in place of what is protected."""

    def attach(self, client: Client, endpoint: str, nbytes: int, seed: int) -> Any:
        """See :class:`Subject`."""
        return super().attach(client, "model", nbytes, seed)
