"""Attaching a module: time and memory of the first call of a client process and of later ones."""

from __future__ import annotations

import json as codec
import subprocess
from collections import defaultdict
from typing import Annotated, Any

import torch
import typer

from benchmarks.processes import Process, private_bytes, python, used
from benchmarks.runner import ECHO, OURS, PATIENCE, Device, Goal, Json, Run, Sample, Shape, chosen, numbers, size, timed
from benchmarks.sides import SIDES, Echo, Ours, SharedTensor, present, serve

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
    title = f"Attaching a module ({shape}) on {device} (x raw echo)"
    with Run("attach", title, [ECHO, *(side.name for side in sides)], device, json) as run:
        run.note(SharedTensor.missing(device))
        started = {side.name: serve(run, side) for side in sides}
        clients = _Clients(run, {name: server.address for name, server in started.items()})
        calls = [model, *(by_tensors + by_bytes if rounds else [])]
        made = {name: server.process.ask("make", calls=calls) for name, server in started.items()}
        _model_rows(run, clients, model, fresh, repeats, judge=device == "cuda" and shape == "llama-3-8b")
        _rows_from_nothing(run, started[OURS].address, shape, fresh)
        _publishing_rows(run, made[OURS][0])
        if rounds:
            _sweep_rows(run, clients, by_tensors, by_bytes, rounds, max(repeats // 2, 1))


Samples = dict[str, Sample]


class _Clients:
    """Fresh client processes, one after the other.

    :param addresses: servers, by side.
    """

    def __init__(self, run: Run, addresses: dict[str, str]) -> None:
        self._run = run
        self._addresses = addresses
        self._echo = serve(run, Echo).address
        self._echoes: list[list[float]] = []

    def measure(self, cases: list[Case], repeats: int, processes: int) -> list[dict[str, list[Result]]]:
        """Measure all cases in each process, all sides in turns; return the results of each case, by side.

        :raises RuntimeError: if a case of ours fails; those of others become notes.
        """
        found: list[dict[str, list[Result]]] = [defaultdict(list) for _ in cases]
        for _ in range(processes):
            for side, address in self._addresses.items():
                with Process(Attacher, side=side, address=address, echo=self._echo, device=self._run.device) as process:
                    answers, echo = process.ready().ask("measure", cases=cases, repeats=repeats)
                self._echoes.append(echo)
                for case, results, answer in zip(cases, found, answers, strict=True):
                    if not isinstance(answer, str):
                        results[side].append(answer)
                    elif side == OURS:
                        raise RuntimeError(f"{side}, {case}: {answer}")
                    else:
                        self._run.note(f"{side}, {case}: {answer}")
        return found

    def samples(self, results: dict[str, list[Result]], key: str) -> Samples:
        """Return the times of that name by side, with all round trips of the echo so far."""
        return {ECHO: Sample(*self._echoes), **_samples(results, key)}


def _samples(results: dict[str, list[Result]], key: str) -> Samples:
    return {side: Sample(*(result[key] for result in taken)) for side, taken in results.items()}


def _model_rows(run: Run, clients: _Clients, call: Case, fresh: int, repeats: int, *, judge: bool) -> None:
    [results] = clients.measure([call], repeats, fresh)
    for name, key, limit in (
        ("first attach of a process", "first", 8e-3),
        ("again, while held", "held", 4e-3),
        ("again, after release", "released", 4e-3),
    ):
        run.row(name, clients.samples(results, key), "s", Goal("≤", limit, "16 GB, GPU"), judge=judge)
    run.note(f"the model has {results[OURS][0]['tensors']} tensors, {size(results[OURS][0]['nbytes'])}")
    on_host = run.device == "cpu"
    name = "private host memory of a client" if on_host else "GPU memory of a client, without its context"
    run.row(name, _samples(results, "grown"), "bytes", Goal("<", 4 << 20, "GPU"), judge=not on_host)


#: The steps of a process from the import to the model, after torch, CUDA and the model's classes are loaded.
_STEPS = """
import gc, json, sys, time, torch, benchmarks.workload
path, shape, device = sys.argv[1:]
if device != "cpu":
    torch.zeros(1, device=device)
    torch.cuda.synchronize()
gc.collect()
times = [time.perf_counter()]
from shared_rpc import Client
times.append(time.perf_counter())
client = Client(socket_path=path)
times.append(time.perf_counter())
client.ping()
times.append(time.perf_counter())
handle = client.call("model", shape)
times.append(time.perf_counter())
print(json.dumps([end - begin for begin, end in zip(times, times[1:])]))
"""


def _rows_from_nothing(run: Run, address: str, shape: str, fresh: int) -> None:
    taken = []
    for _ in range(fresh):
        with python("-c", _STEPS, address, shape, run.device, stdout=subprocess.PIPE) as process:
            output, _ = process.communicate(timeout=PATIENCE)
        taken.append(codec.loads(output.splitlines()[-1]))
    goal = Goal("≤", 40e-3, "host") if run.device == "cpu" else Goal("≤", 60e-3, "GPU")
    whole = Sample([sum(steps) for steps in taken])
    run.row("from the import of shared_rpc to the model, beyond torch and CUDA", whole, "s", goal)
    for name, seconds in zip(("import Client", "Client(...)", "first ping", "call"), zip(*taken, strict=True), strict=True):
        run.row(f"… {name}", Sample(seconds))


def _publishing_rows(run: Run, costs: dict[str, float]) -> None:
    run.row("publishing it, once", costs["seconds"])
    above = max(costs["peak"] - costs["largest"], 0)
    goal = Goal("≤", 3 << 30, "+ its largest tensor")
    run.row("memory that publishing adds at its peak", costs["peak"], "bytes", goal, measured=above)
    run.note(f"the size of its largest tensor, {size(int(costs['largest']))}, is subtracted before comparing with the goal")


def _sweep_rows(run: Run, clients: _Clients, by_tensors: list[Case], by_bytes: list[Case], rounds: int, repeats: int) -> None:
    sweeps = [*by_tensors, *by_bytes]
    # The first case of a process is measured twice, because it includes one-time costs.
    found = clients.measure([sweeps[0], *sweeps], repeats, rounds)[1:]
    medians = []
    for (_, count, nbytes), results in zip(sweeps, found, strict=True):
        samples = clients.samples(results, "released")
        medians.append(samples[OURS].p50)
        # With few tensors the fixed cost of a call dominates.
        goal = Goal("≤", 25e-6, "a tensor") if len(medians) <= len(by_tensors) and count >= 100 else None
        run.row(f"after release: {count:,} tensors, {size(nbytes)}", samples, "s", goal, measured=medians[-1] / count)
    if len(by_bytes) > 1:
        ratio = medians[-1] / medians[len(by_tensors)]
        # 1.25 instead of 1 allows for noise.
        run.row(f"the most bytes over the fewest, {_TENSORS} tensors", ratio, "ratio", Goal("≤", 1.25, "flat"))


# The client process, which is ready when interpreter, torch, CUDA context and the model's classes are loaded.

#: Round trips of the echo.
_PINGS = 200
#: Seconds after which a case is no longer repeated, and the minimum number of repetitions.
_BUDGET, _FEWEST = 3.0, 3


class Attacher:
    """A client that measures cases."""

    def __init__(self, side: str, address: str, echo: str, device: str) -> None:
        if device != "cpu":
            torch.zeros(1, device=device)
            torch.cuda.synchronize()
        self._device = device
        self._side, self._echo = SIDES[side](address), Echo(echo)
        self._kept: Any = None

    def measure(self, cases: list[Case], repeats: int, *, hold: bool = False) -> tuple[list[Result | str], list[float]]:
        """Measure all cases, in order, and the echo; return a result or an error text for each, and the echo's times.

        :param hold: whether to hold the first case's handle until the process ends.
        """
        results: list[Result | str] = []
        for call in cases:
            try:
                results.append(self._measure(call, repeats))
            except Exception as error:  # a case that one side does not support must not end the run
                results.append(f"{type(error).__name__}: {error}")
        self._kept = self._side.call(*cases[0]) if hold else None
        return results, [timed(self._echo.ping) for _ in range(_PINGS)]

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
        """Release the handles."""
        self._kept = None
        self._side.close()
        self._echo.close()
