"""Sleep and wake of models: times of evictions and restores, compared with a plain copy of as many bytes and a reload."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from safetensors.torch import load_file, save_file

from benchmarks.processes import Process, ask_all, on_cores, private_bytes
from benchmarks.runner import APP, OURS, PATIENCE, Goal, Json, Run, Sample, Times, numbers
from benchmarks.workload import Stack, digest, question
from shared_rpc import Client, Handle
from shared_rpc.cli import rendering

PLAIN, RELOAD = "plain copy", "safetensors"
#: Bytes of each piece of a plain copy, because allocating a pinned buffer for all bytes would dominate the run.
_PIECE = 1 << 30
#: Maximum number of bytes that a reload reads.
_PART = 4 << 30
#: Number of models in the round-robin that fit into memory.
_FIT = 3

#: The names of the rows, in their order.
_LOWER, _SUSPEND, _EVICT = "first eviction, with a copy", "suspend: unmap", "evict, with an existing copy"
_AGAIN = "later eviction of a writable model, with a copy"
_SLEEP, _WAKE, _MAP = "sleep: both", "wake: restore, and map at the same address", "… map alone, while it is on its device"


def run(
    cuda: Annotated[bool, typer.Option("--cuda", help="Models on the GPU, copies in the host's memory.")] = False,
    megabytes: Annotated[int | None, typer.Option(help="MiB of the model; by default 16384 on a GPU, 256 on the host.")] = None,
    rounds: Annotated[int, typer.Option(help="Sleeps and wakes of the model.")] = 5,
    models: Annotated[int, typer.Option(help="Models used in turns, with memory for three.")] = 10,
    engines: Annotated[str, typer.Option(help="Processes that sleep and wake together, ascending.")] = "1,2,4",
    json: Json = None,
) -> None:
    """Measure sleep and wake of models, compared with plain copies and a reload; several processes; more models than memory."""
    device = "cuda:0" if cuda else "cpu"
    whole = megabytes or (16384 if cuda else 256)
    title = f"Tiers: a model of {whole} MiB on {device}"
    # No other process is measured at the same time, so this one uses all cores.
    with Run("tiers", title, [PLAIN, OURS, RELOAD], device, json) as run, on_cores(run.cores):
        with run.broker(APP, "--spill-dir", str(run.folder)) as client:
            plain = _Plain(device, whole << 20, run.folder)
            _one_model(run, client, plain, whole, rounds)
            _written_model(run, client, plain, whole, rounds)
            _engines(run, client, whole, numbers(engines))
        _round_robin(run, max(whole // models, 8), models, rounds)


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


def _yes(same: bool) -> str:
    return "yes" if same else "NO"


def _one_model(run: Run, client: Client, plain: _Plain, mebibytes: int, rounds: int) -> None:
    """Measure sleep and wake of one model in one process, in turns with plain copies."""
    times = Times()
    handle: Handle[Stack] = client.call("stack", mebibytes, 0)
    with handle:
        model, nbytes = handle.value, handle.get_object_info()["nbytes"]
        before, captured = digest(model), _captured(model)
        replayed = captured()
        plain.lower(Times(), _LOWER)  # one-time costs
        plain.raise_(Times(), _LOWER)
        plain.lower(times, _LOWER)
        handle.suspend()
        with times.of(_LOWER):
            client.evict(handle)
        handle.resume()
        copied, same, graph = 0, digest(model) == before, captured() == replayed
        for _ in range(rounds):
            with times.of(_SUSPEND):
                handle.suspend()
            with times.of(_MAP):
                handle.resume()
            digest(model)  # touch the pages: unmapping untouched pages takes no time
            with times.of(_SLEEP):
                handle.suspend()
                with times.of(_EVICT):
                    copied += sum(move["copied"] for move in client.evict(handle))
            plain.raise_(times, _WAKE)
            with times.of(_WAKE):
                handle.resume()
            same, graph = same and digest(model) == before, graph and captured() == replayed
        _reload(run, times, model, min(rounds, 2))
    _one_model_rows(run, times, nbytes)
    run.note(f"medians of {rounds} rounds; evictions with a copy copied {copied:,} bytes in all")
    run.row("a pass after each wake is bit-identical", _yes(same))
    if run.device != "cpu":
        run.row("a replay of a CUDA graph captured before is bit-identical", _yes(graph))


def _written_model(run: Run, client: Client, plain: _Plain, mebibytes: int, rounds: int) -> None:
    """Measure evictions of a writable model: each of them copies it, later ones into allocated memory."""
    times = Times()
    handle: Handle[Stack] = client.call("writable_stack", mebibytes)
    same = True
    with handle:
        handle.suspend()
        client.evict(handle)
        handle.resume()
        for number in range(rounds):
            with torch.no_grad():
                next(handle.value.parameters()).fill_(number)
            before = digest(handle.value)
            plain.lower(times, _AGAIN)
            handle.suspend()
            with times.of(_AGAIN):
                client.evict(handle)
            handle.resume()
            same = same and digest(handle.value) == before
    client.invalidate_endpoint_cache("writable_stack")
    run.row(_AGAIN, times.samples(_AGAIN))
    run.row("… the written bits are preserved", _yes(same))


def _captured(model: Stack) -> Callable[[], list[float]]:
    """Capture a pass as a CUDA graph; return a function that replays it. On the host the function runs the pass."""
    x = question(model)
    if not x.is_cuda:
        return lambda: digest(model)
    with torch.cuda.stream(torch.cuda.Stream()):
        model(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = model(x)

    def replay() -> list[float]:
        y.zero_()
        graph.replay()
        answer: list[float] = y[0, :8].float().tolist()
        return answer

    return replay


def _reload(run: Run, times: Times, model: Stack, rounds: int) -> None:
    """Measure a process without tiers, which reads the weights from a file in the page cache."""
    file = run.folder / "model.safetensors"
    # Only a part, because writing a large file would dominate the run.
    whole = sum(parameter.nbytes for parameter in model.parameters())
    part = dict(list(model.state_dict().items())[: max(len(model.layers) * min(whole, _PART) // whole, 1)])
    save_file(part, file)
    nbytes, target = file.stat().st_size, str(next(model.parameters()).device)
    for number in range(rounds + 1):
        begin = time.perf_counter()
        state = load_file(file, device=target)
        if target == "cpu":  # load_file() only maps the pages
            state = {name: tensor.clone() for name, tensor in state.items()}
        else:
            torch.cuda.synchronize()
        del state
        if number:  # the first round has one-time costs
            times[_WAKE, RELOAD].append((time.perf_counter() - begin) * whole / nbytes)
    if whole > nbytes:
        run.note(f"{RELOAD}: extrapolated from {nbytes >> 20:,} MiB")
    file.unlink()


def _one_model_rows(run: Run, times: Times, nbytes: int) -> None:
    large = nbytes >= 15 * 10**9
    for name in (_LOWER, _SUSPEND, _EVICT, _SLEEP, _WAKE, _MAP):
        samples = times.samples(name)
        run.row(name, samples, "s", Goal("≤", 20e-3, "16 GB, GPU") if name == _SLEEP and large else None)
        if name == _WAKE:
            run.row("… in GB/s", {side: nbytes / 1e9 / sample.p50 for side, sample in samples.items()}, "number")
            ratio = samples[OURS].p50 / samples[PLAIN].p50
            run.row("… relative to the plain copy", ratio, "ratio", Goal("≤", 1.15, "GPU") if large else None)


def _engines(run: Run, client: Client, mebibytes: int, counts: Sequence[int]) -> None:
    """Measure several processes with one model: their concurrent wake, and the host memory while they sleep."""
    config: dict[str, Any] = {"address": client.socket_path, "device": run.device, "mebibytes": mebibytes}
    processes: list[Process] = []
    kept: dict[int, int] = {}
    for count in counts:
        processes += run.processes(count - len(processes), Engine, **config)
        # Includes private host memory that engines add while they sleep.
        added = sum(ask_all(processes, "suspend"))
        client.evict("stack")
        (item,) = client.list_objects()
        kept[count] = sum(item["copies"].values()) + added
        begin = time.monotonic()
        answers = ask_all(processes, "resume")
        took = max(ended for ended, _ in answers) - begin
        run.row(f"wake of {rendering.several(count, 'engine')} at once, until the last one has it", took)
        if not all(same for _, same in answers):
            run.note("THE BITS OF SOME ENGINES DIFFER AFTER THE WAKE")
    for process in processes:
        process.close()
    for count, nbytes in kept.items():
        run.row(f"copies in lower tiers, {rendering.several(count, 'engine')} asleep", nbytes, "bytes")
    if len(counts) > 1:
        first, last = counts[0], counts[-1]
        each = (kept[last] - kept[first]) / (last - first) / (mebibytes << 20)
        run.row("… growth per process, relative to a copy", each, "ratio", Goal("≤", 0.05, "flat"))


def _round_robin(run: Run, mebibytes: int, models: int, rounds: int) -> None:
    """Measure several models used in turns, with memory for three: each turn wakes one and evicts another."""
    quota = int((_FIT + 0.1) * mebibytes) << 20
    options = ["--quota", f"{run.device}={quota}", "--when-full", "evict", "--spill-dir", str(run.folder)]
    with run.broker(APP, *options, name="round") as client, ExitStack() as stack:
        handles: list[Handle[Stack]] = []
        answers = []
        for number in range(models):
            handles.append(stack.enter_context(client.call("stack", mebibytes, number)))
            answers.append(digest(handles[-1].value))
            handles[-1].suspend()
        turns: list[list[float]] = []
        same = True
        for _ in range(rounds):
            turns.append([])
            for handle, answer in zip(handles, answers, strict=True):
                begin = time.perf_counter()
                with handle.active() as model:
                    same = digest(model) == answer and same
                    turns[-1].append(time.perf_counter() - begin)
        sample = Sample(*turns)
        run.row(f"{models} models of {mebibytes} MiB in turns, memory for {_FIT}: wake, a pass, p50", sample)
        run.row("… p99", sample.p99)
        run.row("… the bits are preserved", _yes(same))


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

    def resume(self) -> tuple[float, bool]:
        """Map the model again; return the time, and whether a pass is bit-identical to the first one."""
        self._handle.resume()
        return time.monotonic(), digest(self._handle.value) == self._answer

    def close(self) -> None:
        """Release the model."""
        self._handle.release()
        self._client.close()
