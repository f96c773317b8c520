"""The checks, in the order in which they are made."""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Literal

from shared_rpc.extras.verification.clients import ClientFailed, VerifyClient
from shared_rpc.extras.verification.stage import COUNTED as _COUNTED
from shared_rpc.extras.verification.stage import SEED, Stage, all_of, counts_of

#: Bytes of the smallest model: a copy exceeds the noise of the measurements.
LEAST = 8 << 20
#: Bytes of the model of many processes: to read a large one would take most of the time.
_SMALL = 16 << 20
#: Ends of processes, in turn, see ``Subject.end``. The one that takes long comes once in ten.
_ENDS = (*("closed", "left", "killed") * 3, "finished")
#: Seconds for a server to notice the end of a client.
_SETTLED = 2.0
#: Attaches before those that count: caches fill, and allocators reserve memory.
_WARM_UP = 100
#: Mappings that allocators make and remove at any time, and bytes that they keep beyond those in use.
_MAPPINGS, _KEPT = 8, 4 << 20
#: Seconds within which the leases of a killed client are released.
_LEASES = 1.0
#: Seconds that an attach may take while there is no worker: less than a worker needs to import torch.
_NO_GAP = 1.0
#: Seconds for a worker to end with its server.
_ORPHAN = 2.0
#: Advice where a promise of the library itself is broken.
_REPORT = "please report this, with the server's log"


@dataclass
class Outcome:
    """The outcome of a check, filled while it runs: a check that breaks off keeps what it found.

    ``name`` is for programs, ``title`` for people.
    """

    name: str
    title: str
    state: Literal["passed", "failed", "skipped"] = "passed"
    seconds: float = 0.0
    #: Lines for people.
    found: list[str] = field(default_factory=list)
    #: Each has ``expected``, ``found`` and ``advice``.
    problems: list[dict[str, str]] = field(default_factory=list)
    #: Counts; those of other units say so at the end of their name, ``_bytes`` or ``_seconds``.
    figures: dict[str, float] = field(default_factory=dict)

    def note(self, text: str, **figures: float) -> None:
        """Add figures, and a line that has some of them in braces."""
        self.figures |= figures
        self.found.append(text.format(**{name: _shown(name, value) for name, value in figures.items()}))

    def require(self, good: bool, expected: str, found: str, advice: str = _REPORT) -> None:
        """Note a problem unless ``good``."""
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
    """A check: ``name`` is for programs and the command line, ``title`` for people."""

    name: str
    title: str
    run: Callable[[Stage, Outcome], None]


def sharing(stage: Stage, outcome: Outcome) -> None:
    """Check that N processes share one model: its memory, the bits that they compute, and what each of them writes."""
    seed, model, workers = stage.new_seed(), stage.nbytes, max(stage.workers, 2)
    with stage.clients(workers) as clients:
        # First what a process needs once: contexts, kernels, workspaces, and memory that allocators keep of a build.
        all_of(clients, "attach", nbytes=model, seed=SEED, name="another")
        all_of(clients, "digest", name="another")
        stage.used()
        before, listed = stage.used(), stage.info()["objects"]
        attached = all_of(clients, "attach", nbytes=model, seed=seed)
        digests = all_of(clients, "digest")
        used, built = stage.used() - before, stage.info()["objects"] - listed

        for number, client in enumerate(clients):
            client.ask("write", first=number, values=[1000.0 + number])
        written = [1000.0 + number for number in range(workers)]
        with stage.attached(1, seed=seed) as (late,):
            seen = all_of([*clients, late], "read", count=workers)
        with stage.clients(1) as (single,):
            alone = single.ask("alone", nbytes=model, seed=seed, device=stage.device)
        stage.drop(seed)
    blind, wrong = sum(values != written for values in seen), sum(digest != alone for digest in digests)
    objects = len({object_id for object_id, _ in attached})
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
    most = model + model // 4 + workers * stage.noise
    outcome.require(used <= most, f"at most {size(most)} more than before", f"{used / model:.1f} models more", copies)
    quiet = "something else freed memory meanwhile: run it again while this device is quiet"
    outcome.require(used >= model * 3 // 4 - stage.noise, f"about {size(model)} more than before", f"{size(used)} more", quiet)
    outcome.require(objects == built == 1, "one build for all that ask at the same time", f"{built} builds, {objects} objects")
    settings = "see whether a process writes into the model, and whether torch's settings are the same in all processes"
    outcome.require(wrong == 0, f"all compute {same}", f"{wrong} of {workers} processes compute others", settings)
    outcome.require(blind == 0, "every process sees what others write", f"{blind} of {len(seen)} read other numbers", copies)


def read_only(stage: Stage, outcome: Outcome) -> None:
    """Check that memory of an ``access="read"`` endpoint cannot be changed: a process that writes ends, or gets an error."""
    if not stage.protects:
        outcome.state = "skipped"
        outcome.note("the mechanism that this GPU is shared with cannot protect memory; see 'shared-rpc doctor'")
        return
    with stage.clients(2) as clients:
        all_of(clients, "attach", nbytes=stage.nbytes, seed=SEED, endpoint="protected")
        reader, writer = clients
        before, how = reader.ask("digest"), ""
        try:
            writer.ask("write", first=0, values=[1000.0])
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
    """Check that nothing is left of many attaches and releases, and of many processes that attach, compute and end."""
    total, nbytes = stage.lifetimes, min(stage.nbytes, _SMALL)
    ends, good, digests, seconds = itertools.cycle(_ENDS), 0, set(), 0.0
    together = min(len(os.sched_getaffinity(0)), 8)
    running: deque[VerifyClient] = deque()
    # Another process holds the model, as in practice; each release is the last one of its process.
    with stage.attached(1, nbytes=nbytes) as (first,), stage.clients(1) as (client,), ExitStack() as stack:
        right, leases = first.ask("digest"), stage.info()["leases"]
        client.ask("cycles", count=_WARM_UP, nbytes=nbytes, seed=SEED)
        pids = {"server": stage.broker.pid, "worker": stage.worker_pid(), "client": client.pid}
        before, state, held = _counts(pids), stage.state() | {"leases": leases}, stage.segments()
        seconds += client.ask("cycles", count=stage.cycles, nbytes=nbytes, seed=SEED)
        for number in range(total + together):
            if number < total:
                running.append(stack.enter_context(stage.connect()))
                running[-1].send("attach", nbytes=nbytes, seed=SEED)
            if number >= together and running:
                process, how = running.popleft(), next(ends)
                process.receive()
                digests.add(process.ask("digest"))
                process.send("end", how=how)
                good += process.wait() == (-signal.SIGKILL if how == "killed" else 0)
        stage.within(_SETTLED, lambda: not _grown(before, _counts(pids)) and stage.state() == state)
        stage.within(stage.patience, lambda: stage.segments() <= held + stage.blur)
        after, later, more = _counts(pids), stage.state(), stage.segments() - held
        still = first.ask("digest")
        same = (pids["server"], pids["worker"]) == (stage.broker.pid, stage.worker_pid())
    grown = _grown(before, after)
    outcome.note(
        "{cycles} attaches and releases, {cycle_seconds} each",
        **{"cycles": stage.cycles, "cycle_seconds": seconds / stage.cycles, "segment_bytes": more},
    )
    outcome.note(
        "{as_expected} of {lifetimes} processes attached, computed and ended as told", lifetimes=total, as_expected=good
    )
    outcome.note(
        ", ".join(grown) or "server, worker and client are as before",
        **{f"{who}_{key}": new - old for who in pids for key, new, old in zip(_COUNTED, after[who], before[who], strict=True)},
    )
    outcome.require(good == total, f"{total} processes end as they are asked to", f"{total - good} ended otherwise")
    outcome.require(digests == {right}, "all compute the same bits", f"{len(digests | {right})} different results")
    outcome.require(still == right, "one that was there all the time computes on", "it computes other bits")
    changed = ", ".join(f"{key} {state[key]} → {later[key]}" for key in state if state[key] != later[key])
    outcome.require(not changed, f"the server's counters as before within {_SETTLED:g} s", changed)
    outcome.require(same, "the same server and the same worker all the time", "one of them was replaced")
    keeps = "the named process does not release what it was given; if it is the client, look for handles that are kept"
    limits = f"the state after {_WARM_UP} attaches, but for {_MAPPINGS} mappings and {size(_KEPT)} of each process"
    outcome.require(not grown, limits, "; ".join(grown), keeps)
    holders = "memory of released objects is kept: see its holders with 'shared-rpc objects'"
    outcome.require(more <= stage.blur, "no more shared memory than before", f"{size(more)} more", holders)


def _counts(pids: dict[str, int]) -> dict[str, tuple[int, ...]]:
    return {who: counts_of(pid) for who, pid in pids.items()}


def _grown(before: dict[str, tuple[int, ...]], after: dict[str, tuple[int, ...]]) -> list[str]:
    """List the growth that allocators do not explain, for people."""
    return [
        f"{who}: {key} {old} → {new}"
        for who in before
        for key, limit, old, new in zip(_COUNTED, (0, _MAPPINGS, 0, _KEPT), before[who], after[who], strict=True)
        if new - old > limit
    ]


def kills(stage: Stage, outcome: Outcome) -> None:
    """Kill a client, the worker and the server: the attached processes compute and share on."""
    with stage.attached(max(stage.workers, 2)) as clients:
        right = all_of(clients, "digest")
        _kill_client(stage, outcome)
        _kill_worker(stage, outcome, right[0])
        outcome.require(all_of(clients, "digest") == right, "the attached processes compute on", "some compute other bits")
        _kill_server(stage, outcome, clients, right)


def _kill_client(stage: Stage, outcome: Outcome) -> None:
    """Kill the only holder of a model that is in no cache: lease and memory are released."""
    seed, patience = stage.new_seed(), stage.patience
    with stage.connect() as victim:
        before = stage.segments()
        object_id, _ = victim.ask("attach", nbytes=stage.nbytes, seed=seed)
        stage.drop(seed)
        held = stage.segments() - before
        os.kill(victim.pid, signal.SIGKILL)
        begin = time.monotonic()
        lease = stage.within(_LEASES, lambda: object_id not in {item["object_id"] for item in stage.client().list_objects()})
        freed = stage.within(patience, lambda: stage.segments() <= before + stage.blur)
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
    with stage.clients(2) as (late, builder):
        all_of([late, builder], "alone", nbytes=LEAST, seed=seed, device=stage.device)  # creates a context, which takes long
        worker = stage.worker_pid()
        os.kill(worker, signal.SIGKILL)
        begin = time.monotonic()
        _, attached = late.ask("attach", nbytes=stage.nbytes, seed=SEED)
        none = not any(item["state"] == "ready" and item["pid"] != worker for item in stage.info()["workers"])
        same = late.ask("digest") == right
        builder.ask("attach", nbytes=stage.nbytes, seed=seed)
        built = time.monotonic() - begin
        builder.ask("digest")
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
    """Kill the server: attached processes share on; the same clients use the next server."""
    pids = {stage.broker.pid, stage.worker_pid()}
    os.kill(stage.broker.pid, signal.SIGKILL)
    ended = stage.within(_ORPHAN, lambda: not pids & set(stage.pids()))
    same = all_of(clients, "digest") == right
    clients[0].ask("write", first=0, values=[1000.0])
    shared = all_of(clients, "read", count=1) == [[1000.0]] * len(clients)
    begin = time.monotonic()
    stage.restart_server()
    started = time.monotonic() - begin
    again = all_of(clients, "attach", nbytes=stage.nbytes, seed=SEED, name="again")
    taken_over = all_of(clients, "digest", name="again") == right
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


def size(nbytes: float) -> str:
    """Format bytes: ``"64.0 MiB"``, with a sign if negative."""
    amount, unit = abs(float(nbytes)), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if amount < 1024:
            break
        amount, unit = amount / 1024, larger
    sign = "-" if nbytes < 0 else ""
    return f"{sign}{amount:.0f} B" if unit == "B" else f"{sign}{amount:.1f} {unit}"


CHECKS = (
    Check("sharing", "one model for all", sharing),
    Check("read_only", "read-only memory stays as it is", read_only),
    Check("lifetimes", "nothing is left of those that end", lifetimes),
    Check("kills", "kill -9 of client, worker, server", kills),
)
