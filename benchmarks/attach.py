"""Attaching a module: time and memory of the first call of a client process and of later ones."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Annotated, Any

import torch
import typer

from benchmarks.processes import Process, private_bytes, used
from benchmarks.runner import OURS, Device, Json, Run, Sample, Shape, chosen, numbers, timed
from benchmarks.sides import PEER, SIDES, Ours, SharedTensor, present, serve

#: Bytes of each tensor in the sweep over tensors, and tensors in the sweep over bytes.
_TENSOR_BYTES, _TENSORS = 4096, 100

#: A managed call: the endpoint, and its arguments.
Case = list[Any]


#: The values of a case in all processes, by measurement and by side: seconds of the first attach, of later ones while it
#: is held and after its release, and bytes that the first one adds to the memory.
Found = dict[str, dict[str, Sample]]


def run(
    shape: Shape = None,
    device: Device = "auto",
    fresh: Annotated[int, typer.Option(help="Fresh processes that attach, of each kind.")] = 3,
    repeats: Annotated[int, typer.Option(help="Later attaches in each process, held and released.")] = 20,
    rounds: Annotated[int, typer.Option(help="Processes that run the sweeps; 0 for no sweeps.")] = 1,
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
    with Run("attach", title, [side.name for side in sides], device, json, base=PEER) as run:
        run.note(SharedTensor.missing(device))
        started = {side.name: serve(run, side) for side in sides}
        addresses = {name: server.address for name, server in started.items()}
        calls = [model, *(by_tensors + by_bytes if rounds else [])]
        made = {name: server.process.ask("make", calls=calls) for name, server in started.items()}
        [found] = _measure(run, addresses, [model], repeats, fresh)
        large = device == "cuda" and shape == "llama-3-8b"
        run.row("first attach of a process, with the connection and its imports", found["first"])
        run.row("again, while held", found["held"], goal=4e-3 if large else None)
        run.row("again, after release", found["released"], goal=4e-3 if large else None)
        memory = "GPU memory of a client, without its context" if device == "cuda" else "private host memory of a client"
        run.row(memory, found["grown"], "bytes")
        words = ("-c", _FROM_NOTHING, addresses[OURS], shape, device)
        whole = Sample(float(run.program(*words).splitlines()[-1]) for _ in range(fresh))
        run.row("from the import of shared_rpc to the model, beyond torch and CUDA", whole, goal=60e-3)
        run.row("publishing it, once", made[OURS][0])
        if rounds:
            cases: list[Case] = [*by_tensors, *by_bytes]
            # The first case of a process is measured twice, because it includes one-time costs.
            results = _measure(run, addresses, [cases[0], *cases], max(repeats // 4, 1), rounds)[1:]
            for (_, count, nbytes), found in zip(cases, results, strict=True):
                run.row(f"after release: {count:,} tensors, {nbytes / 1e6:.3g} MB", found["released"])


def _measure(run: Run, addresses: dict[str, str], cases: list[Case], repeats: int, processes: int) -> list[Found]:
    """Measure all cases in fresh client processes, all sides in turns.

    :param addresses: servers, by side.
    """
    found: list[Found] = [defaultdict(lambda: defaultdict(Sample)) for _ in cases]
    for _ in range(processes):
        for side, address in addresses.items():
            with Process(Attacher, side=side, address=address, device=run.device) as process:
                process.ready()
                for case, results in zip(cases, found, strict=True):
                    for key, values in process.ask("measure", case=case, repeats=repeats).items():
                        results[key][side] += values
    return found


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


# The client process, which is ready when interpreter, torch, CUDA context and the model's classes are loaded.


class Attacher:
    """A client that measures cases."""

    def __init__(self, side: str, address: str, device: str) -> None:
        if device != "cpu":
            torch.zeros(1, device=device)
            torch.cuda.synchronize()
        self._device, self._side = device, SIDES[side](address)
        self.close = self._side.close

    def measure(self, case: Case, repeats: int) -> dict[str, list[float]]:
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
        del parameters
        held = list(repeated())
        handles.pop(0).release()
        return {"first": [first], "held": held, "released": list(repeated()), "grown": [grown]}

    def _memory(self) -> int:
        if self._device == "cpu":
            return private_bytes()
        torch.cuda.synchronize()
        return used(self._device)
