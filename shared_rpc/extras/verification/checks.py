"""The nine checks, in the order in which they are made."""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

from shared_rpc.extras.verification.clients import ClientFailed, VerifyClient
from shared_rpc.extras.verification.gauges import Counts, DeviceGauge, HostGauge, counts_of
from shared_rpc.extras.verification.stage import Stage, within
from shared_rpc.extras.verification.verdict import Outcome, size

__all__ = ["CHECKS", "Bench", "Check"]

#: Bytes of the model of checks that are about processes: to read a large one would take most of the time.
_SMALL = 16 << 20
#: Seed of the model that most checks share, so that it is built once.
_SEED = 1
#: Ends of processes, in turn, see ``ClientProcess.end``. The one that takes long comes once in ten.
_ENDS = (*("closed", "left", "killed") * 3, "finished")
#: Seconds for a server to notice the end of a client.
_SETTLED = 2.0
#: Attaches before those that count: caches fill, and allocators reserve memory.
_WARM_UP = 100
#: Attaches between two reports of progress.
_STRIDE = 100
#: Mappings that allocators make and remove at any time.
_MAPPINGS = 8
#: Bytes that allocators keep beyond those in use. A model, or a leak of some KiB each time, is more.
_KEPT = 4 << 20
#: Counters of the server that are as before when its clients are gone.
_KEYS: tuple[Literal["leases", "sessions", "connections", "objects"], ...] = ("leases", "sessions", "connections", "objects")
#: Seconds within which the leases of a killed client are back.
_LEASES = 1.0
#: Seconds that an attach may take while there is no worker: less than a worker needs to import torch.
_NO_GAP = 1.0
#: Seconds for a worker to end with its server.
_ORPHAN = 2.0
#: Result of a write to protected memory that was not stopped.
_WRITTEN = "its write went through"


@dataclass(frozen=True)
class Check:
    """A check: ``name`` is for programs and the command line, ``title`` for people."""

    name: str
    title: str
    run: Callable[[Bench, Outcome], None]


@dataclass
class Bench:
    """Processes, gauge and settings of all checks.

    :param device: torch's name of the device, in the client processes.
    :param protects: whether the server's mechanism enforces read-only memory.
    :param nbytes: size of the model.
    :param together: number of client processes that run at the same time, where many come and go.
    """

    stage: Stage
    gauge: HostGauge | DeviceGauge
    device: str
    protects: bool
    workers: int
    nbytes: int
    lifetimes: int
    cycles: int
    together: int
    _seeds: Iterator[int] = field(default_factory=lambda: itertools.count(_SEED + 1))

    def new_seed(self) -> int:
        """Return the seed of a model that is not built yet."""
        return next(self._seeds)

    def drop(self, seed: int, endpoint: str = "model") -> None:
        """Drop a model from the server's cache; its holders keep it."""
        self.stage.client().invalidate_call_cache(endpoint, self.nbytes, seed)

    @contextmanager
    def attached(self, count: int, *, seed: int = _SEED, nbytes: int | None = None) -> Iterator[list[VerifyClient]]:
        """Start client processes that attach to the model, or to one of that size, at the same time."""
        with self.stage.clients(count) as clients:
            _all_of(clients, "attach", nbytes=nbytes or self.nbytes, seed=seed)
            yield clients


def _all_of(clients: list[VerifyClient], do: str, **options: Any) -> list[Any]:
    """Execute one command in all clients at the same time, and return the answers."""
    for client in clients:
        client.send(do, **options)
    return [client.receive() for client in clients]


def one_copy(bench: Bench, outcome: Outcome) -> None:
    """Check that N processes that attach and compute use the memory of one model more than before."""
    gauge, seed, workers = bench.gauge, bench.new_seed(), bench.workers
    with bench.stage.clients(workers) as clients:
        # First what a process needs once: contexts, kernels, workspaces, and memory that allocators keep of a build.
        _all_of(clients, "attach", nbytes=bench.nbytes, seed=_SEED, name="another")
        _all_of(clients, "digest", name="another")
        gauge.used()
        before, listed = gauge.used(), bench.stage.info()["objects"]
        attached = _all_of(clients, "attach", nbytes=bench.nbytes, seed=seed)
        _all_of(clients, "digest")
        used = gauge.used() - before
        built = bench.stage.info()["objects"] - listed
        bench.drop(seed)
    model, slowest = bench.nbytes, max(seconds for _, seconds in attached)
    outcome.figures |= {"workers": workers, "model_bytes": model, "used_bytes": used, "unshared_bytes": workers * model}
    outcome.figures |= {"models_built": built, "attach_seconds": slowest}
    outcome.found = (
        f"{workers} processes with a model of {size(model)} use {size(used)} together; "
        f"unshared it would be {size(workers * model)} ({gauge.method})"
    )
    limit = model + model // 4 + workers * gauge.noise
    outcome.require(
        used <= limit,
        f"at most {size(limit)} more than before: one model, a quarter of it, and {size(gauge.noise)} for each process",
        f"{size(used)} more, {used / model:.1f} models",
        "if nothing else uses this device meanwhile, processes copy the model: look for .clone(), .to() or deepcopy",
    )
    outcome.require(
        used >= model - model // 4 - gauge.noise,
        f"about {size(model)} more than before",
        f"{size(used)} more",
        "something else gave memory back meanwhile: run it again while this device is quiet",
    )
    objects = len({object_id for object_id, _ in attached})
    outcome.require(
        objects == 1 and built == 1,
        f"one build for {workers} processes that ask at the same time",
        f"{built} builds, {objects} objects",
    )


def zero_copy(bench: Bench, outcome: Outcome) -> None:
    """Check that all processes see what each of them writes into the model, a later one too."""
    workers, seed = max(bench.workers, 2), bench.new_seed()
    with bench.attached(workers, seed=seed) as clients:
        for number, client in enumerate(clients):
            client.ask("write", first=number, values=[1000.0 + number])
        written = [1000.0 + number for number in range(workers)]
        seen = [client.ask("read", count=workers) for client in clients]
        with bench.attached(1, seed=seed) as (late,):
            seen.append(late.ask("read", count=workers))
        bench.drop(seed)
    blind = sum(values != written for values in seen)
    outcome.figures |= {"writes": workers, "readers": len(seen), "readers_that_missed_one": blind}
    outcome.found = (
        f"{workers} processes wrote, and {len(seen) - blind} of {len(seen)} saw all of it, one that came later among them"
    )
    outcome.require(
        blind == 0,
        "every process sees what every other one has written, without a call",
        f"{blind} of {len(seen)} processes read other numbers",
        "they have copies of the model: look for .clone(), .to() or deepcopy where they attach",
    )


def accuracy(bench: Bench, outcome: Outcome) -> None:
    """Check that a forward pass over the shared model has the bits of one over an unshared model."""
    with bench.stage.clients(1) as (single,):
        alone = single.ask("alone", nbytes=bench.nbytes, seed=_SEED, device=bench.device)
    with bench.attached(bench.workers) as clients:
        shared = _all_of(clients, "digest")
    wrong = sum(digest != alone for digest in shared)
    outcome.figures |= {"workers": bench.workers, "workers_that_differ": wrong}
    outcome.found = (
        f"{bench.workers - wrong} of {bench.workers} processes compute the same bits as an unshared one ({alone[:12]}…)"
    )
    outcome.require(
        wrong == 0,
        "the bits that a process computes which has the model for itself",
        f"{wrong} of {bench.workers} processes compute others",
        "see whether a process writes into the model, and whether torch and its settings are the same in all processes",
    )


def read_only(bench: Bench, outcome: Outcome) -> None:
    """Check that memory of an ``access="read"`` endpoint cannot be changed: a process that writes ends, or gets an error."""
    if not bench.protects:
        outcome.skipped = True
        outcome.found = "the mechanism that this GPU is shared with cannot protect memory; see 'shared-rpc doctor'"
        return
    model = {"nbytes": bench.nbytes, "seed": _SEED, "endpoint": "protected"}
    with bench.stage.clients(2) as clients:
        _all_of(clients, "attach", **model)
        reader, writer = clients
        before = reader.ask("digest")
        how = _WRITTEN
        try:
            writer.ask("write", first=0, values=[1000.0])
        except ClientFailed as failure:
            how = str(failure)
        after = reader.ask("digest")
        bench.drop(_SEED, "protected")
    stopped = how != _WRITTEN
    killed = f"exit code {-signal.SIGSEGV}" in how
    outcome.figures |= {"writes_stopped": int(stopped), "readers_disturbed": int(before != after)}
    outcome.found = (
        f"a process that wrote {'was ended by the kernel' if killed else 'got an error'}, and another one computes on"
    )
    advice = "see 'shared-rpc doctor': which mechanism is used, and whether the kernel seals memfds"
    outcome.require(stopped, "the write is refused", how, advice)
    outcome.require(before == after, "the other process computes the same bits", "other bits", advice)


def lifetimes(bench: Bench, outcome: Outcome) -> None:
    """Start processes that attach, compute and end: with and without closing their client, and by SIGKILL."""
    stage, total, nbytes = bench.stage, bench.lifetimes, min(bench.nbytes, _SMALL)
    ends, codes, digests = itertools.cycle(_ENDS), [], set()
    running: deque[VerifyClient] = deque()
    try:
        with bench.attached(1, nbytes=nbytes) as (first,):
            right = first.ask("digest")
            broker, worker = stage.broker_pid, stage.worker_pid()
            before = _state(bench)
            for number in range(total + bench.together):
                if number < total:
                    running.append(stage.connect())
                    running[-1].send("attach", nbytes=nbytes, seed=_SEED)
                if number >= bench.together and running:
                    client = running.popleft()
                    client.receive()
                    digests.add(client.ask("digest"))
                    how = next(ends)
                    codes.append(client.end(how) == (-signal.SIGKILL if how == "killed" else 0))
                    client.close()
                    outcome.watcher.step(len(codes), total)
            settled = within(_SETTLED, lambda: _state(bench) == before, stage.interrupts)
            after = _state(bench)
            still = first.ask("digest")
    finally:
        for client in running:
            client.close()
    good = sum(codes)
    outcome.figures |= {"lifetimes": len(codes), "as_expected": good}
    outcome.found = (
        f"{good} of {total} processes attached, computed and ended as told (forked with torch imported; a session each; some "
        f"closed their client, some did not, a third was killed)"
    )
    outcome.require(good == total, f"{total} processes end as they are asked to", f"{total - good} ended otherwise")
    outcome.require(digests == {right}, "all compute the same bits", f"{len(digests | {right})} different results")
    outcome.require(still == right, "one that was there all the time computes on", "it computes other bits")
    found = ", ".join(f"{key} {before[key]} → {after[key]}" for key in before if before[key] != after[key])
    outcome.require(settled is not None, f"the server is as before within {_SETTLED:g} s", found or "it changes still")
    same = (broker, worker) == (stage.broker_pid, stage.worker_pid())
    outcome.require(same, "the same server and the same worker all the time", "one of them was replaced")


def _state(bench: Bench) -> dict[str, int]:
    info = bench.stage.info()
    return {key: info[key] for key in _KEYS} | {"descriptors": counts_of(bench.stage.broker_pid).fds}


def growth(bench: Bench, outcome: Outcome) -> None:
    """Check that server, worker and client need no more after many attaches and releases than after the first hundred."""
    stage = bench.stage
    # Another process holds the model, as in practice; each release is the last one of its process.
    with bench.attached(1), stage.clients(1) as (client,):
        leases = stage.info()["leases"]
        client.ask("cycles", count=_WARM_UP, nbytes=bench.nbytes, seed=_SEED)
        pids = {"server": stage.broker_pid, "worker": stage.worker_pid(), "client": client.pid}
        before, state, used = _counts(pids), _state(bench) | {"leases": leases}, bench.gauge.segments()
        seconds = 0.0
        for done in range(0, bench.cycles, _STRIDE):
            count = min(_STRIDE, bench.cycles - done)
            seconds += client.ask("cycles", count=count, nbytes=bench.nbytes, seed=_SEED)
            outcome.watcher.step(done + count, bench.cycles)
        within(_SETTLED, lambda: not _grown(before, _counts(pids)) and _state(bench) == state, stage.interrupts)
        after, later, more = _counts(pids), _state(bench), bench.gauge.segments() - used
    memory = {f"{who}_memory_bytes": after[who].memory - before[who].memory for who in pids}
    fds = {f"{who}_descriptors": after[who].fds - before[who].fds for who in pids}
    mappings = {f"{who}_mappings": after[who].mappings - before[who].mappings for who in pids}
    outcome.figures |= {"cycles": bench.cycles, "cycle_seconds": seconds / bench.cycles, "segment_bytes": more}
    outcome.figures |= memory | fds | mappings | {"leases": later["leases"] - state["leases"]}
    outcome.found = (
        f"{bench.cycles} attaches and releases, {seconds / bench.cycles * 1e3:.2f} ms each: descriptors "
        f"{_signed(sum(fds.values()))}, mappings {_signed(sum(mappings.values()))}, leases "
        f"{_signed(later['leases'] - state['leases'])}, memory {size(sum(memory.values()))}"
    )
    grown = _grown(before, after)
    outcome.require(
        not grown,
        f"the state after the first {_WARM_UP}, but for {_MAPPINGS} mappings and {size(_KEPT)} of each process",
        "; ".join(grown),
        "the named process does not release what it was given; if it is the client, look for handles that are kept",
    )
    changed = ", ".join(f"{key} {state[key]} → {later[key]}" for key in state if state[key] != later[key])
    outcome.require(not changed, "the server's leases, sessions and objects as before", changed)
    outcome.require(
        more <= bench.gauge.blur,
        "no more shared memory than before",
        f"{size(more)} more",
        "memory of released objects is kept: see its holders with 'shared-rpc objects'",
    )


def _counts(pids: dict[str, int]) -> dict[str, Counts]:
    return {who: counts_of(pid) for who, pid in pids.items()}


def _grown(before: dict[str, Counts], after: dict[str, Counts]) -> list[str]:
    """List the growth that allocators do not explain, for people."""
    limits: dict[str, Any] = {"fds": 0, "mappings": _MAPPINGS, "threads": 0, "memory": _KEPT}
    return [
        f"{who}: {key} {old} → {new}"
        for who in before
        for (key, limit), old, new in zip(limits.items(), before[who], after[who], strict=True)
        if new - old > limit
    ]


def _signed(number: int) -> str:
    return f"{number:+d}" if number else "±0"


def kill_client(bench: Bench, outcome: Outcome) -> None:
    """Kill the only holder of a model that is in no cache: lease and memory are released."""
    stage, seed = bench.stage, bench.new_seed()
    with bench.attached(1) as (other,):
        right = other.ask("digest")
        before = bench.gauge.segments()
        with stage.connect() as victim:
            object_id, _ = victim.ask("attach", nbytes=bench.nbytes, seed=seed)
            bench.drop(seed)
            held = bench.gauge.segments() - before
            os.kill(victim.pid, signal.SIGKILL)
            leases = within(_LEASES, lambda: not _holders(bench, object_id), stage.interrupts)
            enough = before + bench.gauge.blur
            memory = within(bench.gauge.patience, lambda: bench.gauge.segments() <= enough, stage.interrupts)
        left = bench.gauge.segments() - before
        still = other.ask("digest")
    outcome.figures |= {"held_bytes": held, "left_bytes": left}
    back = None if leases is None or memory is None else leases + memory
    outcome.figures |= {"leases_back_seconds": -1.0 if leases is None else leases}
    outcome.figures |= {"memory_back_seconds": -1.0 if back is None else back}
    outcome.found = (
        f"its lease was back after {_took(leases)}, its {size(held)} after {_took(back)}; another client computes on"
    )
    outcome.require(held >= bench.nbytes * 3 // 4, f"it holds {size(bench.nbytes)}", f"{size(held)}")
    outcome.require(leases is not None, f"its lease is back within {_LEASES:g} s", "it is held still")
    outcome.require(
        memory is not None,
        f"its memory is back within {bench.gauge.patience:g} s",
        f"{size(left)} are in use still",
        "see which process has it open: ls -l /proc/*/fd | grep shared-rpc; on a GPU, nvidia-smi",
    )
    outcome.require(still == right, "other clients compute on", "another client computes other bits")


def _holders(bench: Bench, object_id: str) -> list[Any]:
    objects = bench.stage.client().list_objects()
    return [holder for item in objects if item["object_id"] == object_id for holder in item["holders"]]


def kill_worker(bench: Bench, outcome: Outcome) -> None:
    """Kill the worker: attached processes compute on, a new one attaches at once, the next build runs in a new worker."""
    stage = bench.stage
    with bench.attached(bench.workers) as clients, stage.clients(2) as (late, builder):
        right = _all_of(clients, "digest")
        _all_of([late, builder], "warm_up", device=bench.device)
        worker = stage.worker_pid()
        os.kill(worker, signal.SIGKILL)
        begin = time.monotonic()
        _, attached = late.ask("attach", nbytes=bench.nbytes, seed=_SEED)
        workers = stage.info()["workers"]
        no_worker = not any(item["state"] == "ready" and item["pid"] != worker for item in workers)
        same = _all_of([*clients, late], "digest") == [*right, right[0]]
        outcome.figures |= {"attach_seconds": attached, "attached_without_worker": int(no_worker)}
        seed = bench.new_seed()
        builder.ask("attach", nbytes=bench.nbytes, seed=seed)
        built = time.monotonic() - begin
        builder.ask("digest")
        bench.drop(seed)
        new = stage.worker_pid()
    outcome.figures |= {"next_build_seconds": built}
    outcome.found = (
        f"{bench.workers} attached computed on, another one attached after {attached * 1e3:.0f} ms"
        f"{' while there was no worker' if no_worker else ''}, the next build was there after {built:.1f} s"
    )
    outcome.require(same, "all attached processes compute the same bits as before", "some compute other bits")
    outcome.require(attached < _NO_GAP, f"a new process attaches within {_NO_GAP:g} s", f"it took {attached:.2f} s")
    outcome.require(new != worker, "a new worker", "the worker that was killed is listed still")


def kill_server(bench: Bench, outcome: Outcome) -> None:
    """Kill the server: attached processes compute on and share on; the same clients use the next server."""
    stage = bench.stage
    with bench.attached(max(bench.workers, 2)) as clients:
        right = _all_of(clients, "digest")
        pids = [stage.broker_pid, stage.worker_pid()]
        os.kill(stage.broker_pid, signal.SIGKILL)
        worker_gone = within(_ORPHAN, lambda: not set(pids) & set(stage.pids()), stage.interrupts)
        same = _all_of(clients, "digest") == right
        shared = _shares(clients)
        begin = time.monotonic()
        stage.restart_server()
        started = time.monotonic() - begin
        again = _all_of(clients, "attach", nbytes=bench.nbytes, seed=_SEED, name="again")
        taken_over = _all_of(clients, "digest", name="again") == right
        one = len({object_id for object_id, _ in again}) == 1
    outcome.figures |= {"new_server_seconds": started}
    outcome.found = (
        f"{len(clients)} attached computed and shared on; a new server answered {started:.1f} s after it was started, "
        f"and the same client objects attached to its model"
    )
    outcome.require(same, "attached processes compute the same bits as before", "some compute other bits")
    outcome.require(shared, "what one of them writes the others see", "they do not")
    outcome.require(worker_gone is not None, f"its worker ends with it, within {_ORPHAN:g} s", "it runs still")
    outcome.require(
        taken_over and one,
        "the same clients attach to one new model with the same bits",
        "other bits" if one else "several models",
    )


def _shares(clients: list[VerifyClient]) -> bool:
    """Return whether all clients see a write of the first one, which is undone."""
    first = clients[0]
    (old,) = first.ask("read", count=1)
    other = 1.0 if old != 1.0 else 2.0  # exact in any dtype: what is read must be what was written
    first.ask("write", first=0, values=[other])
    seen = all(answer == [other] for answer in _all_of(clients, "read", count=1))
    first.ask("write", first=0, values=[old])
    return seen


def _took(seconds: float | None) -> str:
    return "too long" if seconds is None else f"{seconds * 1e3:.0f} ms"


CHECKS = (
    Check("one_copy", "one copy in memory", one_copy),
    Check("zero_copy", "zero copy: writes are seen by all", zero_copy),
    Check("accuracy", "same results as unshared", accuracy),
    Check("read_only", "read-only memory stays as it is", read_only),
    Check("lifetimes", "workers come and go", lifetimes),
    Check("growth", "nothing grows", growth),
    Check("kill_client", "kill -9 of a client", kill_client),
    Check("kill_worker", "kill -9 of the server's worker", kill_worker),
    Check("kill_server", "kill -9 of the server", kill_server),
)
