"""Processes of a run. Each has an object, executes its methods for lines of JSON, and ends with its stdin.

A client and its server may or may not share a core, as the scheduler likes; the raw echo takes three times as long in
one case as in the other, and the ratios would tell of the scheduler. So servers run on one half of the cores, and
measuring processes on the other.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Set
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from shared_rpc.settings import socket_path

_ROOT = str(Path(__file__).parent.parent)
#: Seconds in which a process ends once its stdin is closed, and a broker after SIGTERM.
_PATIENCE, _BROKER_PATIENCE = 20.0, 300.0
#: Beginning of a line with an answer; other lines are messages of libraries.
_ANSWER = '{"answer"'


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
    """A process with an object of ``benchmarks.<module>``, which executes its methods; its standard error is ours.

    :param subject: ``module:class`` below ``benchmarks``; ``config`` is what the object is made of.
    :param cores: where it may run.
    """

    def __init__(self, subject: str, cores: Set[int], **config: Any) -> None:
        self.subject = subject
        words = [sys.executable, "-m", "benchmarks.servers", subject, json.dumps(config)]
        with on_cores(cores):
            self._process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environ())
        self.pid = self._process.pid
        self._ready = False

    def ready(self) -> Process:
        """Wait until the object is made.

        :raises RuntimeError: if the process ends instead.
        """
        if not self._ready:
            self._ready = True
            self._answer()
        return self

    def tell(self, do: str, **options: Any) -> None:
        """Begin to execute a method; :meth:`read` returns its result."""
        assert self._process.stdin is not None, "stdin is a pipe"
        self._process.stdin.write(json.dumps({"do": do, "options": options}) + "\n")
        self._process.stdin.flush()

    def read(self) -> Any:
        """Wait for the result of a method.

        :raises RuntimeError: if the process ends instead.
        """
        self.ready()
        return self._answer()

    def ask(self, do: str, **options: Any) -> Any:
        """Execute a method and return its result."""
        self.tell(do, **options)
        return self.read()

    def _answer(self) -> Any:
        assert self._process.stdout is not None, "stdout is a pipe"
        for line in self._process.stdout:
            if line.startswith(_ANSWER):
                return json.loads(line)["answer"]
            print(line, end="", file=sys.stderr)
        raise RuntimeError(f"benchmarks.{self.subject} (pid {self.pid}) ended with exit code {self._process.wait()}; see above")

    def close(self) -> None:
        """Close its stdin and wait for its end; kill it where it does not end."""
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None, "both are pipes"
            with suppress(BrokenPipeError):  # it is gone already
                pipe.close()
        try:
            self._process.wait(_PATIENCE)
        except subprocess.TimeoutExpired:
            print(f"benchmarks.{self.subject} (pid {self.pid}) did not end and was killed", file=sys.stderr)
            self._process.kill()
            self._process.wait()

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def main(subject: str, config: str) -> None:
    """Make the object of a :class:`Process`, execute methods until stdin is closed, and close the object."""
    module, _, name = subject.partition(":")
    made = getattr(importlib.import_module(f"benchmarks.{module}"), name)(**json.loads(config))
    print(json.dumps({"answer": None}), flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        print(json.dumps({"answer": getattr(made, command["do"])(**command["options"])}), flush=True)
    if hasattr(made, "close"):
        made.close()


# The servers of a run.


class Started(NamedTuple):
    """A server that is ready."""

    process: Process
    address: str


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

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def start(self, side: str, **config: Any) -> Started:
        """Start a server of :mod:`benchmarks.sides`. Ours listens where ``shared-rpc ls`` looks for :attr:`base_path`."""
        name = config.get("peer", side)
        address = socket_path(self.base_path, "cpu") if side == "OurServer" else str(self.folder / name)
        process = self.client(f"sides:{side}", self.server_cores, address=address, **self._workload, **config)
        return Started(process.ready(), address)

    def client(self, subject: str, cores: Set[int] | None = None, **config: Any) -> Process:
        """Start a process that measures; it ends with the block. By default it has this process's cores."""
        return self._stack.enter_context(Process(subject, cores or self._clients, **config))

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
        with broker(self.folder, f"{name}.py", socket, environ(), self.server_cores, *options) as pid:
            yield socket, pid


@contextmanager
def broker(folder: Path, app: str, socket: str, variables: dict[str, str], cores: Set[int], *options: str) -> Iterator[int]:
    """Run ``shared-rpc serve`` on these cores, and yield its pid when it serves."""
    words = [sys.executable, "-m", "shared_rpc.cli", "serve", app, "--socket", socket, *options]
    streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with on_cores(cores):
        process = subprocess.Popen(words, cwd=folder, env=variables, text=True, **streams)
    with process:
        try:
            assert process.stdout is not None, "stdout is a pipe"
            if "serving" not in process.stdout.readline():
                raise RuntimeError(f"the broker ended with exit code {process.wait()}: run 'shared-rpc serve' on the app")
            yield process.pid
        finally:
            process.terminate()
            process.wait(_BROKER_PATIENCE)


if __name__ == "__main__":
    main(*sys.argv[1:])
