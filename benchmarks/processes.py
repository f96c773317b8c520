"""Processes of a run: start, cores, remote methods, and memory in use.

Servers run on one half of the cores, and measuring processes on the other. Otherwise the scheduler would decide by chance
whether a client and its server share a core, which alone changes a raw echo by a factor of three.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import AbstractContextManager, contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

_CONTEXT = multiprocessing.get_context("spawn")
#: Seconds within which a process must exit after its pipe is closed.
_PATIENCE = 20.0


@contextmanager
def on_cores(cores: Set[int]) -> Iterator[None]:
    """Run the block, and the processes that it starts, on these cores."""
    own = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, own)


class Process(AbstractContextManager["Process"]):
    """A process that creates an object and executes its methods.

    :param make: a class, or another function of a module; ``config`` are its arguments.
    :param cores: None for the cores of this process.
    """

    def __init__(self, make: Callable[..., Any], cores: Set[int] | None = None, **config: Any) -> None:
        self._name = f"{make.__module__}:{make.__qualname__}"
        self._pipe, theirs = _CONTEXT.Pipe()
        self._process = _CONTEXT.Process(target=_execute, args=(theirs, make, config))
        with theirs, on_cores(cores or os.sched_getaffinity(0)):
            self._process.start()
        self.pid = self._process.pid or 0

    def ready(self) -> Process:
        """Wait until the object is created.

        :raises RuntimeError: if the process exits instead, also in the methods below.
        """
        self.ask("")
        return self

    def tell(self, do: str, **options: Any) -> None:
        """Start a method; :meth:`read` returns its result."""
        with suppress(BrokenPipeError):  # read() reports it
            self._pipe.send((do, options))

    def read(self) -> Any:
        """Wait for the result of a method."""
        try:
            return self._pipe.recv()
        except (EOFError, ConnectionResetError):
            self._process.join()
        raise RuntimeError(f"{self._name} (pid {self.pid}) ended with exit code {self._process.exitcode}; see above")

    def ask(self, do: str, **options: Any) -> Any:
        """Execute a method and return its result."""
        self.tell(do, **options)
        return self.read()

    def close(self) -> None:
        """Close the pipe so that the process exits; kill it if it does not."""
        self._pipe.close()
        self._process.join(_PATIENCE)
        if self._process.is_alive():
            print(f"{self._name} (pid {self.pid}) did not end and was killed", file=sys.stderr)
            self._process.kill()
            self._process.join()

    def __exit__(self, *_: object) -> None:
        self.close()


def ask_all(processes: Sequence[Process], do: str, **options: Any) -> list[Any]:
    """Execute a method in all processes concurrently, and return the results."""
    for process in processes:
        process.tell(do, **options)
    return [process.read() for process in processes]


def _execute(pipe: Connection, make: Callable[..., Any], config: dict[str, Any]) -> None:
    """Create the object of a :class:`Process`, execute methods until the pipe is closed, and close the object."""
    made = make(**config)
    with suppress(EOFError):
        while True:
            do, options = pipe.recv()
            pipe.send(getattr(made, do)(**options) if do else None)
    if hasattr(made, "close"):
        made.close()


# Memory in use.


def used(device: str) -> int:
    """Return the bytes in use: of the whole GPU, from the driver, or this process's resident memory with shared memory."""
    if device == "cpu":
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    import torch

    free, total = torch.cuda.mem_get_info()
    return total - free


def private_bytes() -> int:
    """Return the bytes of this process's private host memory."""
    rollup = Path("/proc/self/smaps_rollup").read_text()
    return sum(int(kib) * 1024 for kib in re.findall(r"^Private_\w+:\s+(\d+) kB", rollup, re.MULTILINE))


def process_counts(pid: int) -> dict[str, int]:
    """Count ``fds``, ``mappings``, and bytes: ``resident``, ``shared``, and ``memory`` without files."""
    status = dict(re.findall(r"^(\w+):\s+(\d+)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE))
    return {
        "fds": len(os.listdir(f"/proc/{pid}/fd")),
        "mappings": len(Path(f"/proc/{pid}/maps").read_text().splitlines()),
        "resident": int(status["VmRSS"]) * 1024,
        "memory": (int(status["RssAnon"]) + int(status["RssShmem"])) * 1024,
        "shared": int(status["RssShmem"]) * 1024,
    }
