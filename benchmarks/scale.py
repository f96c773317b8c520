"""Many clients on host memory: idle connections, and killed clients."""

from __future__ import annotations

import importlib
import multiprocessing
import resource
import socket
import time
from contextlib import ExitStack, closing, suppress
from multiprocessing.synchronize import Semaphore
from typing import Annotated

import torch
import typer

from benchmarks.processes import process_counts
from benchmarks.runner import ECHO, OURS, PATIENCE, Json, Run, Shape, Times, chosen, interleaved, numbers, timed, wait_for
from benchmarks.sides import PEER, Echo, Ours, SharedTensor, Started, serve
from shared_rpc import Client

#: Idle connections that occupy the four default workers of shared-tensor.
_PEER_IDLE = 4
#: Seconds to wait for an answer of shared-tensor.
_PATIENCE = 1.0
_FORK = multiprocessing.get_context("fork")


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
    with Run("scale", "Many clients", [ECHO, *([] if absent else [PEER]), OURS], json=json, base=ECHO) as run:
        run.note(absent)
        echo, ours = serve(run, Echo), serve(run, Ours)
        ours.process.ask("make", calls=[["model", shape]])
        _idle_rows(run, echo, ours, numbers(idle), rounds, calls)
        if absent is None:
            _peer_row(run)
        _killed_rows(run, ours, killed, shape)


def _idle_rows(run: Run, echo: Started, ours: Started, levels: list[int], rounds: int, calls: int) -> None:
    times = Times()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with closing(Echo(echo.address)) as floor, closing(Ours(ours.address)) as client:
        for _ in range(rounds):
            with ExitStack() as idle:
                opened = 0
                for level in levels:
                    for _ in range(level - opened):
                        idle.enter_context(Client(socket_path=ours.address)).ping()
                    opened = level
                    for side, taken in interleaved({ECHO: floor.ping, OURS: client.ping}, rounds=1, calls=calls).items():
                        times[f"ping with {level:,} idle connections", side] += taken
    run.rows_of(times)


def _peer_row(run: Run) -> None:
    base_path = serve(run, SharedTensor).address
    client = SharedTensor(base_path, timeout=_PATIENCE)
    answer: float | str = f"no answer in {_PATIENCE:g} s"
    with ExitStack() as stack:
        for _ in range(_PEER_IDLE):
            # The socket for GPU 0, even if there is no GPU.
            stack.enter_context(socket.socket(socket.AF_UNIX)).connect(f"{base_path}-0.sock")
        with suppress(TimeoutError):
            answer = timed(client.ping)
    run.row(f"shared-tensor with {_PEER_IDLE} idle connections: ping", {PEER: answer})


def _killed_rows(run: Run, ours: Started, count: int, shape: str) -> None:
    """Kill forks of this process that hold the model, and wait until the server has released their leases."""
    # So that forks are light: no threads, and modules for the first tensor imported in advance.
    torch.set_num_threads(1)
    importlib.import_module("shared_rpc.codec.results")
    with Client(socket_path=ours.address) as asking:

        def counts() -> tuple[int, int, int]:
            info = asking.get_server_info()
            return info["leases"], info["sessions"], process_counts(ours.process.pid)["fds"]

        for _ in range(2):  # first a warm-up, because the first growth of the allocator and the loop is not a leak
            before, memory = counts(), process_counts(ours.process.pid)["memory"]
            attached = _FORK.Semaphore(0)
            forks = [_FORK.Process(target=_hold, args=(ours.address, shape, attached)) for _ in range(count)]
            for fork in forks:
                fork.start()
            if not all(attached.acquire(timeout=PATIENCE) for _ in forks):
                raise RuntimeError("a light client could not attach; see above")
            held = tuple(after - earlier for after, earlier in zip(counts(), before, strict=True))
            begin = time.monotonic()
            for fork in forks:
                fork.kill()
            wait_for(counts, before.__eq__, 1e-3)
            seconds = time.monotonic() - begin
        grown = process_counts(ours.process.pid)["memory"] - memory
    run.row(f"{count} clients killed: until all is released", seconds)
    run.note("they held {} leases, {} sessions and {} descriptors of the server".format(*held))
    # Python's allocator keeps some memory of the connections for the next ones.
    run.row("… growth of the server's memory", max(grown, 0), "bytes", 1 << 20)


def _hold(address: str, shape: str, attached: Semaphore) -> None:
    """Attach the model, and hold it until the parent process ends."""
    with Client(socket_path=address) as client, client.call("model", shape) as handle:
        next(handle.value.parameters()).view(-1)[0].item()
        attached.release()
        parent = multiprocessing.parent_process()
        assert parent is not None, "this process is a fork"
        parent.join()
