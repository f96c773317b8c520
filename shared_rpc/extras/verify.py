"""Verification of sharing on this machine: real processes, a real server, a real model, and kills.

:func:`verify` runs the checks, and ``shared-rpc verify`` shows them. The clients only use the public interface of the package.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import shared_rpc
from shared_rpc.errors import ConfigurationError
from shared_rpc.extras.verification.stage import LEAST, SEED, CannotRun, ClientFailed, Settings, Stage, all_of, size

__all__ = ["SCHEMA", "CannotRun", "Report", "Settings", "verify"]

#: Schema of the JSON. It changes if a field changes its meaning or is removed, but not with an added field.
SCHEMA = "shared-rpc-verify/4"
#: Number of attaches and releases of a process, after uncounted ones: caches fill, and allocators reserve memory.
_CYCLES, _WARM_UP = 1000, 100
#: Growth of server, worker and client together that is no leak: mappings that allocators make and remove at any time, and
#: bytes that they keep, less than a model.
_MAPPINGS, _BYTES = 24, 12 << 20
#: Seconds for a worker to end with its server; and for an attach while there is no worker: less than one needs to import torch.
_ORPHAN, _NO_GAP = 2.0, 1.0


@dataclass
class Outcome:
    """The outcome of a check, filled while it runs: an aborted check keeps its findings.

    ``name`` is for programs, ``title`` for display, and ``advice`` for a failed check.
    """

    name: str
    title: str
    advice: str
    passed: bool = True
    seconds: float = 0.0
    #: Lines for display, one for each requirement.
    found: list[str] = field(default_factory=list)
    #: Each has ``expected`` and ``found``.
    problems: list[dict[str, str]] = field(default_factory=list)

    def require(self, good: bool, expected: str, found: str = "") -> None:
        """Add a finding, by default ``yes`` or ``no``; unless ``good``, it is a problem too."""
        found = found or ("yes" if good else "no")
        self.found.append(f"{expected}: {found}")
        if not good:
            self.passed = False
            self.problems.append({"expected": expected, "found": found})


#: Title, advice and function of each check by its name, in order of execution.
CHECKS: dict[str, tuple[str, str, Callable[[Stage, Outcome], None]]] = {}


def _check(title: str, advice: str) -> Callable[[Callable[[Stage, Outcome], None]], None]:
    return lambda run: CHECKS.update({run.__name__: (title, advice, run)})


@_check(
    "one model for all",
    "look for .clone(), .to() or deepcopy where processes attach, for other users of this device, and at 'shared-rpc doctor'",
)
def sharing(stage: Stage, outcome: Outcome) -> None:
    """Check that N processes share one model: its memory, the bits of their results, and the writes of each; and that memory of
    an ``access="read"`` endpoint cannot be changed.
    """
    seed, model, everyone = next(stage.seeds), stage.nbytes, stage.crew()
    *crew, late = everyone
    workers, pids = len(crew), [client.pid for client in everyone]
    # First the one-time costs of a process: contexts, kernels, workspaces, and memory that allocators keep of a build.
    all_of(everyone, "attach", nbytes=model, seed=SEED)
    earlier, listed = stage.used(pids), stage.client.get_server_info()["objects"]
    objects, digests = zip(*all_of(crew, "attach", nbytes=model, seed=seed), strict=True)
    used, built = stage.used(pids) - earlier, stage.client.get_server_info()["objects"] - listed
    written = [1000.0 + number for number in range(workers)]
    for number, client in enumerate(crew):
        client.ask("write", index=number, value=written[number])
    late.ask("attach", nbytes=model, seed=seed)
    saw = all_of(everyone, "read", count=workers).count(written)
    alone = late.ask("digest", nbytes=model, seed=seed, device=stage.device["device"])
    stage.drop(seed)
    right, least, most = digests.count(alone), model * 3 // 4 - stage.noise, model * 5 // 4 + workers * stage.noise
    outcome.require(least <= used <= most, f"{workers} processes use one model of {size(model)}", size(used))
    made = f"{built} builds, {len({*objects})} objects"
    outcome.require(len({*objects}) == built == 1, "they attached at the same time to one build", made)
    outcome.require(right == workers, f"they compute the bits of an unshared model, {alone[:12]}", f"{right} of {workers}")
    outcome.require(saw == len(everyone), "they see all writes, a later process too", f"{saw} of {len(everyone)}")
    if stage.device["mechanism"] not in ("memfd", "vmm"):
        outcome.found.append("the mechanism that this GPU is shared with cannot protect memory; see 'shared-rpc doctor'")
        return
    reader, writer, stopped = crew[0], stage.new_client(), False
    (_, before), _ = all_of([reader, writer], "attach", nbytes=model, seed=SEED, endpoint="protected")
    try:
        writer.ask("write", index=0, value=written[0])
    except ClientFailed:
        stopped = True
    writer.end()
    outcome.require(stopped, "a process that writes to read-only memory ends, or gets an error")
    outcome.require(reader.ask("digest") == before, "another process computes the same bits afterwards")
    stage.drop(SEED, "protected")


@_check("nothing is left of those that end", "look for handles that are kept, and their holders with 'shared-rpc objects'")
def lifetimes(stage: Stage, outcome: Outcome) -> None:
    """Check for leaks after many attaches and releases, the end of a process, and the kill of one that alone holds a model."""
    model, seed, patience = {"nbytes": stage.nbytes, "seed": SEED}, next(stage.seeds), stage.patience
    # Another process holds the model, as in practice; each release is the last one of its process.
    first, client = stage.crew()[:2]
    _, right = first.ask("attach", **model)
    leases = stage.client.get_server_info()["leases"]
    client.ask("cycles", count=_WARM_UP, **model)
    pids = [*stage.server_pids(), client.pid]
    before = stage.counts(pids) | {"leases": leases}
    begin = time.monotonic()
    client.ask("cycles", count=_CYCLES, **model)
    each = (time.monotonic() - begin) / _CYCLES
    ended, killed = stage.new_client(), stage.new_client()
    same = ended.ask("attach", **model)[1] == first.ask("digest") == right
    killed.ask("attach", nbytes=stage.nbytes, seed=seed)
    stage.drop(seed)
    ended.end(kill=False)
    killed.end()

    allowed = {"mappings": _MAPPINGS, "bytes": max(_BYTES, stage.noise)}

    def grown() -> str:
        more = {name: count - before[name] for name, count in stage.counts(pids).items()}
        return ", ".join(f"{count} more {name}" for name, count in more.items() if count > allowed.get(name, 0))

    took = stage.within(patience, lambda: not grown())
    outcome.found.append(f"{_CYCLES} attaches and releases, {each * 1e3:.2f} ms each")
    outcome.require(same, "a process attaches, computes the same bits and ends; another one is killed")
    left = f"nothing of them is left in server, worker, client and shared memory after {patience:g} s"
    outcome.require(took < patience, left, grown() or f"{took:.2f} s")
    outcome.require(pids[:2] == stage.server_pids(), "server and worker are the same all the time")


@_check("kill -9 of worker and server", "see which process has memory open: ls -l /proc/*/fd | grep shared-rpc; nvidia-smi")
def kills(stage: Stage, outcome: Outcome) -> None:
    """Kill the worker and the server: the attached processes continue to compute and share."""
    *crew, late = stage.crew()
    right = [digest for _, digest in all_of(crew, "attach", nbytes=stage.nbytes, seed=SEED)]

    # The worker: a new process attaches at once, the next build runs in a new worker.
    seed = next(stage.seeds)
    late.ask("digest", nbytes=LEAST, seed=seed, device=stage.device["device"])  # creates a context, which takes long
    _, worker = stage.server_pids()
    os.kill(worker, signal.SIGKILL)
    begin = time.monotonic()
    _, digest = late.ask("attach", nbytes=stage.nbytes, seed=SEED)
    attached = time.monotonic() - begin
    late.ask("attach", nbytes=stage.nbytes, seed=seed)
    built = time.monotonic() - begin
    stage.drop(seed)
    outcome.require(attached < _NO_GAP, f"worker: a process attaches within {_NO_GAP:g} s", f"{attached:.2f} s")
    outcome.require(stage.server_pids()[1] != worker, "worker: a new one runs the next build", f"after {built:.1f} s")
    outcome.require([digest, *all_of(crew, "digest")] == [right[0], *right], "worker: all compute the same bits")

    # The server: attached processes continue to share; the same clients use the next server.
    _, worker = stage.server_pids()
    stage.servers[-1].end()
    ended = stage.within(_ORPHAN, lambda: worker not in stage.pids())
    same = all_of(crew, "digest") == right
    crew[0].ask("write", index=0, value=1000.0)
    shared = all_of(crew, "read", count=1) == [[1000.0]] * len(crew)
    begin = time.monotonic()
    stage.ensure_server()
    started = time.monotonic() - begin
    objects, digests = zip(*all_of(crew, "attach", nbytes=stage.nbytes, seed=SEED), strict=True)
    outcome.require(ended < _ORPHAN, f"server: its worker ends within {_ORPHAN:g} s", f"{ended:.2f} s")
    outcome.require(same and shared, "server: attached processes compute the same bits, and see writes")
    good, models = len({*objects}) == 1 and [*digests] == right, f"{len({*objects})} after {started:.1f} s"
    outcome.require(good, "server: the same clients share one model of the next server", models)


@dataclass
class Report:
    """The findings of a verification."""

    device: dict[str, Any]
    workers: int
    model_bytes: int
    seconds: float = 0.0
    checks: list[Outcome] = field(default_factory=list)
    #: The end of the server's log, if a check failed.
    log: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """True if no check has failed."""
        return all(outcome.passed for outcome in self.checks)

    def as_json(self) -> dict[str, Any]:
        """Return the report for programs; the documentation has the schema."""
        return {"schema": SCHEMA, "version": shared_rpc.__version__, "passed": self.passed, **asdict(self)}


def verify(settings: Settings | None = None, progress: Callable[[str, float], None] = lambda title, done: None) -> Report:
    """Start a server and clients, check, and end all of them, even if an exception such as KeyboardInterrupt ends it.

    :param progress: called with the title of the current check, and the completed part of the checks, from 0 to 1.
    :raises CannotRun: if there is nothing to check.
    :raises ConfigurationError: for impossible settings.
    """
    settings = settings or Settings()
    for name in settings.names:
        if name not in CHECKS:
            raise ConfigurationError(f"--check {name}: use {', '.join(CHECKS)}")
    begin = time.monotonic()
    stage = Stage(settings)
    try:
        progress("starting a server and its clients", 0)
        stage.start()
        report = Report(stage.device, settings.workers, stage.nbytes)
        for name in (names := [name for name in CHECKS if name in (settings.names or CHECKS)]):
            progress(CHECKS[name][0], len(report.checks) / len(names))
            report.checks.append(_run_check(name, stage))
        report.log = [] if report.passed else stage.log()
    finally:
        stage.close()
    report.seconds = time.monotonic() - begin
    return report


def _run_check(name: str, stage: Stage) -> Outcome:
    begin = time.monotonic()
    title, advice, check = CHECKS[name]
    outcome = Outcome(name, title, advice)
    try:
        stage.ensure_server()
        check(stage, outcome)
    except Exception as error:  # the other checks continue
        outcome.require(False, "the check completes", f"{type(error).__name__}: {error}")
    if not outcome.passed:
        stage.dismiss()
    outcome.seconds = time.monotonic() - begin
    return outcome
