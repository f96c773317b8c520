"""Sleep and wake of models: times of evictions and restores, compared with a plain copy of as many bytes and a reload."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from safetensors.torch import load_file, save_file

from benchmarks.processes import Process, ask_all, on_cores, private_bytes
from benchmarks.runner import APP, OURS, PATIENCE, Json, Run, Sample, Times, numbers
from benchmarks.workload import Stack, digest
from shared_rpc import Client, Handle
from shared_rpc.cli import rendering

PLAIN, RELOAD = "plain copy", "safetensors"
#: Bytes of each piece of a plain copy, because allocating a pinned buffer for all bytes would dominate the run.
_PIECE = 1 << 30
#: Maximum number of bytes that a reload reads: writing a large file would dominate the run.
_PART = 2 << 30
#: Number of models in the round-robin that fit into memory.
_FIT = 3
#: Rows with several sides.
_LOWER, _AGAIN = "first eviction, with a copy", "later eviction of a writable model, with a copy"
_WAKE = "wake: restore, and map at the same address"


def run(
    cuda: Annotated[bool, typer.Option("--cuda", help="Models on the GPU, copies in the host's memory.")] = False,
    megabytes: Annotated[int | None, typer.Option(help="MiB of the model; by default 16384 on a GPU, 256 on the host.")] = None,
    rounds: Annotated[int, typer.Option(help="Sleeps and wakes of the model.")] = 3,
    models: Annotated[int, typer.Option(help="Models used in turns, with memory for three.")] = 10,
    engines: Annotated[str, typer.Option(help="Processes that sleep and wake together, ascending.")] = "1,4",
    json: Json = None,
) -> None:
    """Measure sleep and wake of models, compared with plain copies and a reload; several processes; more models than memory."""
    device = "cuda:0" if cuda else "cpu"
    whole = megabytes or (16384 if cuda else 256)
    title = f"Tiers: a model of {whole} MiB on {device}"
    # No other process is measured at the same time, so this one uses all cores.
    with Run("tiers", title, [PLAIN, OURS, RELOAD], device, json, base=PLAIN) as run, on_cores(run.cores):
        with run.broker(APP, "--spill-dir", str(run.folder)) as client:
            times, plain = Times(), _Plain(device, whole << 20, run.folder)
            with client.call("stack", whole, 0) as handle:
                copied = _read_only_model(client, handle, plain, times, rounds)
                _reload(run, times, handle.value)
            with client.call("writable_stack", whole) as handle:
                _written_model(client, handle, plain, times, rounds)
            client.invalidate_endpoint_cache("writable_stack")
            run.rows_of(times)
            run.row("bytes copied by evictions with an existing copy", copied, "bytes", 0)
            _engines(run, client, whole, numbers(engines))
        _round_robin(run, max(whole // models, 8), models, rounds)
        run.note("every pass after a wake was bit-identical")


class _Plain:
    """Plain copies of as many bytes as the model has: from a GPU to allocated, pinned memory and back, or from host memory to a
    file in the page cache and to new memory.
    """

    def __init__(self, device: str, nbytes: int, folder: Path) -> None:
        self._cuda = device != "cpu"
        self._pieces = max(nbytes // _PIECE, 1) if self._cuda else 1
        self._file = folder / "plain"
        self._above = torch.ones(nbytes // self._pieces, dtype=torch.uint8, device=device)
        if self._cuda:
            self._below = torch.empty(self._above.shape, dtype=torch.uint8, pin_memory=True)

    def lower(self, times: Times, row: str) -> None:
        """Measure a copy to the lower tier."""
        self._file.unlink(missing_ok=True)
        with times.of(row, PLAIN):
            if self._cuda:
                self._copy(self._below, self._above)
            else:
                self._file.write_bytes(self._above.numpy().data)

    def raise_(self, times: Times, row: str) -> None:
        """Measure a copy to the upper tier. On the host the target is untouched memory, as in a restore."""
        with times.of(row, PLAIN):
            if self._cuda:
                self._copy(self._above, self._below)
            else:
                with open(os.memfd_create("plain"), "wb") as memory, self._file.open("rb") as file:
                    while os.sendfile(memory.fileno(), file.fileno(), None, _PIECE):
                        pass

    def _copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        for _ in range(self._pieces):
            target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()


def _check(answer: list[float], expected: list[float]) -> None:
    if answer != expected:
        raise RuntimeError(f"the bits of a model differ after a wake: {answer} instead of {expected}")


def _read_only_model(client: Client, handle: Handle[Stack], plain: _Plain, times: Times, rounds: int) -> int:
    """Measure sleep and wake of a model in turns with plain copies; return the bytes copied by evictions with a copy."""
    model, copied = handle.value, 0
    expected = digest(model)
    plain.lower(Times(), _LOWER)  # one-time costs
    plain.raise_(Times(), _LOWER)
    plain.lower(times, _LOWER)
    handle.suspend()
    with times.of(_LOWER):
        client.evict(handle)
    handle.resume()
    for _ in range(rounds):
        with times.of("suspend: unmap"):
            handle.suspend()
        with times.of("resume: map, while it is on its device"):
            handle.resume()
        _check(digest(model), expected)  # touch the pages: unmapping untouched pages takes no time
        with times.of("sleep: both"):
            handle.suspend()
            with times.of("evict, with an existing copy"):
                copied += sum(move["copied"] for move in client.evict(handle))
        plain.raise_(times, _WAKE)
        with times.of(_WAKE):
            handle.resume()
        _check(digest(model), expected)
    return copied


def _written_model(client: Client, handle: Handle[Stack], plain: _Plain, times: Times, rounds: int) -> None:
    """Measure evictions of a writable model: each of them copies it, all but the first into allocated memory."""
    for number in range(rounds + 1):
        with torch.no_grad():
            next(handle.value.parameters()).fill_(number)
        expected = digest(handle.value)
        taken = times if number else Times()
        plain.lower(taken, _AGAIN)
        handle.suspend()
        with taken.of(_AGAIN):
            client.evict(handle)
        handle.resume()
        _check(digest(handle.value), expected)


def _reload(run: Run, times: Times, model: Stack) -> None:
    """Measure a process without tiers, which reads the weights from a file in the page cache."""
    file = run.folder / "model.safetensors"
    weights = [parameter.detach() for parameter in model.parameters()]
    part = {str(number): weight for number, weight in enumerate(weights[: max(_PART // weights[0].nbytes, 1)])}
    save_file(part, file)
    target = str(weights[0].device)
    for number in range(3):
        begin = time.perf_counter()
        state = load_file(file, device=target)
        if target == "cpu":  # load_file() only maps the pages
            state = {name: tensor.clone() for name, tensor in state.items()}
        else:
            torch.cuda.synchronize()
        del state
        if number:  # the first round has one-time costs
            times[_WAKE, RELOAD].append((time.perf_counter() - begin) * len(weights) / len(part))
    run.note(f"{RELOAD}: extrapolated from {file.stat().st_size >> 20:,} MiB")
    file.unlink()


def _engines(run: Run, client: Client, mebibytes: int, counts: Sequence[int]) -> None:
    """Measure several processes with one model: their concurrent wake, and the host memory while they sleep."""
    config: dict[str, Any] = {"address": client.socket_path, "device": run.device, "mebibytes": mebibytes}
    processes: list[Process] = []
    for count in counts:
        processes += run.processes(count - len(processes), Engine, **config)
        # Includes private host memory that engines add while they sleep.
        added = sum(ask_all(processes, "suspend"))
        client.evict("stack")
        (item,) = client.list_objects()
        begin = time.monotonic()
        took = max(ask_all(processes, "resume")) - begin
        engines = rendering.several(count, "engine")
        run.row(f"copies in lower tiers, {engines} asleep", sum(item["copies"].values()) + added, "bytes")
        run.row(f"wake of {engines} at once, until the last one has it", took)
    for process in processes:
        process.close()


def _round_robin(run: Run, mebibytes: int, models: int, rounds: int) -> None:
    """Measure several models used in turns, with memory for three: each turn wakes one and evicts another."""
    quota = int((_FIT + 0.1) * mebibytes) << 20
    options = ["--quota", f"{run.device}={quota}", "--when-full", "evict", "--spill-dir", str(run.folder)]
    with run.broker(APP, *options, name="round") as client, ExitStack() as stack:
        answers: dict[Handle[Stack], list[float]] = {}
        for number in range(models):
            handle = stack.enter_context(client.call("stack", mebibytes, number))
            answers[handle] = digest(handle.value)
            handle.suspend()
        sample = Sample()
        for _ in range(rounds):
            for handle, answer in answers.items():
                begin = time.perf_counter()
                with handle.active() as model:
                    _check(digest(model), answer)
                    sample.append(time.perf_counter() - begin)
        run.row(f"{models} models of {mebibytes} MiB in turns, memory for {_FIT}: wake, a pass, p50", sample)
        run.row("… p99", sample.p99)


class Engine:
    """A process with an attached model, which sleeps and wakes."""

    def __init__(self, address: str, device: str, mebibytes: int) -> None:
        torch.set_num_threads(1)
        self._client = Client(socket_path=address, device=device, timeout=PATIENCE)
        self._handle: Handle[Stack] = self._client.call("stack", mebibytes, 0)
        self._answer = digest(self._handle.value)
        self.suspend()  # one-time costs
        self.resume()

    def suspend(self) -> int:
        """Unmap the model; return the private memory that this adds."""
        before = private_bytes()
        self._handle.suspend()
        return max(private_bytes() - before, 0)

    def resume(self) -> float:
        """Map the model again, check its bits, and return the time between."""
        self._handle.resume()
        end = time.monotonic()
        _check(digest(self._handle.value), self._answer)
        return end

    def close(self) -> None:
        """Release the model."""
        self._handle.release()
        self._client.close()
