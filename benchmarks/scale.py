"""Many clients on host memory: idle connections, and killed clients."""

from __future__ import annotations

import importlib
import multiprocessing
import resource
import socket
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing, suppress
from multiprocessing.synchronize import Semaphore
from typing import Annotated, Any

import torch
import typer

from benchmarks.processes import Process, process_counts
from benchmarks.runner import (
    ECHO,
    OURS,
    PATIENCE,
    Goal,
    Json,
    Run,
    Sample,
    Shape,
    Unit,
    chosen,
    interleaved,
    numbers,
    shown,
    timed,
    wait_for,
)
from benchmarks.sides import PEER, Echo, Ours, SharedTensor, Started, serve
from shared_rpc import Client

#: Idle connections that occupy the four default workers of shared-tensor.
_PEER_IDLE = 4
#: Seconds to wait for an answer of shared-tensor.
_PATIENCE = 1.0


def run(
    idle: Annotated[str, typer.Option(help="Idle connections, ascending.")] = "0,100,1000",
    rounds: Annotated[int, typer.Option(help="Turns at each number of idle connections.")] = 5,
    calls: Annotated[int, typer.Option(help="Pings in a turn.")] = 300,
    killed: Annotated[int, typer.Option(help="Light clients killed with SIGKILL.")] = 200,
    shape: Shape = None,
    json: Json = None,
) -> None:
    """Measure many clients on host memory: idle connections, and killed clients."""
    _, shape = chosen("cpu", shape)
    absent = SharedTensor.missing()
    with Run("scale", "Many clients", [ECHO, *([] if absent else [PEER]), OURS], json=json) as run:
        run.note(absent)
        echo, ours = serve(run, Echo), serve(run, Ours)
        ours.process.ask("make", calls=[["model", shape]])
        _idle_rows(run, echo, ours, numbers(idle), rounds, calls)
        if absent is None:
            _peer_row(run)
        _killed_rows(run, ours, killed, shape)


def _idle_rows(run: Run, echo: Started, ours: Started, levels: list[int], rounds: int, calls: int) -> None:
    times: dict[int, dict[str, list[Sequence[float]]]] = {level: {ECHO: [], OURS: []} for level in levels}
    idle = run.process(Idle, address=ours.address)
    with closing(Echo(echo.address)) as floor, closing(Ours(ours.address)) as client:
        for _ in range(rounds):
            for level in levels:
                idle.ask("open", count=level)
                for name, sample in interleaved({ECHO: floor.ping, OURS: client.ping}, rounds=1, calls=calls).items():
                    times[level][name] += sample.turns
            idle.ask("open", count=0)
    idle.close()
    none = Sample(*times[levels[0]][OURS]).p50
    for level in levels:
        samples = {name: Sample(*taken) for name, taken in times[level].items()}
        goal = Goal("≤", 1.5, "without", "ratio") if level != levels[0] else None
        name = f"ping, p50, with {level:,} idle connections"
        run.row(name, samples, "s", goal, measured=samples[OURS].p50 / none)


def _peer_row(run: Run) -> None:
    base_path = serve(run, SharedTensor).address
    client = SharedTensor(base_path, timeout=_PATIENCE)
    answer: float | str = f"no answer in {_PATIENCE:g} s"
    with ExitStack() as stack:
        for _ in range(_PEER_IDLE):
            idler = stack.enter_context(socket.socket(socket.AF_UNIX))
            idler.connect(f"{base_path}-0.sock")  # the socket for GPU 0, even if there is no GPU
        with suppress(TimeoutError):
            answer = timed(client.ping)
    run.row(f"shared-tensor with {_PEER_IDLE} idle ones: ping", {PEER: answer})


Counts = dict[str, int]


#: What the server keeps for a client that is connected and holds the model.
_KEPT = ("leases", "sessions", "fds")


def _killed_rows(run: Run, ours: Started, count: int, shape: str) -> None:
    """Kill clients that hold the model: the server's state before, with them, and after."""
    holders = run.process(Holders, address=ours.address, call=["model", shape])
    with Client(socket_path=ours.address) as asking:
        _wave(holders, asking, ours, count)  # a warm-up, because the first growth of the allocator and the loop is not a leak
        before, during, after, seconds = _wave(holders, asking, ours, count)
    holders.close()

    def row(name: str, key: str, unit: Unit, goal: Goal) -> None:
        text = " → ".join(shown(counts[key], unit) for counts in (before, during, after))
        run.row(f"{count} clients killed: {name}", text, unit, goal, measured=max(after[key] - before[key], 0))

    for key in _KEPT:
        row(key, key, "number", Goal("≤", 0, "as before"))
    # Python's allocator keeps some memory of the connections for the next ones.
    row("the server's memory", "memory", "bytes", Goal("≤", 1 << 20, "more than before"))
    run.row(f"{count} clients killed: until all is released", seconds)


def _wave(holders: Process, asking: Client, ours: Started, count: int) -> tuple[Counts, Counts, Counts, float]:
    """Attach ``count`` clients, kill them, and wait until their resources are released.

    :return: the server's counts before, during and after, and the seconds from the kill to the latter.
    """

    def counts() -> Counts:
        info = asking.get_server_info()
        return {"leases": info["leases"], "sessions": info["sessions"], **process_counts(ours.process.pid)}

    before = counts()
    holders.ask("attach", count=count)
    during = counts()
    begin = time.monotonic()
    holders.ask("kill")
    after = wait_for(counts, lambda found: all(found[key] == before[key] for key in _KEPT), 1e-3)
    return before, during, after, time.monotonic() - begin


class Idle:
    """A process with idle clients."""

    def __init__(self, address: str) -> None:
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        self._path = address
        self._clients: list[Client] = []

    def open(self, count: int) -> None:
        """Open or close clients until there are ``count``."""
        while len(self._clients) > count:
            self._clients.pop().close()
        while len(self._clients) < count:
            self._clients.append(Client(socket_path=self._path))
            self._clients[-1].ping()


_FORK = multiprocessing.get_context("fork")


class Holders:
    """A process with forks that have a model attached until they are killed.

    :param call: the call of the model.
    """

    def __init__(self, address: str, call: Sequence[Any]) -> None:
        self._config = (address, call, _FORK.Semaphore(0))
        self._forks: list[multiprocessing.process.BaseProcess] = []
        # So that forks are light: no threads, and modules for the first tensor imported in advance.
        torch.set_num_threads(1)
        importlib.import_module("shared_rpc.codec.results")

    def attach(self, count: int) -> None:
        """Fork ``count`` processes, and wait until they have attached."""
        self._forks = [_FORK.Process(target=_hold, args=self._config) for _ in range(count)]
        for fork in self._forks:
            fork.start()
        for _ in range(count):
            if not self._config[-1].acquire(timeout=PATIENCE):
                raise RuntimeError("a light client could not attach; see above")

    def kill(self) -> None:
        """Kill the forks by SIGKILL."""
        for fork in self._forks:
            fork.kill()
        for fork in self._forks:
            fork.join()


def _hold(address: str, call: Sequence[Any], attached: Semaphore) -> None:
    """Attach the model, and hold it until the parent process ends."""
    with Client(socket_path=address) as client, client.call(*call) as handle:
        next(handle.value.parameters()).view(-1)[0].item()
        attached.release()
        parent = multiprocessing.parent_process()
        assert parent is not None, "this process is a fork"
        parent.join()
