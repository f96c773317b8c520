"""Whether a death is an event: of a client, of the worker that built what is shared, of the server."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

from shared_rpc.verification.checks.check import SEED, Bench, all_of
from shared_rpc.verification.clients import RemoteClient
from shared_rpc.verification.stage import within
from shared_rpc.verification.verdict import Verdict, size

__all__ = ["kill_client", "kill_server", "kill_worker"]

#: Seconds within which the leases of a killed client are back.
_LEASES = 1.0
#: Seconds that an attach may take while there is no worker: less than a worker needs to import torch.
_NO_GAP = 1.0
#: Seconds for a worker to end with its server.
_ORPHAN = 2.0


def kill_client(bench: Bench, verdict: Verdict) -> None:
    """The only holder of a model, which is in no cache, is killed: lease and memory come back."""
    stage, seed = bench.stage, bench.new_seed()
    with bench.attached(1) as (other,):
        right = other.ask("digest")["digest"]
        before = bench.gauge.segments()
        with stage.connect() as victim:
            object_id = victim.ask("attach", nbytes=bench.nbytes, seed=seed)["object_id"]
            bench.drop(seed)
            held = bench.gauge.segments() - before
            os.kill(victim.pid, signal.SIGKILL)
            leases = within(_LEASES, lambda: not _holders(bench, object_id), stage.interrupts)
            enough = before + bench.gauge.blur
            memory = within(bench.gauge.patience, lambda: bench.gauge.segments() <= enough, stage.interrupts)
        left = bench.gauge.segments() - before
        still = other.ask("digest")["digest"]
    verdict.figures |= {"held_bytes": held, "left_bytes": left}
    verdict.figures |= {"leases_back_seconds": -1.0 if leases is None else leases}
    verdict.figures |= {"memory_back_seconds": -1.0 if leases is None or memory is None else leases + memory}
    verdict.found = (
        f"its lease was back after {_took(leases)}, its {size(held)} after "
        f"{_took(None if leases is None or memory is None else leases + memory)}; another client computes on"
    )
    report = "please report this, with what 'shared-rpc objects' shows"
    verdict.require(held >= bench.nbytes * 3 // 4, f"it holds {size(bench.nbytes)}", f"{size(held)}", report)
    verdict.require(leases is not None, f"its lease is back within {_LEASES:g} s", "it is held still", report)
    verdict.require(
        memory is not None,
        f"its memory is back within {bench.gauge.patience:g} s",
        f"{size(left)} are in use still",
        "see which process has it open: ls -l /proc/*/fd | grep shared-rpc; on a GPU, nvidia-smi",
    )
    verdict.require(still == right, "other clients compute on", "another client computes other bits", report)


def _holders(bench: Bench, object_id: str) -> list[Any]:
    objects = bench.stage.client().list_objects()
    return [holder for item in objects if item["object_id"] == object_id for holder in item["holders"]]


def kill_worker(bench: Bench, verdict: Verdict) -> None:
    """Who is attached computes on, who comes attaches at once, and the next build runs in a new worker."""
    stage = bench.stage
    with bench.attached(bench.workers) as clients, stage.clients(2) as (late, builder):
        right = all_of(clients, "digest")
        all_of([late, builder], "warm_up", device=bench.device)
        worker = stage.worker_pid()
        os.kill(worker, signal.SIGKILL)
        begin = time.monotonic()
        attached = late.ask("attach", nbytes=bench.nbytes, seed=SEED)["seconds"]
        workers = stage.info()["workers"]
        no_worker = not any(item["state"] == "ready" and item["pid"] != worker for item in workers)
        same = all_of([*clients, late], "digest") == [*right, right[0]]
        verdict.figures |= {"attach_seconds": attached, "attached_without_worker": int(no_worker)}
        seed = bench.new_seed()
        builder.ask("attach", nbytes=bench.nbytes, seed=seed)
        built = time.monotonic() - begin
        builder.ask("digest")
        bench.drop(seed)
        new = stage.worker_pid()
    verdict.figures |= {"next_build_seconds": built}
    verdict.found = (
        f"{bench.workers} attached computed on, another one attached after {attached * 1e3:.0f} ms"
        f"{' while there was no worker' if no_worker else ''}, the next build was there after {built:.1f} s"
    )
    report = "please report this, with the server's log"
    verdict.require(same, "all attached processes compute the same bits as before", "some compute other bits", report)
    verdict.require(attached < _NO_GAP, f"a new process attaches within {_NO_GAP:g} s", f"it took {attached:.2f} s", report)
    verdict.require(new != worker, "a new worker", "the worker that was killed is listed still", report)


def kill_server(bench: Bench, verdict: Verdict) -> None:
    """Who is attached computes on and shares on; a new server takes over, and the same clients use it."""
    stage = bench.stage
    with bench.attached(max(bench.workers, 2)) as clients:
        right = all_of(clients, "digest")
        pids = [stage.broker_pid, stage.worker_pid()]
        os.kill(stage.broker_pid, signal.SIGKILL)
        worker_gone = within(_ORPHAN, lambda: not set(pids) & set(stage.pids()), stage.interrupts)
        same = all_of(clients, "digest") == right
        shared = _shares(clients)
        begin = time.monotonic()
        stage.restart_server()
        started = time.monotonic() - begin
        again = all_of(clients, "attach", nbytes=bench.nbytes, seed=SEED, name="again")
        taken_over = all_of(clients, "digest", name="again") == right
        one = len({answer["object_id"] for answer in again}) == 1
    verdict.figures |= {"new_server_seconds": started}
    verdict.found = (
        f"{len(clients)} attached computed and shared on; a new server answered {started:.1f} s after it was started, "
        f"and the same client objects attached to its model"
    )
    report = "please report this, with the server's log"
    verdict.require(same, "attached processes compute the same bits as before", "some compute other bits", report)
    verdict.require(shared, "what one of them writes the others see", "they do not", report)
    verdict.require(worker_gone is not None, f"its worker ends with it, within {_ORPHAN:g} s", "it runs still", report)
    verdict.require(
        taken_over and one,
        "the same clients attach to one new model with the same bits",
        "other bits" if one else "several models",
        report,
    )


def _shares(clients: list[RemoteClient]) -> bool:
    """Whether a write of the first one is seen by all. It is taken back."""
    first = clients[0]
    (old,) = first.ask("read", count=1)["values"]
    other = 1.0 if old != 1.0 else 2.0  # exact in any dtype: what is read must be what was written
    first.ask("write", first=0, values=[other])
    seen = all(answer["values"] == [other] for answer in all_of(clients, "read", count=1))
    first.ask("write", first=0, values=[old])
    return seen


def _took(seconds: float | None) -> str:
    return "too long" if seconds is None else f"{seconds * 1e3:.0f} ms"
