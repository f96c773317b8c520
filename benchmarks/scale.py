"""Many clients: connections that idle, processes that attach at once, clients that are killed. On host memory."""

from __future__ import annotations

import os
import socket
import time
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from benchmarks.echo import Echo
from benchmarks.memory import process_counts
from benchmarks.options import Json, Shape, numbers
from benchmarks.ours import Ours
from benchmarks.peer import Peer, missing
from benchmarks.processes import Process
from benchmarks.report import Report, Row, Unit, shown, size
from benchmarks.servers import Servers, Started
from benchmarks.stats import Sample, interleaved, timed
from benchmarks.targets import GOALS
from shared_rpc import Client

__all__ = ["run"]

#: Connections that shared-tensor's default of four workers can hold.
_PEER_IDLE = 4
#: Seconds within which a server has let go of clients that were killed; longer is reported as it is.
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
    shape = shape or "small"
    clients = clients or min(8, len(os.sched_getaffinity(0)))
    absent = missing()
    report = Report("scale", "Many clients", [Echo.name, *([Peer.name] if absent is None else []), Ours.name])
    report.note(absent)
    with Servers("cpu") as servers:
        echo, ours = servers.echo(), servers.ours([["model", shape]])
        _idle_rows(report, servers, echo, ours, numbers(idle), rounds, calls)
        if absent is None:
            _peer_row(report, servers, calls, patience)
        _together_rows(report, servers, echo, ours, clients, shape)
        _killed_rows(report, servers, ours, killed, shape)
    report.finish(json)


def _idle_rows(
    report: Report, servers: Servers, echo: Started, ours: Started, levels: list[int], rounds: int, calls: int
) -> None:
    load = servers.client("load_client", socket=ours.address, call=[])
    load.read()
    floor, client = Echo(echo.address), Ours(ours.address)
    times: dict[int, dict[str, list[list[float]]]] = {level: {Echo.name: [], Ours.name: []} for level in levels}
    for _ in range(rounds):
        for level in levels:
            load.ask(idle=level)
            actions = {Echo.name: floor.ping, Ours.name: client.ping}
            for name, sample in interleaved(actions, rounds=1, calls=calls).items():
                times[level][name] += sample.rounds
        load.ask(idle=0)
    none = Sample(times[levels[0]][Ours.name]).p50
    for level in levels:
        samples = {name: Sample(taken) for name, taken in times[level].items()}
        goal = GOALS["idle"] if level != levels[0] else None
        report.add(
            Row(
                f"ping, p50, beside {level:,} idle connections",
                {name: sample.p50 for name, sample in samples.items()},
                goal=goal,
                judged=samples[Ours.name].p50 / none if goal is not None else None,
                judged_unit="ratio",
                samples=samples,
                extra={"idle": level},
            )
        )
    client.close()
    floor.close()
    load.close()


def _peer_row(report: Report, servers: Servers, calls: int, patience: float) -> None:
    client = Peer(servers.peer().address, timeout=patience)
    before = interleaved({Peer.name: client.ping}, rounds=1, calls=calls)[Peer.name]
    report.sampled("shared-tensor alone: ping, p50", {Peer.name: before})
    idlers = [socket.socket(socket.AF_UNIX) for _ in range(_PEER_IDLE)]
    for idler in idlers:
        idler.connect(servers.socket_of_peer())
    try:
        values = {Peer.name: timed(client.ping)}
        texts = {}
    except TimeoutError:
        values, texts = {}, {Peer.name: f"no answer in {patience:g} s"}
    for idler in idlers:
        idler.close()
    name = f"shared-tensor beside {_PEER_IDLE} idle ones: ping"
    report.add(Row(name, values, texts=texts, extra={"idle": _PEER_IDLE, "answered": bool(values)}))


def _together_rows(report: Report, servers: Servers, echo: Started, ours: Started, count: int, shape: str) -> None:
    """Measure processes that attach at the same moment."""
    settings: dict[str, Any] = {"cases": [["model", shape]], "repeats": 0, "preload": False, "hold": True, "device": "cpu"}
    clients = [
        servers.client("attach", servers.cores, who=Ours.name, socket=ours.address, echo=echo.address, **settings)
        for _ in range(count)
    ]
    for client in clients:
        client.read()
    for client in clients:
        client.tell(go=True)
    results = [client.read()["results"][0] for client in clients]
    for result in results:
        if "error" in result:
            raise RuntimeError(f"a client could not attach: {result['error']}")
    with Client(socket_path=ours.address) as asking:
        leases = asking.get_server_info()["leases"]
    for client in clients:
        client.close()
    first = Sample([[result["first"] for result in results]])
    grown = Sample([[result["grown"]["private"] for result in results]])
    nbytes = results[0]["nbytes"]
    name = f"{count} processes attach {size(nbytes)} at once, p50"
    report.add(Row(name, {Ours.name: first.p50}, samples={Ours.name: first}, extra={"clients": count, "nbytes": nbytes}))
    report.add(Row("… the slowest of them", {Ours.name: max(first.rounds[0])}))
    report.add(Row("… leases while they hold it", {Ours.name: leases}, "number", extra={"clients": count}))
    report.add(
        Row(
            "… host memory each adds of its own",
            {Ours.name: grown.p50},
            "bytes",
            goal=GOALS["one_copy"] if nbytes >= 10**8 else None,
            judged=grown.p50 / nbytes,
            judged_unit="ratio",
        )
    )


def _killed_rows(report: Report, servers: Servers, ours: Started, count: int, shape: str) -> None:
    """Measure clients that hold the model and are killed: the server's state before, with them, and after."""
    load = servers.client("load_client", socket=ours.address, call=["model", shape])
    load.read()
    who = f"{count} clients killed"
    with Client(socket_path=ours.address) as asking:
        _wave(load, asking, ours, count)  # the allocator's and the loop's first growth is no leak
        wave = _wave(load, asking, ours, count)
        last = _wave(load, asking, ours, count, invalidate=True)
    load.close()
    for key in ("leases", "sessions", "fds", "threads"):
        report.add(_row(f"{who}: {key}", wave, key, "killed", abs(wave.after[key] - wave.before[key])))
    grown = wave.after["memory"] - wave.before["memory"]
    report.add(_row(f"{who}: the server's memory", wave, "memory", "killed_memory", max(grown, 0)))
    report.add(Row(f"{who}: until all is back", {Ours.name: wave.seconds}))
    name = f"{who}, model invalidated: its memory"
    report.add(_row(name, last, "shared", "given_back", last.after["shared"]))


Counts = dict[str, int]


@dataclass(frozen=True)
class _Wave:
    """The server's counts before clients came, with them, and after they were killed; the seconds that took."""

    before: Counts
    during: Counts
    after: Counts
    seconds: float


def _wave(load: Process, asking: Client, ours: Started, count: int, *, invalidate: bool = False) -> _Wave:
    """Attach that many, kill them, and wait.

    :param invalidate: drop the model from the cache meanwhile, so that it goes with its last holder.
    """
    before = _counts(asking, ours)
    attached = load.ask(attach=count)["attached"]
    if attached != count:
        raise RuntimeError(f"{attached} of {count} light clients could attach; see above")
    if invalidate:
        asking.invalidate_endpoint_cache("model")
    during = _counts(asking, ours)
    begin = time.monotonic()
    load.ask(kill=True)
    while True:
        after = _counts(asking, ours)
        seconds = time.monotonic() - begin
        back = after["shared"] == 0 if invalidate else all(after[key] == before[key] for key in ("leases", "sessions", "fds"))
        if back or seconds > _SETTLED:
            return _Wave(before, during, after, seconds)
        time.sleep(0.001)


def _counts(asking: Client, ours: Started) -> Counts:
    info = asking.get_server_info()
    return {key: info[key] for key in ("leases", "sessions", "connections", "objects")} | process_counts(ours.process.pid)


def _row(name: str, wave: _Wave, key: str, goal: str, judged: int) -> Row:
    unit: Unit = "bytes" if key in ("memory", "shared") else "number"
    text = " → ".join(shown(counts[key], unit) for counts in (wave.before, wave.during, wave.after))
    counts = {"before": wave.before, "during": wave.during, "after": wave.after, "seconds": wave.seconds}
    return Row(name, {}, unit, goal=GOALS[goal], judged=judged, texts={Ours.name: text}, extra=counts)
