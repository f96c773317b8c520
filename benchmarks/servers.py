"""Processes of a run. They get a configuration, answer in lines of JSON, and end with their stdin.

A client and its server may or may not share a core, as the scheduler likes; the raw echo takes three times as long in
one case as in the other, and the ratios would tell of the scheduler. So servers run on one half of the cores, and
measuring processes on the other.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Set
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

from shared_rpc.settings import socket_path

_ROOT = str(Path(__file__).parent.parent)
#: Seconds in which a process ends once its stdin is closed, and a broker after SIGTERM.
_PATIENCE, _BROKER_PATIENCE = 20.0, 300.0


def environ() -> dict[str, str]:
    """Return this process's environment for a child: the package importable, and no role or path from outside."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("SHARED_TENSOR_")}
    # An installed package has its bytecode; without it, imports would be compilations.
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


class Process:
    """A running ``python -m benchmarks.<module> <configuration>``; its standard error is ours.

    :param cores: where it may run.
    """

    def __init__(self, module: str, cores: Set[int], **config: Any) -> None:
        self.module = module
        words = [sys.executable, "-m", f"benchmarks.{module}", json.dumps(config)]
        with on_cores(cores):
            self._process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environ())
        self.pid = self._process.pid

    def read(self) -> dict[str, Any]:
        """Wait for the next message of the process.

        :raises RuntimeError: if it ends instead.
        """
        assert self._process.stdout is not None, "stdout is a pipe"
        for line in self._process.stdout:
            if line.startswith("{"):
                answer: dict[str, Any] = json.loads(line)
                return answer
            print(line, end="", file=sys.stderr)
        raise RuntimeError(f"benchmarks.{self.module} (pid {self.pid}) ended with exit code {self._process.wait()}; see above")

    def tell(self, **command: Any) -> None:
        """Send a command."""
        assert self._process.stdin is not None, "stdin is a pipe"
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()

    def ask(self, **command: Any) -> dict[str, Any]:
        """Send a command and return the answer."""
        self.tell(**command)
        return self.read()

    def close(self) -> None:
        """Close its stdin and wait for its end; kill it where it does not end."""
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None, "both are pipes"
            try:
                pipe.close()
            except BrokenPipeError:
                continue  # it is gone already
        try:
            self._process.wait(_PATIENCE)
        except subprocess.TimeoutExpired:
            print(f"benchmarks.{self.module} (pid {self.pid}) did not end and was killed", file=sys.stderr)
            self._process.kill()
            self._process.wait()

    def __enter__(self) -> Process:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()


# In such a process.


def configuration() -> dict[str, Any]:
    """Return the configuration that :class:`Process` was given."""
    config: dict[str, Any] = json.loads(sys.argv[1])
    return config


def say(**facts: Any) -> None:
    """Answer with one line."""
    print(json.dumps(facts), flush=True)


def commands() -> Iterator[dict[str, Any]]:
    """Yield the commands until stdin is closed."""
    for line in sys.stdin:
        yield json.loads(line)


def until_told() -> None:
    """Return when stdin is closed."""
    for _ in commands():
        continue


# The servers of a run.


class Started:
    """A server that is ready: its process, its address, and what it said."""

    def __init__(self, process: Process, address: str) -> None:
        self.process = process
        self.address = address
        self.facts = process.read()


class Servers:
    """The servers of a run, in a folder of their own. They end with the block.

    :param pinned: whether servers and measuring processes have one half of the cores each.
    """

    def __init__(self, device: str, checkpoint: Path | None = None, *, pinned: bool = True) -> None:
        self._workload = {"device": device, "checkpoint": str(checkpoint) if checkpoint is not None else None}
        self._pinned = pinned
        self._stack = ExitStack()

    def __enter__(self) -> Servers:
        self.cores = frozenset(os.sched_getaffinity(0))
        ordered = sorted(self.cores)
        middle = len(ordered) // 2
        # With a single core there is nothing to divide.
        self._clients, self.server_cores = frozenset(ordered[:middle] or ordered), frozenset(ordered[middle:])
        if not self._pinned:
            self._clients = self.server_cores = self.cores
        self._stack.enter_context(on_cores(self._clients))
        # A socket address has room for 107 bytes: a short prefix.
        self.folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-")))
        # 'ls' asks every socket of a folder, and ours is to be alone.
        (self.folder / "ours").mkdir(mode=0o700)
        self.base_path = str(self.folder / "ours" / "s")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._stack.close()

    def start(self, side: str, build: list[list[Any]] | None = None) -> Started:
        """Start the server of a side of :mod:`benchmarks.sides`, with these managed calls made.

        Ours listens where ``shared-rpc ls`` looks for :attr:`base_path`.
        """
        address = socket_path(self.base_path, "cpu") if side == "Ours" else str(self.folder / side)
        config = {"side": side, "address": address, "build": build or [], **self._workload}
        return Started(self._stack.enter_context(Process("sides", self.server_cores, **config)), address)

    def start_peer(self, name: str) -> str:
        """Start the server of another way to call, see :mod:`benchmarks.peers`, and return its address."""
        address = str(self.folder / name)
        config = {"peer": name, "socket": address, "device": self._workload["device"]}
        return Started(self._stack.enter_context(Process("peers", self.server_cores, **config)), address).address

    def client(self, module: str, cores: Set[int] | None = None, **config: Any) -> Process:
        """Start a process that measures; it ends with the block. By default it has this process's cores."""
        return self._stack.enter_context(Process(module, cores or self._clients, **config))

    def run(self, *arguments: str) -> str:
        """Return the output of a Python program on the servers' cores, in the folder."""
        words = [sys.executable, *arguments]
        with on_cores(self.server_cores):
            return subprocess.run(words, cwd=self.folder, env=environ(), check=True, stdout=subprocess.PIPE, text=True).stdout

    @contextmanager
    def broker(self, app: str, *options: str, name: str = "app") -> Iterator[tuple[str, int]]:
        """Start ``shared-rpc serve`` with this app; yield its socket and its pid."""
        (self.folder / f"{name}.py").write_text(app)
        socket = f"{self.base_path}-{name}.sock"
        words = [sys.executable, "-m", "shared_rpc.cli", "serve", f"{name}.py", "--socket", socket, *options]
        with on_cores(self.server_cores):
            process = subprocess.Popen(
                words, cwd=self.folder, env=environ(), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
            )
        try:
            assert process.stdout is not None, "stdout is a pipe"
            if "serving" not in process.stdout.readline():
                raise RuntimeError(f"the broker ended with exit code {process.wait()}: run 'shared-rpc serve' on the app")
            yield socket, process.pid
        finally:
            process.terminate()
            process.wait(_BROKER_PATIENCE)
