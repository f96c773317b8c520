"""Whether memory is shared: one copy, that all see, that computes as an unshared one does, and that can be protected."""

from __future__ import annotations

import signal

from shared_rpc.verification.checks.check import SEED, Bench, all_of
from shared_rpc.verification.clients import ClientFailed
from shared_rpc.verification.verdict import Verdict, size

__all__ = ["accuracy", "one_copy", "read_only", "zero_copy"]


def one_copy(bench: Bench, verdict: Verdict) -> None:
    """N processes that attach and compute use the memory of one model more than before."""
    gauge, seed, workers = bench.gauge, bench.new_seed(), bench.workers
    with bench.stage.clients(workers) as clients:
        # What a process needs once is no part of it: contexts, kernels, workspaces, and what allocators keep of a build.
        all_of(clients, "attach", nbytes=bench.nbytes, seed=SEED, name="another")
        all_of(clients, "digest", name="another")
        gauge.used()
        before, objects = gauge.used(), bench.stage.info()["objects"]
        attached = all_of(clients, "attach", nbytes=bench.nbytes, seed=seed)
        all_of(clients, "digest")
        used = gauge.used() - before
        built = bench.stage.info()["objects"] - objects
        bench.drop(seed)
    model, slowest = bench.nbytes, max(answer["seconds"] for answer in attached)
    verdict.figures |= {"workers": workers, "model_bytes": model, "used_bytes": used, "unshared_bytes": workers * model}
    verdict.figures |= {"models_built": built, "attach_seconds": slowest}
    verdict.found = (
        f"{workers} processes with a model of {size(model)} use {size(used)} together; "
        f"unshared it would be {size(workers * model)} ({gauge.method})"
    )
    limit = model + model // 4 + workers * gauge.noise
    verdict.require(
        used <= limit,
        f"at most {size(limit)} more than before: one model, a quarter of it, and {size(gauge.noise)} for each process",
        f"{size(used)} more, {used / model:.1f} models",
        "if nothing else uses this device meanwhile, processes copy the model: look for .clone(), .to() or deepcopy",
    )
    verdict.require(
        used >= model - model // 4 - gauge.noise,
        f"about {size(model)} more than before",
        f"{size(used)} more",
        "something else gave memory back meanwhile: run it again while this device is quiet",
    )
    same = len({answer["object_id"] for answer in attached}) == 1
    verdict.require(
        same and built == 1,
        f"one build for {workers} processes that ask at the same time",
        f"{built} builds, {len({answer['object_id'] for answer in attached})} objects",
        "please report this: identical calls join one run",
    )


def zero_copy(bench: Bench, verdict: Verdict) -> None:
    """Every process writes numbers into the model, and all see all of them; so does one that comes later."""
    workers, seed = max(bench.workers, 2), bench.new_seed()
    with bench.attached(workers, seed=seed) as clients:
        for number, client in enumerate(clients):
            client.ask("write", first=number, values=[1000.0 + number])
        written = [1000.0 + number for number in range(workers)]
        seen = [client.ask("read", count=workers)["values"] for client in clients]
        with bench.attached(1, seed=seed) as (late,):
            seen.append(late.ask("read", count=workers)["values"])
        bench.drop(seed)
    blind = sum(values != written for values in seen)
    verdict.figures |= {"writes": workers, "readers": len(seen), "readers_that_missed_one": blind}
    verdict.found = (
        f"{workers} processes wrote, and {len(seen) - blind} of {len(seen)} saw all of it, one that came later among them"
    )
    verdict.require(
        blind == 0,
        "every process sees what every other one has written, without a call",
        f"{blind} of {len(seen)} processes read other numbers",
        "they have copies of the model: look for .clone(), .to() or deepcopy where they attach",
    )


def accuracy(bench: Bench, verdict: Verdict) -> None:
    """A forward pass over the shared model has the same bits as over one that a process has for itself."""
    with bench.stage.clients(1) as (single,):
        alone = single.ask("alone", nbytes=bench.nbytes, seed=SEED, device=bench.device)["digest"]
    with bench.attached(bench.workers) as clients:
        shared = [answer["digest"] for answer in all_of(clients, "digest")]
    wrong = sum(digest != alone for digest in shared)
    verdict.figures |= {"workers": bench.workers, "workers_that_differ": wrong}
    verdict.found = (
        f"{bench.workers - wrong} of {bench.workers} processes compute the same bits as an unshared one ({alone[:12]}…)"
    )
    verdict.require(
        wrong == 0,
        "the bits that a process computes which has the model for itself",
        f"{wrong} of {bench.workers} processes compute others",
        "see whether somebody writes into the model, and whether torch and its settings are the same in all processes",
    )


def read_only(bench: Bench, verdict: Verdict) -> None:
    """A process that writes to memory of an ``access="read"`` endpoint ends, or is told, and the memory stays as it is."""
    if not bench.protects:
        verdict.skipped = True
        verdict.found = "the mechanism that this GPU is shared with cannot protect memory; 'shared-rpc doctor' tells why"
        return
    model = {"nbytes": bench.nbytes, "seed": SEED, "endpoint": "protected"}
    with bench.stage.clients(2) as clients:
        all_of(clients, "attach", **model)
        reader, writer = clients
        before = reader.ask("digest")["digest"]
        how = "its write went through"
        try:
            writer.ask("write", first=0, values=[1000.0])
        except ClientFailed as failure:
            how = str(failure)
        after = reader.ask("digest")["digest"]
        bench.drop(SEED, "protected")
    stopped = how != "its write went through"
    killed = f"exit code {-signal.SIGSEGV}" in how
    verdict.figures |= {"writes_stopped": int(stopped), "readers_disturbed": int(before != after)}
    verdict.found = (
        f"a process that wrote {'was ended by the kernel' if killed else 'got an error'}, and another one computes on"
    )
    advice = "see 'shared-rpc doctor': which mechanism is used, and whether the kernel seals memfds"
    verdict.require(stopped, "the write is refused", how, advice)
    verdict.require(before == after, "the other process computes what it did", "other bits", advice)
