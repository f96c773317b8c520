"""Round trips, in turns: the raw echo, shared-tensor, and we."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any

import typer

from benchmarks.concurrency import concurrent_calls, finished_tasks, trivial_tasks
from benchmarks.echo import Echo
from benchmarks.long_run import many_calls
from benchmarks.options import Json
from benchmarks.ours import Ours
from benchmarks.peer import Peer, missing
from benchmarks.peers import PEERS, RpcPeer, installed
from benchmarks.processes import environ
from benchmarks.report import Report, Row
from benchmarks.servers import Servers
from benchmarks.stats import Sample, interleaved, timed
from benchmarks.subjects import Subject
from benchmarks.targets import GOALS, Goal
from benchmarks.throughput import throughput

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
