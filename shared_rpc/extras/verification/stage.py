"""Processes of a verification, in their own directory, their memory, and their end.

Every process of a verification has the directory's name in its environment, so that :meth:`Stage.close` finds all of them,
regardless of their parents.
"""

from __future__ import annotations

import itertools
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from shared_rpc import Client
from shared_rpc.errors import ConnectError, SharedRPCError
from shared_rpc.extras.verification.app import true_size
from shared_rpc.extras.verification.clients import ClientFailed, VerifyClient
from shared_rpc.memory.devices import torch_device
from shared_rpc.protocol.infos import DeviceInfo, ServerInfo
from shared_rpc.settings import SOCKET_PATH_LIMIT, client_environment, program, server_environment

#: An anonymous file of the library in a line of /proc/PID/maps.
_MAPPED = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) \S+ ([0-9a-f]+) \S+ (\d+)\s+/memfd:shared-rpc-", re.MULTILINE)
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
#: Seed of the model used by most checks, so that it is built once.
SEED = 1
#: Maximum number of models in memory at the same time, including copies.
_MODELS = 5
#: Seconds for a server to start, which imports torch, perhaps from a cold disk; for processes to end; and between two polls.
_STARTUP, _END, _PAUSE = 120.0, 3.0, 0.002
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
    lifetimes: int = 100
    cycles: int = 1000
    names: Sequence[str] = ()
    subject: str = "shared_rpc.extras.verification.clients:Subject"


class CannotRun(Exception):
    """There is nothing to verify: the server does not start, there is no such device, or too little memory."""


class Interrupted(BaseException):
    """A signal ended the verification. No check treats it as its own failure."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    raise Interrupted(number)


@dataclass(frozen=True)
class _Kind:
    """Measures of a kind of device: the default size of the model, and the precision of memory measurements."""

    nbytes: int
    #: Bytes that each process may use besides the model: memory that allocators keep of a forward pass; on a GPU also kernels,
    #: which are loaded on first use.
    noise: int
    #: Maximum error in bytes of a measurement of shared segments.
    blur: int
    #: Seconds for memory to be freed after a process was killed. A GPU's driver ends the context first.
    patience: float


_KINDS = {"cpu": _Kind(64 << 20, 2 << 20, 0, 1.0), "cuda": _Kind(1 << 30, 64 << 20, 64 << 20, 3.0)}


def size(nbytes: float) -> str:
    """Format bytes: ``"64.0 MiB"``, with a sign if negative."""
    exponent = min(max(int(abs(nbytes)).bit_length() - 1, 0) // 10, 4)
    return f"{nbytes / 1024**exponent:.{1 if exponent else 0}f} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[exponent]}"


def private_bytes(pid: int) -> int:
    """Measure the memory that a process allocated, in bytes: not the files and segments that it has mapped."""
    with suppress(OSError):  # it has ended
        rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
        return sum(int(kib) * 1024 for kib in re.findall(r"^Anonymous:\s+(\d+) kB", rollup, re.MULTILINE))
    return 0


def counts_of(pid: int) -> dict[str, int]:
    """Count a process's open descriptors, mappings, threads and allocated bytes."""
    return {
        "fds": len(os.listdir(f"/proc/{pid}/fd")),
        "mappings": Path(f"/proc/{pid}/maps").read_bytes().count(b"\n"),
        "threads": len(os.listdir(f"/proc/{pid}/task")),
        "memory_bytes": private_bytes(pid),
    }


def segment_bytes(pids: Iterable[int]) -> int:
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
    """List the processes with ``mark`` in their environment at their start, and forks of them, but no zombies."""
    found = []
    for entry in os.listdir("/proc"):
        # An error if it is another user's, or has ended. A zombie has no environment.
        with suppress(OSError):
            if entry.isdecimal() and mark.encode() in Path("/proc", entry, "environ").read_bytes():
                found.append(int(entry))
    return found


def all_of(clients: list[VerifyClient], do: str, **options: Any) -> list[Any]:
    """Execute one command in all clients at the same time, and return the answers."""
    for client in clients:
        client.send(do, **options)
    return [client.receive() for client in clients]


class Stage:
    """A server (a broker and its worker) and client processes, from :meth:`start` to :meth:`close`.

    In between, SIGINT, SIGTERM and SIGHUP raise :class:`Interrupted`, wherever the code is. The clean-up ignores them.
    """

    #: Process of the latest server.
    broker: subprocess.Popen[bytes] | None = None
    #: The description for the report, and the size of the model.
    device: dict[str, Any]
    nbytes: int

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.folder = Path(tempfile.gettempdir(), f"shared-rpc-verify-{secrets.token_hex(4)}")
        self._socket = str(self.folder / "s.sock")
        #: Seeds of models that are not built yet.
        self.seeds = itertools.count(SEED + 1)
        self._handlers: dict[int, Any] = {}
        self._started: list[subprocess.Popen[bytes]] = []
        self._opened = ExitStack()

    def start(self) -> None:
        """Start the server and the process that forks clients, and choose the size of the model.

        :raises CannotRun: if there is nothing to verify.
        """
        if len(os.fsencode(self._socket)) > SOCKET_PATH_LIMIT:
            raise CannotRun(f"{self.folder.parent} has too long a name for sockets: set TMPDIR to a shorter one")
        for number in _SIGNALS:
            # Ignored signals stay ignored: nohup, and jobs that a shell runs in the background.
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._handlers[number] = signal.signal(number, _interrupt)
        self.folder.mkdir(0o700)
        self.client = self._opened.enter_context(Client(socket_path=self._socket, timeout=30.0, connect_timeout=0.0))
        self._control, control = socket.socketpair()
        self._opened.enter_context(self._control)
        with control:
            words = str(control.fileno()), self._socket, self.settings.subject
            self._start("clients", client_environment(), "shared_rpc.extras.verification.clients", words, [control.fileno()])
        try:
            self.ensure_server()
            self.nbytes = true_size(0)
            with self.clients(1) as (
                client,
            ):  # a build gives the worker a context, without which a GPU's free memory is unknown
                client.ask("attach", nbytes=self.nbytes, seed=0)
                self.drop(0)
        except (SharedRPCError, ClientFailed) as error:
            raise CannotRun(f"{error}; {' | '.join(self.log('server', 3) + self.log('clients', 3))}") from error
        import torch

        info = self.info()
        self.on_gpu = info["device"] != "cpu"
        self.kind = _KINDS["cuda" if self.on_gpu else "cpu"]
        self.nbytes = true_size(self.settings.nbytes or self.kind.nbytes)
        self.device = {
            "device": str(torch_device(info["device"])),
            "id": info["device"],
            "name": self._memory()["name"],
            "mechanism": (info["mechanism"] or {"name": "memfd"})["name"],
            "torch": torch.__version__,
            "cuda": torch.version.cuda if self.on_gpu else None,
        }
        if self.nbytes * _MODELS > (free := self._free_and_all()[0]):
            raise CannotRun(
                f"a model of {size(self.nbytes)} needs up to {_MODELS} times as much, and {size(free)} are free on "
                f"{self.device['name']}: choose a smaller --size"
            )

    def close(self) -> None:
        """Kill all processes, and remove the directory."""
        for number in self._handlers:
            signal.signal(number, signal.SIG_IGN)
        self._opened.close()
        deadline = time.monotonic() + _END
        while (left := self.pids()) and time.monotonic() < deadline:
            for pid in left:
                with suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(_PAUSE)
        for process in self._started:
            with suppress(subprocess.TimeoutExpired):
                process.wait(_END)
        shutil.rmtree(self.folder, ignore_errors=True)
        for number, before in self._handlers.items():
            signal.signal(number, before)

    def _start(self, name: str, environ: dict[str, str], module: str, words: Sequence[str], fds: Sequence[int] = ()) -> None:
        environ["SHARED_TENSOR_BASE_PATH"] = str(self.folder / "s")
        with open(self.folder / f"{name}.log", "ab") as log:
            # Its own session: Ctrl-C is for the verification alone.
            options: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log, "start_new_session": True}
            command = program(module, *words)
            self._started.append(subprocess.Popen(command, cwd=self.folder, env=environ, pass_fds=fds, **options))

    def log(self, name: str = "server", lines: int = 20) -> list[str]:
        """Return the last lines of a log."""
        text = (self.folder / f"{name}.log").read_text(errors="replace")
        return [line.rstrip() for line in text.splitlines() if line.strip()][-lines:]

    def within(self, seconds: float, condition: Callable[[], bool]) -> float | None:
        """Wait for a condition that another process makes true. Returns the seconds it took, None after a timeout."""
        begin = time.monotonic()
        while True:
            good, taken = condition(), time.monotonic() - begin
            if good or taken > seconds:
                return taken if good else None
            time.sleep(_PAUSE)

    # The server.

    def ensure_server(self) -> None:
        """Start a server unless one answers, and wait for it.

        :raises ConnectError: if it ends, or does not answer in time.
        """
        if self._answers():
            return
        if self.broker is not None:
            self.broker.kill()
            self.broker.wait()
        words = ["serve", "shared_rpc.extras.verification.app", "--no-preload", "--device", self.settings.device]
        words += ["--socket", self._socket, "--idle-exit", str(_ORPHANED)]
        self._start("server", server_environment(), "shared_rpc.cli", words)
        self.broker = broker = self._started[-1]
        self.within(_STARTUP, lambda: self._answers() or broker.poll() is not None)
        if not self._answers():
            raise ConnectError(f"the server did not start, exit code {broker.poll()}")

    def _answers(self) -> bool:
        with suppress(SharedRPCError):
            self.client.ping()
            return True
        return False

    def info(self) -> ServerInfo:
        """Return the server's description."""
        return self.client.get_server_info()

    def server_pids(self) -> list[int]:
        """Return the ids of the server's process, and of the one that runs its endpoints."""
        info = self.info()
        return [info["pid"], info["workers"][0]["pid"]]

    def drop(self, seed: int, endpoint: str = "model") -> None:
        """Drop a model from the server's cache; its holders keep it."""
        self.client.invalidate_call_cache(endpoint, self.nbytes, seed)

    # Clients.

    @contextmanager
    def clients(self, count: int) -> Iterator[list[VerifyClient]]:
        """Start new client processes, which end with the block."""
        with ExitStack() as stack:
            yield [stack.enter_context(closing(VerifyClient(self._control))) for _ in range(count)]

    # Measurements.

    def pids(self) -> list[int]:
        """List all processes of the verification except this one."""
        return [pid for pid in marked(self.folder.name) if pid != os.getpid()]

    def _memory(self) -> DeviceInfo:
        return next(device for device in self.client.list_devices() if device["id"] == self.info()["device"])

    def _free_and_all(self) -> tuple[int, int]:
        memory = self._memory()
        assert memory["free"] is not None, "it is known once the worker has built a model"
        return memory["free"], memory["total"]

    def used(self) -> int:
        """Measure the bytes in use: by the verification's processes on the host, by all programs on a GPU."""
        if self.on_gpu:
            free, total = self._free_and_all()
            return total - free
        # Without the worker's allocations: its allocator keeps memory of a build.
        return self.segments() + sum(private_bytes(pid) for pid in {*self.pids()} - {*self.server_pids()})

    def segments(self) -> int:
        """Measure the bytes of shared segments in use by any process: on a GPU, the bytes in use."""
        return self.used() if self.on_gpu else segment_bytes(self.pids())
