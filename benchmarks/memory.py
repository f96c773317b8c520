"""Memory in use, on a GPU or by a process."""

from __future__ import annotations

import os
import re
import threading
from pathlib import Path
from types import TracebackType

_PAGE = os.sysconf("SC_PAGE_SIZE")
#: Seconds between two readings.
_PERIOD = 5e-4


def used(device: str) -> int:
    """Return the bytes in use: of the whole GPU, by its driver, or this process's resident memory, shared memory included."""
    if device == "cpu":
        return int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE
    import torch

    free, total = torch.cuda.mem_get_info()
    return total - free


def private_bytes(pid: int | str = "self") -> int:
    """Return the bytes of a process's private host memory."""
    rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return sum(int(kib) * 1024 for kib in re.findall(r"^Private_\w+:\s+(\d+) kB", rollup, re.MULTILINE))


def process_counts(pid: int) -> dict[str, int]:
    """Count ``fds``, ``mappings``, ``threads``, and resident bytes: ``shared`` ones, and ``memory`` without files."""
    status = Path(f"/proc/{pid}/status").read_text()
    sizes = {key: int(value) for key, value in re.findall(r"^(RssAnon|RssShmem|Threads):\s+(\d+)", status, re.MULTILINE)}
    return {
        "fds": len(os.listdir(f"/proc/{pid}/fd")),
        "mappings": len(Path(f"/proc/{pid}/maps").read_text().splitlines()),
        "threads": sizes["Threads"],
        "memory": (sizes["RssAnon"] + sizes["RssShmem"]) * 1024,
        "shared": sizes["RssShmem"] * 1024,
    }


class Watermark:
    """The most memory in use while the block runs, read by a thread; :meth:`reset` begins again."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self.reset()

    def reset(self) -> None:
        """Count from what is in use now."""
        self.baseline = self._peak = used(self._device)

    @property
    def rise(self) -> int:
        """Bytes by which the peak is above the baseline."""
        return self._peak - self.baseline

    def _watch(self) -> None:
        while not self._done.wait(_PERIOD):
            self._peak = max(self._peak, used(self._device))

    def __enter__(self) -> Watermark:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._done.set()
        self._thread.join()
        self._peak = max(self._peak, used(self._device))
