"""Comparison of the mechanisms that share memory: their costs, and the state of the memory after its maker is killed."""

from __future__ import annotations

import os
import pkgutil
import signal
import time
from collections.abc import Callable
from contextlib import ExitStack
from multiprocessing.reduction import DupFd
from typing import Annotated, Any, NamedTuple

import torch
import typer

from benchmarks.processes import Process, used
from benchmarks.runner import Json, Run, Sample, Value, numbers, timed
from shared_rpc.errors import CapabilityError, SharedRPCError
from shared_rpc.memory.backends.choice import PREFERENCE, backend_for, survey
from shared_rpc.memory.segments import Segment
from shared_rpc.protocol.records import EXPORTER_OWNED, Mechanism, SegmentInfo

_MIB = 1 << 20
#: The timed steps of a segment; a mechanism without a step has a dash in its row.
_STEPS = {
    "create": "create: allocate and zero",
    "export": "export: make it sendable",
    "map here": "map in the process that made it",
    "open": "open in another process",
    "map": "map in another process",
    "unmap": "wait for the device and unmap there",
}
#: Rows about writes to protected memory, and about a killed maker.
_QUESTIONS = {
    "protected": "a write to memory mapped for reading",
    "reads on": "maker killed: a process that has it mapped",
    "reads beside others": "… after a new process has filled and freed all other memory of the device",
    "opens": "maker killed: a new process opens it",
    "opens below": "… by the driver alone, which the library refuses",
    "reads after": "… and the process that had it mapped, after that",
}
#: The value that fills a segment.
_VALUE = 7


def run(
    megabytes: Annotated[str, typer.Option(help="Sizes of segments, in MiB.")] = "2,64,1024",
    rounds: Annotated[int, typer.Option(help="Segments of each size that are created and mapped.")] = 30,
    calls: Annotated[int, typer.Option(help="Timed calls.")] = 1000,
    json: Json = None,
) -> None:
    """Measure the mechanisms that share memory: their costs, and the memory after its maker is killed."""
    sizes = numbers(megabytes)
    device, lacks = _gpu()
    there: list[tuple[str, Mechanism]] = [("cpu", "memfd"), *((device, name) for name in PREFERENCE if not lacks[name])]
    subjects = {name: Subject(device, name) for device, name in there}
    with Run("mechanisms", "Mechanisms", list(subjects), json=json, pinned=False) as run:
        for mechanism, lack in lacks.items():
            if lack:
                run.note(f"{mechanism} was left out: {lack}")
        run.note("the pages of a memfd are allocated at the first access, which no row includes")
        for subject in subjects.values():
            subject.measure(sizes, rounds, calls)
            subject.kill(min(sizes))

        def row(name: str, key: str, missing: str = "") -> None:
            values: dict[str, Value] = {who: subject.found.get(key, missing) for who, subject in subjects.items()}
            run.row(name, values, "bytes" if key == "taken" else "s")

        for mebibytes in sizes:
            for step, name in _STEPS.items():
                row(f"{mebibytes} MiB: {name}, p50", f"{step} {mebibytes}", "-")
        row("a kernel, a copy of 4 KiB into the segment, a wait: p50", "call")
        if len(subjects) > 1:
            row("memory that a segment of 2 MiB takes", "taken")
        for key, name in _QUESTIONS.items():
            row(name, key)


def _gpu() -> tuple[str, dict[Mechanism, str]]:
    """Return the first GPU, and for each mechanism the reason if the GPU does not support it."""
    try:
        from shared_rpc.memory.backends.cuda import visible_gpus

        gpus = visible_gpus()
        return (gpus[0], survey(gpus[0])) if gpus else ("", dict.fromkeys(PREFERENCE, "no GPU here"))
    except (ImportError, SharedRPCError) as error:
        return "", dict.fromkeys(PREFERENCE, str(error))


class Subject:
    """One mechanism with its results: times by step and size, bytes, and texts by question."""

    def __init__(self, device: str, mechanism: Mechanism) -> None:
        self.device = device
        self.mechanism = mechanism
        self.found: dict[str, Value] = {}

    def measure(self, sizes: list[int], rounds: int, calls: int) -> None:
        """Measure the costs of creating, mapping and using segments."""
        for size in sizes:
            with self._process() as maker, self._process() as consumer:
                maker.ask("make", nbytes=size * _MIB, rounds=2)  # one-time costs
                times = maker.ask("make", nbytes=size * _MIB, rounds=rounds)
                times |= consumer.ask("attach", sent=maker.ask("keep", nbytes=size * _MIB), rounds=rounds + 1)
                # One round more is mapped than unmapped; the first one, with one-time costs, is dropped.
                self.found |= {f"{step} {size}": Sample(taken[-rounds:]) for step, taken in times.items()}
                if size == min(sizes):
                    self.found["call"] = Sample(consumer.ask("call", count=calls))
                    if self.device != "cpu":
                        self.found["taken"] = maker.ask("take", nbytes=2 * _MIB)

    def kill(self, size: int) -> None:
        """Kill the maker and compare the bytes, in a process that has them mapped (at once, and after another process has
        used all other memory of the device), and in a process that opens them afterwards. Also write to protected memory.
        """
        with self._process() as maker, self._process() as consumer, self._process() as late, self._process() as culprit:
            self.found["protected"] = _answer(culprit, "write_protected", sent=maker.ask("keep", nbytes=size * _MIB))
            segment, _ = received(maker.ask("keep", nbytes=size * _MIB))
            with segment, ExitStack() as stack:
                others = self._driver_descriptors(segment)
                for fd in others:
                    stack.callback(os.close, fd)
                consumer.ask("attach", sent=sent(segment), rounds=1)
                os.kill(maker.pid, signal.SIGKILL)
                maker.close()
                self.found["reads on"] = _answer(consumer, "read")
                self.found["reads beside others"] = "-"
                if self.device != "cpu":
                    with self._process() as other:
                        other.ask("use_all")
                    self.found["reads beside others"] = _answer(consumer, "read")
                self.found["opens"] = self.found["opens below"] = _answer(late, "open", sent=sent(segment, *others))
                if self.mechanism in EXPORTER_OWNED:
                    self.found["opens below"] = _answer(late, "open_below")
                self.found["reads after"] = _answer(consumer, "read")

    def _driver_descriptors(self, segment: Segment) -> list[int]:
        """Fetch the descriptors that the driver needs in addition to the export descriptor, while the maker runs."""
        if self.mechanism != "pool":
            return []
        from shared_rpc.memory.backends.exporter_owned import export_descriptor_of
        from shared_rpc.memory.backends.fd_server import fetch

        exported = export_descriptor_of(segment.fileno())
        return [fetch(exported.fd_server, exported.token)]

    def _process(self) -> Process:
        return Process(End, device=self.device, mechanism=self.mechanism).ready()


def _answer(process: Process, do: str, **options: Any) -> str:
    try:
        return str(process.ask(do, **options))
    except RuntimeError:
        return "its process crashes"


#: A segment for another process: its description and its descriptors.
Sent = tuple[SegmentInfo, list[Any]]


def sent(segment: Segment, *others: int) -> Sent:
    """Send a segment and its descriptors, which are borrowed."""
    return segment.info, [DupFd(fd) for fd in (segment.fileno(), *others)]


def received(sent: Sent) -> tuple[Segment, list[int]]:
    """Receive a segment and its descriptors, which the caller owns."""
    info, (fd, *others) = sent[0], [descriptor.detach() for descriptor in sent[1]]
    return Segment.owning(info, fd), others


#: Segments created to measure the size of one.
_MANY = 16


class End:
    """A process that creates a segment, or uses a received one."""

    def __init__(self, device: str, mechanism: Any) -> None:
        self.host = device == "cpu"
        self.backend: Any = backend_for(device, mechanism)
        self.making, self.mapping = Watch(MAKING[mechanism]), Watch(MAPPING[mechanism])
        self.device = torch.device("cpu") if self.host else torch.device("cuda", 0)
        self.segment: Any = None
        self.others: list[int] = []
        self.address = 0
        if not self.host:
            torch.zeros(1, device=self.device)

    def bytes(self) -> torch.Tensor:
        """Return the mapped memory as a tensor."""
        from shared_rpc.codec.storages import bytes_at

        return bytes_at(self.address, self.segment.info.nbytes, self.device)

    def wait(self) -> None:
        """Wait for the GPU."""
        if not self.host:
            torch.cuda.synchronize(self.device)

    def make(self, nbytes: int, rounds: int) -> dict[str, list[float]]:
        """Create, map, unmap and close segments; return the seconds of each step of the mechanism."""
        times: dict[str, list[float]] = {"map here": []}
        for _ in range(rounds):
            self.making.time(lambda: self._create(nbytes), times)
            times["map here"].append(timed(self._map))
            self._unmap()
            self.segment.close()
        return times

    def take(self, nbytes: int) -> float:
        """Measure the device memory of a segment."""
        time.sleep(0.2)  # until earlier frees have taken effect
        before = used(str(self.device))
        made = [self.backend.create(nbytes) for _ in range(_MANY)]
        taken = (used(str(self.device)) - before) / _MANY
        for segment in made:
            segment.close()
        return taken

    def keep(self, nbytes: int) -> Sent:
        """Create a segment, fill it and send it."""
        self._create(nbytes)
        self._map()
        self.bytes().fill_(_VALUE)
        self.wait()
        return sent(self.segment)

    def attach(self, sent: Sent, rounds: int) -> dict[str, list[float]]:
        """Receive a segment and map it repeatedly; the last mapping stays. Return the seconds as :meth:`make` does."""
        self.segment, self.others = received(sent)
        times: dict[str, list[float]] = {"unmap": []}
        for number in range(rounds):
            self.mapping.time(self._map, times)
            if number < rounds - 1:
                times["unmap"].append(timed(self._unmap))
        return times

    def call(self, count: int) -> list[float]:
        """Measure the work of a call: a small kernel, a copy of 4 KiB into the mapped memory, and a wait for the stream."""
        source = torch.zeros(4096, dtype=torch.uint8, device=self.device)
        target = self.bytes()[:4096]

        def once() -> None:
            source.add_(1)
            target.copy_(source, non_blocking=True)
            if not self.host:
                torch.cuda.current_stream(self.device).synchronize()

        for _ in range(10):
            once()
        return [timed(once) for _ in range(count)]

    def read(self) -> str:
        """Return whether all bytes are unchanged."""
        return self._outcome(lambda: None, "reads all bytes")

    def use_all(self) -> None:
        """Fill the free memory of the GPU, except half a GiB, with another value, and free it."""
        free, _ = torch.cuda.mem_get_info(self.device)
        blocks = [torch.full((64 << 20,), _VALUE + 1, dtype=torch.uint8, device=self.device) for _ in range((free >> 26) - 8)]
        self.wait()
        blocks.clear()
        torch.cuda.empty_cache()

    def open(self, sent: Sent) -> str:
        """Receive a segment whose maker has ended, and open it like the library."""
        self.segment, self.others = received(sent)
        return self._outcome(self._map, "yes")

    def open_below(self) -> str:
        """Open memory by the driver alone, because the library refuses memory whose maker has ended."""
        from shared_rpc.memory.backends.exporter_owned import export_descriptor_of

        def opened() -> None:
            exported = export_descriptor_of(self.segment.fileno())
            memory = self.backend.open_pool(self.others[0], exported) if self.others else self.backend.open(exported)
            self.address = memory.address

        return self._outcome(opened, "yes")

    def write_protected(self, sent: Sent) -> str:
        """Receive a segment, map it for reading, and write the value that it has."""
        self.segment, self.others = received(sent)
        self.address = self.backend.map(self.segment.fileno(), self.segment.info.nbytes, "read")

        def write() -> None:
            self.bytes()[:1].fill_(_VALUE)
            self.wait()

        return self._outcome(write, "not refused")

    def close(self) -> None:
        """Close the segment. Mappings here end with the process."""
        if self.segment is not None:
            self.segment.close()

    def _create(self, nbytes: int) -> None:
        self.segment = self.backend.create(nbytes)

    def _map(self) -> None:
        self.address = self.backend.map(self.segment.fileno(), self.segment.info.nbytes, "read_write")

    def _unmap(self) -> None:
        self.backend.synchronize()
        self.backend.unmap(self.address, self.segment.info.nbytes)

    def _outcome(self, action: Callable[[], object], good: str) -> str:
        """Return ``good`` if the bytes are right after an action, or the error."""
        try:
            action()
            return good if bool((self.bytes() == _VALUE).all()) else "other bytes"
        except (CapabilityError, RuntimeError) as error:
            return f"error: {str(error).splitlines()[0][:200]}"


# Times of the steps of creating and mapping a segment, measured around driver calls of the library's own code.

_DRIVER = "cuda.bindings.driver"
_ISSUE = ("shared_rpc.memory.backends.liveness", "issue")


class Parts(NamedTuple):
    """The steps of an operation: calls of ``targets`` (object, attribute) are the step ``inner``, the remainder is ``rest``."""

    rest: str
    inner: str = ""
    targets: tuple[tuple[str, str], ...] = ()


#: The steps of ``Backend.create``: memory is allocated and zeroed, then exported. A memfd is a descriptor from the
#: beginning. The older mechanisms issue an export descriptor when they export.
MAKING: dict[Mechanism, Parts] = {
    "memfd": Parts("create"),
    "vmm": Parts("create", "export", ((_DRIVER, "cuMemExportToShareableHandle"),)),
    "ipc": Parts("create", "export", ((_DRIVER, "cuIpcGetMemHandle"), _ISSUE)),
    "pool": Parts(
        "create",
        "export",
        (
            (_DRIVER, "cuMemPoolExportToShareableHandle"),
            (_DRIVER, "cuMemPoolExportPointer"),
            ("shared_rpc.memory.backends.fd_server:FD_SERVER", "register"),
            _ISSUE,
        ),
    ),
}

#: The steps of ``Backend.map`` in another process: the memory is opened, then mapped at an address. A memfd is not opened, and
#: legacy IPC opens memory at an address.
MAPPING: dict[Mechanism, Parts] = {
    "memfd": Parts("map"),
    "vmm": Parts("map", "open", ((_DRIVER, "cuMemImportFromShareableHandle"),)),
    "ipc": Parts("open"),
    "pool": Parts("open", "map", ((_DRIVER, "cuMemPoolImportPointer"),)),
}


class Watch:
    """Times an operation by step. Replaces the watched functions permanently in this process."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._inside = 0.0
        for owner, name in parts.targets:
            found = pkgutil.resolve_name(owner)
            setattr(found, name, self._watched(getattr(found, name)))

    def _watched(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self._inside += time.perf_counter() - begin

        return call

    def time(self, action: Callable[[], object], times: dict[str, list[float]]) -> None:
        """Run the action, and append the seconds of each step."""
        self._inside = 0.0
        begin = time.perf_counter()
        action()
        total = time.perf_counter() - begin
        times.setdefault(self._parts.rest, []).append(total - self._inside)
        if self._parts.inner:
            times.setdefault(self._parts.inner, []).append(self._inside)
