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

from benchmarks.processes import process_counts, used
from benchmarks.runner import ECHO, OURS, Json, Run, Sample, interleaved, timed
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


def run(
    cuda: Annotated[bool, typer.Option("--cuda", help="Tensors on the GPU, compared with shared-tensor.")] = False,
    rounds: Annotated[int, typer.Option(help="Turns of each side.")] = 5,
    calls: Annotated[int, typer.Option(help="Calls in a turn.")] = 200,
    processes: Annotated[int, typer.Option(help="Processes for the times of import and of 'shared-rpc ls'.")] = 5,
    megabytes: Annotated[int, typer.Option(help="MiB of the large argument.")] = 64,
    kept: Annotated[int, typer.Option(help="Small cached results.")] = 12_000,
    long_run: Annotated[int, typer.Option(help="Calls of the long run.")] = 2_000,
    peers: Annotated[bool, typer.Option("--peers", help="Compare with other installed RPC libraries.")] = False,
    pinned: Annotated[bool, typer.Option(help="Servers on one half of the cores, measuring processes on the other.")] = True,
    json: Json = None,
) -> None:
    """Measure round trips: ping, direct and managed calls, arguments, tasks, concurrent and many calls, import, CLI."""
    device = "cuda" if cuda else "cpu"
    others: list[type[Side]] = [SharedTensor, *(PEERS if peers else ())]
    sides = present(Echo, *others, Ours)
    title = f"Round trips, tensors on {device} (x raw echo)"
    names = [side.name for side in sides]
    with Run("rpc", title, names, device, json, base=ECHO, pinned=pinned) as run, ExitStack() as stack:
        for other in others:
            run.note(other.missing(device))
        servers = {side.name: serve(run, side) for side in sides}
        connected = {side.name: stack.enter_context(closing(side(servers[side.name].address, device))) for side in sides}
        _turns(run, connected, rounds, calls, megabytes)
        anyio.run(_coroutines, run, servers[OURS].address, rounds)
        _kept_results(run, connected[OURS].link, servers[OURS].process.pid, kept)
        if long_run:
            _many_calls(run, connected[OURS].link, servers[OURS].process.pid, long_run)
        _cold_starts(run, processes)


def _turns(run: Run, clients: dict[str, Side], rounds: int, calls: int, mebibytes: int) -> None:
    """Measure requests over open connections, in turns: pings, tasks, and calls with tensors."""
    all_sides = clients.keys() - {ECHO}
    pair = {OURS} if SharedTensor.missing(run.device) else {PEER, OURS}
    others = all_sides - {PEER} | pair

    def row(name: str, sides: Set[str], action: Callable[[Any], object], calls: int = calls, **goal: Any) -> float:
        actions: dict[str, Callable[[], object]] = {ECHO: clients[ECHO].ping}
        actions |= {name: partial(action, client) for name, client in clients.items() if name in sides}
        times = interleaved(actions, rounds=rounds, calls=calls)
        run.row(name, times, **goal)
        return times[OURS].p50

    ping = row("ping", all_sides, lambda side: side.ping(), goal=2, of=ECHO)
    row("submit and wait for a task", {PEER, OURS}, lambda side: side.task("nothing"), goal=6, of=ECHO)
    row("direct call, 4 KiB tensor, cached", pair, lambda side: side.call("small"), goal=2.2 * ping)
    row("direct call, 4 KiB tensor, new", others, lambda side: side.call("fresh"))
    row("the same by an async def endpoint", pair, lambda side: side.call("fresh_on_loop"))
    if PEER in pair:
        clients[PEER].call("kept")  # one reference stays; otherwise it would be built again after every release
    row("managed call and release, 4 KiB", pair, lambda side: side.call("kept").release(), goal=ping + 150e-6)
    name = "direct call, takes and returns 4 KiB, new"
    row(name, others, lambda side: side.call("plus_one", torch.ones(SMALL, device=run.device)))
    large = torch.ones(mebibytes << 18, device=run.device)
    row(f"echo of a {mebibytes} MiB tensor argument", others, lambda side: side.call("echo", large), calls=1)


def _cold_starts(run: Run, processes: int) -> None:
    def list_servers() -> None:
        answer = run.program("-m", "shared_rpc.cli", "ls", "--json", SHARED_TENSOR_BASE_PATH=run.base_path)
        if run.base_path not in answer:
            raise RuntimeError(f"'shared-rpc ls' does not list the server at {run.base_path}: {answer}")

    turns = [(float(run.program("-c", _IMPORT).splitlines()[-1]), timed(list_servers)) for _ in range(processes)]
    importing, listing = (Sample(times) for times in zip(*turns, strict=True))
    run.row("import of every public name, after torch", importing, goal=60e-3)
    run.row("shared-rpc ls --json, as a process", listing, goal=0.2)


#: Concurrent calls of one connection, and consecutive calls of each of its coroutines.
_AT_ONCE, _EACH = 64, 10


async def _coroutines(run: Run, socket: str, rounds: int) -> None:
    """Measure calls over one connection of an :class:`AsyncClient`, one by one and concurrently, in seconds per call."""
    apart, together = Sample(), Sample()
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
            apart.append((middle - begin) / _AT_ONCE)
            together.append((time.perf_counter() - middle) / _AT_ONCE / _EACH)
        del kept
    # The first turn creates the threads, and is dropped.
    run.row("AsyncClient, a cached tensor: one by one, per call", Sample(apart[1:]))
    run.row(f"… by {_AT_ONCE} coroutines at once, per call", Sample(together[1:]))


def _kept_results(run: Run, client: Client, pid: int, count: int) -> None:
    """Measure the device memory and the descriptors of many cached results of 4 KiB."""
    before, fds = client.get_server_info()["nbytes"], process_counts(pid)["fds"]
    results = [client.call("small", number) for number in range(1, count + 1)]
    nbytes = client.get_server_info()["nbytes"] - before
    run.row(f"{count:,} cached results of 4 KiB: memory of their device", nbytes, "bytes", 100 << 20)
    run.row("… descriptors of the server", process_counts(pid)["fds"] - fds, "number", 400)
    run.row("… descriptors of a client that holds all", process_counts(os.getpid())["fds"], "number", 400)
    results.clear()
    client.invalidate_endpoint_cache("small")


#: Calls after which no resource may grow.
_FIRST = 100


def _many_calls(run: Run, client: Client, server: int, calls: int) -> None:
    """Make calls that take and return a small tensor, and measure what they leave in this process and in the server."""

    def call(count: int) -> None:
        for _ in range(count):
            client.call("plus_one", torch.ones(SMALL, device=run.device))

    def reading() -> dict[str, int]:
        time.sleep(0.05)
        call(1)
        gc.collect()
        counts = process_counts(os.getpid()), process_counts(server)
        found = {key: sum(each[key] for each in counts) for key in ("fds", "mappings", "shared")}
        return {**found, "memory": used(run.device) if run.device == "cuda" else found["shared"]}

    def lowest() -> dict[str, int]:
        """Return the lowest of several readings, because a call may release resources of the previous one."""
        readings = [reading() for _ in range(20)]
        return {key: min(each[key] for each in readings) for key in readings[0]}

    call(_FIRST)
    gc.collect()
    gc.freeze()  # so that collections of the readings skip the imported modules
    before = lowest()
    seconds = timed(lambda: call(calls))
    after = lowest()
    run.row(f"{calls:,} calls, 4 KiB there and back: per call", seconds / calls)
    name = "GPU memory in use" if run.device == "cuda" else "shared memory"
    run.row(f"… growth of {name} after the first {_FIRST}", after["memory"] - before["memory"], "bytes", 0)
    run.row("… descriptors of client and server", after["fds"] - before["fds"], "number", 0)
    run.row("… mappings of client and server", after["mappings"] - before["mappings"], "number", 0)
