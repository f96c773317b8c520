"""Whether it stays as it is: many processes that come and go, and many attaches of one."""

from __future__ import annotations

import itertools
import signal
from collections import deque
from typing import Any

from shared_rpc.verification.checks.check import SEED, SMALL, Bench
from shared_rpc.verification.clients import RemoteClient
from shared_rpc.verification.processes import Counts, counts_of
from shared_rpc.verification.stage import within
from shared_rpc.verification.verdict import Verdict, size

__all__ = ["growth", "lifetimes"]

#: How processes end, in turn: see ``ClientProcess.end``. The one that takes long comes once in ten.
_ENDS = (*("closed", "left", "killed") * 3, "finished")
#: Seconds for a server to notice what has ended.
_SETTLED = 2.0
#: Attaches before those that count: caches fill, and allocators take what they keep.
_WARM_UP = 100
#: Attaches between two looks at how far it is.
_STRIDE = 100
#: Mappings that allocators make and give back as they like.
_MAPPINGS = 8
#: Bytes that allocators keep beyond what is in use; a model, or a leak of some KiB each time, is more than that.
_KEPT = 4 << 20
#: Counters of the server that are as before when its clients are gone.
_KEYS = ("leases", "sessions", "connections", "objects")


def lifetimes(bench: Bench, verdict: Verdict) -> None:
    """Processes start, attach, compute and end: with and without closing their client, and by SIGKILL."""
    stage, total, nbytes = bench.stage, bench.lifetimes, min(bench.nbytes, SMALL)
    ends, codes, digests = itertools.cycle(_ENDS), [], set()
    running: deque[RemoteClient] = deque()
    try:
        with bench.attached(1, nbytes=nbytes) as (first,):
            right = first.ask("digest")["digest"]
            broker, worker = stage.broker_pid, stage.worker_pid()
            before = _state(bench)
            for number in range(total + bench.together):
                if number < total:
                    running.append(stage.connect())
                    running[-1].tell("attach", nbytes=nbytes, seed=SEED)
                if number >= bench.together and running:
                    client = running.popleft()
                    client.answer()
                    digests.add(client.ask("digest")["digest"])
                    how = next(ends)
                    codes.append(client.end(how) == (-signal.SIGKILL if how == "killed" else 0))
                    client.close()
                    verdict.step(len(codes), total)
            settled = within(_SETTLED, lambda: _state(bench) == before, stage.interrupts)
            after = _state(bench)
            still = first.ask("digest")["digest"]
    finally:
        for client in running:
            client.close()
    good = sum(codes)
    verdict.figures |= {"lifetimes": len(codes), "as_expected": good}
    verdict.found = (
        f"{good} of {total} processes attached, computed and ended as told (forked with torch imported; a session each; some "
        f"closed their client, some did not, a third was killed)"
    )
    report = "please report this, with the server's log"
    verdict.require(good == total, f"{total} processes end as they are told to", f"{total - good} ended otherwise", report)
    verdict.require(digests == {right}, "all compute the same bits", f"{len(digests | {right})} different results", report)
    verdict.require(still == right, "one that was there all the time computes on", "it computes other bits", report)
    found = ", ".join(f"{key} {before[key]} → {after[key]}" for key in before if before[key] != after[key])
    verdict.require(settled is not None, f"the server is as before within {_SETTLED:g} s", found or "it changes still", report)
    same = (broker, worker) == (stage.broker_pid, stage.worker_pid())
    verdict.require(same, "the same server and the same worker all the time", "one of them was replaced", report)


def _state(bench: Bench) -> dict[str, int]:
    info = bench.stage.info()
    return {key: info[key] for key in _KEYS} | {"descriptors": counts_of(bench.stage.broker_pid).fds}


def growth(bench: Bench, verdict: Verdict) -> None:
    """After many attaches and releases, server, worker and client have what they had after the first hundred."""
    stage = bench.stage
    # Somebody else holds the model, as in life; each release is the last one of its process.
    with bench.attached(1), stage.clients(1) as (client,):
        leases = stage.info()["leases"]
        client.ask("cycles", count=_WARM_UP, nbytes=bench.nbytes, seed=SEED)
        pids = {"server": stage.broker_pid, "worker": stage.worker_pid(), "client": client.pid}
        before, state, used = _counts(pids), _state(bench) | {"leases": leases}, bench.gauge.segments()
        seconds = 0.0
        for done in range(0, bench.cycles, _STRIDE):
            count = min(_STRIDE, bench.cycles - done)
            seconds += client.ask("cycles", count=count, nbytes=bench.nbytes, seed=SEED)["seconds"]
            verdict.step(done + count, bench.cycles)
        within(_SETTLED, lambda: not _grown(before, _counts(pids)) and _state(bench) == state, stage.interrupts)
        after, later, more = _counts(pids), _state(bench), bench.gauge.segments() - used
    memory = {f"{who}_memory_bytes": after[who].memory - before[who].memory for who in pids}
    fds = {f"{who}_descriptors": after[who].fds - before[who].fds for who in pids}
    mappings = {f"{who}_mappings": after[who].mappings - before[who].mappings for who in pids}
    verdict.figures |= {"cycles": bench.cycles, "cycle_seconds": seconds / bench.cycles, "segment_bytes": more}
    verdict.figures |= memory | fds | mappings | {"leases": later["leases"] - state["leases"]}
    verdict.found = (
        f"{bench.cycles} attaches and releases, {seconds / bench.cycles * 1e3:.2f} ms each: descriptors "
        f"{_signed(sum(fds.values()))}, mappings {_signed(sum(mappings.values()))}, leases "
        f"{_signed(later['leases'] - state['leases'])}, memory {size(sum(memory.values()))}"
    )
    grown = _grown(before, after)
    verdict.require(
        not grown,
        f"what was there after the first {_WARM_UP}, but for {_MAPPINGS} mappings and {size(_KEPT)} of each process",
        "; ".join(grown),
        "the process named does not let go of what it was given; if it is the client, look for handles that are kept",
    )
    changed = ", ".join(f"{key} {state[key]} → {later[key]}" for key in state if state[key] != later[key])
    verdict.require(not changed, "the server's leases, sessions and objects as before", changed, "please report this")
    verdict.require(
        more <= bench.gauge.blur,
        "no more shared memory than before",
        f"{size(more)} more",
        "memory of released objects is kept: see who holds it with 'shared-rpc objects'",
    )


def _counts(pids: dict[str, int]) -> dict[str, Counts]:
    return {who: counts_of(pid) for who, pid in pids.items()}


def _grown(before: dict[str, Counts], after: dict[str, Counts]) -> list[str]:
    """What has become more than allocators explain, for people."""
    limits: dict[str, Any] = {"fds": 0, "mappings": _MAPPINGS, "threads": 0, "memory": _KEPT}
    return [
        f"{who}: {key} {old} → {new}"
        for who in before
        for (key, limit), old, new in zip(limits.items(), before[who], after[who], strict=True)
        if new - old > limit
    ]


def _signed(number: int) -> str:
    return f"{number:+d}" if number else "±0"
