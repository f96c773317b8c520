"""Processes of a verification, in a directory of their own, their memory, and their end.

Every process of a verification has the directory's name in its environment, so that :meth:`Stage.close` finds all of them,
whatever process started them and is their parent now.
"""

from __future__ import annotations

import itertools
import os
import re
import secrets
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from types import FrameType
from typing import Any, Literal

from shared_rpc import Client
from shared_rpc.errors import ConnectError, ConnectionClosed, SharedRPCError
from shared_rpc.extras.verification.clients import LOG, PRELOAD, VerifyClient
from shared_rpc.protocol.infos import ServerInfo
from shared_rpc.settings import SOCKET_PATH_LIMIT, environment_of_children, program, server_environment

#: What is counted of a process: descriptors, mappings, threads, and anonymous memory.
COUNTED = "fds", "mappings", "threads", "memory_bytes"
#: An anonymous file of the library in a line of /proc/PID/maps.
_MAPPED = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) \S+ ([0-9a-f]+) \S+ (\d+)\s+/memfd:shared-rpc-", re.MULTILINE)
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
#: Seed of the model that most checks share, so that it is built once.
SEED = 1
#: Counters of the server that are as before when its clients are gone.
_KEYS: tuple[Literal["leases", "sessions", "connections", "objects"], ...] = ("leases", "sessions", "connections", "objects")
#: Seconds for a process to start, which imports torch, perhaps from a cold disk; and to end.
_STARTUP, _END = 120.0, 3.0
#: Seconds between two polls of another process.
_PAUSE = 0.002
#: Seconds after which a server ends by itself if its verification was killed with SIGKILL.
_ORPHANED = 60.0
#: The longest name of a socket, below the directory for temporary files: the fork server's.
_LONGEST = "pymp-xxxxxxxx/listener-xxxxxxxx"


class CannotRun(Exception):
    """Lack of something to verify: the server does not start, or there is no such device, or not enough memory."""


class Interrupted(BaseException):
    """End by a signal. No check takes it for its own failure."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


class Interrupts:
    """Handler of this process's signals while the block runs, in the main thread.

    The first signal raises, wherever the code is: :meth:`Stage.close` finds a process that was just started by its environment.
    """

    def __init__(self) -> None:
        #: The first signal that came, 0 before it.
        self.number = 0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Interrupts:
        for number in _SIGNALS:
            # What is ignored stays ignored: nohup, and jobs that a shell runs in the background.
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        # Another one must not interrupt the cleaning up that the first has begun.
        if not self.number:
            self.number = number
            raise Interrupted(number)

    def check(self) -> None:
        """Raise if a signal has come: the exception of one that came during a finaliser is lost.

        :raises Interrupted: once more.
        """
        if self.number:
            raise Interrupted(self.number)


def counts_of(pid: int) -> tuple[int, ...]:
    """Count what a process has open, mapped, running and allocated now, see :data:`COUNTED`."""
    sizes = dict(re.findall(r"^(RssAnon|Threads):\s+(\d+)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE))
    mappings = Path(f"/proc/{pid}/maps").read_bytes().count(b"\n")
    return len(os.listdir(f"/proc/{pid}/fd")), mappings, int(sizes["Threads"]), int(sizes["RssAnon"]) * 1024


def memory_of(pids: Iterable[int], builder: int = 0) -> int:
    """Add up the host memory that processes use together, in bytes; memory that several of them share counts once.

    Files on disk are left out (libraries): their share depends on the other processes of the machine that use them.

    :param builder: the process whose own memory is left out, because its allocator keeps memory of a build.
    """
    total = 0
    for pid in pids:
        with suppress(OSError):  # it has ended
            kinds = "Shmem" if pid == builder else "Anon|Shmem"
            rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
            total += sum(int(kib) * 1024 for kib in re.findall(rf"^Pss_(?:{kinds}):\s+(\d+) kB", rollup, re.MULTILINE))
    return total


def segment_bytes(pids: Iterable[int]) -> int:
    """Add up the library's anonymous files that processes have open or mapped, in bytes; each file counts once."""
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
        # An error if it is another user's, or has ended meanwhile. A zombie has no environment.
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

    :param device: as ``serve --device`` takes it.
    :param subject: ``module:class`` of the client processes, see ``Subject`` of clients.py.
    """

    #: torch's name of the device, in the client processes, and the size of the model.
    device: str
    nbytes: int
    #: Whether the server's mechanism enforces read-only memory.
    protects: bool
    #: Bytes that each process may use beside the model, and by which a measurement of shared segments may be off.
    noise: int
    blur: int
    #: Seconds for memory to be freed after a process was killed.
    patience: float

    def __init__(self, device: str, subject: str, workers: int, lifetimes: int, cycles: int) -> None:
        self._device = device
        self._subject = subject
        self.workers = workers
        self.lifetimes = lifetimes
        self.cycles = cycles
        self._seeds = itertools.count(SEED + 1)
        self.interrupts = Interrupts()
        self.directory: Path | None = None
        #: The process that measures the memory of a GPU, as torch names it; its context exists before the first reading.
        self.probe: tuple[VerifyClient, str] | None = None
        self._broker: subprocess.Popen[bytes] | None = None
        self._client: Client | None = None

    def __enter__(self) -> Stage:
        place = Path(tempfile.gettempdir())
        if len(os.fsencode(place / _LONGEST)) > SOCKET_PATH_LIMIT:
            raise CannotRun(f"{place} has too long a name for sockets: set TMPDIR to a shorter one")
        self.directory = place / f"shared-rpc-verify-{secrets.token_hex(4)}"
        self.directory.mkdir(0o700)
        self._environ = {**server_environment(), "SHARED_TENSOR_BASE_PATH": str(self.folder / "s")}
        self.socket_path = str(self.folder / "s.sock")
        self._start_server()
        resource_tracker.ensure_running()  # it outlives the verification, and must not have the mark
        forkserver.set_forkserver_preload(PRELOAD)
        with environment_of_children({name: self._environ[name] for name in ("PYTHONPATH", "SHARED_TENSOR_BASE_PATH")}):
            forkserver.ensure_running()
        forkserver.set_forkserver_preload(["__main__"])  # the default
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # The server.

    def _start_server(self) -> None:
        words = ["serve", "shared_rpc.extras.verification.app", "--no-preload", "--device", self._device]
        with open(self.folder / "server.log", "ab") as log:
            self._broker = subprocess.Popen(
                program("shared_rpc.cli", *words, "--socket", self.socket_path, "--idle-exit", str(_ORPHANED)),
                cwd=self.folder,
                env=self._environ,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=log,
                start_new_session=True,  # Ctrl-C is for the verification alone
            )

    @property
    def folder(self) -> Path:
        """The directory, while there is one."""
        assert self.directory is not None, "the stage is open"
        return self.directory

    @property
    def broker(self) -> subprocess.Popen[bytes]:
        """The server's process."""
        assert self._broker is not None, "the stage is open"
        return self._broker

    def worker_pid(self) -> int:
        """Ask for the id of the process that runs the server's endpoints."""
        return int(self.info()["workers"][0]["pid"])

    def within(self, seconds: float, condition: Callable[[], bool]) -> float | None:
        """Wait for a condition that another process makes true. Returns the seconds it took, None if it took too long."""
        begin = time.monotonic()
        while True:
            good, taken = condition(), time.monotonic() - begin
            if good or taken > seconds:
                return taken if good else None
            self.interrupts.check()
            time.sleep(_PAUSE)

    def wait_for_server(self) -> None:
        """Wait until the server answers.

        :raises ConnectError: if the server ends, or does not answer in time.
        """
        answered = self.within(_STARTUP, lambda: self._answers() or self.broker.poll() is not None)
        if not self._answers():
            end = f"ended with exit code {self.broker.poll()}" if answered else f"did not answer within {_STARTUP:g} s"
            raise ConnectError(f"the server {end}; {self._last_words('server.log')}")

    def _answers(self) -> bool:
        try:
            self.client().ping()
        except (ConnectError, ConnectionClosed):
            return False
        return True

    def restart_server(self) -> None:
        """Replace a server that has ended or does not answer, and wait for the new one."""
        self.broker.kill()
        self.broker.wait()
        self._start_server()
        self.wait_for_server()

    def ensure_server(self) -> None:
        """Ensure that a server answers, and has closed the sessions of the check before."""
        try:
            self.client().ping()
        except SharedRPCError:
            self.restart_server()
        self.within(_END, lambda: self.info()["sessions"] <= 1)

    def client(self) -> Client:
        """Return this process's own client."""
        if self._client is None:
            self._client = Client(socket_path=self.socket_path, timeout=30.0, connect_timeout=0.0)
        return self._client

    def info(self) -> ServerInfo:
        """Ask the server about itself."""
        return self.client().get_server_info()

    def log(self, lines: int = 20, name: str = "server.log") -> list[str]:
        """Return the last lines of a log."""
        try:
            text = (self.folder / name).read_text(errors="replace")
        except OSError:
            return []
        return [line.rstrip() for line in text.splitlines() if line.strip()][-lines:]

    def _last_words(self, name: str) -> str:
        said = self.log(3, name)
        return f"its last words: {' | '.join(line.strip() for line in said)}" if said else "it said nothing"

    # Client processes.

    def connect(self) -> VerifyClient:
        """Start a new client process.

        :raises CannotRun: if the fork server has ended, or is not this verification's.
        """
        try:
            client = VerifyClient(self.socket_path, self._subject, self.folder)
        except (EOFError, OSError) as error:
            raise CannotRun(f"the process that forks clients has ended; {self._last_words(LOG)}") from error
        if self.folder.name.encode() not in Path(f"/proc/{client.pid}/environ").read_bytes():
            client.close()
            raise CannotRun("this program has a fork server of multiprocessing; verify in a process that has none")
        return client

    @contextmanager
    def clients(self, count: int) -> Iterator[list[VerifyClient]]:
        """Start new client processes, which end with the block."""
        with ExitStack() as stack:
            yield [stack.enter_context(self.connect()) for _ in range(count)]

    @contextmanager
    def attached(self, count: int, *, seed: int = SEED, nbytes: int | None = None) -> Iterator[list[VerifyClient]]:
        """Start client processes that attach to the model, or to one of that size, at the same time."""
        with self.clients(count) as clients:
            all_of(clients, "attach", nbytes=nbytes or self.nbytes, seed=seed)
            yield clients

    # Models.

    def new_seed(self) -> int:
        """Return the seed of a model that is not built yet."""
        return next(self._seeds)

    def drop(self, seed: int, endpoint: str = "model") -> None:
        """Drop a model from the server's cache; its holders keep it."""
        self.client().invalidate_call_cache(endpoint, self.nbytes, seed)

    # All of them.

    def state(self) -> dict[str, int]:
        """Return the server's counters, and its open descriptors."""
        info = self.info()
        return {key: info[key] for key in _KEYS} | {"descriptors": counts_of(self.broker.pid)[0]}

    def pids(self) -> list[int]:
        """List all processes of the verification but this one."""
        return [pid for pid in marked(self.folder.name) if pid != os.getpid()]

    def used(self) -> int:
        """Measure the bytes in use: by the verification's processes on the host, by all programs on a GPU."""
        if self.probe is None:
            return memory_of(self.pids(), builder=self.worker_pid())
        probe, device = self.probe
        free, total = probe.ask("memory", device=device)
        return int(total - free)

    def segments(self) -> int:
        """Measure the bytes of shared segments that any process has: on a GPU, the bytes in use."""
        return segment_bytes(self.pids()) if self.probe is None else self.used()

    def close(self) -> None:
        """End all processes, and remove the directory. A second call does nothing."""
        if self.directory is None:
            return
        if self._client is not None:
            self._client.close()
        if self._broker is not None:
            self._broker.terminate()
            with suppress(subprocess.TimeoutExpired):
                self._broker.wait(_END)
        deadline = time.monotonic() + _END
        # The fork server is among them; multiprocessing starts another one when it is asked to.
        while (left := self.pids()) and time.monotonic() < deadline:
            for pid in left:
                with suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(_PAUSE)
        if self._broker is not None:
            self._broker.wait()
        shutil.rmtree(self.directory, ignore_errors=True)
        self.directory = None
