"""Processes of a benchmark: started with a configuration, they answer in lines of JSON and end with their stdin."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Set
from pathlib import Path
from types import TracebackType
from typing import Any

__all__ = ["Process", "configuration", "environ", "next_command", "say", "until_told"]

_ROOT = str(Path(__file__).parent.parent)
#: Seconds a process has to end once its stdin is closed.
_PATIENCE = 20.0


def environ() -> dict[str, str]:
    """Return this process's environment for a child: the package importable, and no role or path from outside."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("SHARED_TENSOR_")}
    # An installed package has its bytecode; without it, imports would be compilations.
    clean.pop("PYTHONDONTWRITEBYTECODE", None)
    clean["PYTHONPATH"] = os.pathsep.join(path for path in (_ROOT, clean.get("PYTHONPATH", "")) if path)
    # shared-tensor logs every start and stop by default.
    clean["SHARED_TENSOR_LOG_LEVEL"] = "ERROR"
    return clean


class Process:
    """A running ``python -m benchmarks.<module> <configuration>``; its standard error is ours.

    :param cores: where it may run.
    """

    def __init__(self, module: str, cores: Set[int], **config: Any) -> None:
        self.module = module
        own = os.sched_getaffinity(0)
        os.sched_setaffinity(0, cores)  # which the child inherits
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", f"benchmarks.{module}", json.dumps(config)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=environ(),
            )
        finally:
            os.sched_setaffinity(0, own)

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

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

    def ask(self, **command: Any) -> dict[str, Any]:
        """Send a command and return the answer."""
        self.tell(**command)
        return self.read()

    def tell(self, **command: Any) -> None:
        """Send a command."""
        assert self._process.stdin is not None, "stdin is a pipe"
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()

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


# What such a process uses itself.


def configuration() -> dict[str, Any]:
    """Return the configuration that :class:`Process` was given."""
    config: dict[str, Any] = json.loads(sys.argv[1])
    return config


def say(**facts: Any) -> None:
    """Answer with one line."""
    print(json.dumps(facts), flush=True)


def next_command() -> dict[str, Any] | None:
    """Wait for the next command; None after the last one."""
    line = sys.stdin.readline()
    if not line:
        return None
    command: dict[str, Any] = json.loads(line)
    return command


def until_told() -> None:
    """Return when stdin is closed."""
    while sys.stdin.readline():
        continue
