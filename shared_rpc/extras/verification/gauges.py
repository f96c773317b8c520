"""Measurements of a verification's processes and of their memory, by the kernel and by a GPU's driver."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from shared_rpc.extras.verification.clients import ClientFailed, VerifyClient
from shared_rpc.extras.verification.stage import Stage

__all__ = ["Counts", "DeviceGauge", "HostGauge", "counts_of", "memory_of", "segment_bytes"]

#: An anonymous file of the library in a line of /proc/PID/maps.
_MAPPED = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) \S+ ([0-9a-f]+) (\S+ \d+)\s+/memfd:shared-rpc-")


class Counts(NamedTuple):
    """Resources of a process: open descriptors, mappings, threads, and bytes of anonymous memory."""

    fds: int
    mappings: int
    threads: int
    memory: int


def counts_of(pid: int) -> Counts:
    """Count the resources of a process now."""
    sizes = dict(re.findall(r"^(RssAnon|Threads):\s+(\d+)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE))
    mappings = Path(f"/proc/{pid}/maps").read_bytes().count(b"\n")
    return Counts(len(os.listdir(f"/proc/{pid}/fd")), mappings, int(sizes["Threads"]), int(sizes["RssAnon"]) * 1024)


def memory_of(pids: Iterable[int], builder: int = 0) -> int:
    """Add up the host memory that processes use together, in bytes; memory that several of them share counts once.

    Files on disk are left out (libraries): their share depends on the other processes of the machine that use them.

    :param builder: the process whose own memory is left out, because its allocator keeps memory of a build.
    """
    total = 0
    for pid in pids:
        with suppress(OSError):  # it has ended
            kinds = "Shmem" if pid == builder else "Anon|Shmem"
            rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
            total += sum(int(kib) * 1024 for kib in re.findall(rf"^Pss_(?:{kinds}):\s+(\d+) kB", rollup, re.MULTILINE))
    return total


def segment_bytes(pids: Iterable[int]) -> int:
    """Add up the library's anonymous files that processes have open or mapped, in bytes; each file counts once."""
    files: dict[str, int] = {}
    for pid in pids:
        with suppress(OSError):
            for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
                if match := _MAPPED.match(line):
                    begin, end, offset, file = match.groups()
                    files[file] = max(files.get(file, 0), int(offset, 16) + int(end, 16) - int(begin, 16))
        with suppress(OSError):
            for link in Path(f"/proc/{pid}/fd").iterdir():
                with suppress(OSError):
                    if os.readlink(link).startswith("/memfd:shared-rpc-"):
                        status = link.stat()
                        file = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x} {status.st_ino}"
                        files[file] = max(files.get(file, 0), status.st_size)
    return sum(files.values())


class HostGauge:
    """Gauge of host memory, by the kernel's accounts of all processes of the verification."""

    #: Method of measurement, for people.
    method = "Pss of all processes but for the builder's own heap"
    #: Seconds for memory to come back after a process was killed.
    patience = 1.0
    #: Bytes that each process may use beside the model: pages that it shares with the fork server until it writes to them.
    noise = 2 << 20
    #: Bytes by which a reading of the segments may be off.
    blur = 0

    def __init__(self, stage: Stage) -> None:
        self._stage = stage

    def used(self) -> int:
        """Measure the bytes in use by all processes together."""
        return memory_of(self._stage.pids(), builder=self._stage.worker_pid())

    def segments(self) -> int:
        """Measure the bytes of shared segments that are open or mapped in any process."""
        return segment_bytes(self._stage.pids())


class DeviceGauge:
    """Gauge of a GPU's memory, by its driver, asked in a process whose context exists before and after.

    All contexts exist before the first reading. Memory of other programs is counted too. The attributes are those of
    :class:`HostGauge`.
    """

    method = "cudaMemGetInfo, contexts there before"
    patience = 3.0  # the driver ends the context of a process that was killed, and then its memory is free
    noise = blur = 64 << 20  # kernels are loaded at their first use, and a forward pass leaves memory with torch's allocator

    def __init__(self, connect: Callable[[], VerifyClient], device: str) -> None:
        self._connect = connect
        self._device = device
        self._probe: VerifyClient | None = None

    def used(self) -> int:
        """Measure the bytes in use."""
        if self._probe is None:
            self._probe = self._connect()
        try:
            used, _ = self._probe.ask("used", device=self._device)
        except ClientFailed:
            self._probe.close()
            self._probe = None
            raise
        return int(used)

    segments = used
