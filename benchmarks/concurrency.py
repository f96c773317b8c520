"""Tasks, and calls that are under way together."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import anyio

from benchmarks.echo import Echo
from benchmarks.memory import private_bytes
from benchmarks.ours import Ours
from benchmarks.peer import Peer
from benchmarks.report import Report, Row
from benchmarks.stats import Sample, interleaved, timed
from benchmarks.targets import GOALS
from shared_rpc import AsyncClient

__all__ = ["concurrent_calls", "finished_tasks", "trivial_tasks"]

#: Calls of one connection that are under way together.
_TOGETHER = 64
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
        name = f"… {_TOGETHER} at once, a call"
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
            await calls(_TOGETHER)
            middle = time.perf_counter()
            async with anyio.create_task_group() as group:
                for _ in range(_TOGETHER):
                    group.start_soon(calls, _EACH)
            end = time.perf_counter()
            apart.append([(middle - begin) / _TOGETHER])
            together.append([(end - middle) / _TOGETHER / _EACH])
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
