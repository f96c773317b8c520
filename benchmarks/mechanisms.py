"""Ways to share memory, beside each other: what they cost, and what is left when the process that made it is killed."""

from __future__ import annotations

import os
import signal
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer

from benchmarks.options import Json, numbers
from benchmarks.processes import Process
from benchmarks.report import Report, Row
from benchmarks.segment_process import receive, send
from benchmarks.stats import Sample
from shared_rpc.errors import SharedRPCError
from shared_rpc.memory.backends.choice import PREFERENCE, survey
from shared_rpc.memory.segments import Segment
from shared_rpc.protocol.records import EXPORTER_OWNED, Mechanism

__all__ = ["Subject", "run"]

_MIB = 1 << 20
#: What is timed of each segment; a mechanism that has no such step gets a dash.
_STEPS = {
    "create": "create: allocate and zero",
    "export": "export: make it such that it can be sent",
    "map here": "map in the process that made it",
    "open": "open in another process",
    "map": "map in another process",
    "unmap": "wait for the device and unmap there",
}
#: What a segment is filled with.
_VALUE = 7


def run(
    megabytes: Annotated[str, typer.Option(help="Sizes of segments, in MiB.")] = "2,64,1024",
    rounds: Annotated[int, typer.Option(help="Segments that are made and mapped, of each size.")] = 30,
    calls: Annotated[int, typer.Option(help="Calls that are timed.")] = 1000,
    json: Json = None,
) -> None:
    """Measure the ways to share memory: the costs of each, and the memory after its maker was killed."""
    mebibytes = numbers(megabytes)
    device, lacks = _gpu()
    there: list[tuple[str, Mechanism]] = [("cpu", "memfd"), *((device, name) for name in PREFERENCE if not lacks[name])]
    report = Report("mechanisms", "Mechanisms", [name for _, name in there])
    for name in PREFERENCE:
        if lacks[name]:
            report.note(f"{name} was left out: {lacks[name]}")
    report.note("the pages of a memfd come when they are first touched, which is in no row")
    results = {name: Subject(device, name) for device, name in there}
    for subject in results.values():
        subject.measure(mebibytes, rounds, calls)
        subject.kill(min(mebibytes))
    _rows(report, results, mebibytes)
    report.finish(json)


def _gpu() -> tuple[str, dict[Mechanism, str]]:
    """Return the first GPU, and what it lacks for each mechanism."""
    try:
        from shared_rpc.memory.backends.cuda import visible_gpus

        gpus = visible_gpus()
    except ImportError as error:
        return "", dict.fromkeys(PREFERENCE, f"no GPU support here ({error})")
    if not gpus:
        return "", dict.fromkeys(PREFERENCE, "no GPU here")
    try:
        return gpus[0], survey(gpus[0])
    except SharedRPCError as error:
        return "", dict.fromkeys(PREFERENCE, str(error))


class Subject:
    """One mechanism and what was found of it: times by name, and texts by question."""

    def __init__(self, device: str, mechanism: Mechanism) -> None:
        self.device = device
        self.mechanism = mechanism
        self.samples: dict[str, Sample] = {}
        self.texts: dict[str, str] = {}
        self.taken: float | None = None

    def measure(self, sizes: list[int], rounds: int, calls: int) -> None:
        """Measure the costs of making, mapping and using."""
        for size in sizes:
            with self._process() as (maker, ours), self._process() as (consumer, theirs):
                maker.ask(do="make", nbytes=size * _MIB, rounds=2)  # the first of everything
                made = maker.ask(do="make", nbytes=size * _MIB, rounds=rounds)
                maker.ask(do="keep", nbytes=size * _MIB, value=_VALUE)
                with receive(ours)[0] as segment:
                    send(theirs, segment)
                    used = consumer.ask(do="attach", rounds=rounds + 1)
                for step, times in made.items():
                    self.samples[f"{step} {size}"] = Sample([times])
                for step, times in used.items():
                    # Of what is mapped there is one more than of what is unmapped: the first of everything.
                    self.samples[f"{step} {size}"] = Sample([times[-rounds:]])
                if size == min(sizes):
                    self.samples["call"] = Sample([consumer.ask(do="call", count=calls)["call"]])
                    if self.device != "cpu":
                        self.taken = maker.ask(do="take", nbytes=2 * _MIB)["taken"]

    def kill(self, size: int) -> None:
        """Kill the maker, and compare the bytes: by a process that has them mapped, at once and after another one has used all
        other memory of the device, and by one that opens them then. Write to protected memory, which is not that memory.
        """
        self.texts["protected"] = self._protected(size)
        with self._process() as (maker, ours), self._process() as (consumer, theirs), self._process() as (late, later):
            maker.ask(do="keep", nbytes=size * _MIB, value=_VALUE)
            with receive(ours)[0] as segment:
                others = self._driver_descriptors(segment)
                send(theirs, segment)
                consumer.ask(do="attach", rounds=1)
                pid = maker.pid
                os.kill(pid, signal.SIGKILL)
                maker.close()
                self.texts["reads on"] = _answer(consumer, do="read", value=_VALUE)
                self.texts["reads beside others"] = "-"
                if self.device != "cpu":
                    with self._process() as (other, _):
                        other.ask(do="use_all", value=_VALUE + 1)
                    self.texts["reads beside others"] = _answer(consumer, do="read", value=_VALUE)
                send(later, segment, *others)
                self.texts["opens"] = _answer(late, do="open", value=_VALUE)
                below = self.mechanism in EXPORTER_OWNED
                self.texts["opens below"] = _answer(late, do="open_below", value=_VALUE) if below else self.texts["opens"]
                self.texts["reads after"] = _answer(consumer, do="read", value=_VALUE)
                for fd in others:
                    os.close(fd)

    def _driver_descriptors(self, segment: Segment) -> list[int]:
        """Fetch the descriptors that the driver needs beside the export descriptor, while the maker runs."""
        if self.mechanism != "pool":
            return []
        from shared_rpc.memory.backends.exporter_owned import export_descriptor_of
        from shared_rpc.memory.backends.fd_server import fetch

        exported = export_descriptor_of(segment.fileno())
        return [fetch(exported.fd_server, exported.token)]

    def _protected(self, size: int) -> str:
        with self._process() as (maker, ours), self._process() as (culprit, sock):
            maker.ask(do="keep", nbytes=size * _MIB, value=_VALUE)
            with receive(ours)[0] as segment:
                send(sock, segment)
                return _answer(culprit, do="write_protected")

    @contextmanager
    def _process(self) -> Iterator[tuple[Process, socket.socket]]:
        """Start a process, and yield it with this process's end of its socket."""
        with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as listener:
            listener.bind(f"{folder}/s")
            listener.listen()
            config = {"socket": f"{folder}/s", "device": self.device, "mechanism": self.mechanism}
            with Process("segment_process", os.sched_getaffinity(0), **config) as process:
                process.read()
                with listener.accept()[0] as sock:
                    yield process, sock


def _answer(process: Process, **command: object) -> str:
    try:
        return str(process.ask(**command)["outcome"])
    except (RuntimeError, BrokenPipeError):
        return "its process ends"


def _rows(report: Report, results: dict[Mechanism, Subject], sizes: list[int]) -> None:
    for size in sizes:
        for key, name in _STEPS.items():
            found = {who: subject.samples.get(f"{key} {size}") for who, subject in results.items()}
            samples: dict[str, Sample] = {who: sample for who, sample in found.items() if sample is not None}
            report.add(
                Row(
                    f"{size} MiB: {name}, p50",
                    {who: sample.p50 for who, sample in samples.items()},
                    samples=samples,
                    texts=dict.fromkeys(found.keys() - samples.keys(), "-"),
                )
            )
    report.sampled(
        "a kernel, a copy of 4 KiB into the segment, a wait: p50",
        {who: subject.samples["call"] for who, subject in results.items()},
    )
    taken: dict[str, float] = {who: subject.taken for who, subject in results.items() if subject.taken is not None}
    if taken:
        report.add(Row("memory that a segment of 2 MiB takes", taken, "bytes"))
    for key, name in (
        ("protected", "a write to what was mapped for reading"),
        ("reads on", "maker killed: who has it mapped"),
        ("reads beside others", "… after a new process has filled and freed all other memory of the device"),
        ("opens", "maker killed: a new process opens it"),
        ("opens below", "… where the library does not refuse to"),
        ("reads after", "… and who had it mapped then"),
    ):
        report.add(Row(name, {}, texts={who: subject.texts[key] for who, subject in results.items()}))
