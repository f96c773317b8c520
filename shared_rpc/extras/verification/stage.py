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
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from shared_rpc import Client
from shared_rpc.errors import ConnectError, SharedRPCError
from shared_rpc.extras.verification.app import true_size
from shared_rpc.extras.verification.clients import ClientFailed, VerifyClient
from shared_rpc.protocol.infos import ServerInfo
from shared_rpc.settings import SOCKET_PATH_LIMIT, client_environment, program, server_environment

#: An anonymous file of the library in a line of /proc/PID/maps.
_MAPPED = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) \S+ ([0-9a-f]+) \S+ (\d+)\s+/memfd:shared-rpc-", re.MULTILINE)
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
#: Seed of the model used by most checks, so that it is built once.
SEED = 1
#: Maximum number of models in memory at the same time, including copies.
_MODELS = 5
#: Seconds for a server to start, which imports torch, perhaps from a cold disk; and for processes to end.
_STARTUP, _END = 120.0, 3.0
#: Seconds between two polls of another process.
_PAUSE = 0.002
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
    #: Bytes that each process may use besides the model: on the host, pages shared copy-on-write; on a GPU, kernels, which are
    #: loaded on first use, and memory that torch's allocator keeps of a forward pass.
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


def counts_of(pid: int) -> dict[str, int]:
    """Count a process's open descriptors, mappings, threads and allocated bytes."""
    sizes = dict(re.findall(r"^(RssAnon|Threads):\s+(\d+)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE))
    return {
        "fds": len(os.listdir(f"/proc/{pid}/fd")),
        "mappings": Path(f"/proc/{pid}/maps").read_bytes().count(b"\n"),
        "threads": int(sizes["Threads"]),
        "memory_bytes": int(sizes["RssAnon"]) * 1024,
    }


def memory_of(pids: Iterable[int], builder: int = 0) -> int:
    """Sum the host memory used by processes, in bytes; shared memory counts once.

    Files on disk are left out (libraries): their share depends on the other processes of the machine that use them.

    :param builder: a process whose private memory is left out, because its allocator keeps memory of a build.
    """
    total = 0
    for pid in pids:
        with suppress(OSError):  # it has ended
            kinds = "Shmem" if pid == builder else "Anon|Shmem"
            rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
            total += sum(int(kib) * 1024 for kib in re.findall(rf"^Pss_(?:{kinds}):\s+(\d+) kB", rollup, re.MULTILINE))
    return total


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
    """A server (a broker and its worker) and client processes. They end with the block, and the directory with them.

    SIGINT, SIGTERM and SIGHUP raise :class:`Interrupted` in the block, wherever the code is. The clean-up ignores them.
    """

    #: Process of the server.
    broker: subprocess.Popen[bytes]
    #: A client that describes the device, and measures the memory of a GPU: its context exists before the first reading.
    probe: VerifyClient
    #: Description of the device, see ``Subject.device``, with the server's mechanism; and the size of the model.
    device: dict[str, Any]
    nbytes: int

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.folder = Path(tempfile.gettempdir(), f"shared-rpc-verify-{secrets.token_hex(4)}")
        self._socket, self._forks = str(self.folder / "s.sock"), str(self.folder / "forks.sock")
        self._seeds = itertools.count(SEED + 1)
        self._handlers: dict[int, Any] = {}
        self._started: list[subprocess.Popen[bytes]] = []
        self.client = Client(socket_path=self._socket, timeout=30.0, connect_timeout=0.0)

    def __enter__(self) -> Stage:
        if len(os.fsencode(self._forks)) > SOCKET_PATH_LIMIT:
            raise CannotRun(f"{self.folder.parent} has too long a name for sockets: set TMPDIR to a shorter one")
        for number in _SIGNALS:
            # Ignored signals stay ignored: nohup, and jobs that a shell runs in the background.
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._handlers[number] = signal.signal(number, _interrupt)
        self.folder.mkdir(0o700)
        self.broker = self._start_server()
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(self._forks)
            listener.listen(64)
            words = str(listener.fileno()), self._socket, self.settings.subject
            environ, module = client_environment(), "shared_rpc.extras.verification.clients"
            self._start("clients", program(module, *words), environ, stdin=subprocess.PIPE, pass_fds=[listener.fileno()])
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self, name: str, words: list[str], environ: dict[str, str], **options: Any) -> subprocess.Popen[bytes]:
        environ["SHARED_TENSOR_BASE_PATH"] = str(self.folder / "s")
        with open(self.folder / f"{name}.log", "ab") as log:
            # Its own session: Ctrl-C is for the verification alone.
            options |= {"cwd": self.folder, "env": environ, "stdout": log, "stderr": log, "start_new_session": True}
            self._started.append(subprocess.Popen(words, **options))
        return self._started[-1]

    # The server.

    def _start_server(self) -> subprocess.Popen[bytes]:
        words = ["serve", "shared_rpc.extras.verification.app", "--no-preload", "--device", self.settings.device]
        words += ["--socket", self._socket, "--idle-exit", str(_ORPHANED)]
        return self._start("server", program("shared_rpc.cli", *words), server_environment(), stdin=subprocess.DEVNULL)

    def within(self, seconds: float, condition: Callable[[], bool]) -> float | None:
        """Wait for a condition that another process makes true. Returns the seconds it took, None after a timeout."""
        begin = time.monotonic()
        while True:
            good, taken = condition(), time.monotonic() - begin
            if good or taken > seconds:
                return taken if good else None
            time.sleep(_PAUSE)

    def answers(self) -> bool:
        """Return True if the server answers."""
        with suppress(SharedRPCError):
            self.client.ping()
            return True
        return False

    def wait_for_server(self) -> None:
        """Wait until the server answers.

        :raises ConnectError: if the server ends, or does not answer in time.
        """
        answered = self.within(_STARTUP, lambda: self.answers() or self.broker.poll() is not None)
        if answered is None or not self.answers():
            end = "did not answer in time" if answered is None else f"ended with exit code {self.broker.poll()}"
            raise ConnectError(f"the server {end}; {self._end_of_log('server')}")

    def restart_server(self) -> None:
        """Replace a server that has ended or does not answer, and wait for the new one."""
        self.broker.kill()
        self.broker.wait()
        self.broker = self._start_server()
        self.wait_for_server()

    def ensure_server(self) -> None:
        """Ensure that a server answers, and has closed the sessions of the previous check."""
        if not self.answers():
            self.restart_server()
        self.within(_END, lambda: self.info()["sessions"] <= 1)

    def info(self) -> ServerInfo:
        """Return the server's description."""
        return self.client.get_server_info()

    def worker_pid(self) -> int:
        """Return the id of the process that runs the server's endpoints."""
        return int(self.info()["workers"][0]["pid"])

    def log(self, name: str = "server", lines: int = 20) -> list[str]:
        """Return the last lines of a log."""
        text = (self.folder / f"{name}.log").read_text(errors="replace")
        return [line.rstrip() for line in text.splitlines() if line.strip()][-lines:]

    def _end_of_log(self, name: str) -> str:
        said = self.log(name, 3)
        return f"its last words: {' | '.join(line.strip() for line in said)}" if said else "it said nothing"

    # Clients and models.

    def connect(self) -> VerifyClient:
        """Start a new client process.

        :raises CannotRun: if the process that forks clients has ended.
        """
        try:
            return VerifyClient(self._forks)
        except (ClientFailed, OSError) as error:
            raise CannotRun(f"no client process starts: {error}; {self._end_of_log('clients')}") from error

    @contextmanager
    def clients(self, count: int) -> Iterator[list[VerifyClient]]:
        """Start new client processes, which end with the block."""
        with ExitStack() as stack:
            yield [stack.enter_context(self.connect()) for _ in range(count)]

    def prepare(self) -> None:
        """Wait for the server and the first client, and choose the size of the model.

        :raises CannotRun: if there is nothing to verify.
        """
        try:
            self.wait_for_server()
            self.probe = self.connect()
            self.device = self.probe.ask("device", asked=self.settings.device)
        except SharedRPCError as error:
            raise CannotRun(f"the server does not start: {error}") from error
        except ClientFailed as error:
            raise CannotRun(str(error)) from error
        self.on_gpu = self.device["id"] != "cpu"
        self.kind = _KINDS["cuda" if self.on_gpu else "cpu"]
        self.device["mechanism"] = (self.info()["mechanism"] or {"name": "memfd"})["name"]
        self.nbytes = true_size(self.settings.nbytes or self.kind.nbytes)
        available = re.search(r"^MemAvailable:\s+(\d+)", Path("/proc/meminfo").read_text(), re.MULTILINE)
        assert available is not None, "Linux has it since 3.14"
        free = self._free_and_all()[0] if self.on_gpu else int(available[1]) * 1024
        if self.nbytes * _MODELS > free:
            raise CannotRun(
                f"a model of {size(self.nbytes)} needs up to {_MODELS} times as much, and {size(free)} are free on "
                f"{self.device['name']}: choose a smaller --size"
            )

    def new_seed(self) -> int:
        """Return the seed of a model that is not built yet."""
        return next(self._seeds)

    def drop(self, seed: int, endpoint: str = "model") -> None:
        """Drop a model from the server's cache; its holders keep it."""
        self.client.invalidate_call_cache(endpoint, self.nbytes, seed)

    # Measurements.

    def pids(self) -> list[int]:
        """List all processes of the verification except this one."""
        return [pid for pid in marked(self.folder.name) if pid != os.getpid()]

    def _free_and_all(self) -> tuple[int, int]:
        answer: tuple[int, int] = self.probe.ask("memory", device=self.device["device"])
        return answer

    def used(self) -> int:
        """Measure the bytes in use: by the verification's processes on the host, by all programs on a GPU."""
        if not self.on_gpu:
            return memory_of(self.pids(), builder=self.worker_pid())
        free, total = self._free_and_all()
        return total - free

    def segments(self) -> int:
        """Measure the bytes of shared segments in use by any process: on a GPU, the bytes in use."""
        return self.used() if self.on_gpu else segment_bytes(self.pids())

    def close(self) -> None:
        """End all processes, and remove the directory. Idempotent."""
        for number in self._handlers:
            signal.signal(number, signal.SIG_IGN)
        self.client.close()
        for process in self._started:
            process.terminate()
            if process.stdin is not None:
                process.stdin.close()
            with suppress(subprocess.TimeoutExpired):
                process.wait(_END)
        deadline = time.monotonic() + _END
        while (left := self.pids()) and time.monotonic() < deadline:
            for pid in left:
                with suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(_PAUSE)
        shutil.rmtree(self.folder, ignore_errors=True)
        for number, before in self._handlers.items():
            signal.signal(number, before)
