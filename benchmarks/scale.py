"""Many clients on host memory: idle connections, processes that attach concurrently, killed clients."""

from __future__ import annotations

import importlib
import os
import resource
import signal
import socket
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing, suppress
from typing import Annotated, Any, NamedTuple

import torch
import typer

from benchmarks.attach import Attacher
from benchmarks.processes import Process, ask_all, process_counts
from benchmarks.runner import ECHO, OURS, Goal, Json, Run, Sample, Shape, Unit, chosen, interleaved, numbers, shown, size, timed
from benchmarks.sides import PEER, Echo, Ours, SharedTensor, Started, serve
from shared_rpc import Client
from shared_rpc.memory.mapping import MAPPINGS

#: Idle connections that occupy the four default workers of shared-tensor.
_PEER_IDLE = 4
#: Seconds to wait until a server has released the resources of killed clients.
_SETTLED = 10.0


def run(
    idle: Annotated[str, typer.Option(help="Idle connections, ascending.")] = "0,100,1000",
    rounds: Annotated[int, typer.Option(help="Turns at each number of idle connections.")] = 5,
    calls: Annotated[int, typer.Option(help="Pings in a turn.")] = 300,
    clients: Annotated[
        int | None, typer.Option(help="Processes that attach concurrently; by default one per core, at most 8.")
    ] = None,
    killed: Annotated[int, typer.Option(help="Light clients killed with SIGKILL.")] = 200,
    patience: Annotated[float, typer.Option(help="Seconds to wait for a server that does not answer.")] = 1.0,
    shape: Shape = None,
    json: Json = None,
) -> None:
    """Measure many clients on host memory: idle connections, simultaneous attaches, killed clients."""
    _, shape = chosen("cpu", shape)
    clients = clients or min(8, len(os.sched_getaffinity(0)))
    absent = SharedTensor.missing()
    with Run("scale", "Many clients", [ECHO, *([] if absent else [PEER]), OURS], json=json) as run:
        run.note(absent)
        echo, ours = serve(run, Echo), serve(run, Ours)
        ours.process.ask("make", calls=[["model", shape]])
        _idle_rows(run, echo, ours, numbers(idle), rounds, calls)
        if absent is None:
            _peer_row(run, calls, patience)
        _together_rows(run, echo, ours, clients, shape)
        _killed_rows(run, ours, killed, shape)


def _idle_rows(run: Run, echo: Started, ours: Started, levels: list[int], rounds: int, calls: int) -> None:
    times: dict[int, dict[str, list[Sequence[float]]]] = {level: {ECHO: [], OURS: []} for level in levels}
    load = run.process(Load, address=ours.address)
    with closing(Echo(echo.address)) as floor, closing(Ours(ours.address)) as client:
        for _ in range(rounds):
            for level in levels:
                load.ask("idle", count=level)
                for name, sample in interleaved({ECHO: floor.ping, OURS: client.ping}, rounds=1, calls=calls).items():
                    times[level][name] += sample.turns
            load.ask("idle", count=0)
    load.close()
    none = Sample(*times[levels[0]][OURS]).p50
    for level in levels:
        samples = {name: Sample(*taken) for name, taken in times[level].items()}
        goal = Goal("≤", 1.5, "without", "ratio")
        name = f"ping, p50, with {level:,} idle connections"
        run.row(name, samples, "s", goal, measured=samples[OURS].p50 / none, judge=level != levels[0])


def _peer_row(run: Run, calls: int, patience: float) -> None:
    base_path = serve(run, SharedTensor).address
    client = SharedTensor(base_path, timeout=patience)
    run.row("shared-tensor alone: ping, p50", interleaved({PEER: client.ping}, rounds=1, calls=calls))
    answer: float | str = f"no answer in {patience:g} s"
    with ExitStack() as stack:
        for _ in range(_PEER_IDLE):
            idler = stack.enter_context(socket.socket(socket.AF_UNIX))
            idler.connect(f"{base_path}-0.sock")  # the socket for GPU 0, even if there is no GPU
        with suppress(TimeoutError):
            answer = timed(client.ping)
    run.row(f"shared-tensor with {_PEER_IDLE} idle ones: ping", {PEER: answer})


def _together_rows(run: Run, echo: Started, ours: Started, count: int, shape: str) -> None:
    """Measure processes that attach concurrently."""
    config: dict[str, Any] = {"side": OURS, "address": ours.address, "echo": echo.address, "device": "cpu"}
    clients = run.processes(count, Attacher, cores=run.cores, **config)
    results = [answers[0] for answers, _ in ask_all(clients, "measure", cases=[["model", shape]], repeats=0, hold=True)]
    for result in results:
        if isinstance(result, str):
            raise RuntimeError(f"a client could not attach: {result}")
    with Client(socket_path=ours.address) as asking:
        leases = asking.get_server_info()["leases"]
    for client in clients:
        client.close()
    first = Sample([result["first"][0] for result in results])
    grown = Sample([result["grown"][0] for result in results]).p50
    nbytes = results[0]["nbytes"]
    run.row(f"{count} processes attach {size(nbytes)} at once, p50", first)
    run.row("… the slowest of them", max(first.turns[0]))
    run.row("… leases while they hold it", leases, "number")
    goal = Goal("<", 0.05, "of one copy, each", "ratio") if nbytes >= 10**8 else None
    run.row("… private host memory of each", grown, "bytes", goal, measured=grown / nbytes)


Counts = dict[str, int]


class _Wave(NamedTuple):
    """The server's counts before, during and after clients attach and are killed; the seconds until the latter."""

    before: Counts
    during: Counts
    after: Counts
    seconds: float


def _killed_rows(run: Run, ours: Started, count: int, shape: str) -> None:
    """Kill clients that hold the model: the server's state before, with them, and after."""

    def row(name: str, wave: _Wave, key: str, goal: Goal, measured: int) -> None:
        unit: Unit = "bytes" if key in ("memory", "shared") else "number"
        text = " → ".join(shown(counts[key], unit) for counts in (wave.before, wave.during, wave.after))
        run.row(f"{count} clients killed{name}", text, unit, goal, measured=measured)

    load = run.process(Load, address=ours.address, call=["model", shape])
    with Client(socket_path=ours.address) as asking:
        _wave(load, asking, ours, count)  # a warm-up, because the first growth of the allocator and the loop is not a leak
        wave = _wave(load, asking, ours, count)
        last = _wave(load, asking, ours, count, invalidate=True)
    load.close()
    for key in ("leases", "sessions", "fds", "threads"):
        row(f": {key}", wave, key, Goal("≤", 0, "as before"), abs(wave.after[key] - wave.before[key]))
    # Python's allocator keeps some memory of the connections for the next ones.
    grown = max(wave.after["memory"] - wave.before["memory"], 0)
    row(": the server's memory", wave, "memory", Goal("≤", 1 << 20, "more than before"), grown)
    run.row(f"{count} clients killed: until all is released", wave.seconds)
    row(", model invalidated: its memory", last, "shared", Goal("≤", 0, "all freed"), last.after["shared"])


def _wave(load: Process, asking: Client, ours: Started, count: int, *, invalidate: bool = False) -> _Wave:
    """Attach ``count`` clients, kill them, and wait until their resources are released.

    :param invalidate: drop the model from the cache while they hold it, so that it is freed with its last holder.
    """

    def counts() -> Counts:
        info = asking.get_server_info()
        return {"leases": info["leases"], "sessions": info["sessions"], **process_counts(ours.process.pid)}

    before = counts()
    attached = load.ask("attach", count=count)
    if attached != count:
        raise RuntimeError(f"{attached} of {count} light clients could attach; see above")
    if invalidate:
        asking.invalidate_endpoint_cache("model")
    during = counts()
    begin = time.monotonic()
    load.ask("kill")
    while True:
        after = counts()
        seconds = time.monotonic() - begin
        back = after["shared"] == 0 if invalidate else all(after[key] == before[key] for key in ("leases", "sessions", "fds"))
        if back or seconds > _SETTLED:
            return _Wave(before, during, after, seconds)
        time.sleep(0.001)


class Load:
    """A process with idle clients, and with forks that have a model attached until they are killed.

    :param call: the call of the model; empty without forks.
    """

    def __init__(self, address: str, call: Sequence[Any] = ()) -> None:
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        self._path, self._call = address, call
        self._idle: list[Client] = []
        self._pids: list[int] = []
        # Forks read from this pipe, whose other end only this process holds, so they exit with this process.
        self._leash, self._hand = os.pipe()
        # So that forks are light: no threads, and modules for the first tensor imported in advance.
        torch.set_num_threads(1)
        importlib.import_module("shared_rpc.codec.results")

    def idle(self, count: int) -> None:
        """Open or close idle clients until there are ``count``."""
        while len(self._idle) > count:
            self._idle.pop().close()
        while len(self._idle) < count:
            self._idle.append(Client(socket_path=self._path))
            self._idle[-1].ping()

    def attach(self, count: int) -> int:
        """Fork ``count`` processes that attach; return the number that succeeded."""
        ready, tell = os.pipe()
        for _ in range(count):
            pid = os.fork()
            if pid == 0:
                os.close(ready)
                os.close(self._hand)
                self._live(tell)
            self._pids.append(pid)
        os.close(tell)
        with open(ready, "rb") as reports:
            return len(reports.read())

    def _live(self, tell: int) -> None:
        try:
            with Client(socket_path=self._path) as client, client.call(*self._call) as handle:
                next(handle.value.parameters()).view(-1)[0].item()
                os.write(tell, b".")
                os.close(tell)
                os.read(self._leash, 1)
        finally:
            os._exit(0)

    def kill(self) -> None:
        """Kill the forks by SIGKILL."""
        for pid in self._pids:
            os.kill(pid, signal.SIGKILL)
        for pid in self._pids:
            os.waitpid(pid, 0)
        self._pids.clear()

    def close(self) -> None:
        """Close the idle clients and kill the forks."""
        self.idle(0)
        self.kill()
        MAPPINGS.drain()
