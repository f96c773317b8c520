"""Round trips, in turns: the raw echo, shared-tensor, and we."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any

import anyio
import typer

from benchmarks.clients import throughput
from benchmarks.echo import Echo
from benchmarks.memory import private_bytes, process_counts, used
from benchmarks.options import Json
from benchmarks.ours import Ours
from benchmarks.peer import Peer, missing
from benchmarks.peers import PEERS, RpcPeer, installed
from benchmarks.processes import configuration, environ, next_command, say
from benchmarks.report import Report, Row, Unit, shown
from benchmarks.servers import Servers, Started
from benchmarks.stats import Sample, interleaved, timed
from benchmarks.subjects import Subject
from benchmarks.targets import GOALS, Goal
from shared_rpc import AsyncClient

__all__ = ["run"]

#: Prints the seconds that the package takes to import where torch is there already.
#: A full collection is due when torch is there, and takes 100 ms of whatever comes next: before the clock starts.
_IMPORT = """
import time, torch
begin = time.perf_counter()
import shared_rpc
for name in shared_rpc.__all__:
    getattr(shared_rpc, name)
print(time.perf_counter() - begin)
"""

#: One slow call for so many quick ones.
_SLOW = 100
#: Processes that call at once, and calls of the long run.
_TOGETHER = 8
_LONG = {"cuda": 100_000, "cpu": 2_000}


def run(
    cuda: Annotated[bool, typer.Option("--cuda", help="Tensors on the GPU, beside shared-tensor.")] = False,
    rounds: Annotated[int, typer.Option(help="Turns that each side has.")] = 10,
    calls: Annotated[int, typer.Option(help="Calls in a turn.")] = 300,
    processes: Annotated[int, typer.Option(help="Processes for the times of import and of 'shared-rpc ls'.")] = 7,
    megabytes: Annotated[int, typer.Option(help="MiB of the large argument.")] = 64,
    tasks: Annotated[int, typer.Option(help="Finished tasks that the server remembers.")] = 9_000,
    clients: Annotated[int | None, typer.Option(help="Processes that call at once; 8, on the host one a core at most.")] = None,
    long_run: Annotated[
        int | None, typer.Option(help="Calls of the long run, 0 for none; 100000 on a GPU, 2000 on the host.")
    ] = None,
    peers: Annotated[bool, typer.Option("--peers", help="Beside other ways to call that are installed.")] = False,
    pinned: Annotated[bool, typer.Option(help="Servers on one half of the cores, those who measure on the other.")] = True,
    json: Json = None,
) -> None:
    """Round trips: ping, direct and managed calls, arguments, tasks, many calls at once, very many calls; import and command
    line."""
    device = "cuda" if cuda else "cpu"
    pings, tensors = missing(), missing(tensors=device)
    there, left_out = installed() if peers else ([], None)
    others = [PEERS[name].name for name in there]
    names = [Echo.name, *([Peer.name] if pings is None else []), *others, Ours.name]
    report = Report("rpc", f"Round trips, tensors on {device} (x raw echo)", names, divided=pinned)
    report.note(pings if pings is not None else tensors)
    report.note(left_out)
    with Servers(device, pinned=pinned) as servers:
        echo = Echo(servers.echo().address)
        started = servers.ours()
        ours = Ours(started.address)
        theirs = servers.peer() if pings is None else None
        peer = Peer(theirs.address, device) if theirs is not None else None
        beside = [PEERS[name](servers.rpc_peer(name), device) for name in there]
        turns = _Turns(report, echo, ours, peer, beside, rounds, calls)
        turns.pings()
        turns.calls_with_tensors(peer if tensors is None else None, device, megabytes)
        trivial_tasks(report, echo, ours, peer, rounds, calls)
        concurrent_calls(report, started.address, rounds)
        many = clients or (_TOGETHER if cuda else min(_TOGETHER, len(servers.cores)))
        addresses = {Peer.name: theirs.address} if theirs is not None and tensors is None else {}
        addresses[Ours.name] = started.address
        throughput(report, servers, addresses, device, many, rounds, judge=cuda and many == _TOGETHER)
        finished_tasks(report, ours, started.facts["pid"], tasks)
        count = long_run if long_run is not None else _LONG[device]
        if count:
            many_calls(report, servers, started, device, count)
        _cold_starts(report, servers.base_path, processes)
        for client in (*beside, ours, peer, echo):
            if client is not None:
                client.close()
    report.finish(json)


class _Turns:
    """The rows that are measured over open connections."""

    def __init__(
        self, report: Report, echo: Echo, ours: Ours, peer: Peer | None, others: list[RpcPeer], rounds: int, calls: int
    ) -> None:
        self._report = report
        self._echo = echo
        self._ours = ours
        self._peer = peer
        self._others = others
        self._rounds = rounds
        self._calls = calls

    def _measure(
        self, action: Callable[[Any], object], peer: Peer | None, *, slow: bool = False, others: bool = True
    ) -> dict[str, Sample]:
        actions: dict[str, Callable[[], object]] = {Echo.name: self._echo.ping}
        subjects = [peer, *(self._others if others else ()), self._ours]
        actions |= {subject.name: partial(action, subject) for subject in subjects if subject is not None}
        if slow:
            return interleaved(actions, rounds=self._rounds, calls=max(self._calls // _SLOW, 1), warm_up=1)
        return interleaved(actions, rounds=self._rounds, calls=self._calls)

    def pings(self) -> None:
        """Measure ping: medians, and the slowest call in a hundred."""
        samples = self._measure(lambda subject: subject.ping(), self._peer)
        ratio = samples[Ours.name].p50 / samples[Echo.name].p50
        self._report.add(
            Row(
                "ping, p50",
                {name: sample.p50 for name, sample in samples.items()},
                goal=GOALS["ping"],
                judged=ratio,
                judged_unit="ratio",
                samples=samples,
            )
        )
        self._report.add(Row("ping, p99", {name: sample.p99 for name, sample in samples.items()}))

    def calls_with_tensors(self, peer: Peer | None, device: str, mebibytes: int) -> None:
        """Direct calls, a managed one, and calls with a small and a large argument."""

        def row(
            name: str,
            action: Callable[[Subject], object],
            goal: Goal | None = None,
            *,
            judge: bool = False,
            slow: bool = False,
            others: bool = False,
        ) -> None:
            samples = self._measure(action, peer, slow=slow, others=others)
            self._report.sampled(name, samples, goal, samples[Ours.name].p50 if judge else None)

        on_gpu = device == "cuda"
        row("direct call, 4 KiB tensor, cached", lambda subject: subject.call("small"), GOALS["small_tensor"], judge=on_gpu)
        row(
            "direct call, 4 KiB tensor, new",
            lambda subject: subject.call("fresh"),
            GOALS["small_tensor"],
            judge=on_gpu,
            others=True,
        )
        row("the same by an async def endpoint", _on_loop("fresh"), GOALS["small_tensor"], judge=on_gpu)
        if peer is not None:
            peer.attach("kept")  # one reference that stays, or every release would have it built anew
        row("managed call and release, 4 KiB", lambda subject: subject.attach("kept").release())

        import torch

        from benchmarks.workload import SMALL

        row(
            "direct call, takes and returns 4 KiB, new",
            lambda subject: subject.call("plus_one", torch.ones(SMALL, device=device)),
            GOALS["small_tensor"],
            judge=on_gpu,
            others=True,
        )
        argument = torch.ones(mebibytes << 20, dtype=torch.uint8, device=device)
        row(
            f"echo of a {mebibytes} MiB tensor argument",
            lambda subject: subject.call("echo", argument),
            GOALS["large_argument"],
            judge=on_gpu and mebibytes == 64,
            slow=True,
            others=True,
        )
        row(
            "the same echo by an async def endpoint",
            _on_loop("echo", argument),
            GOALS["large_argument"],
            judge=on_gpu and mebibytes == 64,
            slow=True,
        )


def _on_loop(endpoint: str, *args: Any) -> Callable[[Subject], object]:
    """Return a call of the endpoint's ``async def`` twin, on the side that has one."""
    return lambda subject: subject.call(f"{endpoint}_on_loop" if subject.name == Ours.name else endpoint, *args)


def _cold_starts(report: Report, base_path: str, processes: int) -> None:
    imports: list[float] = []
    listings: list[float] = []
    starts: list[float] = []
    for _ in range(processes):
        imports.append(float(_python("-c", _IMPORT).splitlines()[-1]))
        listings.append(timed(lambda: _list(base_path)))
        starts.append(timed(lambda: _python("-c", "pass")))
    importing, listing = Sample([imports]), Sample([listings])
    report.sampled("import of every public name, beyond torch", {Ours.name: importing}, GOALS["import"], importing.p50)
    report.sampled("shared-rpc ls --json, as a process", {Ours.name: listing}, GOALS["ls"], listing.p50)
    report.note(f"Python itself takes {Sample([starts]).p50 * 1e3:.0f} ms to start and end")


def _list(base_path: str) -> None:
    answer = _python("-m", "shared_rpc.cli", "ls", "--json", "--base-path", base_path)
    if base_path not in answer:
        raise RuntimeError(f"'shared-rpc ls' does not see the server at {base_path}: {answer}")


def _python(*arguments: str) -> str:
    done = subprocess.run([sys.executable, *arguments], stdout=subprocess.PIPE, text=True, check=True, env=environ())
    return done.stdout


# Tasks, and calls that are under way together.

#: Calls of one connection that are under way together.
_AT_ONCE = 64
#: Calls that each of those coroutines makes, one after the other.
_EACH = 10


def trivial_tasks(report: Report, echo: Echo, ours: Ours, peer: Peer | None, rounds: int, calls: int) -> None:
    """Submit a task that does nothing, and wait for it."""
    actions: dict[str, Callable[[], object]] = {
        Echo.name: echo.ping,
        **{who.name: partial(who.task, "nothing") for who in (peer, ours) if who is not None},
    }
    samples = interleaved(actions, rounds=rounds, calls=calls)
    ratio = samples[Ours.name].p50 / samples[Echo.name].p50
    values = {name: sample.p50 for name, sample in samples.items()}
    report.add(
        Row("submit and wait for a task, p50", values, goal=GOALS["task"], judged=ratio, judged_unit="ratio", samples=samples)
    )


def concurrent_calls(report: Report, socket: str, rounds: int) -> None:
    """Measure calls over one connection of an :class:`AsyncClient`, one by one and all at once, in seconds for each call."""
    for endpoint, text in (("small", "a cached tensor"), ("nothing", "an endpoint that runs")):
        apart, together = anyio.run(_calls, socket, endpoint, rounds)
        report.sampled(f"AsyncClient, {text}: one by one, a call", {Ours.name: apart})
        ratio = together.p50 / apart.p50
        name = f"… {_AT_ONCE} at once, a call"
        report.add(
            Row(
                name,
                {Ours.name: together.p50},
                goal=GOALS["concurrent"],
                judged=ratio,
                judged_unit="ratio",
                samples={Ours.name: together},
            )
        )


async def _calls(socket: str, endpoint: str, rounds: int) -> tuple[Sample, Sample]:
    apart: list[list[float]] = []
    together: list[list[float]] = []
    async with AsyncClient(socket_path=socket) as client:

        async def calls(count: int) -> None:
            for _ in range(count):
                await client.call(endpoint)

        kept = await client.call(endpoint)
        for _ in range(rounds + 1):
            begin = time.perf_counter()
            await calls(_AT_ONCE)
            middle = time.perf_counter()
            async with anyio.create_task_group() as group:
                for _ in range(_AT_ONCE):
                    group.start_soon(calls, _EACH)
            end = time.perf_counter()
            apart.append([(middle - begin) / _AT_ONCE])
            together.append([(end - middle) / _AT_ONCE / _EACH])
        del kept
    # The first turn made the threads, and is none of those that count.
    return Sample(apart[1:]), Sample(together[1:])


def finished_tasks(report: Report, ours: Ours, pid: int, count: int) -> None:
    """Measure the server's memory of ended tasks, and the time to list them."""
    for _ in range(200):  # what its allocator takes first is not theirs
        ours.task("nothing")
    before = private_bytes(pid)
    for _ in range(count):
        ours.task("nothing")
    grown = private_bytes(pid) - before
    report.add(
        Row(
            f"{count:,} finished tasks: the server's memory",
            {Ours.name: grown},
            "bytes",
            GOALS["tasks_memory"],
            grown * 10_000 / count,
        )
    )
    report.sampled("… to list them all", {Ours.name: Sample([[timed(ours.list_tasks) for _ in range(5)]])})


# The long run.

#: Calls after which nothing is to grow any more.
_FIRST = 100
#: Readings, a call before each, of which the lowest counts: what a call leaves may go with the next one.
_READINGS = 20
#: Seconds that the readings at the end may take to come down to those at the beginning.
_SETTLED = 5.0

Counts = dict[str, int]


def many_calls(report: Report, servers: Servers, ours: Started, device: str, calls: int) -> None:
    """Make calls that take and return a small tensor, from a process of their own."""
    client = servers.client("rpc", socket=ours.address, server=ours.process.pid, device=device, calls=calls)
    client.read()
    result = client.ask(go=True)
    client.close()
    before, after = result["before"], result["after"]
    name = f"{calls:,} calls, 4 KiB there and back"
    report.add(Row(f"{name}: a call", {Ours.name: result["seconds"] / calls}))
    kind = "GPU memory in use" if device == "cuda" else "shared memory"
    report.add(_row(f"… {kind}", ("memory",), before, after, "bytes"))
    report.add(_row("… descriptors of client, server", ("client fds", "server fds"), before, after))
    report.add(_row("… mappings of client, server", ("client mappings", "server mappings"), before, after))
    # Python's allocator and the C library's take and keep what they like: printed, and not judged.
    for who in ("client", "server"):
        report.add(_row(f"… private host memory of the {who}", (f"{who} private",), before, after, "bytes", judge=False))


def _row(name: str, keys: tuple[str, ...], before: Counts, after: Counts, unit: Unit = "number", *, judge: bool = True) -> Row:
    text = ", ".join(f"{shown(before[key], unit)} → {shown(after[key], unit)}" for key in keys)
    grown = sum(max(after[key] - before[key], 0) for key in keys)
    return Row(
        name,
        {},
        unit,
        goal=GOALS["long_run"] if judge else None,
        judged=grown if judge else None,
        texts={Ours.name: text},
        extra={"before": {key: before[key] for key in keys}, "after": {key: after[key] for key in keys}},
    )


# In the process that calls.


class _Caller:
    """A client that calls, and counts what it and its server hold."""

    def __init__(self, socket: str, server: int, device: str) -> None:
        self._client = Ours(socket)
        self._server = server
        self._device = device

    def call(self, count: int) -> None:
        """Make so many calls, with a new argument for each."""
        import torch

        from benchmarks.workload import SMALL

        for _ in range(count):
            self._client.call("plus_one", torch.ones(SMALL, device=self._device))

    def lowest(self, wanted: Counts | None = None) -> Counts:
        """Return the lowest of several readings.

        :param wanted: read on, for a while, until nothing is above it.
        """
        end = time.monotonic() + _SETTLED
        lowest = self._read()
        for _ in range(_READINGS):
            lowest = _least(lowest, self._read())
        while wanted is not None and any(lowest[key] > wanted[key] for key in wanted) and time.monotonic() < end:
            lowest = _least(lowest, self._read())
        return lowest

    def _read(self) -> Counts:
        self.call(1)
        gc.collect()
        pids = {"client": os.getpid(), "server": self._server}
        counts = {who: process_counts(pid) for who, pid in pids.items()}
        memory = used(self._device) if self._device == "cuda" else sum(each["shared"] for each in counts.values())
        return {
            "memory": memory,
            **{f"{who} {key}": each[key] for who, each in counts.items() for key in ("fds", "mappings")},
            **{f"{who} private": private_bytes(pid) for who, pid in pids.items()},
        }


def _least(one: Counts, other: Counts) -> Counts:
    return {key: min(value, other[key]) for key, value in one.items()}


def main() -> None:
    """Configuration: ``socket``, ``server`` (its pid), ``device``, ``calls``. Waits for a line before it begins."""
    config: dict[str, Any] = configuration()
    caller = _Caller(config["socket"], config["server"], config["device"])
    caller.call(1)
    say(ready=True)
    if next_command() is None:
        return
    caller.call(_FIRST)
    gc.collect()
    gc.freeze()  # what is imported stays: the readings need not look at it again
    before = caller.lowest()
    begin = time.perf_counter()
    caller.call(config["calls"])
    seconds = time.perf_counter() - begin
    say(seconds=seconds, before=before, after=caller.lowest(before))


if __name__ == "__main__":
    main()
