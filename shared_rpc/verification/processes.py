"""What the kernel tells of processes: which ones belong to a verification, and what memory and descriptors they have."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

__all__ = ["Counts", "counts_of", "marked", "memory_of", "segment_bytes"]

#: An anonymous file of the library in a line of /proc/PID/maps.
_MAPPED = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) \S+ ([0-9a-f]+) (\S+ \d+)\s+/memfd:shared-rpc-")


class Counts(NamedTuple):
    """What a process has: open descriptors, mappings, threads, and bytes of memory that is no file's."""

    fds: int
    mappings: int
    threads: int
    memory: int


def marked(mark: str) -> list[int]:
    """Processes that were started with ``mark`` somewhere in their environment, and those forked from them; no zombies."""
    found = []
    for entry in os.listdir("/proc"):
        # It belongs to somebody else, or has ended meanwhile. A zombie has no environment.
        with suppress(OSError):
            if entry.isdecimal() and mark.encode() in Path("/proc", entry, "environ").read_bytes():
                found.append(int(entry))
    return found


def counts_of(pid: int) -> Counts:
    """What a process has now."""
    sizes = dict(re.findall(r"^(RssAnon|Threads):\s+(\d+)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE))
    mappings = Path(f"/proc/{pid}/maps").read_bytes().count(b"\n")
    return Counts(len(os.listdir(f"/proc/{pid}/fd")), mappings, int(sizes["Threads"]), int(sizes["RssAnon"]) * 1024)


def memory_of(pids: Iterable[int], builder: int = 0) -> int:
    """Bytes of host memory that processes use together: what several of them share counts once.

    Files on disk are left out (libraries): what a process uses of those depends on who else on the machine uses them.

    :param builder: the process whose own memory is left out, because its allocator keeps some of what a build needed.
    """
    total = 0
    for pid in pids:
        with suppress(OSError):  # it has ended
            kinds = "Shmem" if pid == builder else "Anon|Shmem"
            rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
            total += sum(int(kib) * 1024 for kib in re.findall(rf"^Pss_(?:{kinds}):\s+(\d+) kB", rollup, re.MULTILINE))
    return total


def segment_bytes(pids: Iterable[int]) -> int:
    """Bytes of the library's anonymous files that processes have open or mapped, each file counted once."""
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
