"""Processes of a run: start, cores, remote methods, and memory in use.

Servers run on one half of the cores, and measuring processes on the other. Otherwise the scheduler would decide by chance
whether a client and its server share a core, which alone changes a raw echo by a factor of three.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, contextmanager, suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

_ROOT = str(Path(__file__).parent.parent)
#: Seconds within which a process must exit after its pipe is closed.
_PATIENCE = 20.0


def environ() -> dict[str, str]:
    """Return this process's environment for a child, with this package importable, and without roles and paths."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("SHARED_TENSOR_")}
    # As for an installed package: without bytecode every import would compile.
    clean.pop("PYTHONDONTWRITEBYTECODE", None)
    clean["PYTHONPATH"] = os.pathsep.join(path for path in (_ROOT, clean.get("PYTHONPATH", "")) if path)
    # shared-tensor logs every start and stop by default.
    clean["SHARED_TENSOR_LOG_LEVEL"] = "ERROR"
    return clean


@contextmanager
def on_cores(cores: Set[int]) -> Iterator[None]:
    """Run the block, and the processes that it starts, on these cores."""
    own = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, own)


def python(
    *words: str, cores: Set[int] | None = None, variables: Mapping[str, str] | None = None, **options: Any
) -> subprocess.Popen[str]:
    """Start Python with these arguments.

    :param cores: None for the cores of this process.
    :param variables: environment variables in addition to :func:`environ`.
    """
    with on_cores(cores or os.sched_getaffinity(0)):
        return subprocess.Popen([sys.executable, *words], env={**environ(), **(variables or {})}, text=True, **options)


class Process(AbstractContextManager["Process"]):
    """A process that creates an object and executes its methods. Its output goes to this process's standard error.

    :param make: a class, or another function of a module; ``config`` are its arguments.
    :param cores: None for the cores of this process.
    :param fds: inherited descriptors.
    """

    def __init__(self, make: Callable[..., Any], cores: Set[int] | None = None, fds: Sequence[int] = (), **config: Any) -> None:
        self._name = f"{make.__module__}:{make.__qualname__}"
        self._pipe, theirs = Pipe()
        with theirs:
            words = ("-m", "benchmarks.processes", str(theirs.fileno()))
            self._process = python(*words, cores=cores, pass_fds=[theirs.fileno(), *fds], stdin=subprocess.DEVNULL, stdout=2)
        self.pid = self._process.pid
        self._pipe.send((make, config))

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
            code = self._process.wait()
        raise RuntimeError(f"{self._name} (pid {self.pid}) ended with exit code {code}; see above")

    def ask(self, do: str, **options: Any) -> Any:
        """Execute a method and return its result."""
        self.tell(do, **options)
        return self.read()

    def close(self) -> None:
        """Close the pipe so that the process exits; kill it if it does not."""
        self._pipe.close()
        try:
            self._process.wait(_PATIENCE)
        except subprocess.TimeoutExpired:
            print(f"{self._name} (pid {self.pid}) did not end and was killed", file=sys.stderr)
            self._process.kill()
            self._process.wait()

    def __exit__(self, *_: object) -> None:
        self.close()


def ask_all(processes: Sequence[Process], do: str, **options: Any) -> list[Any]:
    """Execute a method in all processes concurrently, and return the results."""
    for process in processes:
        process.tell(do, **options)
    return [process.read() for process in processes]


def main(fd: str) -> None:
    """Create the object of a :class:`Process`, execute methods until the pipe is closed, and close the object."""
    pipe = Connection(int(fd))
    make, config = pipe.recv()
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
    """Count ``fds``, ``mappings``, ``threads``, and bytes: ``resident``, ``shared``, and ``memory`` without files."""
    status = dict(re.findall(r"^(\w+):\s+(\d+)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE))
    return {
        "fds": len(os.listdir(f"/proc/{pid}/fd")),
        "mappings": len(Path(f"/proc/{pid}/maps").read_text().splitlines()),
        "threads": int(status["Threads"]),
        "resident": int(status["VmRSS"]) * 1024,
        "memory": (int(status["RssAnon"]) + int(status["RssShmem"])) * 1024,
        "shared": int(status["RssShmem"]) * 1024,
    }


@contextmanager
def readings(device: str) -> Iterator[list[int]]:
    """Yield a list of :func:`used`, sampled by a thread every half millisecond while the block runs."""
    found, done = [used(device)], threading.Event()

    def read() -> None:
        while not done.wait(5e-4):
            found.append(used(device))

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    try:
        yield found
    finally:
        done.set()
        thread.join()
        found.append(used(device))


if __name__ == "__main__":
    main(sys.argv[1])
