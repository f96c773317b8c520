"""Calls per second by number of client processes, which shows where a server saturates."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from typing import Annotated

import torch
import typer

from benchmarks.processes import ask_all
from benchmarks.runner import APP, OURS, Device, Json, Run, Sample, Shape, chosen, numbers
from benchmarks.sides import PEER, SIDES, Ours, SharedTensor, present, serve
from shared_rpc import Client
from shared_rpc.cli import rendering

#: Seconds of a turn, and of the notice before it, so that all processes start together.
_TURN, _NOTICE = 0.5, 0.1
#: Seconds after which a call of shared-tensor counts as failed.
_PATIENCE = 10.0
#: Calls of each process before the first turn.
_WARM_UP = 20
#: The measured endpoints, and the kinds of their results.
_ENDPOINTS = {"small": "cached", "fresh": "new", "fresh_on_loop": "new, async def"}
#: A forward pass of the attached model.
_FORWARD = "forward"


def run(
    device: Device = "auto",
    clients: Annotated[str, typer.Option(help="Client processes, ascending.")] = "1,2,4,8,16",
    replicas: Annotated[str, typer.Option(help="Processes that compute with one model, ascending; empty for none.")] = "1,2,4",
    workers: Annotated[int, typer.Option(help="Workers of 'shared-rpc serve'; 0 for a server in one process.")] = 0,
    rounds: Annotated[int, typer.Option(help="Turns of half a second for each side.")] = 3,
    shape: Shape = "small",
    json: Json = None,
) -> None:
    """Measure calls per second by number of client processes, and forward passes per second of replicas of one model."""
    device, shape = chosen(device, shape)
    sides = present(SharedTensor, Ours, device=device)
    title = f"Calls per second, tensors on {device}"
    with Run("clients", title, [side.name for side in sides], device, json, base=PEER) as run, ExitStack() as stack:
        run.note(SharedTensor.missing(device))
        addresses = {side.name: serve(run, side).address for side in sides if side is not Ours or not workers}
        if workers:
            run.note(f"shared-rpc serve --workers {workers}")
            broker = stack.enter_context(run.broker(APP, "--workers", str(workers)))
            addresses[OURS] = str(broker.socket_path)
        for count in numbers(clients):
            for endpoint, rates in _rates(run, addresses, list(_ENDPOINTS), count, rounds).items():
                name = f"{rendering.several(count, 'client')}, 4 KiB tensor, {_ENDPOINTS[endpoint]}: calls/s"
                run.row(name, rates, "number")
        for count in numbers(replicas):
            found = _rates(run, {OURS: addresses[OURS]}, [_FORWARD], count, rounds, shape)
            name = f"{rendering.several(count, 'replica')} of one model ({shape}): forward passes/s"
            run.row(name, found[_FORWARD], "number")


def _rates(
    run: Run, addresses: dict[str, str], endpoints: list[str], count: int, rounds: int, shape: str | None = None
) -> dict[str, dict[str, Sample]]:
    """Return the total calls per second of ``count`` processes in each turn, by endpoint and side.

    :param shape: the model for forward passes; None for calls.
    """
    callers = run.processes(count, Caller, device=run.device, addresses=addresses, shape=shape)
    rates = {endpoint: {side: Sample() for side in addresses} for endpoint in endpoints}
    for endpoint, sides in rates.items():
        for _ in range(rounds):
            for side, taken in sides.items():
                begin = time.monotonic() + _NOTICE  # the clock is the same for all processes
                counts, errors = zip(*ask_all(callers, "turn", side=side, endpoint=endpoint, begin=begin), strict=True)
                taken.append(sum(counts) / _TURN)
                for error in set(errors) - {None}:
                    run.note(f"{side}, calls of {count} processes: {error}")
    for caller in callers:
        caller.close()
    return rates


class Caller:
    """A process that makes calls.

    :param addresses: servers, by side.
    """

    def __init__(self, device: str, addresses: dict[str, str], shape: str | None) -> None:
        self._forward = _forward(addresses[OURS], device, shape) if shape is not None else None
        self._sides = {name: SIDES[name](address, device, _PATIENCE) for name, address in addresses.items()}
        for side in self._sides.values():
            with suppress(Exception):  # the turns report it
                for endpoint in _ENDPOINTS:
                    for _ in range(_WARM_UP):
                        side.call(endpoint)

    def turn(self, side: str, endpoint: str, begin: float) -> tuple[int, str | None]:
        """Return the number of calls completed in time, and the error that ended the turn early."""
        call = self._forward or partial(self._sides[side].call, endpoint)
        end, calls = begin + _TURN, 0
        time.sleep(max(begin - time.monotonic(), 0))
        try:
            while True:
                call()
                if time.monotonic() > end:
                    return calls, None
                calls += 1
        except Exception as problem:  # a failure of one side must not end the turns of the other
            return calls, f"{type(problem).__name__}: {problem}"

    def close(self) -> None:
        """Close the clients."""
        for side in self._sides.values():
            side.close()


def _forward(address: str, device: str, shape: str) -> Callable[[], object]:
    """Attach the model; return a function that runs a forward pass of one token and waits for it."""
    model = Client(socket_path=address).call("model", shape).value
    token = torch.ones((1, 1), dtype=torch.long, device=device)

    def forward() -> None:
        with torch.inference_mode():
            model(token)[0, 0, 0].item()

    for _ in range(_WARM_UP):
        forward()
    return forward
