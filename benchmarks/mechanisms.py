"""Comparison of the mechanisms that share memory: their costs, and the state of the memory after its maker is killed."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from multiprocessing.reduction import DupFd
from typing import Annotated, Any

import torch
import typer

from benchmarks.processes import Process, used
from benchmarks.runner import Json, Run, Sample, Value, numbers, timed
from shared_rpc.errors import CapabilityError, SharedRPCError
from shared_rpc.memory.backends.choice import PREFERENCE, backend_for, survey
from shared_rpc.memory.devices import devices_of
from shared_rpc.memory.segments import Segment
from shared_rpc.protocol.records import Mechanism, SegmentInfo

#: Rows about a killed maker: what a process reads that has the memory mapped, and whether another one can open it.
READS = (
    "maker killed: a process that has it mapped",
    "… after another process has filled and freed all other memory of the device",
    "… and after another process has tried to open it",
)
OPENS = "maker killed: another process opens it"
_TAKEN = "memory that a segment of 2 MiB takes"
#: The value that fills a segment.
_VALUE = 7
#: Segments created to measure the size of one.
_MANY = 16


def run(
    megabytes: Annotated[str, typer.Option(help="Sizes of segments, in MiB.")] = "2,64,1024",
    rounds: Annotated[int, typer.Option(help="Segments of each size that are created and mapped.")] = 30,
    json: Json = None,
) -> None:
    """Measure the mechanisms that share memory: their costs, and the memory after its maker is killed."""
    device, lacks = _gpu()
    subjects: list[tuple[str, Mechanism]] = [("cpu", "memfd"), *((device, name) for name in PREFERENCE if not lacks[name])]
    with Run("mechanisms", "Mechanisms", [name for _, name in subjects], json=json, pinned=False) as run:
        for mechanism, lack in lacks.items():
            if lack:
                run.note(f"{mechanism} was left out: {lack}")
        run.note("the pages of a memfd are allocated at the first access, which no row includes")
        found = {name: measure(where, name, numbers(megabytes), rounds) for where, name in subjects}
        for row in next(reversed(found.values())):  # a GPU's mechanism has more rows than a memfd
            values: dict[str, Value] = {name: rows.get(row, "-") for name, rows in found.items()}
            run.row(row, values, "bytes" if row == _TAKEN else "s")


def _gpu() -> tuple[str, dict[Mechanism, str]]:
    """Return the first GPU, and for each mechanism the reason if the GPU does not support it."""
    try:
        *gpus, _ = devices_of("cuda")
        return (gpus[0], survey(gpus[0])) if gpus else ("", dict.fromkeys(PREFERENCE, "no GPU here"))
    except SharedRPCError as error:
        return "", dict.fromkeys(PREFERENCE, str(error))


def measure(device: str, mechanism: Mechanism, sizes: Sequence[int], rounds: int) -> dict[str, Value]:
    """Measure a mechanism: the costs of creating and mapping segments, and what other processes can do with the memory after
    its maker is killed.

    :param sizes: of the segments, in MiB; the maker of one of the first size is killed.
    :return: times, bytes and texts by row.
    """
    found: dict[str, Value] = {}
    with ExitStack() as stack:
        ends = [stack.enter_context(Process(End, device=device, mechanism=mechanism)) for _ in range(4)]
        maker, consumer, late, other = (end.ready() for end in ends)
        for size in sizes:
            times = maker.ask("make", nbytes=size << 20, rounds=rounds + 1)
            times |= consumer.ask("attach", sent=maker.ask("keep", nbytes=size << 20), rounds=rounds + 1)
            # The first round has one-time costs.
            found |= {f"{size} MiB: {step}": Sample(taken[1:]) for step, taken in times.items()}
        if device != "cpu":
            found[_TAKEN] = maker.ask("take", nbytes=2 << 20)
        with received(maker.ask("keep", nbytes=sizes[0] << 20)) as segment:
            consumer.ask("attach", sent=sent(segment), rounds=1)
            os.kill(maker.pid, signal.SIGKILL)
            maker.close()
            found[READS[0]] = consumer.ask("read")
            if device != "cpu":
                other.ask("use_all")
                found[READS[1]] = consumer.ask("read")
            found[OPENS] = late.ask("open", sent=sent(segment))
            found[READS[2]] = consumer.ask("read")
    return found


#: A segment for another process: its description and its descriptor.
Sent = tuple[SegmentInfo, Any]


def sent(segment: Segment) -> Sent:
    """Send a segment with its descriptor, which is borrowed."""
    return segment.info, DupFd(segment.fileno())


def received(sent: Sent) -> Segment:
    """Receive a segment."""
    return Segment.owning(sent[0], sent[1].detach())


class End:
    """A process that creates a segment, or uses a received one."""

    def __init__(self, device: str, mechanism: Any) -> None:
        self.host = device == "cpu"
        self.backend: Any = backend_for(device, mechanism)
        self.device = torch.device("cpu") if self.host else torch.device("cuda", 0)
        self.segment: Any = None
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
        """Create, map, unmap and close segments; return the seconds."""
        self._drop()
        times: dict[str, list[float]] = {"create: allocate, zero, export": [], "map in the process that made it": []}
        for _ in range(rounds):
            for taken, action in zip(times.values(), (lambda: self._create(nbytes), self._map), strict=True):
                taken.append(timed(action))
            self._drop()
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
        self._drop()
        self._create(nbytes)
        self._map()
        self.bytes().fill_(_VALUE)
        self.wait()
        return sent(self.segment)

    def attach(self, sent: Sent, rounds: int) -> dict[str, list[float]]:
        """Receive a segment, map and unmap it repeatedly, and map it; return the seconds."""
        self._drop()
        self.segment = received(sent)
        times: dict[str, list[float]] = {"open and map in another process": [], "wait for the device and unmap there": []}
        for _ in range(rounds):
            for taken, action in zip(times.values(), (self._map, self._unmap), strict=True):
                taken.append(timed(action))
        self._map()
        return times

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
        """Receive a segment whose maker has ended, and open it."""
        self.segment = received(sent)
        return self._outcome(self._map, "yes")

    def close(self) -> None:
        """Close the segment. Its mapping ends with the process."""
        if self.segment is not None:
            self.segment.close()

    def _drop(self) -> None:
        if self.address:
            self._unmap()
        self.close()

    def _create(self, nbytes: int) -> None:
        self.segment = self.backend.create(nbytes)

    def _map(self) -> None:
        self.address = self.backend.map(self.segment.fileno(), self.segment.info.nbytes, "read_write")

    def _unmap(self) -> None:
        self.backend.synchronize()
        self.backend.unmap(self.address, self.segment.info.nbytes)
        self.address = 0

    def _outcome(self, action: Callable[[], object], good: str) -> str:
        """Return ``good`` if the bytes are right after an action, or the error."""
        try:
            action()
            return good if bool((self.bytes() == _VALUE).all()) else "other bytes"
        except (CapabilityError, RuntimeError) as error:
            return f"error: {str(error).splitlines()[0][:200]}"
