"""Verification of sharing on this machine: real processes, a real server, a real model, and kills.

:func:`verify` runs the nine checks, and ``shared-rpc verify`` shows them. They use the public interface of the package alone.
"""

from __future__ import annotations

import datetime
import os
import platform
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import shared_rpc
from shared_rpc.errors import ConfigurationError, SharedRPCError
from shared_rpc.extras.verification.checks import CHECKS, Bench, Check
from shared_rpc.extras.verification.clients import ClientFailed
from shared_rpc.extras.verification.gauges import DeviceGauge, HostGauge
from shared_rpc.extras.verification.interrupts import Interrupted, Interrupts
from shared_rpc.extras.verification.model import true_size
from shared_rpc.extras.verification.stage import CannotRun, Stage
from shared_rpc.extras.verification.verdict import Observer, Outcome, size

__all__ = ["SCHEMA", "CannotRun", "Interrupted", "Observer", "Report", "Settings", "verify"]

#: Schema of the JSON. It changes where a field changes its meaning or goes away, and not with an added field.
SCHEMA = "shared-rpc-verify/1"

#: Bytes of the model by default: enough to tell a copy from noise, and little enough for a small machine.
_SIZE = {"cpu": 64 << 20, "cuda": 1 << 30}
#: Bytes of the smallest model: a copy exceeds the noise of the gauges.
_LEAST = 8 << 20
#: Models in memory at the same time, at most, copies included.
_MODELS = 5
#: Client processes that come and go at the same time, at most.
_TOGETHER = 8


@dataclass(frozen=True)
class Settings:
    """Settings of a verification. ``nbytes`` is the size of the model; None is what suits the device.

    :param names: the checks; empty for all of them.
    :param subject: ``module:class`` in place of the clients' use of the library.
    """

    device: str = "auto"
    workers: int = 4
    nbytes: int | None = None
    lifetimes: int = 100
    cycles: int = 1000
    names: Sequence[str] = ()
    subject: str = "shared_rpc.extras.verification.clients:Subject"

    def checks(self) -> list[Check]:
        """Return the chosen checks.

        :raises ConfigurationError: for an unknown name.
        """
        known = [check.name for check in CHECKS]
        for name in self.names:
            if name not in known:
                raise ConfigurationError(f"--check {name}: use {', '.join(known)}")
        return [check for check in CHECKS if not self.names or check.name in self.names]


@dataclass
class Report:
    """The findings of a verification."""

    device: dict[str, Any]
    workers: int
    nbytes: int
    seconds: float = 0.0
    outcomes: list[Outcome] = field(default_factory=list)
    #: The end of the server's log, where something failed.
    log: str = ""

    @property
    def passed(self) -> bool:
        """Whether no check has failed."""
        return all(outcome.state != "failed" for outcome in self.outcomes)

    def as_json(self) -> dict[str, Any]:
        """Return the report for programs; the documentation has the schema."""
        return {
            "schema": SCHEMA,
            "version": shared_rpc.__version__,
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "host": {
                "cores": len(os.sched_getaffinity(0)),
                "kernel": platform.release(),
                "machine": platform.machine(),
                "python": platform.python_version(),
                "torch": self.device["torch"],
                "cuda": self.device["cuda"],
            },
            "device": {key: self.device[key] for key in ("device", "id", "name", "mechanism")},
            "workers": self.workers,
            "model_bytes": self.nbytes,
            "seconds": round(self.seconds, 3),
            "passed": self.passed,
            "checks": [outcome.as_json() for outcome in self.outcomes],
        }


def verify(settings: Settings | None = None, watcher: Observer | None = None) -> Report:
    """Start a server and clients, check, and end all of them. Runs in the main thread, whose signals it handles.

    :raises CannotRun: if there is nothing to check.
    :raises ConfigurationError: for impossible settings.
    :raises Interrupted: if a signal ended it; no process and no file is left then either.
    """
    settings, watcher = settings or Settings(), watcher or Observer()
    checks = settings.checks()
    if settings.nbytes is not None and settings.nbytes < _LEAST:
        raise ConfigurationError(
            f"a model of {size(settings.nbytes)} cannot be told from other memory of the processes: use {size(_LEAST)} or more"
        )
    begin = time.monotonic()
    with Interrupts() as interrupts:
        stage = Stage(settings.device, settings.subject, interrupts)
        try:
            with stage:
                watcher.prepare(len(checks))
                report = _run_checks(stage, settings, checks, watcher)
        finally:
            # A signal can come as the block ends, before it is deferred there.
            stage.close()
    report.seconds = time.monotonic() - begin
    return report


def _run_checks(stage: Stage, settings: Settings, checks: list[Check], watcher: Observer) -> Report:
    try:
        stage.wait_for_server()
    except SharedRPCError as error:
        raise CannotRun(f"the server does not start: {error}") from error
    with stage.clients(1) as (asked,):
        try:
            device = asked.ask("device", asked=settings.device)
        except ClientFailed as error:
            raise CannotRun(str(error)) from error
        on_host = device["id"] == "cpu"
        nbytes = true_size(settings.nbytes or _SIZE["cpu" if on_host else "cuda"])
        free = _free_memory() if on_host else asked.ask("used", device=device["device"])[1]
    if nbytes * _MODELS > free:
        raise CannotRun(
            f"a model of {size(nbytes)} needs up to {_MODELS} times as much, and {size(free)} are free on "
            f"{device['name']}: choose a smaller --size"
        )
    device["mechanism"] = (stage.info()["mechanism"] or {"name": "memfd"})["name"]
    report = Report(device, settings.workers, nbytes)
    bench = Bench(
        stage=stage,
        gauge=HostGauge(stage) if on_host else DeviceGauge(stage.connect, device["device"]),
        device=device["device"],
        protects=device["mechanism"] in ("memfd", "vmm"),
        workers=settings.workers,
        nbytes=nbytes,
        lifetimes=settings.lifetimes,
        cycles=settings.cycles,
        together=min(len(os.sched_getaffinity(0)), _TOGETHER),
    )
    for check in checks:
        report.outcomes.append(_run_check(check, bench, watcher))
    if not report.passed:
        report.log = stage.log()
    return report


def _run_check(check: Check, bench: Bench, watcher: Observer) -> Outcome:
    begin = time.monotonic()
    outcome = Outcome(check.name, check.title, watcher)
    watcher.begin(outcome)
    with outcome.crashes_are_failures():
        bench.stage.ensure_server()
        check.run(bench, outcome)
    bench.stage.interrupts.check()
    outcome.seconds = time.monotonic() - begin
    watcher.end(outcome)
    return outcome


def _free_memory() -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable")) * 1024
