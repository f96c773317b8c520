"""Verification of sharing on this machine: real processes, a real server, a real model, and kills.

:func:`verify` runs the checks, and ``shared-rpc verify`` shows them. The clients only use the public interface of the package.
"""

from __future__ import annotations

import datetime
import os
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import shared_rpc
from shared_rpc.errors import ConfigurationError
from shared_rpc.extras.verification.checks import CHECKS, LEAST, Outcome
from shared_rpc.extras.verification.stage import CannotRun, Interrupted, Settings, Stage, size

__all__ = ["SCHEMA", "CannotRun", "Interrupted", "Report", "Settings", "verify"]

#: Schema of the JSON. It changes if a field changes its meaning or is removed, but not with an added field.
SCHEMA = "shared-rpc-verify/2"
#: Seconds for a server to close the sessions of the previous check.
_CLOSED = 3.0


@dataclass
class Report:
    """The findings of a verification."""

    device: dict[str, Any]
    workers: int
    nbytes: int
    seconds: float = 0.0
    outcomes: list[Outcome] = field(default_factory=list)
    #: The end of the server's log, if a check failed.
    log: str = ""

    @property
    def passed(self) -> bool:
        """True if no check has failed."""
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
            "seconds": self.seconds,
            "passed": self.passed,
            "checks": [vars(outcome) for outcome in self.outcomes],
        }


def verify(settings: Settings | None = None, progress: Callable[[str, float], None] = lambda title, done: None) -> Report:
    """Start a server and clients, check, and end all of them. Runs in the main thread, whose signals it handles.

    :param progress: called with the title of the current check, and the completed part of the checks, from 0 to 1.
    :raises CannotRun: if there is nothing to check.
    :raises ConfigurationError: for impossible settings.
    :raises Interrupted: if a signal ended it; even then no process and no file is left.
    """
    settings = settings or Settings()
    for name in settings.names:
        if name not in CHECKS:
            raise ConfigurationError(f"--check {name}: use {', '.join(CHECKS)}")
    if settings.nbytes is not None and settings.nbytes < LEAST:
        raise ConfigurationError(
            f"a model of {size(settings.nbytes)} cannot be told from other memory of the processes: use {size(LEAST)} or more"
        )
    begin = time.monotonic()
    stage = Stage(settings)
    try:
        progress("starting a server and its clients", 0)
        stage.start()
        report = Report(stage.device, settings.workers, stage.nbytes)
        for name in (names := [name for name in CHECKS if name in (settings.names or CHECKS)]):
            progress(CHECKS[name][0], len(report.outcomes) / len(names))
            report.outcomes.append(_run_check(name, stage))
        report.log = "" if report.passed else "\n".join(stage.log())
    finally:
        stage.close()
    report.seconds = time.monotonic() - begin
    return report


def _run_check(name: str, stage: Stage) -> Outcome:
    begin = time.monotonic()
    title, check = CHECKS[name]
    outcome = Outcome(name, title)
    try:
        stage.ensure_server()
        stage.within(_CLOSED, lambda: stage.info()["sessions"] <= 1)
        check(stage, outcome)
    except Exception as error:  # the other checks continue
        text = f"{type(error).__name__}: {error}"
        outcome.require(False, "the check completes", text, "see the server's log below, and 'shared-rpc doctor'")
    outcome.seconds = time.monotonic() - begin
    return outcome
