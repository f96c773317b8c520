"""Attaching a module: what the first client process and every later call pays, in time and in memory."""

from __future__ import annotations

import json as codec
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from benchmarks import workload  # noqa: F401  the classes of what is attached
from benchmarks.memory import private_bytes, used
from benchmarks.runner import ECHO, OURS, Device, Json, Report, Sample, Shape, chosen, numbers, size, timed
from benchmarks.servers import Servers, Started, environ
from benchmarks.sides import PEER, Echo, client_of, load_lazy_modules, missing

#: Bytes of each tensor in the sweep over tensors, and tensors in the sweep over bytes.
_TENSOR_BYTES, _TENSORS = 4096, 100
#: The module that the goals in milliseconds are about.
_GOAL_SHAPE = "llama-3-8b"

Result = dict[str, Any]


def run(
    shape: Shape = None,
    device: Device = "auto",
    fresh: Annotated[int, typer.Option(help="Fresh processes that attach, of each kind.")] = 5,
    repeats: Annotated[int, typer.Option(help="Later attaches in each process, held and released.")] = 20,
    rounds: Annotated[int, typer.Option(help="Processes that go through the sweeps; 0 for no sweeps.")] = 2,
    tensors: Annotated[str, typer.Option(help="The sweep over tensors.")] = "10,100,1000,10000",
    megabytes: Annotated[
        str | None, typer.Option(help="The sweep over megabytes; up to 100 on the host, 10000 on a GPU.")
    ] = None,
    checkpoint: Annotated[Path | None, typer.Option(help="Load the model from a file that is written to this folder.")] = None,
    json: Json = None,
) -> None:
    """Measure attaches of a module of many tensors: the first of a process, later ones, and their memory."""
    device, shape = chosen(device, shape)
    absent = missing(tensors=device)
    names = [ECHO, *([PEER] if absent is None else []), OURS]
    report = Report("attach", f"Attaching a module ({shape}) on {device} (x raw echo)", names)
    report.note(absent)
    counts, sizes = numbers(tensors), numbers(megabytes or "") or [1, 10, 100, *([1000, 10000] if device == "cuda" else [])]
    sweeps: list[list[Any]] = [["chain", count, count * _TENSOR_BYTES] for count in counts]
    sweeps += [["chain", _TENSORS, size * 10**6] for size in sizes]
    with Servers(device, checkpoint) as servers:
        build: list[list[Any]] = [["model", shape], *(sweeps if rounds else [])]
        started = {OURS: servers.start("OurServer", build=build)}
        if absent is None:
            started[PEER] = servers.start("PeerServer", build=build)
        clients = _Clients(servers, started, device)
        _model_rows(report, clients, fresh, repeats, ["model", shape], judge=device == "cuda" and shape == _GOAL_SHAPE)
        _from_nothing(report, started[OURS].address, shape, device, fresh)
        _server_rows(report, started, checkpoint)
        if rounds:
            _sweep_rows(report, clients, rounds, max(repeats // 2, 1), sweeps, over_tensors=len(counts))
    report.finish(json)


class _Clients:
    """Fresh client processes, one after the other."""

    def __init__(self, servers: Servers, started: dict[str, Started], device: str) -> None:
        self._servers = servers
        self._started = started
        self._echo = servers.start("EchoServer").address
        self._device = device
        self.names = [name for name in (PEER, OURS) if name in started]
        self._echoes: list[list[float]] = []

    def measure(self, who: str, cases: list[list[Any]], repeats: int, *, preload: bool = False) -> list[Result]:
        """Measure all cases in one process, in order."""
        config: dict[str, Any] = {"who": who, "socket": self._started[who].address, "echo": self._echo}
        with self._servers.client("attach:Attacher", device=self._device, preload=preload, **config) as process:
            answer = process.ready().ask("measure", cases=cases, repeats=repeats)
        self._echoes.append(answer["echo"])
        results: list[Result] = answer["results"]
        return results

    def echo(self) -> dict[str, Sample]:
        """Return all round trips so far, by name."""
        return {ECHO: Sample(self._echoes)}


def _model_rows(report: Report, clients: _Clients, fresh: int, repeats: int, call: list[Any], *, judge: bool) -> None:
    results: dict[str, list[Result]] = {name: [] for name in clients.names}
    preloaded: list[Result] = []
    for _ in range(fresh):
        for name in clients.names:
            results[name] += clients.measure(name, [call], repeats)
        preloaded += clients.measure(OURS, [call], 0, preload=True)
    results = {name: _good(report, name, "the model", taken) for name, taken in results.items()}

    def row(name: str, samples: dict[str, Sample], goal: str) -> None:
        report.row(name, clients.echo() | samples, "s", goal, samples[OURS].p50 if judge else None)

    row("first attach of a process", _sampled(results, lambda result: [result["first"]]), "attach_first")
    lazy = Sample([[result["first"] for result in preloaded]])
    row("… with our lazy imports done before", {OURS: lazy}, "attach_first")
    row("again, while held", _sampled(results, lambda result: result["held"]), "attach_again")
    row("again, after release", _sampled(results, lambda result: result["released"]), "attach_again")
    facts = results[OURS][0]
    report.note(f"the model has {facts['tensors']} tensors, {size(facts['nbytes'])}")
    titles = {"private": "host memory a client adds of its own", "device": "GPU memory a client adds beside its context"}
    for key in facts["grown"]:
        grown = {name: Sample([[result["grown"][key] for result in taken]]).p50 for name, taken in results.items() if taken}
        report.row(titles[key], grown, "bytes", "client_memory", grown[OURS] if key == "device" else None)


#: What a process does from the import to the model, where torch, CUDA and the model's classes are there already.
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


def _from_nothing(report: Report, socket: str, shape: str, device: str, fresh: int) -> None:
    taken = []
    for _ in range(max(fresh, 1)):
        words = [sys.executable, "-c", _STEPS, socket, shape, device]
        done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True, env=environ())
        taken.append(codec.loads(done.stdout.splitlines()[-1]))
    whole = Sample([[sum(steps) for steps in taken]])
    goal = "from_nothing" if device == "cpu" else "from_nothing_gpu"
    report.row("from the import of shared_rpc to the model, beyond torch and CUDA", {OURS: whole}, "s", goal, whole.p50)
    for number, step in enumerate(("import Client", "Client(...)", "first ping", "call")):
        report.row(f"… {step}", {OURS: Sample([[steps[number] for steps in taken]])})


def _server_rows(report: Report, started: dict[str, Started], checkpoint: Path | None) -> None:
    built = {name: server.process.ask("built")[0] for name, server in started.items()}
    source = "from a file" if checkpoint is not None else "allocated and filled: no file"
    loads = {name: facts["load"] for name, facts in built.items()}
    report.row(f"for comparison: loading it again ({source})", loads)
    report.row("publishing it, once", {OURS: built[OURS]["publish"]})
    peak, largest = built[OURS]["publish_peak"], built[OURS]["largest_storage"]
    above = max(peak - largest, 0)
    report.row("memory that publishing adds at its peak", {OURS: peak}, "bytes", "publish_peak", above, largest_storage=largest)
    report.note(f"its largest tensor has {size(largest)}, which are taken off the peak that is compared with the goal")


def _sweep_rows(
    report: Report, clients: _Clients, rounds: int, repeats: int, sweeps: list[list[Any]], *, over_tensors: int
) -> None:
    results: dict[str, list[list[Result]]] = {name: [] for name in clients.names}
    for _ in range(rounds):
        for name in clients.names:
            # The first case of a process is not like the others.
            results[name].append(clients.measure(name, [sweeps[0], *sweeps], repeats)[1:])
    by_bytes: list[Sample] = []
    for number, (_, count, nbytes) in enumerate(sweeps):
        what = f"{count:,} tensors, {size(nbytes)}"
        taken = {name: _good(report, name, what, [result[number] for result in turn]) for name, turn in results.items()}
        samples = _sampled(taken, lambda result: result["released"])
        held = _sampled(taken, lambda result: result["held"])
        each = samples[OURS].p50 / count
        # With few tensors the fixed cost of a call is all there is.
        judge = number < over_tensors and count >= 100
        report.row(
            f"after release: {what}",
            clients.echo() | samples,
            goal="attach_tensor" if judge else "",
            judged=each if judge else None,
            tensors=count,
            nbytes=nbytes,
            held={name: sample.as_json() for name, sample in held.items()},
        )
        if number >= over_tensors:
            by_bytes.append(samples[OURS])
    if len(by_bytes) > 1:
        ratio = by_bytes[-1].p50 / by_bytes[0].p50
        report.row(f"the most bytes over the fewest, {_TENSORS} tensors", {OURS: ratio}, "ratio", "attach_bytes", ratio)


def _sampled(results: dict[str, list[Result]], times: Callable[[Result], list[float]]) -> dict[str, Sample]:
    return {name: Sample(map(times, taken)) for name, taken in results.items() if taken}


def _good(report: Report, name: str, what: str, taken: list[Result]) -> list[Result]:
    """Return the successful results; the others become notes, and fail the run where they are ours."""
    good = []
    for result in taken:
        error = result.get("error") or (None if result["right"] else "the last tensor has another value")
        if error is None:
            good.append(result)
        elif name == OURS:
            raise RuntimeError(f"{name}, {what}: {error}")
        else:
            report.note(f"{name}, {what}: {error}")
    return good


# The client process. When it is ready, interpreter, torch, CUDA context and the model's classes are loaded.

#: Round trips of the echo.
_PINGS = 200
#: Seconds after which a case is not repeated any more, once there are a few times.
_BUDGET, _FEWEST = 3.0, 3


class Attacher:
    """A client that measures cases, each a managed call.

    :param preload: whether to import now what a client imports with its first tensor.
    """

    def __init__(self, who: str, socket: str, echo: str, device: str, *, preload: bool = False) -> None:
        if device != "cpu":
            torch.zeros(1, device=device)
            torch.cuda.synchronize()
        if preload:
            load_lazy_modules(device)
        self._device = device
        self._side, self._echo = client_of(who, socket), Echo(echo)
        self._kept: Any = None

    def measure(self, cases: list[list[Any]], repeats: int, *, hold: bool = False) -> Result:
        """Measure all cases, in order, and the echo.

        :param hold: whether to hold the first of them to the end.
        """
        results = []
        for call in cases:
            try:
                results.append(self._measure(call, repeats))
            except Exception as error:  # a case that one side cannot do must not cost the others
                results.append({"error": f"{type(error).__name__}: {error}"})
        self._kept = self._side.attach(*cases[0]) if hold else None
        return {"results": results, "echo": [timed(self._echo.ping) for _ in range(_PINGS)]}

    def _memory(self) -> dict[str, int]:
        if self._device == "cpu":
            return {"private": private_bytes()}
        torch.cuda.synchronize()
        return {"device": used(self._device)}

    def _measure(self, call: list[Any], repeats: int) -> Result:
        """Return ``first`` (s), ``held`` and ``released`` (lists of s), ``grown`` (bytes), ``tensors`` and ``nbytes``."""

        def repeated() -> list[float]:
            times: list[float] = []
            while len(times) < repeats and (sum(times) < _BUDGET or len(times) < _FEWEST):
                times.append(timed(lambda: handles.append(self._side.attach(*call))))
                handles.pop().release()
            return times

        before = self._memory()
        handles: list[Any] = []
        first = timed(lambda: handles.append(self._side.attach(*call)))
        grown = {key: value - before[key] for key, value in self._memory().items()}
        parameters = list(handles[0].value.parameters())
        facts = {
            "first": first,
            "grown": grown,
            "tensors": len(parameters),
            "nbytes": sum(parameter.untyped_storage().nbytes() for parameter in parameters),
            # A read of the last tensor: it is there, and it is the right one.
            "right": float(parameters[-1].detach().flatten()[-1]) == 1 + (len(parameters) - 1) % 100,
        }
        del parameters
        facts["held"] = repeated()
        handles.pop(0).release()
        return facts | {"released": repeated()}

    def close(self) -> None:
        """Release the handles."""
        self._kept = None
        self._side.close()
        self._echo.close()
