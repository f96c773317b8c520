"""Round trips, in turns: the raw echo, shared-tensor, other ways to call, and shared_rpc."""

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
from benchmarks.memory import private_bytes, process_counts, used
from benchmarks.peers import PEERS, RpcPeer, installed
from benchmarks.runner import ECHO, OURS, Json, Report, Sample, Unit, interleaved, shown, timed
from benchmarks.servers import Servers, Started, environ
from benchmarks.sides import PEER, Echo, Ours, Peer, Side, missing
from shared_rpc import AsyncClient

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
    kept: Annotated[int, typer.Option(help="Small results that the server caches.")] = 12_000,
    tasks: Annotated[int, typer.Option(help="Finished tasks that the server remembers.")] = 9_000,
    clients: Annotated[int | None, typer.Option(help="Processes that call at once; 8, on the host one a core at most.")] = None,
    long_run: Annotated[
        int | None, typer.Option(help="Calls of the long run, 0 for none; 100000 on a GPU, 2000 on the host.")
    ] = None,
    peers: Annotated[bool, typer.Option("--peers", help="Beside other ways to call that are installed.")] = False,
    pinned: Annotated[bool, typer.Option(help="Servers on one half of the cores, measuring processes on the other.")] = True,
    json: Json = None,
) -> None:
    """Round trips: ping, direct and managed calls, arguments, tasks, many calls at once, very many calls; import and command
    line."""
    device = "cuda" if cuda else "cpu"
    pings, tensors = missing(), missing(tensors=device)
    there, left_out = installed() if peers else ([], None)
    others = [PEERS[name].name for name in there]
    names = [ECHO, *([PEER] if pings is None else []), *others, OURS]
    report = Report("rpc", f"Round trips, tensors on {device} (x raw echo)", names, divided=pinned)
    report.note(pings if pings is not None else tensors)
    report.note(left_out)
    with Servers(device, pinned=pinned) as servers:
        echo, started = Echo(servers.start("EchoServer").address), servers.start("OurServer")
        ours = Ours(started.address)
        theirs = servers.start("PeerServer") if pings is None else None
        peer = Peer(theirs.address) if theirs is not None else None
        beside = [PEERS[name](servers.start("RpcServer", peer=name).address, device) for name in there]
        turns = _Turns(report, echo, ours, peer, beside, rounds, calls)
        turns.pings_and_tasks()
        turns.calls_with_tensors(peer if tensors is None else None, device, megabytes)
        _concurrent_calls(report, started.address, rounds)
        many = clients or (_TOGETHER if cuda else min(_TOGETHER, len(servers.cores)))
        addresses = {PEER: theirs.address} if theirs is not None and tensors is None else {}
        addresses[OURS] = started.address
        throughput(report, servers, addresses, device, many, rounds, judge=cuda and many == _TOGETHER)
        _kept_results(report, ours, started.process.pid, kept)
        _finished_tasks(report, ours, started.process.pid, tasks)
        count = long_run if long_run is not None else _LONG[device]
        if count:
            _many_calls(report, servers, started, device, count)
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
        self, action: Callable[[Any], object], peer: Peer | None, *, slow: bool = False, others: bool = False
    ) -> dict[str, Sample]:
        actions: dict[str, Callable[[], object]] = {ECHO: self._echo.ping}
        sides = [peer, *(self._others if others else ()), self._ours]
        actions |= {side.name: partial(action, side) for side in sides if side is not None}
        if slow:
            return interleaved(actions, rounds=self._rounds, calls=max(self._calls // _SLOW, 1), warm_up=1)
        return interleaved(actions, rounds=self._rounds, calls=self._calls)

    def pings_and_tasks(self) -> None:
        """Measure pings: medians, and the slowest in a hundred; then tasks that do nothing."""
        samples = self._measure(lambda side: side.ping(), self._peer, others=True)
        self._report.row("ping, p50", samples, "s", "ping", samples[OURS].p50 / samples[ECHO].p50)
        self._report.row("ping, p99", {name: sample.p99 for name, sample in samples.items()})
        samples = self._measure(lambda side: side.task("nothing"), self._peer)
        ratio = samples[OURS].p50 / samples[ECHO].p50
        self._report.row("submit and wait for a task, p50", samples, "s", "task", ratio)

    def calls_with_tensors(self, peer: Peer | None, device: str, mebibytes: int) -> None:
        """Measure direct calls, a managed one, and calls with a small and a large argument."""
        import torch

        from benchmarks.workload import SMALL

        on_gpu = device == "cuda"

        def row(
            name: str, action: Callable[[Side], object], goal: str = "", *, slow: bool = False, others: bool = False
        ) -> None:
            samples = self._measure(action, peer, slow=slow, others=others)
            judge = goal and on_gpu and (not slow or mebibytes == 64)
            self._report.row(name, samples, "s", goal, samples[OURS].p50 if judge else None)

        small = "small_tensor"
        row("direct call, 4 KiB tensor, cached", lambda side: side.call("small"), small)
        row("direct call, 4 KiB tensor, new", lambda side: side.call("fresh"), small, others=True)
        row("the same by an async def endpoint", _on_loop("fresh"), small)
        if peer is not None:
            peer.attach("kept")  # one reference that stays, or it would be built again after every release
        row("managed call and release, 4 KiB", lambda side: side.attach("kept").release())
        row(
            "direct call, takes and returns 4 KiB, new",
            lambda side: side.call("plus_one", torch.ones(SMALL, device=device)),
            small,
            others=True,
        )
        argument = torch.ones(mebibytes << 20, dtype=torch.uint8, device=device)
        name = f"echo of a {mebibytes} MiB tensor argument"
        row(name, lambda side: side.call("echo", argument), "large_argument", slow=True, others=True)
        row("the same echo by an async def endpoint", _on_loop("echo", argument), "large_argument", slow=True)


def _on_loop(endpoint: str, *args: Any) -> Callable[[Side], object]:
    """Return a call of the endpoint's ``async def`` twin, on the side that has one."""
    return lambda side: side.call(f"{endpoint}_on_loop" if side.name == OURS else endpoint, *args)


def _cold_starts(report: Report, base_path: str, processes: int) -> None:
    def python(*arguments: str) -> str:
        words = [sys.executable, *arguments]
        return subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True, env=environ()).stdout

    def list_servers() -> None:
        answer = python("-m", "shared_rpc.cli", "ls", "--json", "--base-path", base_path)
        if base_path not in answer:
            raise RuntimeError(f"'shared-rpc ls' does not see the server at {base_path}: {answer}")

    turns = [
        (float(python("-c", _IMPORT).splitlines()[-1]), timed(list_servers), timed(lambda: python("-c", "pass")))
        for _ in range(processes)
    ]
    importing, listing, start = (Sample([times]) for times in zip(*turns, strict=True))
    report.row("import of every public name, beyond torch", {OURS: importing}, "s", "import", importing.p50)
    report.row("shared-rpc ls --json, as a process", {OURS: listing}, "s", "ls", listing.p50)
    report.note(f"Python itself takes {start.p50 * 1e3:.0f} ms to start and end")


# Calls that are under way together.

#: Calls of one connection that are under way together, and calls that each of their coroutines makes, one after the other.
_AT_ONCE, _EACH = 64, 10


def _concurrent_calls(report: Report, socket: str, rounds: int) -> None:
    """Measure calls over one connection of an :class:`AsyncClient`, one by one and all at once, in seconds for each call."""
    for endpoint, text in (("small", "a cached tensor"), ("nothing", "an endpoint that runs")):
        apart, together = anyio.run(_calls, socket, endpoint, rounds)
        report.row(f"AsyncClient, {text}: one by one, a call", {OURS: apart})
        report.row(f"… {_AT_ONCE} at once, a call", {OURS: together}, "s", "concurrent", together.p50 / apart.p50)


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
            apart.append([(middle - begin) / _AT_ONCE])
            together.append([(time.perf_counter() - middle) / _AT_ONCE / _EACH])
        del kept
    # The first turn made the threads, and does not count.
    return Sample(apart[1:]), Sample(together[1:])


def _kept_results(report: Report, ours: Ours, pid: int, count: int) -> None:
    """Measure what many cached results of 4 KiB take: memory of their device, and descriptors."""
    before, fds = ours.client.get_server_info()["nbytes"], process_counts(pid)["fds"]
    results: list[object] = []
    seconds = timed(lambda: results.extend(ours.call("small", number) for number in range(1, count + 1)))
    nbytes = ours.client.get_server_info()["nbytes"] - before
    report.row(f"{count:,} cached results of 4 KiB: the first call of each", {OURS: seconds / count})
    report.row("… memory of their device", {OURS: nbytes}, "bytes", "kept_memory", nbytes * 12_000 / count)
    more = process_counts(pid)["fds"] - fds
    report.row("… descriptors of the server", {OURS: more}, "number", "kept_fds", more)
    more = process_counts(os.getpid())["fds"]
    report.row("… descriptors of a client that has all", {OURS: more}, "number", "kept_fds", more)
    results.clear()
    ours.client.invalidate_endpoint_cache("small")


def _finished_tasks(report: Report, ours: Ours, pid: int, count: int) -> None:
    """Measure the server's memory of ended tasks, and the time to list them."""
    for _ in range(200):  # what its allocator takes first is not theirs
        ours.task("nothing")
    before = private_bytes(pid)
    for _ in range(count):
        ours.task("nothing")
    grown = private_bytes(pid) - before
    name = f"{count:,} finished tasks: the server's memory"
    report.row(name, {OURS: grown}, "bytes", "tasks_memory", grown * 10_000 / count)
    report.row("… to list them all", {OURS: Sample([[timed(ours.client.list_tasks) for _ in range(5)]])})


# The long run, in a process of its own.

#: Calls after which nothing may grow any more.
_FIRST = 100
#: Readings, a call before each, of which the lowest counts: what a call leaves may go with the next one.
_READINGS = 20
#: Seconds that the readings at the end may take to come down to those at the beginning.
_SETTLED = 5.0

Counts = dict[str, int]


def _many_calls(report: Report, servers: Servers, ours: Started, device: str, calls: int) -> None:
    """Make calls that take and return a small tensor."""
    with servers.client("rpc:LongRun", socket=ours.address, server=ours.process.pid, device=device) as client:
        result = client.ask("run", calls=calls)
    before, after = result["before"], result["after"]

    def row(name: str, keys: tuple[str, ...], unit: Unit = "number", *, judge: bool = True) -> None:
        text = ", ".join(f"{shown(before[key], unit)} → {shown(after[key], unit)}" for key in keys)
        grown = sum(max(after[key] - before[key], 0) for key in keys) if judge else None
        first, last = ({key: counts[key] for key in keys} for counts in (before, after))
        report.row(name, {}, unit, "long_run" if judge else "", grown, texts={OURS: text}, before=first, after=last)

    report.row(f"{calls:,} calls, 4 KiB there and back: a call", {OURS: result["seconds"] / calls})
    row(f"… {'GPU memory in use' if device == 'cuda' else 'shared memory'}", ("memory",), "bytes")
    row("… descriptors of client, server", ("client fds", "server fds"))
    row("… mappings of client, server", ("client mappings", "server mappings"))
    # Python's allocator and the C library's keep what they like: printed, and not judged.
    row("… private host memory of client, server", ("client private", "server private"), "bytes", judge=False)


class LongRun:
    """A client process that makes many calls.

    :param server: pid of the server.
    """

    def __init__(self, socket: str, server: int, device: str) -> None:
        self._client, self._device = Ours(socket), device
        self._pids = {"client": os.getpid(), "server": server}

    def run(self, calls: int) -> dict[str, Any]:
        """Return the seconds of the calls, and the readings before and after them."""
        self._call(_FIRST)
        gc.collect()
        gc.freeze()  # the readings need not visit the imported modules
        before = self._lowest()
        seconds = timed(lambda: self._call(calls))
        return {"seconds": seconds, "before": before, "after": self._lowest(before)}

    def _call(self, count: int) -> None:
        import torch

        from benchmarks.workload import SMALL

        for _ in range(count):
            self._client.call("plus_one", torch.ones(SMALL, device=self._device))

    def _read(self) -> Counts:
        self._call(1)
        gc.collect()
        counts = {who: process_counts(pid) for who, pid in self._pids.items()}
        shared = sum(each["shared"] for each in counts.values())
        return {
            "memory": used(self._device) if self._device == "cuda" else shared,
            **{f"{who} {key}": each[key] for who, each in counts.items() for key in ("fds", "mappings")},
            **{f"{who} private": private_bytes(pid) for who, pid in self._pids.items()},
        }

    def _lowest(self, wanted: Counts | None = None) -> Counts:
        """Return the lowest of several readings; read on, for a while, until nothing is above ``wanted``."""
        end, number, found = time.monotonic() + _SETTLED, 0, self._read()
        while number < _READINGS or (
            wanted is not None and any(found[key] > wanted[key] for key in wanted) and time.monotonic() < end
        ):
            number, found = number + 1, {key: min(value, found[key]) for key, value in self._read().items()}
        return found
