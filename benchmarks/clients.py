"""Calls a second, against the number of client processes: where a server has enough of them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from typing import Annotated, Any

import typer

from benchmarks.runner import OURS, Device, Json, Report, Shape, chosen, numbers
from benchmarks.servers import Process, Servers
from benchmarks.sides import PEER, Side, client_of, missing
from shared_rpc import Client
from shared_rpc.memory.backends.choice import mps
from shared_rpc.memory.devices import device_id

#: The same endpoints, for a broker with several workers.
APP = """
from benchmarks.workload import Workload
from shared_rpc import Provider

provider, workload = Provider(device={device!r}), Workload({device!r})
provider.share(workload.small)
provider.share(cache=False)(workload.fresh)
provider.share(cache=False)(workload.fresh_on_loop)
provider.share(managed=True)(workload.model)
"""
#: Seconds of a turn, and those between the word to begin and the beginning, so that all begin together.
_TURN, _NOTICE = 0.5, 0.1
#: Seconds after which a call counts as failed.
_PATIENCE = 10.0
#: Calls of each process before the first turn.
_WARM_UP = 20
#: An endpoint that one side has, and what the other side has instead.
_ON_LOOP, _INSTEAD = "fresh_on_loop", "fresh"
#: A pass over the model that the process has attached.
_FORWARD = "forward"


def run(
    device: Device = "auto",
    clients: Annotated[str, typer.Option(help="Client processes, ascending.")] = "1,2,4,8,16",
    replicas: Annotated[str, typer.Option(help="Processes that compute with one model, ascending; empty for none.")] = "1,2,4",
    workers: Annotated[
        int, typer.Option(help="Have 'shared-rpc serve' with so many workers; 0 for a server in one process.")
    ] = 0,
    rounds: Annotated[int, typer.Option(help="Turns that each side has, of half a second.")] = 5,
    shape: Shape = "small",
    json: Json = None,
) -> None:
    """Measure calls a second, against the number of client processes, and passes a second of replicas of one model."""
    device, shape = chosen(device, shape)
    absent = missing(tensors=device)
    report = Report("clients", f"Calls a second, tensors on {device}", [*([PEER] if absent is None else []), OURS])
    report.note(absent)
    with Servers(device) as servers, ExitStack() as stack:
        addresses = {PEER: servers.start("PeerServer").address} if absent is None else {}
        if workers:
            report.note(f"shared-rpc serve --workers {workers}")
            broker = servers.broker(APP.format(device=device), "--workers", str(workers))
            addresses[OURS], _ = stack.enter_context(broker)
        else:
            addresses[OURS] = servers.start("OurServer").address
        for count in numbers(clients):
            throughput(report, servers, addresses, device, count, rounds, judge=False)
        for count in numbers(replicas):
            _passes(report, servers, addresses[OURS], device, count, rounds, shape)
        if device == "cuda" and mps(device_id("cuda:0")):
            report.note("under NVIDIA's Multi-Process Service")
    report.finish(json)


def _passes(report: Report, servers: Servers, address: str, device: str, count: int, rounds: int, shape: str) -> None:
    """Measure forward passes of one token, by processes that share one model."""
    callers = _callers(servers, count, device=device, addresses={OURS: address}, shape=shape)
    counts = [_turn(report, callers, OURS, _FORWARD) for _ in range(rounds)]
    passes = statistics.median(sum(each) for each in counts) / _TURN
    name = f"{count} replica{'' if count == 1 else 's'} of one model ({shape}): forward passes/s"
    report.row(name, {OURS: passes}, "number", processes=count, calls={OURS: counts})
    for caller in callers:
        caller.close()


def _callers(servers: Servers, count: int, **config: Any) -> list[Process]:
    started = [servers.client("clients:Caller", **config) for _ in range(count)]
    return [caller.ready() for caller in started]


def throughput(
    report: Report, servers: Servers, addresses: dict[str, str], device: str, processes: int, rounds: int, *, judge: bool
) -> None:
    """Measure calls of a small cached tensor, and of a new one; all sides in turns, from the same processes.

    :param addresses: the servers that take part, by the name of their side.
    :param judge: whether the goal is about these tensors.
    """
    callers = _callers(servers, processes, device=device, addresses=addresses)
    for endpoint, text in (("small", "cached"), ("fresh", "new"), (_ON_LOOP, "new, async def")):
        turns: dict[str, list[list[int]]] = {name: [] for name in addresses}
        for _ in range(rounds):
            for name, counts in turns.items():
                counts.append(_turn(report, callers, name, endpoint))
        values = {name: statistics.median(sum(counts) for counts in taken) / _TURN for name, taken in turns.items()}
        report.row(
            f"{processes} process{'' if processes == 1 else 'es'}, 4 KiB tensor, {text}: calls/s",
            values,
            "number",
            "throughput",
            values[OURS] / values[PEER] if judge and values.get(PEER) else None,
            processes=processes,
            endpoint=endpoint,
            calls=turns,
        )
    for caller in callers:
        caller.close()


def _turn(report: Report, callers: list[Process], name: str, endpoint: str) -> list[int]:
    begin = time.monotonic() + _NOTICE  # one clock for all processes
    for caller in callers:
        caller.tell("turn", who=name, endpoint=endpoint, begin=begin)
    answers = [caller.read() for caller in callers]
    for error in {answer["error"] for answer in answers} - {None}:
        report.note(f"{name}, calls of {len(callers)} processes: {error}")
    return [answer["calls"] for answer in answers]


class Caller:
    """A process that calls.

    :param addresses: servers by the name of their side.
    :param shape: the model over which passes are made; None for calls.
    """

    def __init__(self, device: str, addresses: dict[str, str], shape: str | None = None) -> None:
        self._sides: dict[str, Side] = {}
        self._forward = _forward(addresses[OURS], device, shape) if shape is not None else None
        for name, address in addresses.items():
            self._sides[name] = client_of(name, address, timeout=_PATIENCE)
            with suppress(Exception):  # its turns will show it
                for endpoint in ("small", "fresh", *([_ON_LOOP] if name == OURS else [])):
                    for _ in range(_WARM_UP):
                        self._sides[name].call(endpoint)

    def turn(self, who: str, endpoint: str, begin: float) -> dict[str, Any]:
        """Count the ``calls`` that were complete in time, with the ``error`` that ended the turn early."""
        endpoint = _INSTEAD if endpoint == _ON_LOOP and who != OURS else endpoint
        call = self._forward or partial(self._sides[who].call, endpoint)
        end, calls = begin + _TURN, 0
        time.sleep(max(begin - time.monotonic(), 0))
        try:
            while True:
                call()
                if time.monotonic() > end:
                    return {"calls": calls, "error": None}
                calls += 1
        except Exception as problem:  # one side's failure must not cost the other side its turns
            return {"calls": calls, "error": f"{type(problem).__name__}: {problem}"}

    def close(self) -> None:
        """Close the clients."""
        for side in self._sides.values():
            side.close()


def _forward(address: str, device: str, shape: str) -> Callable[[], object]:
    """Attach the model; return a pass of one token over it, which is complete when it returns."""
    import torch

    model = Client(socket_path=address).call("model", shape).value
    token = torch.ones((1, 1), dtype=torch.long, device=device)

    def forward() -> None:
        with torch.inference_mode():
            model(token)[0, 0, 0].item()

    for _ in range(_WARM_UP):
        forward()
    return forward
