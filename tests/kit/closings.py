"""The threads that close the last descriptors of memory, written to a file by the process that imports this module.

It is imported by a server that is given :func:`hook`.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from shared_rpc.memory.closing import CLOSER
from tests.kit.processes import links_of

#: The variable that contains the file's path.
FILE = "SHARED_RPC_TEST_CLOSINGS"
#: Minimum size in bytes of memory that is reported.
LARGE = 2 << 20

_close = os.close


def hook(event: object) -> None:
    """Do nothing: its import loads this module into the server."""


def _reported(number: int) -> None:
    try:
        link = os.readlink(f"/proc/self/fd/{number}")
        if "memfd:shared-rpc-" in link and os.fstat(number).st_size >= LARGE and links_of().count(link) == 1:
            with open(os.environ[FILE], "a") as file:
                file.write(f"{threading.current_thread().name}\n")
    finally:
        _close(number)


@contextmanager
def late_closings() -> Iterator[threading.Event]:
    """Block this process's closing thread until the event is set; it is set at the end."""
    begun, free = threading.Event(), threading.Event()
    CLOSER.notify(lambda: (begun.set(), free.wait(30)))
    begun.wait(30)
    try:
        yield free
    finally:
        free.set()
        CLOSER.wait()


if FILE in os.environ:
    os.close = _reported
