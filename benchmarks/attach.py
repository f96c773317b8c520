"""Attaching a module: time and memory of the first call of a client process and of later ones."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Annotated, Any, NamedTuple

import torch
import typer

from benchmarks.processes import Process, private_bytes, used
from benchmarks.runner import OURS, Device, Goal, Json, Run, Sample, Shape, chosen, numbers, timed
from benchmarks.sides import SIDES, Ours, SharedTensor, present, serve

#: Bytes of each tensor in the sweep over tensors, and tensors in the sweep over bytes.
_TENSOR_BYTES, _TENSORS = 4096, 100

#: A managed call: the endpoint, and its arguments.
Case = list[Any]


class Attaches(NamedTuple):
    """Attaches of a case in one process: seconds of the first, of later ones while it is held and after its release, and bytes
    that the first one adds to the memory.
    """

    first: list[float]
    held: list[float]
    released: list[float]
    grown: list[float]
    tensors: int
    nbytes: int


#: The attaches of a case in all processes, by side.
Found = dict[str, list[Attaches]]


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
        run.row("publishing it, once", made[OURS][0]["seconds"])
        goal = Goal("≤", 4 << 30, "with a largest tensor of 1 GiB")
        run.row("memory that publishing adds at its peak", made[OURS][0]["peak"], "bytes", goal)
        if rounds:
            _sweep_rows(run, addresses, by_tensors, by_bytes, rounds, max(repeats // 2, 1))


def _measure(run: Run, addresses: dict[str, str], cases: list[Case], repeats: int, processes: int) -> list[Found]:
    """Measure all cases in fresh client processes, all sides in turns.

    :param addresses: servers, by side.
    """
    found: list[Found] = [defaultdict(list) for _ in cases]
    for _ in range(processes):
        for side, address in addresses.items():
            with Process(Attacher, side=side, address=address, device=run.device) as process:
                process.ready()
                for case, results in zip(cases, found, strict=True):
                    results[side].append(process.ask("measure", case=case, repeats=repeats))
    return found


def _samples(found: Found, key: str) -> dict[str, Sample]:
    return {side: Sample(*(getattr(each, key) for each in attaches)) for side, attaches in found.items()}


def _model_rows(run: Run, addresses: dict[str, str], case: Case, fresh: int, repeats: int) -> None:
    [found] = _measure(run, addresses, [case], repeats, fresh)
    ours = found[OURS][0]
    on_gpu = run.device != "cpu"
    for name, key, limit in (
        ("first attach of a process", "first", 8e-3),
        ("again, while held", "held", 4e-3),
        ("again, after release", "released", 4e-3),
    ):
        goal = Goal("≤", limit, "16 GB, GPU") if on_gpu and ours.nbytes > 15 * 10**9 else None
        run.row(name, _samples(found, key), "s", goal)
    run.note(f"the model has {ours.tensors} tensors, {ours.nbytes / 1e9:.4g} GB")
    name = "GPU memory of a client, without its context" if on_gpu else "private host memory of a client"
    run.row(name, _samples(found, "grown"), "bytes", Goal("≤", 4 << 20, "GPU") if on_gpu else None)


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
        run.row(f"after release: {count:,} tensors, {nbytes / 1e6:.3g} MB", samples, "s", goal, measured=medians[-1] / count)
    if len(by_bytes) > 1:
        ratio = medians[-1] / medians[len(by_tensors)]
        # 1.25 instead of 1 allows for noise.
        run.row(f"the most bytes over the fewest, {_TENSORS} tensors", ratio, "ratio", Goal("≤", 1.25, "flat"))


# The client process, which is ready when interpreter, torch, CUDA context and the model's classes are loaded.


class Attacher:
    """A client that measures cases."""

    def __init__(self, side: str, address: str, device: str) -> None:
        if device != "cpu":
            torch.zeros(1, device=device)
            torch.cuda.synchronize()
        self._device, self._side = device, SIDES[side](address)
        self.close = self._side.close

    def measure(self, case: Case, repeats: int) -> Attaches:
        """Attach once, ``repeats`` times while holding it, and as often after its release."""

        def attach() -> None:
            handles.append(self._side.call(*case))

        def repeated() -> Iterator[float]:
            for _ in range(repeats):
                yield timed(attach)
                handles.pop().release()

        before = self._memory()
        handles: list[Any] = []
        first = timed(attach)
        grown = self._memory() - before
        parameters = list(handles[0].value.parameters())
        # Read the last tensor, to check that the memory is mapped and correct.
        assert float(parameters[-1].detach().flatten()[-1]) == 1 + (len(parameters) - 1) % 100, "the last tensor is wrong"
        count, nbytes = len(parameters), sum(parameter.untyped_storage().nbytes() for parameter in parameters)
        del parameters
        held = list(repeated())
        handles.pop(0).release()
        return Attaches([first], held, list(repeated()), [grown], count, nbytes)

    def _memory(self) -> int:
        if self._device == "cpu":
            return private_bytes()
        torch.cuda.synchronize()
        return used(self._device)
