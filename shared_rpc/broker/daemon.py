"""A broker that outlives the process that started it."""

from __future__ import annotations

import os
from contextlib import suppress

__all__ = ["daemonize"]


def daemonize(lock: int) -> None:
    """Continue as a daemon process, whose id is written to standard output; later output goes
    where errors go. Before there are threads.

    The process that was started ends: else the broker would be a zombie one day, and belong to a process tree that some tools
    end as a whole.

    :param lock: a descriptor that is kept open until the end, and not passed on to workers.
    """
    child = os.fork()
    if child:
        with suppress(OSError):  # the process that started the daemon has ended
            os.write(1, f"{child}\n".encode())
        os._exit(0)
    os.set_inheritable(lock, False)
    os.dup2(2, 1)
