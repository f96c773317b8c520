"""The checks, in order of execution."""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from shared_rpc.extras.verification.clients import ClientFailed, VerifyClient
from shared_rpc.extras.verification.stage import SEED, Stage, all_of, counts_of, size

#: Bytes of the smallest model: a copy exceeds the noise of the measurements.
LEAST = 8 << 20
#: Bytes of the model of many processes: reading a large one would take most of the time.
_SMALL = 16 << 20
#: Ends of processes, in turn, see ``Subject.end``. The slow one occurs once in ten.
_ENDS = (*("closed", "left", "killed") * 3, "finished")
#: Number of uncounted attaches at first: caches fill, and allocators reserve memory.
_WARM_UP = 100
#: Growth of a process that is no leak: mappings that allocators make and remove at any time, and bytes that they keep.
_GROWTH = {"fds": 0, "mappings": 8, "threads": 0, "memory_bytes": 4 << 20}
#: The server's counters that must return to their earlier values after the end of its clients.
_COUNTERS = ("leases", "sessions", "connections", "objects")
#: Seconds for a server to detect the end of a client, to release the leases of a killed one, and for a worker to end with it.
_SETTLED, _LEASES, _ORPHAN = 2.0, 1.0, 2.0
#: Maximum seconds of an attach while there is no worker: less than a worker needs to import torch.
_NO_GAP = 1.0
#: Advice for a broken guarantee of the library itself, for unexpected copies, and for failed protection.
_REPORT = "please report this, with the server's log"
_COPIES = "look for .clone(), .to() or deepcopy where processes attach; and run it again while nothing else uses this device"
_PROTECTION = "see 'shared-rpc doctor': which mechanism is used, and whether the kernel seals memfds"


@dataclass
class Outcome:
    """The outcome of a check, filled while it runs: an aborted check keeps its findings.

    ``name`` is for programs, ``title`` for display.
    """

    name: str
    title: str
    state: Literal["passed", "failed", "skipped"] = "passed"
    seconds: float = 0.0
    #: Lines for display.
    found: list[str] = field(default_factory=list)
    #: Each has ``expected``, ``found`` and ``advice``.
    problems: list[dict[str, str]] = field(default_factory=list)
    #: Counts; the names of figures in other units end in ``_bytes`` or ``_seconds``.
    figures: dict[str, float] = field(default_factory=dict)

    def note(self, text: str, **figures: float) -> None:
        """Add figures, and a line that has some of them in braces."""
        self.figures |= figures
        self.found.append(text.format(**{name: _shown(name, value) for name, value in figures.items()}))

    def require(self, good: bool, expected: str, found: str, advice: str = _REPORT) -> None:
        """Add a problem unless ``good``."""
        if not good:
            self.state = "failed"
            self.problems.append({"expected": expected, "found": found, "advice": advice})


def _shown(name: str, value: float) -> str:
    if name.endswith("_bytes"):
        return size(value)
    if name.endswith("_seconds"):
        return f"{value:.1f} s" if value >= 1 else f"{value * 1e3:.2f} ms" if value < 0.01 else f"{value * 1e3:.0f} ms"
    return f"{value:g}"


def sharing(stage: Stage, outcome: Outcome) -> None:
    """Check that N processes share one model: its memory, the bits of their results, and the writes of each."""
    seed, model, workers = next(stage.seeds), stage.nbytes, max(stage.settings.workers, 2)
    with stage.clients(workers + 1) as (late, *clients):
        # First the one-time costs of a process: contexts, kernels, workspaces, and memory that allocators keep of a build.
        all_of(clients, "attach", nbytes=model, seed=SEED)
        all_of(clients, "digest")
        before, listed = stage.used(), stage.info()["objects"]
        attached = all_of(clients, "attach", nbytes=model, seed=seed)
        digests = all_of(clients, "digest")
        used, built = stage.used() - before, stage.info()["objects"] - listed

        for number, client in enumerate(clients):
            client.ask("write", index=number, value=1000.0 + number)
        late.ask("attach", nbytes=model, seed=seed)
        seen = all_of([*clients, late], "read", count=workers)
        alone = late.ask("alone", nbytes=model, seed=seed, device=stage.device["device"])
        stage.drop(seed)
    saw, right = seen.count([1000.0 + number for number in range(workers)]), digests.count(alone)
    outcome.note(
        "{workers} processes with a model of {model_bytes} use {used_bytes}; unshared it would be {unshared_bytes}",
        **{"workers": workers, "model_bytes": model, "used_bytes": used, "unshared_bytes": workers * model},
        **{"models_built": built, "attach_seconds": max(seconds for _, seconds in attached)},
    )
    same = f"the same bits as an unshared one ({alone[:12]}…)"
    outcome.note(f"{right} of {workers} compute {same}", workers_that_differ=workers - right)
    outcome.note(
        "{readers_that_saw_all} of {readers} saw all writes, a later one too", readers=len(seen), readers_that_saw_all=saw
    )
    least, most = model * 3 // 4 - stage.kind.noise, model * 5 // 4 + workers * stage.kind.noise
    outcome.require(least <= used <= most, "about one model more than before", f"{used / model:.1f} models more", _COPIES)
    objects = len({object_id for object_id, _ in attached})
    outcome.require(objects == built == 1, "one build for all that ask at the same time", f"{built} builds, {objects} objects")
    settings = "see whether a process writes into the model, and whether torch's settings are the same in all processes"
    outcome.require(
        right == workers, f"all compute {same}", f"{workers - right} of {workers} processes compute others", settings
    )
    blind = f"{len(seen) - saw} of {len(seen)} read other numbers"
    outcome.require(saw == len(seen), "every process sees what others write", blind, _COPIES)


def read_only(stage: Stage, outcome: Outcome) -> None:
    """Check that memory of an ``access="read"`` endpoint cannot be changed: a process that writes ends, or gets an error."""
    if stage.device["mechanism"] not in ("memfd", "vmm"):
        outcome.state = "skipped"
        outcome.note("the mechanism that this GPU is shared with cannot protect memory; see 'shared-rpc doctor'")
        return
    with stage.clients(2) as (reader, writer):
        all_of([reader, writer], "attach", nbytes=stage.nbytes, seed=SEED, endpoint="protected")
        before, stopped = reader.ask("digest"), None
        try:
            writer.ask("write", index=0, value=1000.0)
        except ClientFailed as failure:
            stopped = failure
        same = reader.ask("digest") == before
        stage.drop(SEED, "protected")
    end = "was ended by the kernel" if stopped and stopped.code == -signal.SIGSEGV else "got an error"
    outcome.note(f"a process that wrote {end}, another computes on", writes_stopped=bool(stopped), readers_disturbed=not same)
    outcome.require(stopped is not None, "the write is refused", "its write went through", _PROTECTION)
    outcome.require(same, "the other process computes the same bits", "other bits", _PROTECTION)


def lifetimes(stage: Stage, outcome: Outcome) -> None:
    """Check for leaks after many attaches and releases, and after many processes that attach, compute and end."""
    total, cycles = stage.settings.lifetimes, stage.settings.cycles
    model = {"nbytes": min(stage.nbytes, _SMALL), "seed": SEED}
    ends = itertools.islice(itertools.cycle(_ENDS), total)
    good = 0
    # Another process holds the model, as in practice; each release is the last one of its process.
    with stage.clients(2) as (first, client):
        first.ask("attach", **model)
        digests, leases = {right := first.ask("digest")}, stage.info()["leases"]
        client.ask("cycles", count=_WARM_UP, **model)
        server, worker = stage.server_pids()
        pids = {"server": server, "worker": worker, "client": client.pid}

        def changes() -> list[str]:
            return _changes(before, _counts(stage, pids))

        before, held = {**_counts(stage, pids), "leases": leases}, stage.segments()
        seconds = client.ask("cycles", count=cycles, **model)
        while batch := list(itertools.islice(ends, min(len(os.sched_getaffinity(0)), 8))):
            with stage.clients(len(batch)) as clients:
                all_of(clients, "attach", **model)
                digests |= {*all_of(clients, "digest")}
                for process, how in zip(clients, batch, strict=True):
                    process.send("end", how=how)
                codes = [-signal.SIGKILL if how == "killed" else 0 for how in batch]
                good += sum(process.code() == code for process, code in zip(clients, codes, strict=True))
        stage.within(_SETTLED, lambda: not changes())
        stage.within(stage.kind.patience, lambda: stage.segments() <= held + stage.kind.blur)
        changed, after, more = changes(), _counts(stage, pids), stage.segments() - held
        digests.add(first.ask("digest"))
        same = [server, worker] == stage.server_pids()
    outcome.note(
        "{cycles} attaches and releases, {cycle_seconds} each",
        **{"cycles": cycles, "cycle_seconds": seconds / cycles, "segment_bytes": more},
    )
    outcome.note(
        "{as_expected} of {lifetimes} processes attached, computed and ended as told", lifetimes=total, as_expected=good
    )
    growth = {f"{who}_{key}": after[f"{who}: {key}"] - before[f"{who}: {key}"] for who in pids for key in _GROWTH}
    outcome.note(", ".join(changed) or "server, worker and client are as before", **growth)
    outcome.require(good == total, f"{total} processes end as they are asked to", f"{total - good} ended otherwise")
    outcome.require(digests == {right}, "all compute the same bits at any time", f"{len(digests)} different results")
    outcome.require(same, "the same server and the same worker all the time", "one of them was replaced")
    kept = f"{_GROWTH['mappings']} mappings and {size(_GROWTH['memory_bytes'])} of each process"
    keeps = "the named process does not release what it was given; if it is the client, look for handles that are kept"
    outcome.require(
        not changed, f"the state after {_WARM_UP} attaches within {_SETTLED:g} s, but for {kept}", "; ".join(changed), keeps
    )
    holders = "memory of released objects is kept: see its holders with 'shared-rpc objects'"
    outcome.require(more <= stage.kind.blur, "no more shared memory than before", f"{size(more)} more", holders)


def _counts(stage: Stage, pids: dict[str, int]) -> dict[str, int]:
    """Count what the server lists, and what each process uses, by name: ``"leases"``, ``"client: fds"``."""
    info: dict[str, Any] = {**stage.info()}
    used = {f"{who}: {key}": value for who, pid in pids.items() for key, value in counts_of(pid).items()}
    return {**{key: info[key] for key in _COUNTERS}, **used}


def _changes(before: dict[str, int], after: dict[str, int]) -> list[str]:
    """Describe changes of the server's counters, and growth of processes above :data:`_GROWTH`."""
    return [
        f"{name} {old} → {after[name]}"
        for name, old in before.items()
        if (after[name] != old if name in _COUNTERS else after[name] - old > _GROWTH[name.partition(": ")[2]])
    ]


def kills(stage: Stage, outcome: Outcome) -> None:
    """Kill a client, the worker and the server: the attached processes continue to compute and share."""
    with stage.clients(max(stage.settings.workers, 2)) as clients:
        all_of(clients, "attach", nbytes=stage.nbytes, seed=SEED)
        right = all_of(clients, "digest")
        _kill_client(stage, outcome)
        _kill_worker(stage, outcome, right[0])
        outcome.require(all_of(clients, "digest") == right, "the attached processes compute on", "some compute other bits")
        _kill_server(stage, outcome, clients, right)


def _kill_client(stage: Stage, outcome: Outcome) -> None:
    """Kill the only holder of a model that is in no cache: lease and memory are released."""
    seed, patience = next(stage.seeds), stage.kind.patience
    with stage.clients(1) as (victim,):
        before = stage.segments()
        object_id, _ = victim.ask("attach", nbytes=stage.nbytes, seed=seed)
        stage.drop(seed)
        held = stage.segments() - before
        os.kill(victim.pid, signal.SIGKILL)
        lease = stage.within(_LEASES, lambda: object_id not in {item["object_id"] for item in stage.client.list_objects()})
        freed = stage.within(patience, lambda: stage.segments() <= before + stage.kind.blur)
        left = stage.segments() - before
    outcome.note(
        "client: its lease was released after {lease_back_seconds}, its {held_bytes} after {memory_back_seconds}",
        lease_back_seconds=-1 if lease is None else lease,
        memory_back_seconds=-1 if freed is None else (lease or _LEASES) + freed,
        **{"held_bytes": held, "left_bytes": left},
    )
    advice = "see which process has it open: ls -l /proc/*/fd | grep shared-rpc; on a GPU, nvidia-smi"
    outcome.require(held >= stage.nbytes * 3 // 4, f"it holds {size(stage.nbytes)}", size(held))
    outcome.require(lease is not None, f"its lease is released within {_LEASES:g} s", "it is held still")
    outcome.require(freed is not None, f"its memory is free within {patience:g} s", f"{size(left)} are in use still", advice)


def _kill_worker(stage: Stage, outcome: Outcome, right: str) -> None:
    """Kill the worker: a new process attaches at once, the next build runs in a new worker."""
    seed = next(stage.seeds)
    with stage.clients(1) as (late,):
        late.ask("alone", nbytes=LEAST, seed=seed, device=stage.device["device"])  # creates a context, which takes long
        _, worker = stage.server_pids()
        os.kill(worker, signal.SIGKILL)
        begin = time.monotonic()
        _, attached = late.ask("attach", nbytes=stage.nbytes, seed=SEED)
        none = not any(item["state"] == "ready" and item["pid"] != worker for item in stage.info()["workers"])
        same = late.ask("digest") == right
        late.ask("attach", nbytes=stage.nbytes, seed=seed)
        built = time.monotonic() - begin
        stage.drop(seed)
        _, new = stage.server_pids()
    outcome.note(
        f"worker: {'without one ' if none else ''}another process attached after {{attach_seconds}}, "
        "the next build was there after {next_build_seconds}",
        **{"attach_seconds": attached, "attached_without_worker": none, "next_build_seconds": built},
    )
    outcome.require(same, "a process that attaches computes the same bits", "it computes other bits")
    outcome.require(attached < _NO_GAP, f"a new process attaches within {_NO_GAP:g} s", f"it took {attached:.2f} s")
    outcome.require(new != worker, "a new worker", "the worker that was killed is listed still")


def _kill_server(stage: Stage, outcome: Outcome, clients: list[VerifyClient], right: list[str]) -> None:
    """Kill the server: attached processes continue to share; the same clients use the next server."""
    pids = stage.server_pids()
    os.kill(pids[0], signal.SIGKILL)
    ended = stage.within(_ORPHAN, lambda: not {*pids} & {*stage.pids()})
    same = all_of(clients, "digest") == right
    clients[0].ask("write", index=0, value=1000.0)
    shared = all_of(clients, "read", count=1) == [[1000.0]] * len(clients)
    begin = time.monotonic()
    stage.ensure_server()
    started = time.monotonic() - begin
    one = len({object_id for object_id, _ in all_of(clients, "attach", nbytes=stage.nbytes, seed=SEED)}) == 1
    taken_over = all_of(clients, "digest") == right
    outcome.note(
        "server: attached processes share on, and attach to the new one, which answered after {new_server_seconds}",
        new_server_seconds=started,
    )
    outcome.require(same, "attached processes compute the same bits as before", "some compute other bits")
    outcome.require(shared, "what one of them writes the others see", "they do not")
    outcome.require(ended is not None, f"its worker ends with it, within {_ORPHAN:g} s", "it runs still")
    found = "other bits" if one else "several models"
    outcome.require(taken_over and one, "the same clients attach to one new model with the same bits", found)


#: The checks by their names, which are for programs and the command line, with their titles for display.
CHECKS: dict[str, tuple[str, Callable[[Stage, Outcome], None]]] = {
    "sharing": ("one model for all", sharing),
    "read_only": ("read-only memory stays as it is", read_only),
    "lifetimes": ("nothing is left of those that end", lifetimes),
    "kills": ("kill -9 of client, worker, server", kills),
}
