"""Starting the servers of one run, and knowing where they are.

A client and its server may or may not share a core, as the scheduler likes; the raw echo takes three times as long in
one case as in the other, and the ratios would tell of the scheduler. So servers run on one half of the cores, and
those who measure on the other.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Set
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from benchmarks.peer import socket_of
from benchmarks.processes import Process, environ
from shared_rpc.settings import socket_path

__all__ = ["Servers", "broker"]

#: Seconds that a broker may take to end.
_PATIENCE = 300.0


@dataclass
class Started:
    """A server that is ready: its process, where a client finds it, and what it said."""

    process: Process
    address: str
    facts: dict[str, Any] = field(default_factory=dict)


class Servers:
    """The servers of a run, in a folder of their own. They end with the block.

    :param pinned: whether servers and those who measure have each one half of the cores.
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
        os.sched_setaffinity(0, self._clients)
        self._stack.callback(os.sched_setaffinity, 0, self.cores)
        # A socket address has room for 107 bytes: a short prefix.
        self.folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-")))
        # 'ls' asks every socket of a folder, and ours is to be alone.
        (self.folder / "ours").mkdir(mode=0o700)
        self.base_path = str(self.folder / "ours" / "s")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._stack.close()

    def echo(self) -> Started:
        """Start the raw echo."""
        path = str(self.folder / "echo.sock")
        return self._ready("echo", path, socket=path)

    def ours(self, build: list[list[Any]] | None = None) -> Started:
        """Start our server, with these managed calls made; it listens where ``shared-rpc ls`` looks for :attr:`base_path`."""
        path = socket_path(self.base_path, "cpu")
        return self._ready("ours", path, socket=path, build=build or [], **self._workload)

    def peer(self, build: list[list[Any]] | None = None) -> Started:
        """Start the server of shared-tensor; the address is a base path."""
        base_path = str(self.folder / "peer")
        return self._ready("peer", base_path, base_path=base_path, build=build or [], **self._workload)

    def rpc_peer(self, name: str) -> str:
        """Start the server of another way to call, and return its address."""
        address = str(self.folder / name)
        return self._ready("peers", address, peer=name, socket=address, device=self._workload["device"]).address

    def socket_of_peer(self) -> str:
        """Return the socket itself of shared-tensor's server."""
        return socket_of(str(self.folder / "peer"))

    def client(self, module: str, cores: Set[int] | None = None, **config: Any) -> Process:
        """Start a process that measures; it ends with the block. By default it has this process's cores."""
        return self._stack.enter_context(Process(module, cores or self._clients, **config))

    def _ready(self, module: str, address: str, **config: Any) -> Started:
        process = self._stack.enter_context(Process(module, self.server_cores, **config))
        return Started(process, address, process.read())


@contextmanager
def broker(servers: Servers, app: str, *options: str, name: str = "app") -> Iterator[str]:
    """Start ``shared-rpc serve`` with this app, on the cores of a run's servers; yield its socket."""
    (servers.folder / f"{name}.py").write_text(app)
    socket = f"{servers.base_path}-{name}.sock"
    own = os.sched_getaffinity(0)
    os.sched_setaffinity(0, servers.server_cores)
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", "shared_rpc.cli", "serve", f"{name}.py", "--socket", socket, *options],
            cwd=servers.folder,
            env=environ(),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
    finally:
        os.sched_setaffinity(0, own)
    try:
        assert process.stdout is not None, "stdout is a pipe"
        if "serving" not in process.stdout.readline():
            raise RuntimeError(f"the broker ended with exit code {process.wait()}: run 'shared-rpc serve' on the app")
        yield socket
    finally:
        process.terminate()
        process.wait(_PATIENCE)
