"""The checks, in order of execution."""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from shared_rpc.errors import ConfigurationError
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
#: Growth that is no leak: mappings that allocators make and remove at any time, and the bytes that they keep in excess.
_GROWTH = {"fds": 0, "mappings": 8, "threads": 0, "memory_bytes": 4 << 20}
#: The server's counters that must return to their earlier values after the end of its clients.
_COUNTERS: tuple[Literal["leases", "sessions", "connections", "objects"], ...] = (
    "leases",
    "sessions",
    "connections",
    "objects",
)
#: Seconds for a server to detect the end of a client, to release the leases of a killed one, and for a worker to end with it.
_SETTLED, _LEASES, _ORPHAN = 2.0, 1.0, 2.0
#: Maximum seconds of an attach while there is no worker: less than a worker needs to import torch.
_NO_GAP = 1.0
#: Advice for a broken guarantee of the library itself.
_REPORT = "please report this, with the server's log"


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


@dataclass(frozen=True)
class Check:
    """A check: ``name`` is for programs and the command line, ``title`` for display."""

    name: str
    title: str
    run: Callable[[Stage, Outcome], None]


def sharing(stage: Stage, outcome: Outcome) -> None:
    """Check that N processes share one model: its memory, the bits of their results, and the writes of each."""
    seed, model, workers = stage.new_seed(), stage.nbytes, max(stage.settings.workers, 2)
    with stage.clients(workers) as clients, stage.clients(1) as (late,):
        # First the one-time costs of a process: contexts, kernels, workspaces, and memory that allocators keep of a build.
        all_of(clients, "attach", nbytes=model, seed=SEED)
        all_of(clients, "digest")
        stage.used()
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
    blind = sum(values != [1000.0 + number for number in range(workers)] for values in seen)
    wrong, objects = sum(digest != alone for digest in digests), len({object_id for object_id, _ in attached})
    outcome.note(
        "{workers} processes with a model of {model_bytes} use {used_bytes}; unshared it would be {unshared_bytes}",
        **{"workers": workers, "model_bytes": model, "used_bytes": used, "unshared_bytes": workers * model},
        **{"models_built": built, "attach_seconds": max(seconds for _, seconds in attached)},
    )
    same = f"the same bits as an unshared one ({alone[:12]}…)"
    outcome.note(f"{workers - wrong} of {workers} compute {same}", workers_that_differ=wrong)
    outcome.note(
        "{readers_that_saw_all} of {readers} saw all writes, a later one too",
        readers=len(seen),
        readers_that_saw_all=len(seen) - blind,
    )
    copies = "look for .clone(), .to() or deepcopy where processes attach, if nothing else uses this device meanwhile"
    most = model + model // 4 + workers * stage.kind.noise
    outcome.require(used <= most, f"at most {size(most)} more than before", f"{used / model:.1f} models more", copies)
    quiet = "something else freed memory meanwhile: run it again while this device is quiet"
    outcome.require(
        used >= model * 3 // 4 - stage.kind.noise, f"about {size(model)} more than before", f"{size(used)} more", quiet
    )
    outcome.require(objects == built == 1, "one build for all that ask at the same time", f"{built} builds, {objects} objects")
    settings = "see whether a process writes into the model, and whether torch's settings are the same in all processes"
    outcome.require(wrong == 0, f"all compute {same}", f"{wrong} of {workers} processes compute others", settings)
    outcome.require(blind == 0, "every process sees what others write", f"{blind} of {len(seen)} read other numbers", copies)


def read_only(stage: Stage, outcome: Outcome) -> None:
    """Check that memory of an ``access="read"`` endpoint cannot be changed: a process that writes ends, or gets an error."""
    if stage.device["mechanism"] not in ("memfd", "vmm"):
        outcome.state = "skipped"
        outcome.note("the mechanism that this GPU is shared with cannot protect memory; see 'shared-rpc doctor'")
        return
    with stage.clients(2) as clients:
        all_of(clients, "attach", nbytes=stage.nbytes, seed=SEED, endpoint="protected")
        reader, writer = clients
        before, how = reader.ask("digest"), ""
        try:
            writer.ask("write", index=0, value=1000.0)
        except ClientFailed as failure:
            how = str(failure)
        same = reader.ask("digest") == before
        stage.drop(SEED, "protected")
    end = "was ended by the kernel" if f"exit code {-signal.SIGSEGV}" in how else "got an error"
    outcome.note(f"a process that wrote {end}, another computes on", writes_stopped=bool(how), readers_disturbed=not same)
    advice = "see 'shared-rpc doctor': which mechanism is used, and whether the kernel seals memfds"
    outcome.require(bool(how), "the write is refused", "its write went through", advice)
    outcome.require(same, "the other process computes the same bits", "other bits", advice)


def lifetimes(stage: Stage, outcome: Outcome) -> None:
    """Check for leaks after many attaches and releases, and after many processes that attach, compute and end."""
    total, cycles = stage.settings.lifetimes, stage.settings.cycles
    model = {"nbytes": min(stage.nbytes, _SMALL), "seed": SEED}
    ends = list(itertools.islice(itertools.cycle(_ENDS), total))
    together = min(len(os.sched_getaffinity(0)), 8)
    # Another process holds the model, as in practice; each release is the last one of its process.
    with stage.clients(1) as (first,), stage.clients(1) as (client,):
        first.ask("attach", **model)
        right, leases = first.ask("digest"), stage.info()["leases"]
        client.ask("cycles", count=_WARM_UP, **model)
        pids = {"server": stage.broker.pid, "worker": stage.worker_pid(), "client": client.pid}

        def counts() -> dict[str, dict[str, int]]:
            info = stage.info()
            return {**{who: counts_of(pid) for who, pid in pids.items()}, "counters": {key: info[key] for key in _COUNTERS}}

        def grown() -> list[str]:
            now = counts()
            return [
                f"{who}: {key} {before[who][key]} → {value}"
                for who in pids
                for key, value in now[who].items()
                if value - before[who][key] > _GROWTH[key]
            ]

        before, held, good, digests = counts(), stage.segments(), 0, set()
        before["counters"]["leases"] = leases
        seconds = client.ask("cycles", count=cycles, **model)
        for number in range(0, total, together):
            with stage.clients(len(batch := ends[number : number + together])) as clients:
                all_of(clients, "attach", **model)
                digests |= set(all_of(clients, "digest"))
                for process, how in zip(clients, batch, strict=True):
                    process.send("end", how=how)
                codes = [process.wait() for process in clients]
            good += sum(code == (-signal.SIGKILL if how == "killed" else 0) for code, how in zip(codes, batch, strict=True))
        stage.within(_SETTLED, lambda: not grown() and counts()["counters"] == before["counters"])
        stage.within(stage.kind.patience, lambda: stage.segments() <= held + stage.kind.blur)
        after, growth, more = counts(), grown(), stage.segments() - held
        still = first.ask("digest")
        same = (pids["server"], pids["worker"]) == (stage.broker.pid, stage.worker_pid())
    outcome.note(
        "{cycles} attaches and releases, {cycle_seconds} each",
        **{"cycles": cycles, "cycle_seconds": seconds / cycles, "segment_bytes": more},
    )
    outcome.note(
        "{as_expected} of {lifetimes} processes attached, computed and ended as told", lifetimes=total, as_expected=good
    )
    outcome.note(
        ", ".join(growth) or "server, worker and client are as before",
        **{f"{who}_{key}": after[who][key] - before[who][key] for who in pids for key in _GROWTH},
    )
    outcome.require(good == total, f"{total} processes end as they are asked to", f"{total - good} ended otherwise")
    outcome.require(digests == {right}, "all compute the same bits", f"{len(digests | {right})} different results")
    outcome.require(still == right, "one that was there all the time computes on", "it computes other bits")
    changed = [
        f"{key} {old} → {after['counters'][key]}" for key, old in before["counters"].items() if old != after["counters"][key]
    ]
    outcome.require(not changed, f"the server's counters as before within {_SETTLED:g} s", ", ".join(changed))
    outcome.require(same, "the same server and the same worker all the time", "one of them was replaced")
    keeps = "the named process does not release what it was given; if it is the client, look for handles that are kept"
    kept = f"{_GROWTH['mappings']} mappings and {size(_GROWTH['memory_bytes'])} of each process"
    limits = f"the state after {_WARM_UP} attaches, but for {kept}"
    outcome.require(not growth, limits, "; ".join(growth), keeps)
    holders = "memory of released objects is kept: see its holders with 'shared-rpc objects'"
    outcome.require(more <= stage.kind.blur, "no more shared memory than before", f"{size(more)} more", holders)


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
    seed, patience = stage.new_seed(), stage.kind.patience
    with stage.connect() as victim:
        before = stage.segments()
        object_id, _ = victim.ask("attach", nbytes=stage.nbytes, seed=seed)
        stage.drop(seed)
        held = stage.segments() - before
        os.kill(victim.pid, signal.SIGKILL)
        begin = time.monotonic()
        lease = stage.within(_LEASES, lambda: object_id not in {item["object_id"] for item in stage.client.list_objects()})
        freed = stage.within(patience, lambda: stage.segments() <= before + stage.kind.blur)
        memory_back = time.monotonic() - begin
        left = stage.segments() - before
    outcome.note(
        "client: its lease was released after {lease_back_seconds}, its {held_bytes} after {memory_back_seconds}",
        **{"lease_back_seconds": -1 if lease is None else lease, "memory_back_seconds": -1 if freed is None else memory_back},
        **{"held_bytes": held, "left_bytes": left},
    )
    outcome.require(held >= stage.nbytes * 3 // 4, f"it holds {size(stage.nbytes)}", size(held))
    outcome.require(lease is not None, f"its lease is released within {_LEASES:g} s", "it is held still")
    advice = "see which process has it open: ls -l /proc/*/fd | grep shared-rpc; on a GPU, nvidia-smi"
    outcome.require(freed is not None, f"its memory is free within {patience:g} s", f"{size(left)} are in use still", advice)


def _kill_worker(stage: Stage, outcome: Outcome, right: str) -> None:
    """Kill the worker: a new process attaches at once, the next build runs in a new worker."""
    seed = stage.new_seed()
    with stage.connect() as late, stage.connect() as builder:
        # Creates a context, which takes long.
        all_of([late, builder], "alone", nbytes=LEAST, seed=seed, device=stage.device["device"])
        worker = stage.worker_pid()
        os.kill(worker, signal.SIGKILL)
        begin = time.monotonic()
        _, attached = late.ask("attach", nbytes=stage.nbytes, seed=SEED)
        none = not any(item["state"] == "ready" and item["pid"] != worker for item in stage.info()["workers"])
        same = late.ask("digest") == right
        builder.ask("attach", nbytes=stage.nbytes, seed=seed)
        built = time.monotonic() - begin
        stage.drop(seed)
        new = stage.worker_pid()
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
    pids = {stage.broker.pid, stage.worker_pid()}
    os.kill(stage.broker.pid, signal.SIGKILL)
    ended = stage.within(_ORPHAN, lambda: not pids & set(stage.pids()))
    same = all_of(clients, "digest") == right
    clients[0].ask("write", index=0, value=1000.0)
    shared = all_of(clients, "read", count=1) == [[1000.0]] * len(clients)
    begin = time.monotonic()
    stage.restart_server()
    started = time.monotonic() - begin
    again = all_of(clients, "attach", nbytes=stage.nbytes, seed=SEED)
    taken_over = all_of(clients, "digest") == right
    one = len({object_id for object_id, _ in again}) == 1
    outcome.note(
        "server: attached processes share on, and attach to the new one, which answered after {new_server_seconds}",
        new_server_seconds=started,
    )
    outcome.require(same, "attached processes compute the same bits as before", "some compute other bits")
    outcome.require(shared, "what one of them writes the others see", "they do not")
    outcome.require(ended is not None, f"its worker ends with it, within {_ORPHAN:g} s", "it runs still")
    found = "other bits" if one else "several models"
    outcome.require(taken_over and one, "the same clients attach to one new model with the same bits", found)


CHECKS = (
    Check("sharing", "one model for all", sharing),
    Check("read_only", "read-only memory stays as it is", read_only),
    Check("lifetimes", "nothing is left of those that end", lifetimes),
    Check("kills", "kill -9 of client, worker, server", kills),
)


def chosen(names: Sequence[str]) -> list[Check]:
    """Return the checks of these names, all of them for no name.

    :raises ConfigurationError: for an unknown name.
    """
    known = [check.name for check in CHECKS]
    for name in names:
        if name not in known:
            raise ConfigurationError(f"--check {name}: use {', '.join(known)}")
    return [check for check in CHECKS if not names or check.name in names]
