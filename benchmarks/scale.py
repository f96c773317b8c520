"""Many clients: connections that idle, processes that attach at once, clients that are killed. On host memory."""

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

#: Connections that shared-tensor's default of four workers can hold.
_PEER_IDLE = 4
#: Seconds within which a server has released what killed clients held; longer is reported as it is.
_SETTLED = 10.0


def run(
    idle: Annotated[str, typer.Option(help="Idle connections, ascending.")] = "0,100,1000",
    rounds: Annotated[int, typer.Option(help="Turns at each number of idle connections.")] = 5,
    calls: Annotated[int, typer.Option(help="Pings in a turn.")] = 300,
    clients: Annotated[
        int | None, typer.Option(help="Processes that attach at once; one a core by default, 8 at most.")
    ] = None,
    killed: Annotated[int, typer.Option(help="Light clients killed with SIGKILL.")] = 200,
    patience: Annotated[float, typer.Option(help="Seconds to wait for a server that does not answer.")] = 1.0,
    shape: Shape = None,
    json: Json = None,
) -> None:
    """Measure many clients: idle ones, simultaneous attaches, killed ones. On host memory."""
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
        name = f"ping, p50, beside {level:,} idle connections"
        run.row(name, samples, "s", goal, measured=samples[OURS].p50 / none, judge=level != levels[0])


def _peer_row(run: Run, calls: int, patience: float) -> None:
    base_path = serve(run, SharedTensor).address
    client = SharedTensor(base_path, timeout=patience)
    run.row("shared-tensor alone: ping, p50", interleaved({PEER: client.ping}, rounds=1, calls=calls))
    answer: float | str = f"no answer in {patience:g} s"
    with ExitStack() as stack:
        for _ in range(_PEER_IDLE):
            idler = stack.enter_context(socket.socket(socket.AF_UNIX))
            idler.connect(f"{base_path}-0.sock")  # its socket for GPU 0, which need not exist
        with suppress(TimeoutError):
            answer = timed(client.ping)
    run.row(f"shared-tensor beside {_PEER_IDLE} idle ones: ping", {PEER: answer})


def _together_rows(run: Run, echo: Started, ours: Started, count: int, shape: str) -> None:
    """Measure processes that attach at the same moment."""
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
    run.row("… host memory each adds of its own", grown, "bytes", goal, measured=grown / nbytes)


Counts = dict[str, int]


class _Wave(NamedTuple):
    """The server's counts before clients came, with them, and after they were killed; the seconds that took."""

    before: Counts
    during: Counts
    after: Counts
    seconds: float


def _killed_rows(run: Run, ours: Started, count: int, shape: str) -> None:
    """Measure clients that hold the model and are killed: the server's state before, with them, and after."""

    def row(name: str, wave: _Wave, key: str, goal: Goal, measured: int) -> None:
        unit: Unit = "bytes" if key in ("memory", "shared") else "number"
        text = " → ".join(shown(counts[key], unit) for counts in (wave.before, wave.during, wave.after))
        run.row(f"{count} clients killed{name}", text, unit, goal, measured=measured)

    load = run.process(Load, address=ours.address, call=["model", shape])
    with Client(socket_path=ours.address) as asking:
        _wave(load, asking, ours, count)  # the allocator's and the loop's first growth is no leak
        wave = _wave(load, asking, ours, count)
        last = _wave(load, asking, ours, count, invalidate=True)
    load.close()
    for key in ("leases", "sessions", "fds", "threads"):
        row(f": {key}", wave, key, Goal("≤", 0, "as before"), abs(wave.after[key] - wave.before[key]))
    # Python's allocator keeps some of what the connections needed, for the next ones.
    grown = max(wave.after["memory"] - wave.before["memory"], 0)
    row(": the server's memory", wave, "memory", Goal("≤", 1 << 20, "more than before"), grown)
    run.row(f"{count} clients killed: until all is back", wave.seconds)
    row(", model invalidated: its memory", last, "shared", Goal("≤", 0, "all given back"), last.after["shared"])


def _wave(load: Process, asking: Client, ours: Started, count: int, *, invalidate: bool = False) -> _Wave:
    """Attach that many, kill them, and wait.

    :param invalidate: drop the model from the cache while they hold it, so that it goes with its last holder.
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
    """A process with idle clients, and with forks that hold a lease on a model and its memory mapped until they are killed.

    :param call: the call of the model; none if there are no forks.
    """

    def __init__(self, address: str, call: Sequence[Any] = ()) -> None:
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        self._path, self._call = address, call
        self._idle: list[Client] = []
        self._pids: list[int] = []
        # A fork reads from it to its end; this process alone holds the other side, so forks end with this process.
        self._leash, self._hand = os.pipe()
        # Forks are light: they have no threads, and what a client imports with its first tensor is there.
        torch.set_num_threads(1)
        importlib.import_module("shared_rpc.codec.results")

    def idle(self, count: int) -> None:
        """Have that many idle clients."""
        while len(self._idle) > count:
            self._idle.pop().close()
        while len(self._idle) < count:
            self._idle.append(Client(socket_path=self._path))
            self._idle[-1].ping()

    def attach(self, count: int) -> int:
        """Fork that many, and wait until each of them has the memory; return how many have it."""
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
        """End all of them."""
        self.idle(0)
        self.kill()
        MAPPINGS.drain()
