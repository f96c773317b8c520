"""Attaching a module: time and memory of the first call of a client process and of later ones."""

from __future__ import annotations

from collections import defaultdict
from typing import Annotated, Any

import torch
import typer

from benchmarks.processes import Process, private_bytes, used
from benchmarks.runner import OURS, Device, Goal, Json, Run, Sample, Shape, chosen, numbers, size, timed
from benchmarks.sides import SIDES, Ours, SharedTensor, present, serve

#: Bytes of each tensor in the sweep over tensors, and tensors in the sweep over bytes.
_TENSOR_BYTES, _TENSORS = 4096, 100

#: A managed call: the endpoint, and its arguments.
Case = list[Any]
#: The result of :meth:`Attacher.measure` for a case.
Result = dict[str, Any]


def run(
    shape: Shape = None,
    device: Device = "auto",
    fresh: Annotated[int, typer.Option(help="Fresh processes that attach, of each kind.")] = 5,
    repeats: Annotated[int, typer.Option(help="Later attaches in each process, held and released.")] = 20,
    rounds: Annotated[int, typer.Option(help="Processes that run the sweeps; 0 for no sweeps.")] = 2,
    tensors: Annotated[str, typer.Option(help="Numbers of tensors of the sweep.")] = "10,100,1000,10000",
    megabytes: Annotated[
        str | None, typer.Option(help="Megabytes of the sweep; by default up to 100 on the host, 10000 on a GPU.")
    ] = None,
    json: Json = None,
) -> None:
    """Measure attaches of a module of many tensors: the first of a process, later ones, and their memory."""
    device, shape = chosen(device, shape)
    model = ["model", shape]
    by_tensors = [["chain", count, count * _TENSOR_BYTES] for count in numbers(tensors)]
    sizes = numbers(megabytes or "") or [1, 10, 100, *([1000, 10000] if device == "cuda" else [])]
    by_bytes = [["chain", _TENSORS, megabytes * 10**6] for megabytes in sizes]
    sides = present(SharedTensor, Ours, device=device)
    title = f"Attaching a module ({shape}) on {device}"
    with Run("attach", title, [side.name for side in sides], device, json) as run:
        run.note(SharedTensor.missing(device))
        started = {side.name: serve(run, side) for side in sides}
        addresses = {name: server.address for name, server in started.items()}
        calls = [model, *(by_tensors + by_bytes if rounds else [])]
        made = {name: server.process.ask("make", calls=calls) for name, server in started.items()}
        _model_rows(run, addresses, model, fresh, repeats)
        words = ("-c", _FROM_NOTHING, addresses[OURS], shape, device)
        whole = Sample([float(run.program(*words).splitlines()[-1]) for _ in range(fresh)])
        goal = Goal("≤", 40e-3, "host") if device == "cpu" else Goal("≤", 60e-3, "GPU")
        run.row("from the import of shared_rpc to the model, beyond torch and CUDA", whole, "s", goal)
        _publishing_rows(run, made[OURS][0])
        if rounds:
            _sweep_rows(run, addresses, by_tensors, by_bytes, rounds, max(repeats // 2, 1))


def _measure(
    run: Run, addresses: dict[str, str], cases: list[Case], repeats: int, processes: int
) -> list[dict[str, list[Result]]]:
    """Measure all cases in fresh client processes, all sides in turns; return the results of each case, by side.

    :param addresses: servers, by side.
    :raises RuntimeError: if a case of ours fails; those of others become notes.
    """
    found: list[dict[str, list[Result]]] = [defaultdict(list) for _ in cases]
    for _ in range(processes):
        for side, address in addresses.items():
            with Process(Attacher, side=side, address=address, device=run.device) as process:
                answers = process.ready().ask("measure", cases=cases, repeats=repeats)
            for case, results, answer in zip(cases, found, answers, strict=True):
                if not isinstance(answer, str):
                    results[side].append(answer)
                elif side == OURS:
                    raise RuntimeError(f"{side}, {case}: {answer}")
                else:
                    run.note(f"{side}, {case}: {answer}")
    return found


def _samples(results: dict[str, list[Result]], key: str) -> dict[str, Sample]:
    return {side: Sample(*(result[key] for result in taken)) for side, taken in results.items()}


def _model_rows(run: Run, addresses: dict[str, str], call: Case, fresh: int, repeats: int) -> None:
    [results] = _measure(run, addresses, [call], repeats, fresh)
    on_gpu, nbytes = run.device != "cpu", results[OURS][0]["nbytes"]
    for name, key, limit in (
        ("first attach of a process", "first", 8e-3),
        ("again, while held", "held", 4e-3),
        ("again, after release", "released", 4e-3),
    ):
        goal = Goal("≤", limit, "16 GB, GPU")
        run.row(name, _samples(results, key), "s", goal, judge=on_gpu and nbytes > 15 * 10**9)
    run.note(f"the model has {results[OURS][0]['tensors']} tensors, {size(nbytes)}")
    name = "GPU memory of a client, without its context" if on_gpu else "private host memory of a client"
    run.row(name, _samples(results, "grown"), "bytes", Goal("<", 4 << 20, "GPU"), judge=on_gpu)


#: Prints the seconds from the import of the package to the model, after torch, CUDA and the model's classes are loaded.
_FROM_NOTHING = """
import gc, sys, time, torch, benchmarks.workload
path, shape, device = sys.argv[1:]
if device != "cpu":
    torch.zeros(1, device=device)
    torch.cuda.synchronize()
gc.collect()
begin = time.perf_counter()
from shared_rpc import Client
handle = Client(socket_path=path).call("model", shape)
print(time.perf_counter() - begin)
"""


def _publishing_rows(run: Run, costs: dict[str, float]) -> None:
    run.row("publishing it, once", costs["seconds"])
    above = max(costs["peak"] - costs["largest"], 0)
    goal = Goal("≤", 3 << 30, "+ its largest tensor")
    run.row("memory that publishing adds at its peak", costs["peak"], "bytes", goal, measured=above)
    run.note(f"the size of its largest tensor, {size(int(costs['largest']))}, is subtracted before comparing with the goal")


def _sweep_rows(
    run: Run, addresses: dict[str, str], by_tensors: list[Case], by_bytes: list[Case], rounds: int, repeats: int
) -> None:
    sweeps = [*by_tensors, *by_bytes]
    # The first case of a process is measured twice, because it includes one-time costs.
    found = _measure(run, addresses, [sweeps[0], *sweeps], repeats, rounds)[1:]
    medians = []
    for (_, count, nbytes), results in zip(sweeps, found, strict=True):
        samples = _samples(results, "released")
        medians.append(samples[OURS].p50)
        # With few tensors the fixed cost of a call dominates.
        goal = Goal("≤", 25e-6, "a tensor") if len(medians) <= len(by_tensors) and count >= 100 else None
        run.row(f"after release: {count:,} tensors, {size(nbytes)}", samples, "s", goal, measured=medians[-1] / count)
    if len(by_bytes) > 1:
        ratio = medians[-1] / medians[len(by_tensors)]
        # 1.25 instead of 1 allows for noise.
        run.row(f"the most bytes over the fewest, {_TENSORS} tensors", ratio, "ratio", Goal("≤", 1.25, "flat"))


# The client process, which is ready when interpreter, torch, CUDA context and the model's classes are loaded.

#: Seconds after which a case is no longer repeated, and the minimum number of repetitions.
_BUDGET, _FEWEST = 3.0, 3


class Attacher:
    """A client that measures cases."""

    def __init__(self, side: str, address: str, device: str) -> None:
        if device != "cpu":
            torch.zeros(1, device=device)
            torch.cuda.synchronize()
        self._device, self._side = device, SIDES[side](address)

    def measure(self, cases: list[Case], repeats: int) -> list[Result | str]:
        """Measure all cases, in order; return a result or an error text for each."""
        results: list[Result | str] = []
        for call in cases:
            try:
                results.append(self._measure(call, repeats))
            except Exception as error:  # a case that one side does not support must not end the run
                results.append(f"{type(error).__name__}: {error}")
        return results

    def _memory(self) -> int:
        if self._device == "cpu":
            return private_bytes()
        torch.cuda.synchronize()
        return used(self._device)

    def _measure(self, call: Case, repeats: int) -> Result:
        """Return ``first``, ``held``, ``released`` (s) and ``grown`` (bytes), all of them lists; ``tensors`` and ``nbytes``."""

        def attach() -> None:
            handles.append(self._side.call(*call))

        def repeated() -> list[float]:
            times: list[float] = []
            while len(times) < repeats and (sum(times) < _BUDGET or len(times) < _FEWEST):
                times.append(timed(attach))
                handles.pop().release()
            return times

        before = self._memory()
        handles: list[Any] = []
        first = timed(attach)
        grown = self._memory() - before
        parameters = list(handles[0].value.parameters())
        # Read the last tensor, to check that the memory is mapped and correct.
        assert float(parameters[-1].detach().flatten()[-1]) == 1 + (len(parameters) - 1) % 100, "the last tensor is wrong"
        count, nbytes = len(parameters), sum(parameter.untyped_storage().nbytes() for parameter in parameters)
        del parameters
        held = repeated()
        handles.pop(0).release()
        times = {"first": [first], "held": held, "released": repeated()}
        return {**times, "grown": [grown], "tensors": count, "nbytes": nbytes}

    def close(self) -> None:
        """Close the connection."""
        self._side.close()
