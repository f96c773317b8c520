"""Processes of a verification, in their own directory, their memory, and their end.

Every process of a verification has the directory's name in its command, so that :meth:`Stage.close` finds all of them,
regardless of their parents.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import secrets
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shared_rpc import Client
from shared_rpc.extras.verification.app import LAYER
from shared_rpc.memory.devices import torch_device
from shared_rpc.protocol.infos import DeviceInfo
from shared_rpc.settings import client_environment, program

#: An anonymous file of the library in a line of /proc/PID/maps.
_MAPPED = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) \S+ ([0-9a-f]+) \S+ (\d+)\s+/memfd:shared-rpc-", re.MULTILINE)
_APP = "shared_rpc.extras.verification.app"
#: Seed of the model used by most checks, so that it is built once.
SEED = 1
#: Bytes of the smallest model: a copy exceeds the noise of the measurements.
LEAST = 16 << 20
#: Maximum number of models in memory at the same time, including copies.
_MODELS = 5
#: Seconds between two polls; and after which a server ends by itself if its verification was killed with SIGKILL.
_PAUSE, _ORPHANED = 0.002, 60


@dataclass(frozen=True)
class Settings:
    """Settings of a verification. ``nbytes`` is the size of the model, by default chosen for the device.

    :param names: the checks; empty for all of them.
    :param subject: ``module:class`` that replaces the clients' use of the library.
    """

    device: str = "auto"
    workers: int = 4
    nbytes: int | None = None
    names: Sequence[str] = ()
    subject: str = f"{_APP}:Subject"


class CannotRun(Exception):
    """There is nothing to verify: the server does not start, there is no such device, or too little memory."""


class ClientFailed(CannotRun):
    """Failure of a client process: its command raised an error, or the process has ended."""


def size(nbytes: float) -> str:
    """Format bytes: ``"64.0 MiB"``."""
    return f"{nbytes / (1 << 20):.1f} MiB"


def _private_bytes(pids: Iterable[int]) -> int:
    """Sum the memory that processes allocated, in bytes: not the files and segments that they have mapped."""
    found = 0
    for pid in pids:
        with suppress(OSError):  # it has ended
            rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
            found += sum(int(kib) * 1024 for kib in re.findall(r"^Anonymous:\s+(\d+) kB", rollup, re.MULTILINE))
    return found


def _segment_bytes(pids: Iterable[int]) -> int:
    """Sum the library's anonymous files that processes have open or mapped, in bytes; each file counts once."""
    files: dict[int, int] = {}
    for pid in pids:
        with suppress(OSError):  # it has ended
            for begin, end, offset, file in _MAPPED.findall(Path(f"/proc/{pid}/maps").read_text()):
                files[int(file)] = max(files.get(int(file), 0), int(offset, 16) + int(end, 16) - int(begin, 16))
            for link in Path(f"/proc/{pid}/fd").iterdir():
                with suppress(OSError):
                    if os.readlink(link).startswith("/memfd:shared-rpc-"):
                        files[link.stat().st_ino] = link.stat().st_size
    return sum(files.values())


def marked(mark: str) -> list[int]:
    """List the programs of verifications with ``mark`` in their command, and forks of them, but no zombies: these have none."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # it has ended
            if _APP in (command := path.read_text()) and mark in command:
                found.append(int(path.parent.name))
    return found


class Process(subprocess.Popen[str]):
    """The server, or a client with pipes for commands of :class:`~shared_rpc.extras.verification.app.Subject` and answers."""

    def ask(self, do: str, **options: Any) -> Any:
        """Execute a command, and return its answer.

        :raises ClientFailed: if the command fails, or the process ends.
        """
        return all_of([self], do, **options)[0]

    def end(self, *, kill: bool = True) -> None:
        """End the process by SIGKILL, or like a script."""
        with suppress(OSError), self:  # an error if it has not read all commands
            if kill:
                self.kill()


def all_of(clients: list[Process], do: str, **options: Any) -> list[Any]:
    """Execute one command in all clients at the same time, and return the answers."""
    for client in clients:
        with suppress(OSError):  # an error if the process has ended
            print(json.dumps([do, options]), file=client.stdin, flush=True)
    answers = []
    for client in clients:
        assert client.stdout is not None
        answer, error = json.loads(client.stdout.readline() or '[null, "has ended"]')
        if error:
            raise ClientFailed(f"client process {client.pid} {error}")
        answers.append(answer)
    return answers


class Stage:
    """A server (a broker and its worker) and client processes, from :meth:`start` to :meth:`close`."""

    #: The description for the report, and the size of the model.
    device: dict[str, Any]
    nbytes = LAYER
    #: Bytes that each process may use besides the model: memory that allocators keep of a forward pass; on a GPU also kernels,
    #: which are loaded on first use.
    noise = 2 << 20
    #: Seconds for all that a killed process held to be released. A GPU's driver ends the context first.
    patience = 1.0

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.folder = Path(tempfile.gettempdir(), f"shared-rpc-verify-{secrets.token_hex(4)}")
        self._socket, self._log = str(self.folder / "s.sock"), self.folder / "log"
        self.client = Client(socket_path=self._socket, timeout=30.0, connect_timeout=0.0)
        #: Seeds of models that are not built yet.
        self.seeds = itertools.count(SEED + 1)
        #: The server, after those that were killed.
        self.servers: list[Process] = []
        self._clients: list[Process] = []

    def start(self) -> None:
        """Start the server and the clients that all checks use, and choose the size of the model.

        :raises CannotRun: if there is nothing to verify.
        """
        self.folder.mkdir(0o700)
        self.ensure_server()
        # A build gives the worker a context, without which a GPU's free memory is unknown.
        all_of(self.crew(), "attach", nbytes=self.nbytes, seed=0)
        self.drop(0)
        import torch

        info, memory = self.client.get_server_info(), self._memory()
        self.on_gpu = info["device"] != "cpu"
        if self.on_gpu:
            self.noise, self.patience = 64 << 20, 3.0
        self.nbytes = max(self.settings.nbytes or (1 << 30 if self.on_gpu else 64 << 20), LEAST) // LAYER * LAYER
        self.device = {
            "device": str(torch_device(info["device"])),
            "name": memory["name"],
            "mechanism": (info["mechanism"] or {"name": "memfd"})["name"],
            "torch": torch.__version__,
        }
        if self.nbytes * _MODELS > (free := memory["free"] or 0):
            raise CannotRun(
                f"a model of {size(self.nbytes)} needs up to {_MODELS} times as much, and {size(free)} are free on "
                f"{memory['name']}: choose a smaller --size"
            )

    def close(self) -> None:
        """Kill all processes, and remove the directory."""
        self.client.close()
        self.dismiss()
        for server in self.servers:
            server.end()
        while left := self.pids():
            for pid in left:
                with suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(_PAUSE)
        shutil.rmtree(self.folder, ignore_errors=True)

    def log(self) -> list[str]:
        """Return the last lines that the server and its clients wrote."""
        return [line for line in self._log.read_text(errors="replace").splitlines() if line.strip()][-20:]

    def within(self, seconds: float, condition: Callable[[], bool]) -> float:
        """Wait for a condition that another process makes true. Returns the seconds it took, ``inf`` after a timeout."""
        begin = time.monotonic()
        while not condition():
            if time.monotonic() > begin + seconds:
                return math.inf
            time.sleep(_PAUSE)
        return time.monotonic() - begin

    # The server.

    def ensure_server(self) -> None:
        """Start a server unless it runs, and wait until it listens.

        :raises CannotRun: if it ends instead.
        """
        if self.servers and self.servers[-1].poll() is None:
            return
        options = ["--device", self.settings.device, "--no-preload", "--idle-exit", str(_ORPHANED)]
        self.servers.append(self._begin("shared_rpc.cli", "serve", _APP, "--socket", self._socket, *options))
        stdout = self.servers[-1].stdout
        if stdout is None or not stdout.readline():
            raise CannotRun(f"the server does not start: {' | '.join(self.log())}")

    def server_pids(self) -> list[int]:
        """Return the ids of the server's process, and of the one that runs its endpoints."""
        info = self.client.get_server_info()
        return [info["pid"], info["workers"][0]["pid"]]

    def drop(self, seed: int, endpoint: str = "model") -> None:
        """Drop a model from the server's cache; its holders keep it."""
        self.client.invalidate_call_cache(endpoint, self.nbytes, seed)

    # Clients.

    def new_client(self) -> Process:
        """Start a client process."""
        self._clients.append(self._begin(_APP, self._socket, self.settings.subject))
        return self._clients[-1]

    def _begin(self, *words: str) -> Process:
        with self._log.open("ab") as log:
            # Its own session: Ctrl-C is for the verification alone.
            options: dict[str, Any] = {"start_new_session": True, "text": True, "env": client_environment(), "stderr": log}
            return Process(program(*words), stdin=subprocess.PIPE, stdout=subprocess.PIPE, **options)

    def crew(self) -> list[Process]:
        """Return the clients that all checks use, without handles: those that share a model, and a later one."""
        number = max(self.settings.workers, 2) + 1
        crew = self._clients[:number] or [self.new_client() for _ in range(number)]
        all_of(crew, "detach")
        return crew

    def dismiss(self) -> None:
        """Kill all clients. After a failed check, their state is unknown."""
        while self._clients:
            self._clients.pop().end()

    # Measurements.

    def pids(self) -> list[int]:
        """List all processes of the verification except this one."""
        return marked(self.folder.name)

    def _memory(self) -> DeviceInfo:
        return next(device for device in self.client.list_devices() if device["id"] == self.client.get_server_info()["device"])

    def used(self, pids: Iterable[int] = ()) -> int:
        """Measure the bytes of all shared segments, on a GPU the bytes in use by any program; and the processes' own memory."""
        if self.on_gpu:
            memory = self._memory()
            shared = memory["total"] - (memory["free"] or 0)
        else:
            shared = _segment_bytes(self.pids())
        # Without the worker's allocations: its allocator keeps memory of a build.
        return shared + _private_bytes({*pids} - {self.server_pids()[1]})

    def counts(self, pids: list[int]) -> dict[str, int]:
        """Count what the server lists, and what processes use together."""
        info = self.client.get_server_info()
        return {
            "leases": info["leases"],
            "sessions": info["sessions"],
            "objects": info["objects"],
            "descriptors": sum(len(os.listdir(f"/proc/{pid}/fd")) for pid in pids),
            "threads": sum(len(os.listdir(f"/proc/{pid}/task")) for pid in pids),
            "mappings": sum(Path(f"/proc/{pid}/maps").read_bytes().count(b"\n") for pid in pids),
            "bytes": self.used(pids),
        }
