"""Round trips, measured in turns: the raw echo, shared-tensor, other RPC libraries, and shared_rpc."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Set
from contextlib import ExitStack, closing
from functools import partial
from typing import Annotated, Any

import anyio
import torch
import typer

from benchmarks.clients import throughput
from benchmarks.processes import process_counts, used
from benchmarks.runner import ECHO, OURS, Goal, Json, Run, Sample, Unit, interleaved, shown, timed
from benchmarks.sides import PEER, PEERS, Echo, Ours, SharedTensor, Side, present, serve
from benchmarks.workload import SMALL
from shared_rpc import AsyncClient, Client

#: Prints the seconds for importing the package after torch. The full collection that is due after the import of torch takes
#: 100 ms, and happens before the clock starts.
_IMPORT = """
import time, torch
begin = time.perf_counter()
import shared_rpc
for name in shared_rpc.__all__:
    getattr(shared_rpc, name)
print(time.perf_counter() - begin)
"""

#: Quick calls for each slow one.
_SLOW = 100
#: Concurrent processes, and calls of the long run.
_TOGETHER = 8
_LONG = {"cuda": 100_000, "cpu": 2_000}


def run(
    cuda: Annotated[bool, typer.Option("--cuda", help="Tensors on the GPU, compared with shared-tensor.")] = False,
    rounds: Annotated[int, typer.Option(help="Turns of each side.")] = 10,
    calls: Annotated[int, typer.Option(help="Calls in a turn.")] = 300,
    processes: Annotated[int, typer.Option(help="Processes for the times of import and of 'shared-rpc ls'.")] = 7,
    megabytes: Annotated[int, typer.Option(help="MiB of the large argument.")] = 64,
    kept: Annotated[int, typer.Option(help="Small cached results.")] = 12_000,
    clients: Annotated[
        int | None, typer.Option(help="Concurrent processes; by default 8, on the host at most one per core.")
    ] = None,
    long_run: Annotated[
        int | None, typer.Option(help="Calls of the long run, 0 for none; by default 100000 on a GPU, 2000 on the host.")
    ] = None,
    peers: Annotated[bool, typer.Option("--peers", help="Compare with other installed RPC libraries.")] = False,
    pinned: Annotated[bool, typer.Option(help="Servers on one half of the cores, measuring processes on the other.")] = True,
    json: Json = None,
) -> None:
    """Measure round trips: ping, direct and managed calls, arguments, tasks, concurrent and many calls, import, CLI."""
    device = "cuda" if cuda else "cpu"
    others: list[type[Side]] = [SharedTensor, *(PEERS if peers else ())]
    sides = present(Echo, *others, Ours)
    title = f"Round trips, tensors on {device} (x raw echo)"
    with Run("rpc", title, [side.name for side in sides], device, json, pinned=pinned) as run, ExitStack() as stack:
        for other in others:
            run.note(other.missing(device))
        servers = {side.name: serve(run, side) for side in sides}
        connected = {side.name: stack.enter_context(closing(side(servers[side.name].address, device))) for side in sides}
        _turns(run, connected, rounds, calls, megabytes)
        _concurrent_calls(run, servers[OURS].address, rounds)
        many = clients or (_TOGETHER if cuda else min(_TOGETHER, len(run.cores)))
        addresses = {side.name: servers[side.name].address for side in present(SharedTensor, Ours, device=device)}
        throughput(run, addresses, many, rounds, Goal("≥", 4, of=PEER) if cuda and many == _TOGETHER else None)
        _kept_results(run, connected[OURS].link, servers[OURS].process.pid, kept)
        count = long_run if long_run is not None else _LONG[device]
        if count:
            _many_calls(run, connected[OURS].link, servers[OURS].process.pid, count)
        _cold_starts(run, processes)


def _turns(run: Run, clients: dict[str, Side], rounds: int, calls: int, mebibytes: int) -> None:
    """Measure requests over open connections, in turns: pings, tasks, and calls with tensors."""
    all_sides = clients.keys() - {ECHO}
    pair = {OURS} if SharedTensor.missing(run.device) else {PEER, OURS}
    others = all_sides - {PEER} | pair
    on_gpu = run.device == "cuda"

    def row(name: str, sides: Set[str], action: Callable[[Any], object], goal: Goal | None = None, calls: int = calls) -> None:
        actions: dict[str, Callable[[], object]] = {ECHO: clients[ECHO].ping}
        actions |= {name: partial(action, client) for name, client in clients.items() if name in sides}
        run.row(name, interleaved(actions, rounds=rounds, calls=calls), "s", goal)

    row("ping, p50", all_sides, lambda side: side.ping(), Goal("≤", 2, of=ECHO))
    row("submit and wait for a task, p50", {PEER, OURS}, lambda side: side.task("nothing"), Goal("≤", 6, of=ECHO))
    small = Goal("≤", 120e-6, "GPU") if on_gpu else None
    row("direct call, 4 KiB tensor, cached", pair, lambda side: side.call("small"), small)
    row("direct call, 4 KiB tensor, new", others, lambda side: side.call("fresh"), small)
    row("the same by an async def endpoint", pair, lambda side: side.call("fresh_on_loop"), small)
    if PEER in pair:
        clients[PEER].call("kept")  # one reference stays; otherwise it would be built again after every release
    row("managed call and release, 4 KiB", pair, lambda side: side.call("kept").release())
    name = "direct call, takes and returns 4 KiB, new"
    row(name, others, lambda side: side.call("plus_one", torch.ones(SMALL, device=run.device)), small)
    large = torch.ones(mebibytes << 20, dtype=torch.uint8, device=run.device)
    goal = Goal("≤", 1e-3, "64 MiB, GPU") if on_gpu and mebibytes == 64 else None
    name = f"echo of a {mebibytes} MiB tensor argument"
    row(name, others, lambda side: side.call("echo", large), goal, calls=max(calls // _SLOW, 1))


def _cold_starts(run: Run, processes: int) -> None:
    def list_servers() -> None:
        answer = run.program("-m", "shared_rpc.cli", "ls", "--json", "--base-path", run.base_path)
        if run.base_path not in answer:
            raise RuntimeError(f"'shared-rpc ls' does not list the server at {run.base_path}: {answer}")

    turns = [
        (float(run.program("-c", _IMPORT).splitlines()[-1]), timed(list_servers), timed(lambda: run.program("-c", "pass")))
        for _ in range(processes)
    ]
    importing, listing, start = (Sample(times) for times in zip(*turns, strict=True))
    run.row("import of every public name, after torch", importing, "s", Goal("≤", 60e-3))
    run.row("shared-rpc ls --json, as a process", listing, "s", Goal("≤", 0.2))
    run.note(f"Python itself takes {start.p50 * 1e3:.0f} ms to start and exit")


# Concurrent calls.

#: Concurrent calls of one connection, and consecutive calls of each of its coroutines.
_AT_ONCE, _EACH = 64, 10


def _concurrent_calls(run: Run, socket: str, rounds: int) -> None:
    """Measure calls over one connection of an :class:`AsyncClient`, one by one and concurrently, in seconds per call."""
    apart, together = anyio.run(_calls, socket, rounds)
    run.row("AsyncClient, a cached tensor: one by one, per call", apart)
    goal = Goal("≤", 1 / 3, "one by one", "ratio")
    run.row(f"… {_AT_ONCE} at once, per call", together, "s", goal, measured=together.p50 / apart.p50)


async def _calls(socket: str, rounds: int) -> tuple[Sample, Sample]:
    apart: list[list[float]] = []
    together: list[list[float]] = []
    async with AsyncClient(socket_path=socket) as client:

        async def calls(count: int) -> None:
            for _ in range(count):
                await client.call("small")

        kept = await client.call("small")
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
    # The first turn creates the threads, and is dropped.
    return Sample(*apart[1:]), Sample(*together[1:])


# Resources of many results and calls.


def _kept_results(run: Run, client: Client, pid: int, count: int) -> None:
    """Measure the device memory and the descriptors of many cached results of 4 KiB."""
    before, fds = client.get_server_info()["nbytes"], process_counts(pid)["fds"]
    results: list[object] = []
    seconds = timed(lambda: results.extend(client.call("small", number) for number in range(1, count + 1)))
    nbytes = client.get_server_info()["nbytes"] - before
    run.row(f"{count:,} cached results of 4 KiB: the first call of each", seconds / count)
    goal = Goal("≤", 100 << 20, "12,000 of them")
    run.row("… memory of their device", nbytes, "bytes", goal, measured=nbytes * 12_000 / count)
    run.row("… descriptors of the server", process_counts(pid)["fds"] - fds, "number", Goal("≤", 400))
    run.row("… descriptors of a client that holds all", process_counts(os.getpid())["fds"], "number", Goal("≤", 400))
    results.clear()
    client.invalidate_endpoint_cache("small")


#: Calls after which no resource may grow.
_FIRST = 100
#: Readings, each after a call, of which the lowest counts, because a call may release resources of the previous one.
_READINGS = 20
#: Seconds within which the final readings must fall to the initial ones.
_SETTLED = 5.0

Counts = dict[str, int]


def _many_calls(run: Run, client: Client, server: int, calls: int) -> None:
    """Make calls that take and return a small tensor, and measure what they leave in this process and in the server."""

    def call(count: int) -> None:
        for _ in range(count):
            client.call("plus_one", torch.ones(SMALL, device=run.device))

    def reading() -> Counts:
        call(1)
        gc.collect()
        counts = {"client": process_counts(os.getpid()), "server": process_counts(server)}
        shared = sum(each["shared"] for each in counts.values())
        found = {f"{who} {key}": each[key] for who, each in counts.items() for key in ("fds", "mappings")}
        return {"memory": used(run.device) if run.device == "cuda" else shared, **found}

    def lowest(wanted: Counts | None = None) -> Counts:
        """Return the lowest of several readings; continue for :data:`_SETTLED` seconds while any count is above ``wanted``."""
        end, number, found = time.monotonic() + _SETTLED, 0, reading()
        while number < _READINGS or (
            wanted is not None and any(found[key] > wanted[key] for key in wanted) and time.monotonic() < end
        ):
            number, found = number + 1, {key: min(value, found[key]) for key, value in reading().items()}
        return found

    def row(name: str, keys: tuple[str, ...], unit: Unit = "number") -> None:
        text = ", ".join(f"{shown(before[key], unit)} → {shown(after[key], unit)}" for key in keys)
        grown = sum(max(after[key] - before[key], 0) for key in keys)
        run.row(name, text, unit, Goal("≤", 0, f"as after the first {_FIRST}"), measured=grown)

    call(_FIRST)
    gc.collect()
    gc.freeze()  # so that collections of the readings skip the imported modules
    before = lowest()
    seconds = timed(lambda: call(calls))
    after = lowest(before)
    run.row(f"{calls:,} calls, 4 KiB there and back: per call", seconds / calls)
    row(f"… {'GPU memory in use' if run.device == 'cuda' else 'shared memory'}", ("memory",), "bytes")
    row("… descriptors of client, server", ("client fds", "server fds"))
    row("… mappings of client, server", ("client mappings", "server mappings"))
