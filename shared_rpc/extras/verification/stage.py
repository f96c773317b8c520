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
from shared_rpc.client.starting import ServerStarter, log_path
from shared_rpc.errors import SharedRPCError
from shared_rpc.extras.verification.app import LAYER
from shared_rpc.memory.devices import torch_device
from shared_rpc.protocol.infos import DeviceInfo
from shared_rpc.protocol.options import ServeOptions
from shared_rpc.settings import client_environment, program

#: An anonymous file of the library in a line of /proc/PID/maps.
_MAPPED = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) \S+ ([0-9a-f]+) \S+ (\d+)\s+/memfd:shared-rpc-", re.MULTILINE)
_APP = "shared_rpc.extras.verification.app"
#: Seed of the model used by most checks, so that it is built once.
SEED = 1
#: Bytes of the smallest model: a copy exceeds the noise of the measurements.
LEAST = 8 << 20
#: Maximum number of models in memory at the same time, including copies.
_MODELS = 5
#: Seconds for a server to start, which imports torch, perhaps from a cold disk; and between two polls.
_STARTUP, _PAUSE = 120.0, 0.002
#: Seconds after which a server ends by itself if its verification was killed with SIGKILL.
_ORPHANED = 60.0


@dataclass(frozen=True)
class Settings:
    """Settings of a verification. ``nbytes`` is the size of the model, by default chosen for the device.

    :param names: the checks; empty for all of them.
    :param subject: ``module:class`` that replaces the clients' use of the library.
    """

    device: str = "auto"
    workers: int = 4
    nbytes: int | None = None
    lifetimes: int = 4
    cycles: int = 1000
    names: Sequence[str] = ()
    subject: str = f"{_APP}:Subject"


class CannotRun(Exception):
    """There is nothing to verify: the server does not start, there is no such device, or too little memory."""


class ClientFailed(Exception):
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
    for entry in os.listdir("/proc"):
        with suppress(OSError):  # it has ended, or is no process
            command = Path("/proc", entry, "cmdline").read_text()
            if entry.isdecimal() and _APP in command and mark in command:
                found.append(int(entry))
    return found


class VerifyClient(subprocess.Popen[str]):
    """A client process, with pipes for commands of :class:`~shared_rpc.extras.verification.app.Subject` and their answers."""

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


def all_of(clients: list[VerifyClient], do: str, **options: Any) -> list[Any]:
    """Execute one command in all clients at the same time, and return the answers."""
    answers = []
    for client in clients:
        with suppress(OSError):  # an error if the process has ended
            print(json.dumps([do, options]), file=client.stdin, flush=True)
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
    #: which are loaded on first use. Maximum error in bytes of a measurement of shared segments.
    noise, blur = 2 << 20, 0
    #: Seconds for memory to be freed after a process was killed. A GPU's driver ends the context first.
    patience = 1.0

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.folder = Path(tempfile.gettempdir(), f"shared-rpc-verify-{secrets.token_hex(4)}")
        self._socket = str(self.folder / "s.sock")
        self.client = Client(socket_path=self._socket, timeout=30.0, connect_timeout=0.0)
        #: Seeds of models that are not built yet.
        self.seeds = itertools.count(SEED + 1)
        self._crew: list[VerifyClient] = []
        self._clients: list[VerifyClient] = []

    def start(self) -> None:
        """Start the server and the clients that all checks use, and choose the size of the model.

        :raises CannotRun: if there is nothing to verify.
        """
        self.folder.mkdir(0o700)
        try:
            self.ensure_server()
            # A build gives the worker a context, without which a GPU's free memory is unknown.
            all_of(self.crew(), "attach", nbytes=self.nbytes, seed=0)
            self.drop(0)
        except ClientFailed as error:
            raise CannotRun(f"{error}; {' | '.join(self.log(5))}") from error
        import torch

        info, memory = self.client.get_server_info(), self._memory()
        self.on_gpu = info["device"] != "cpu"
        if self.on_gpu:
            self.noise, self.blur, self.patience = 64 << 20, 64 << 20, 3.0
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
        while left := self.pids():
            for pid in left:
                with suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(_PAUSE)
        shutil.rmtree(self.folder, ignore_errors=True)

    def log(self, lines: int = 20) -> list[str]:
        """Return the last lines that the server and its clients wrote."""
        text = Path(log_path(self._socket)).read_text(errors="replace")
        return [line.rstrip() for line in text.splitlines() if line.strip()][-lines:]

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
        """Start a server unless one listens, and wait for it.

        :raises ConnectError: if it ends, or does not listen in time.
        """
        options = ServeOptions(socket=self._socket, devices=(self.settings.device,), preload=False, idle_exit=_ORPHANED)

        def answers() -> bool:
            ServerStarter(lambda: _APP, options)(self._socket, _STARTUP, math.inf)
            with suppress(SharedRPCError):  # one that was just killed has no command any more, and may listen for a moment
                self.client.ping()
                return True
            return False

        self.within(_STARTUP, answers)

    def server_pids(self) -> list[int]:
        """Return the ids of the server's process, and of the one that runs its endpoints."""
        info = self.client.get_server_info()
        return [info["pid"], info["workers"][0]["pid"]]

    def drop(self, seed: int, endpoint: str = "model") -> None:
        """Drop a model from the server's cache; its holders keep it."""
        self.client.invalidate_call_cache(endpoint, self.nbytes, seed)

    # Clients.

    def new_client(self) -> VerifyClient:
        """Start a client process."""
        words = program(_APP, self._socket, self.settings.subject)
        with open(log_path(self._socket), "ab") as log:
            # Its own session: Ctrl-C is for the verification alone.
            options: dict[str, Any] = {"start_new_session": True, "text": True, "env": client_environment(), "stderr": log}
            self._clients.append(VerifyClient(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, **options))
        return self._clients[-1]

    def crew(self) -> list[VerifyClient]:
        """Return the clients that all checks use, without handles: those that share a model, and a later one."""
        self._crew = self._crew or [self.new_client() for _ in range(max(self.settings.workers, 2) + 1)]
        all_of(self._crew, "detach")
        return self._crew

    def dismiss(self) -> None:
        """Kill all clients. After a failed check, their state is unknown."""
        self._crew = []
        while self._clients:
            self._clients.pop().end()

    # Measurements.

    def pids(self) -> list[int]:
        """List all processes of the verification except this one."""
        return marked(self.folder.name)

    def _memory(self) -> DeviceInfo:
        return next(device for device in self.client.list_devices() if device["id"] == self.client.get_server_info()["device"])

    def used(self) -> int:
        """Measure the bytes in use: by the verification's processes on the host, by all programs on a GPU."""
        if self.on_gpu:
            memory = self._memory()
            return memory["total"] - (memory["free"] or 0)
        # Without the worker's allocations: its allocator keeps memory of a build.
        return self.segments() + _private_bytes({*self.pids()} - {*self.server_pids()})

    def segments(self) -> int:
        """Measure the bytes of shared segments in use by any process: on a GPU, the bytes in use."""
        return self.used() if self.on_gpu else _segment_bytes(self.pids())

    def counts(self, pids: list[int]) -> dict[str, int]:
        """Count what the server lists, and what processes use together."""
        info = self.client.get_server_info()
        return {
            **{"leases": info["leases"], "sessions": info["sessions"], "objects": info["objects"]},
            "descriptors": sum(len(os.listdir(f"/proc/{pid}/fd")) for pid in pids),
            "threads": sum(len(os.listdir(f"/proc/{pid}/task")) for pid in pids),
            "mappings": sum(Path(f"/proc/{pid}/maps").read_bytes().count(b"\n") for pid in pids),
            "private bytes": _private_bytes(pids),
            "shared bytes": self.segments(),
        }
