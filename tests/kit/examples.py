"""The programs of a folder of ``examples/``, started there as their docstrings say."""

from __future__ import annotations

import importlib
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import Any

from shared_rpc import Client
from tests.kit.brokers import is_running
from tests.kit.processes import ROOT, Child, eventually


class Example:
    """A folder of ``examples/``, a base path of its own, and the processes that were started. They are ended with the block.

    :param folder: for sockets and files; it is made private.
    :param gpus: the value of ``CUDA_VISIBLE_DEVICES``; None to leave it as it is.
    """

    def __init__(self, name: str, folder: Path, device: str = "cpu", gpus: str | None = None) -> None:
        self.source = ROOT / "examples" / name
        self.folder = folder
        self.device = "cpu" if device == "cpu" else "cuda:0"
        self.children: list[Child] = []
        folder.chmod(0o700)
        self.base_path = str(folder / "s")
        self.environ = {"SHARED_TENSOR_BASE_PATH": self.base_path, "SHARED_TENSOR_ENABLED": "", "SHARED_TENSOR_ROLE": ""}
        if device == "cpu" or gpus is not None:
            self.environ["CUDA_VISIBLE_DEVICES"] = gpus or ""

    def __enter__(self) -> Example:
        return self

    def __exit__(self, *_: object) -> None:
        running = [pid for child in self.children for pid in descendants(child.pid)]
        for child in self.children:
            child.process.terminate()
        with suppress(AssertionError):
            eventually(lambda: not any(map(is_running, running)), 20.0, every=0.02)
        for pid in filter(is_running, running):
            os.kill(pid, signal.SIGKILL)
        for child in self.children:
            child.process.communicate()

    def start(self, *words: str, fresh: bool = False, **environ: str) -> Child:
        """Start Python with these arguments, in the example's folder."""
        child = Child(*words, cwd=self.source, environ={**self.environ, **environ}, fresh=fresh)
        self.children.append(child)
        return child

    def serve(self, app: str, *options: str, **environ: str) -> Child:
        """Start ``shared-rpc serve``, and wait until it serves."""
        server = self.start("-m", "shared_rpc.cli", "serve", app, *options, **environ)
        server.expect("serving ")
        return server

    def client(self, **options: Any) -> Client:
        """Make a client of the server."""
        return Client(self.base_path, **{"device": self.device, "timeout": 60.0, "connect_timeout": 5.0, **options})


def descendants(pid: int) -> list[int]:
    """Return the process ids of a process and all its descendants."""
    found = [pid]
    for one in found:
        with suppress(OSError):
            for thread in Path(f"/proc/{one}/task").iterdir():
                found += map(int, (thread / "children").read_text(encoding="ascii").split())
    return found


@contextmanager
def importing(name: str) -> Iterator[Callable[[str], ModuleType]]:
    """Import modules of an example by the names that they use for each other, and remove them at the end."""
    folder = str(ROOT / "examples" / name)
    sys.path.insert(0, folder)
    try:
        yield importlib.import_module
    finally:
        sys.path.remove(folder)
        for module in list(sys.modules.values()):
            if (getattr(module, "__file__", None) or "").startswith(folder):
                del sys.modules[module.__name__]


def private_bytes(pid: int) -> int:
    """Return the host memory of a process that no other process maps."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private_")) * 1024
