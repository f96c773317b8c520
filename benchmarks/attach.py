"""Attaching a module: what the first client process and every later call pays, in time and in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from benchmarks import models  # noqa: F401  the classes of what is attached
from benchmarks.echo import Echo
from benchmarks.memory import gpu_bytes_of_process, private_bytes, used
from benchmarks.options import Device, Json, Shape, chosen, numbers
from benchmarks.ours import Ours, load_lazy_modules
from benchmarks.peer import Peer, missing
from benchmarks.processes import configuration, next_command, say, until_told
from benchmarks.report import Report, Row, size
from benchmarks.servers import Servers, Started
from benchmarks.stats import Sample, timed
from benchmarks.subjects import Held, Subject
from benchmarks.targets import GOALS, Goal

__all__ = ["run"]

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
    device = chosen(device)
    shape = shape or (_GOAL_SHAPE if device == "cuda" else "small")
    absent = missing(tensors=device)
    names = [Echo.name, *([Peer.name] if absent is None else []), Ours.name]
    report = Report("attach", f"Attaching a module ({shape}) on {device} (x raw echo)", names)
    report.note(absent)
    counts, sizes = numbers(tensors), numbers(megabytes or "") or [1, 10, 100, *([1000, 10000] if device == "cuda" else [])]
    sweeps: list[list[Any]] = [["chain", count, count * _TENSOR_BYTES] for count in counts]
    sweeps += [["chain", _TENSORS, size * 10**6] for size in sizes]
    with Servers(device, checkpoint) as servers:
        build: list[list[Any]] = [["model", shape], *(sweeps if rounds else [])]
        started = {Ours.name: servers.ours(build)}
        if absent is None:
            started[Peer.name] = servers.peer(build)
        clients = _Clients(servers, started, servers.echo().address, device)
        _model_rows(report, clients, fresh, repeats, ["model", shape], judge=device == "cuda" and shape == _GOAL_SHAPE)
        _server_rows(report, started, checkpoint)
        if rounds:
            _sweep_rows(report, clients, rounds, max(repeats // 2, 1), sweeps, over_tensors=len(counts))
    report.finish(json)


class _Clients:
    """Fresh client processes, one after the other."""

    def __init__(self, servers: Servers, started: dict[str, Started], echo: str, device: str) -> None:
        self._servers = servers
        self._started = started
        self._echo = echo
        self._device = device
        #: Those who take part, and the round trips that their processes measured beside.
        self.names = [name for name in (Peer.name, Ours.name) if name in started]
        self.echoes: list[list[float]] = []

    def measure(self, who: str, cases: list[list[Any]], repeats: int, *, preload: bool = False) -> list[Result]:
        """Measure all cases in one process, in order."""
        process = self._servers.client(
            "attach",
            who=who,
            socket=self._started[who].address,
            echo=self._echo,
            device=self._device,
            cases=cases,
            repeats=repeats,
            preload=preload,
            hold=False,
        )
        process.read()
        answer = process.ask(go=True)
        process.close()
        self.echoes.append(answer["echo"])
        results: list[Result] = answer["results"]
        return results

    def echo(self) -> dict[str, Sample]:
        """Return all round trips so far, by name."""
        return {Echo.name: Sample(self.echoes)}


def _model_rows(report: Report, clients: _Clients, fresh: int, repeats: int, call: list[Any], *, judge: bool) -> None:
    results: dict[str, list[Result]] = {name: [] for name in clients.names}
    preloaded: list[Result] = []
    for _ in range(fresh):
        for name in clients.names:
            results[name] += clients.measure(name, [call], repeats)
        preloaded += clients.measure(Ours.name, [call], 0, preload=True)
    results = {name: _good(report, name, "the model", taken) for name, taken in results.items()}

    def row(name: str, samples: dict[str, Sample], goal: str) -> None:
        ours = samples[Ours.name].p50 if judge else None
        report.sampled(name, clients.echo() | samples, GOALS[goal], ours)

    row("first attach of a process", _sampled(results, lambda result: [result["first"]]), "attach_first")
    lazy = Sample([[result["first"] for result in preloaded]])
    row("… with our lazy imports done before", {Ours.name: lazy}, "attach_first")
    row("again, while held", _sampled(results, lambda result: result["held"]), "attach_again")
    row("again, after release", _sampled(results, lambda result: result["released"]), "attach_again")
    facts = results[Ours.name][0]
    report.note(f"the model has {facts['tensors']} tensors, {size(facts['nbytes'])}")
    _memory_rows(report, results)


def _memory_rows(report: Report, results: dict[str, list[Result]]) -> None:
    titles = {
        "private": "host memory a client adds of its own",
        "device": "GPU memory a client adds beside its context",
        "nvml": "… as NVML tells",
    }
    for key in results[Ours.name][0]["grown"]:
        values = {
            name: float(Sample([[result["grown"][key] for result in taken if key in result["grown"]]]).p50)
            for name, taken in results.items()
            if any(key in result["grown"] for result in taken)
        }
        goal = GOALS["client_memory"]
        report.add(Row(titles[key], values, "bytes", goal=goal, judged=values[Ours.name] if key != "private" else None))


def _server_rows(report: Report, started: dict[str, Started], checkpoint: Path | None) -> None:
    built = {name: server.facts["built"][0] for name, server in started.items()}
    source = "from a file" if checkpoint is not None else "allocated and filled: no file"
    report.add(Row(f"for comparison: loading it anew ({source})", {name: facts["load"] for name, facts in built.items()}))
    ours = built[Ours.name]
    report.add(Row("publishing it, once", {Ours.name: ours["publish"]}))
    peak, largest = ours["publish_peak"], ours["largest_storage"]
    goal = GOALS["publish_peak"]
    report.add(
        Row(
            "memory that publishing adds at its peak",
            {Ours.name: peak},
            "bytes",
            goal=goal,
            judged=max(peak - largest, 0),
            extra={"largest_storage": largest},
        )
    )
    report.note(f"its largest tensor has {size(largest)}, which are taken off the peak that is held against the goal")


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
        taken = {name: _good(report, name, what, [result[number] for result in rounds]) for name, rounds in results.items()}
        samples = _sampled(taken, lambda result: result["released"])
        held = _sampled(taken, lambda result: result["held"])
        each = samples[Ours.name].p50 / count
        # With few tensors the fixed cost of a call is all there is.
        goal: Goal | None = GOALS["attach_tensor"] if number < over_tensors and count >= 100 else None
        report.add(
            Row(
                f"after release: {what}",
                {name: sample.p50 for name, sample in (clients.echo() | samples).items()},
                goal=goal,
                judged=each if goal is not None else None,
                samples=samples,
                extra={
                    "sweep": "tensors" if number < over_tensors else "bytes",
                    "tensors": count,
                    "nbytes": nbytes,
                    "seconds_per_tensor": each,
                    "held": {name: sample.as_json() for name, sample in held.items()},
                },
            )
        )
        if number >= over_tensors:
            by_bytes.append(samples[Ours.name])
    if len(by_bytes) > 1:
        ratio = by_bytes[-1].p50 / by_bytes[0].p50
        name = f"the most bytes over the fewest, {_TENSORS} tensors"
        report.add(Row(name, {Ours.name: ratio}, "ratio", goal=GOALS["attach_bytes"], judged=ratio))


def _sampled(results: dict[str, list[Result]], times: Any) -> dict[str, Sample]:
    return {name: Sample([times(result) for result in taken]) for name, taken in results.items() if taken}


def _good(report: Report, name: str, what: str, taken: list[Result]) -> list[Result]:
    """Return the successful results; the others become notes, and fail the run where they are ours."""
    good = []
    for result in taken:
        error = result.get("error") or (None if result["right"] else "the last tensor has another value")
        if error is None:
            good.append(result)
        elif name == Ours.name:
            raise RuntimeError(f"{name}, {what}: {error}")
        else:
            report.note(f"{name}, {what}: {error}")
    return good


# The client process: it says when it is ready (interpreter, torch, CUDA context and the model's classes are loaded then), waits
# for a line, measures every case, answers, and holds what it attached until stdin is closed, where it was asked to.

#: Round trips by which the machine's speed is told.
_PINGS = 200
#: Seconds after which a case is not repeated any more, once there are a few times.
_BUDGET, _FEWEST = 3.0, 3


class Attaching:
    """Measures one case after the other with one client."""

    def __init__(self, subject: Subject, device: str) -> None:
        self._subject = subject
        self._device = device

    def measure(self, call: list[Any], repeats: int) -> dict[str, Any]:
        """Return ``first`` (s), ``held`` and ``released`` (lists of s), ``grown`` (bytes), ``tensors`` and ``nbytes``."""
        before = self._memory()
        handles: list[Held] = []
        first = timed(lambda: handles.append(self._subject.attach(*call)))
        grown = {key: value - before[key] for key, value in self._memory().items() if key in before}
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
        held = self._repeated(call, repeats)
        handles.pop().release()
        return facts | {"held": held, "released": self._repeated(call, repeats)}

    def _repeated(self, call: list[Any], repeats: int) -> list[float]:
        times: list[float] = []
        while len(times) < repeats and (sum(times) < _BUDGET or len(times) < _FEWEST):
            times.append(self._again(call))
        return times

    def _again(self, call: list[Any]) -> float:
        handles: list[Held] = []
        seconds = timed(lambda: handles.append(self._subject.attach(*call)))
        handles.pop().release()
        return seconds

    def _memory(self) -> dict[str, int]:
        if self._device == "cpu":
            return {"private": private_bytes()}
        torch.cuda.synchronize()
        sizes = {"device": used(self._device)}
        nvml = gpu_bytes_of_process()
        return sizes if nvml is None else sizes | {"nvml": nvml}


def main() -> None:
    """Configuration: ``who``, ``socket``, ``device``, ``echo``, ``preload``, ``cases``, ``repeats``, ``hold``."""
    config = configuration()
    device: str = config["device"]
    if device != "cpu":
        torch.zeros(1, device=device)
        torch.cuda.synchronize()
    if config["preload"]:
        load_lazy_modules(device)
    subject: Subject = Ours(config["socket"]) if config["who"] == Ours.name else Peer(config["socket"], device)
    echo = Echo(config["echo"])
    say(ready=True)
    if next_command() is None:
        return
    attaching = Attaching(subject, device)
    results = []
    for call in config["cases"]:
        try:
            results.append(attaching.measure(call, config["repeats"]))
        except Exception as error:
            # One case that a side cannot do must not cost the others.
            results.append({"error": f"{type(error).__name__}: {error}"})
    kept = subject.attach(*config["cases"][0]) if config["hold"] else None
    say(results=results, echo=[timed(echo.ping) for _ in range(_PINGS)])
    until_told()
    del kept
    subject.close()
    echo.close()


if __name__ == "__main__":
    main()
