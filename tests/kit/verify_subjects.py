"""Clients that do not share as they should, for a verification to notice."""

from __future__ import annotations

import copy
import os
import signal
import time
from pathlib import Path
from typing import Any

from shared_rpc import Client
from shared_rpc.extras.verification.clients import Subject


class Copying(Subject):
    """Has a copy of the model, and shows that around."""

    def attach(self, client: Client, endpoint: str, nbytes: int, seed: int) -> Any:
        """See :class:`Subject`."""
        handle = super().attach(client, endpoint, nbytes, seed)
        handle._value = copy.deepcopy(handle.value)
        return handle


class Leaking(Subject):
    """Keeps a descriptor, a megabyte and the handle of every attach."""

    def __init__(self) -> None:
        self._kept: list[Any] = []

    def release(self, handle: Any) -> None:
        """See :class:`Subject`."""
        self._kept.append((handle, os.urandom(1 << 20), os.dup(0)))


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


class Careless(Subject):
    """Attaches to what it may write to, in place of what is protected."""

    def attach(self, client: Client, endpoint: str, nbytes: int, seed: int) -> Any:
        """See :class:`Subject`."""
        return super().attach(client, "model", nbytes, seed)


#: Where a test says which subject the next client process has: in the directory of the verification.
CHOICE = "subject"


def chosen() -> Subject:
    """The one whose name the test has written there."""
    subject: Subject = globals()[Path(CHOICE).read_text()]()
    return subject
