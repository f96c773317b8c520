"""Numbers for metrics of a broker's workers."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from shared_rpc.broker.supervisor import Supervisor
from shared_rpc.server.measures import Measures

__all__ = ["add_workers"]

_PAGE = os.sysconf("SC_PAGE_SIZE")


def add_workers(found: Measures, supervisor: Supervisor) -> Measures:
    """Add the numbers of all workers to those of the servers."""
    found["workers"].update({("starting",): 0, ("ready",): 0, ("draining",): 0})
    for worker in supervisor.all:
        found["workers"][worker.state,] += 1
    found["worker_crashes"][()] = supervisor.crashes
    found["worker_restarts"][()] = supervisor.restarts.total()
    for worker in supervisor.workers:
        found["worker_runs"][str(worker.number),] = len(worker.runs)
        with suppress(OSError, IndexError):  # it has ended
            resident = int(Path(f"/proc/{worker.pid}/statm").read_text().split()[1])
            found["worker_resident_bytes"][str(worker.number),] = resident * _PAGE
    return found
