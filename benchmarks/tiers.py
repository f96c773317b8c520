"""Models that sleep: what an eviction and a wake take, beside a plain copy of as many bytes and beside a reload from files."""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from benchmarks.memory import private_bytes
from benchmarks.runner import OURS, Json, Report, Sample, numbers, timed
from benchmarks.servers import Process, Servers, on_cores
from benchmarks.workload import Stack, digest, question
from shared_rpc import Client, Handle

PLAIN, RELOAD = "plain copy", "safetensors"
#: Seconds that anything here may take.
_PATIENCE = 300.0
#: Bytes of a plain copy that are copied at once: a pinned buffer of all bytes would take longer to make than anything here.
_PIECE = 1 << 30
#: Bytes that a reload reads at most.
_PART = 4 << 30
#: Models of the round that there is memory for.
_FIT = 3

APP = """
from benchmarks.workload import Stack, make_stack
from shared_rpc import Provider

provider = Provider(device={device!r})

@provider.share(managed=True, access="read")
def model(mebibytes: int, number: int) -> Stack:
    return make_stack(mebibytes, number, {device!r})

@provider.share(managed=True)
def written(mebibytes: int) -> Stack:
    return make_stack(mebibytes, 0, {device!r})
"""

_Times = defaultdict[tuple[str, str], list[float]]

#: The names of the rows, in their order.
_LOWER, _SUSPEND, _EVICT = "first eviction: the copy is made", "suspend: unmap", "evict, the copy being there"
_AGAIN = "a later eviction of a model that is written to"
_SLEEP, _WAKE, _MAP = "sleep: both", "wake: restore, and map at the same address", "… as a map alone, while it is on its device"
_FORWARD, _FIRST = "a pass over all weights", "… the first one after a wake"


def run(
    cuda: Annotated[bool, typer.Option("--cuda", help="Models on the GPU, copies in the host's memory.")] = False,
    megabytes: Annotated[int | None, typer.Option(help="MiB of the model; 16384 on a GPU, 256 on the host.")] = None,
    rounds: Annotated[int, typer.Option(help="Times that the model sleeps and wakes.")] = 5,
    models: Annotated[int, typer.Option(help="Models that take turns, with memory for three.")] = 10,
    engines: Annotated[str, typer.Option(help="Processes that sleep and wake together, ascending.")] = "1,2,4",
    json: Json = None,
) -> None:
    """Measure models that sleep and wake: beside plain copies and a reload, in several processes, and more than memory."""
    device = "cuda:0" if cuda else "cpu"
    whole = megabytes or (16384 if cuda else 256)
    report = Report("tiers", f"Tiers: a model of {whole} MiB on {device}", [PLAIN, OURS, RELOAD])
    # Nothing else calls while a model moves, so this process has all cores.
    with Servers(device) as servers, on_cores(servers.cores):
        with (
            servers.broker(APP.format(device=device), "--spill-dir", str(servers.folder)) as (socket, _),
            Client(socket_path=socket, device=device, timeout=_PATIENCE) as client,
        ):
            plain = _Plain(device, whole << 20, servers.folder)
            _one_model(report, client, plain, whole, rounds, servers.folder)
            _written_model(report, client, plain, whole, rounds)
            _engines(report, client, device, whole, numbers(engines))
        _round_robin(report, servers, device, max(whole // models, 8), models, rounds)
    report.finish(json)


class _Plain:
    """Copies of as many bytes as the model has, as a program makes them that has a place for them.

    They are between pinned memory and a GPU, or between the host's memory and a file in the page cache.
    """

    def __init__(self, device: str, nbytes: int, folder: Path) -> None:
        self._cuda = device != "cpu"
        self._pieces = max(nbytes // _PIECE, 1)
        self._size = nbytes // self._pieces
        self._file = folder / "plain"
        if self._cuda:
            self._below = torch.empty(self._size, dtype=torch.uint8, pin_memory=True)
            self._above = torch.empty(self._size, dtype=torch.uint8, device=device)

    def lower(self) -> float:
        """Measure a copy to the lower tier, in seconds."""
        if self._cuda:
            return timed(lambda: self._repeat(lambda: self._below.copy_(self._above, non_blocking=True)))
        self._file.unlink(missing_ok=True)
        above = torch.ones(self._size, dtype=torch.uint8).numpy()
        return timed(lambda: self._write(above.data))

    def _write(self, above: memoryview) -> None:
        with self._file.open("wb", buffering=0) as file:
            for _ in range(self._pieces):
                file.write(above)

    def raise_(self) -> float:
        """Measure a copy up, in seconds. On the host it is into memory that was not touched before, as that of a restore is."""
        if self._cuda:
            return timed(lambda: self._repeat(lambda: self._above.copy_(self._below, non_blocking=True)))
        return timed(self._read)

    def _read(self) -> None:
        fd = os.memfd_create("plain")
        try:
            with self._file.open("rb", buffering=0) as file:
                left = self._pieces * self._size
                while left > 0:
                    left -= os.sendfile(fd, file.fileno(), None, left)
        finally:
            os.close(fd)

    def _repeat(self, copy: Callable[[], object]) -> None:
        for _ in range(self._pieces):
            copy()
        torch.cuda.synchronize()


def _one_model(report: Report, client: Client, plain: _Plain, mebibytes: int, rounds: int, folder: Path) -> None:
    """Measure one model in one process: it sleeps and wakes, in turns with plain copies."""
    times: _Times = defaultdict(list)
    handle: Handle[Stack] = client.call("model", mebibytes, 0)
    with handle:
        model, nbytes = handle.value, handle.get_object_info()["nbytes"]
        before, captured = digest(model), _captured(model)
        replayed = captured()
        plain.lower(), plain.raise_()  # the first of everything
        times[PLAIN, _LOWER].append(plain.lower())
        handle.suspend()
        times[OURS, _LOWER].append(timed(lambda: client.evict(handle)))
        times[OURS, "cold first"].append(timed(handle.resume))
        copied, same, graph = 0, digest(model) == before, captured() == replayed
        for _ in range(rounds):
            for _ in range(3):
                times[OURS, _FORWARD].append(timed(lambda: digest(model)))
            times[OURS, _SUSPEND].append(timed(handle.suspend))
            times[OURS, _MAP].append(timed(handle.resume))
            digest(model)  # pages that nobody has touched are unmapped in no time
            times[OURS, "suspend again"].append(timed(handle.suspend))
            begin = time.perf_counter()
            copied += sum(move["copied"] for move in client.evict(handle))
            times[OURS, _EVICT].append(time.perf_counter() - begin)
            times[PLAIN, _WAKE].append(plain.raise_())
            times[OURS, _WAKE].append(timed(handle.resume))
            times[OURS, _FIRST].append(timed(lambda: digest(model)))
            same, graph = same and digest(model) == before, graph and captured() == replayed
        _reload(times, model, folder, min(rounds, 2), report)
    _one_model_rows(report, times, nbytes)
    report.note(f"medians of {rounds} rounds; evictions with a copy copied {copied:,} bytes in all")
    report.row("a pass after each wake has the bits of one before", {}, texts={OURS: "yes" if same else "NO"})
    if torch.cuda.is_available() and next(model.parameters()).is_cuda:
        report.row("a CUDA graph of before, replayed, has them too", {}, texts={OURS: "yes" if graph else "NO"})


def _written_model(report: Report, client: Client, plain: _Plain, mebibytes: int, rounds: int) -> None:
    """Measure evictions of a model that processes write to: each of them copies it, the later ones to memory that is there."""
    times: _Times = defaultdict(list)
    handle: Handle[Stack] = client.call("written", mebibytes)
    same = True
    with handle:
        handle.suspend()
        client.evict(handle)
        handle.resume()
        for number in range(rounds):
            with torch.no_grad():
                next(handle.value.parameters()).fill_(number)
            before = digest(handle.value)
            times[PLAIN, _AGAIN].append(plain.lower())
            handle.suspend()
            times[OURS, _AGAIN].append(timed(lambda: client.evict(handle)))
            handle.resume()
            same = same and digest(handle.value) == before
    client.invalidate_endpoint_cache("written")
    report.row(_AGAIN, {who: Sample([times[who, _AGAIN]]) for who in (PLAIN, OURS)})
    report.row("… with what was written since", {}, texts={OURS: "yes" if same else "NO"})


def _captured(model: Stack) -> Callable[[], list[float]]:
    """Capture a pass as a CUDA graph; return a function that replays it. On the host it is the pass itself."""
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


def _reload(times: _Times, model: Stack, folder: Path, rounds: int, report: Report) -> None:
    """Measure a process without tiers: it reads the weights from a file, which is in the page cache."""
    try:
        from safetensors.torch import load_file, save_file
    except ImportError as error:
        report.note(f"safetensors was left out: {error}")
        return
    file = folder / "model.safetensors"
    # A large file takes longer to write than all else: a part of it shows how fast it is read.
    whole = sum(parameter.nbytes for parameter in model.parameters())
    part = dict(list(model.state_dict().items())[: max(len(model.layers) * min(whole, _PART) // whole, 1)])
    save_file(part, file)
    nbytes, target = file.stat().st_size, str(next(model.parameters()).device)

    def load() -> None:
        state = load_file(file, device=target)
        if target == "cpu":  # the pages are mapped: each is copied when it is first touched
            state = {name: tensor.clone() for name, tensor in state.items()}
        else:
            torch.cuda.synchronize()
        del state

    load()
    times[RELOAD, _WAKE] = [timed(load) * whole / nbytes for _ in range(rounds)]
    if whole > nbytes:
        report.note(f"{RELOAD}: {nbytes >> 20:,} MiB were read, and the time for all is computed from that")
    file.unlink()


def _one_model_rows(report: Report, times: _Times, nbytes: int) -> None:
    found = {key: Sample([taken]) for key, taken in times.items()}

    def row(name: str) -> None:
        report.row(name, {who: found[who, name] for who in (PLAIN, OURS, RELOAD) if (who, name) in found})

    large = nbytes >= 15 * 10**9
    row(_LOWER)
    row(_SUSPEND)
    row(_EVICT)
    sleep = Sample([[a + b for a, b in zip(times[OURS, "suspend again"], times[OURS, _EVICT], strict=True)]])
    report.row(_SLEEP, {OURS: sleep}, "s", "sleep", sleep.p50 if large else None)
    row(_WAKE)
    speed = {
        who: float(f"{nbytes / found[who, _WAKE].p50 / 1e9:.3g}") for who in (PLAIN, OURS, RELOAD) if (who, _WAKE) in found
    }
    report.row("… in GB/s", speed, "number")
    ratio = found[OURS, _WAKE].p50 / found[PLAIN, _WAKE].p50
    report.row("… beside the plain copy", {OURS: ratio}, "ratio", "wake", ratio if large else None)
    row(_MAP)
    row(_FORWARD)
    row(_FIRST)


def _engines(report: Report, client: Client, device: str, mebibytes: int, counts: Sequence[int]) -> None:
    """Measure several processes with one model: their wake all at once, and the memory of the host while they sleep."""
    with ExitStack() as stack:
        config = {"socket": client.socket_path, "device": device, "mebibytes": mebibytes}
        processes: list[Process] = []
        kept: dict[int, int] = {}
        for count in counts:
            cores = os.sched_getaffinity(0)
            started = [stack.enter_context(Process("tiers:Engine", cores, **config)) for _ in range(count - len(processes))]
            for process in started:
                for what in ("suspend", "resume"):  # the first of everything
                    process.ask(what)
            processes += started
            awake = [process.ask("state")["private"] for process in processes]
            asleep = [process.ask("suspend")["private"] for process in processes]
            client.evict("model")
            (item,) = client.list_objects()
            # What engines have of the host's memory beyond what they had awake counts as theirs.
            kept[count] = sum(item["copies"].values()) + sum(max(b - a, 0) for a, b in zip(awake, asleep, strict=True))
            begin = time.monotonic()
            for process in processes:
                process.tell("resume")
            answers = [process.read() for process in processes]
            took = max(answer["ended"] for answer in answers) - begin
            report.row(f"wake of {_processes(count)} at once, until the last one has it", {OURS: took})
            if not all(answer["same"] for answer in answers):
                report.note("NOT ALL ENGINES HAD THE SAME BITS AFTER THE WAKE")
        for count, nbytes in kept.items():
            report.row(f"copies in lower tiers, {_processes(count)} asleep", {OURS: float(nbytes)}, "bytes")
        if len(counts) > 1:
            first, last = counts[0], counts[-1]
            each = (kept[last] - kept[first]) / (last - first) / (mebibytes << 20)
            report.row("… what a process adds, as a part of a copy", {OURS: each}, "ratio", "engines", each)


def _processes(count: int) -> str:
    return f"{count} process{'' if count == 1 else 'es'}"


def _round_robin(report: Report, servers: Servers, device: str, mebibytes: int, models: int, rounds: int) -> None:
    """Measure turns of several models with memory for three: each turn another one wakes, and one that sleeps gives way."""
    quota = int((_FIT + 0.1) * mebibytes) << 20
    options = ["--quota", f"{device}={quota}", "--when-full", "evict", "--spill-dir", str(servers.folder)]
    with (
        servers.broker(APP.format(device=device), *options, name="round") as (socket, _),
        Client(socket_path=socket, device=device, timeout=_PATIENCE) as client,
        ExitStack() as stack,
    ):
        handles: list[Handle[Stack]] = []
        answers = []
        for number in range(models):
            handles.append(stack.enter_context(client.call("model", mebibytes, number)))
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
        sample = Sample(turns)
        name = f"{models} models of {mebibytes} MiB in turns, memory for {_FIT}"
        report.row(f"{name}: wake, a pass, p50", {OURS: sample})
        report.row("… p99", {OURS: sample.p99})
        report.row("… with the bits of before", {}, texts={OURS: "yes" if same else "NO"})


class Engine:
    """A process that has a model attached, sleeps and wakes."""

    def __init__(self, socket: str, device: str, mebibytes: int) -> None:
        torch.set_num_threads(1)
        self._client = Client(socket_path=socket, device=device, timeout=_PATIENCE)
        self._handle: Handle[Stack] = self._client.call("model", mebibytes, 0)
        self._answer = digest(self._handle.value)

    def suspend(self) -> dict[str, Any]:
        """Unmap the model."""
        self._handle.suspend()
        return self.state()

    def resume(self) -> dict[str, Any]:
        """Map it again."""
        self._handle.resume()
        return self.state()

    def state(self) -> dict[str, Any]:
        """Return the time, whether a pass has the bits of the first one, and the private memory."""
        ended = time.monotonic()
        same = self._handle.suspended or digest(self._handle.value) == self._answer
        return {"ended": ended, "same": same, "private": private_bytes()}

    def close(self) -> None:
        """Release the model."""
        self._handle.release()
        self._client.close()
