"""What a broker tells Prometheus: of all its services together, and of its workers."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from shared_rpc.broker.restoring import Service
from shared_rpc.broker.supervisor import Supervisor
from shared_rpc.instrumentation import HOOKS
from shared_rpc.server.meter import Meter
from shared_rpc.server.metrics import Reading, WorkersReading, read

if TYPE_CHECKING:
    from shared_rpc.server.exporter import Exporter, Found

__all__ = ["Measuring"]

_PAGE = os.sysconf("SC_PAGE_SIZE")


class Measuring:
    """On the broker's loop only.

    :param exporter: None where nobody asked for metrics: then nothing is counted for them.
    """

    def __init__(self, exporter: Exporter | None) -> None:
        self._exporter = exporter
        #: By the server's id.
        self._meters: dict[str, Meter] = {}

    def start(
        self,
        post: Callable[[Callable[[], None]], object],
        services: Callable[[], Iterable[Service]],
        supervisor: Supervisor,
    ) -> None:
        """Serve what there is from now on."""
        if self._exporter is not None:
            self._exporter.start(post, lambda: self._found(services(), supervisor))

    def watch(self, server_id: str) -> None:
        """A service begins: nothing of it has happened yet."""
        if self._exporter is not None and server_id not in self._meters:
            meter = self._meters[server_id] = Meter(server_id)
            HOOKS.add(meter)

    def stop(self) -> None:
        """The broker ends."""
        for meter in self._meters.values():
            HOOKS.remove(meter)
        self._meters.clear()
        if self._exporter is not None:
            self._exporter.close()

    def _found(self, services: Iterable[Service], supervisor: Supervisor) -> Found:
        reading = Reading()
        for service in services:
            meter = self._meters.get(service.core.server_id)
            if meter is not None:
                reading.add(read(service.core, service.acceptor, meter))
        return reading, _workers(supervisor)


def _workers(supervisor: Supervisor) -> WorkersReading:
    reading = WorkersReading(crashes=supervisor.crashes, restarts=supervisor.restarts.total())
    reading.states.update({"starting": 0, "ready": 0, "draining": 0})
    for worker in supervisor.all:
        reading.states[worker.state] += 1
    for worker in supervisor.workers:
        reading.runs[worker.number] = len(worker.runs)
        with suppress(OSError, IndexError):  # it has ended
            reading.resident[worker.number] = int(Path(f"/proc/{worker.pid}/statm").read_text().split()[1]) * _PAGE
    return reading
