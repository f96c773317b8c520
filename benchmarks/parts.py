"""Times of the parts of making and mapping a segment: the library's own code, by the calls that it makes."""

from __future__ import annotations

import functools
import importlib
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from shared_rpc.protocol.records import Mechanism

__all__ = ["MAKING", "MAPPING", "Parts", "Watch"]

_DRIVER = "cuda.bindings.driver"


class Parts(NamedTuple):
    """The steps of one operation: the calls ``targets`` (``"module:name"``) are the step ``inner``, all else is ``rest``."""

    rest: str
    inner: str = ""
    targets: tuple[str, ...] = ()


#: What ``Backend.create`` consists of: memory is allocated and zeroed, then made such that it can be sent. A memfd is a
#: descriptor from the beginning. What is sent of the older mechanisms is an export descriptor, which is issued then.
MAKING: dict[Mechanism, Parts] = {
    "memfd": Parts("create"),
    "vmm": Parts("create", "export", (f"{_DRIVER}:cuMemExportToShareableHandle",)),
    "ipc": Parts("create", "export", (f"{_DRIVER}:cuIpcGetMemHandle", "shared_rpc.memory.backends.liveness:issue")),
    "pool": Parts(
        "create",
        "export",
        (
            f"{_DRIVER}:cuMemPoolExportToShareableHandle",
            f"{_DRIVER}:cuMemPoolExportPointer",
            "shared_rpc.memory.backends.fd_server:FD_SERVER.register",
            "shared_rpc.memory.backends.liveness:issue",
        ),
    ),
}

#: What ``Backend.map`` consists of in another process: the memory is opened, then given an address. A memfd is not opened, and
#: legacy IPC opens memory at an address.
MAPPING: dict[Mechanism, Parts] = {
    "memfd": Parts("map"),
    "vmm": Parts("map", "open", (f"{_DRIVER}:cuMemImportFromShareableHandle",)),
    "ipc": Parts("open"),
    "pool": Parts("open", "map", (f"{_DRIVER}:cuMemPoolImportPointer",)),
}


class Watch:
    """Times an operation step by step. Replaces the functions that it watches, in this process and for good.

    :param clock: in seconds.
    """

    def __init__(self, parts: Parts, clock: Callable[[], float] = time.perf_counter) -> None:
        self._parts = parts
        self._clock = clock
        self._inside = 0.0
        for target in parts.targets:
            module, _, path = target.partition(":")
            *owners, name = path.split(".")
            owner = functools.reduce(getattr, owners, importlib.import_module(module))
            setattr(owner, name, self._watched(getattr(owner, name)))

    def _watched(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            begin = self._clock()
            try:
                return function(*args, **kwargs)
            finally:
                self._inside += self._clock() - begin

        return call

    def time(self, action: Callable[[], object], times: dict[str, list[float]]) -> None:
        """Do it, and add the seconds of each of its steps."""
        self._inside = 0.0
        begin = self._clock()
        action()
        total = self._clock() - begin
        times.setdefault(self._parts.rest, []).append(total - self._inside)
        if self._parts.inner:
            times.setdefault(self._parts.inner, []).append(self._inside)
