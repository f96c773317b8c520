"""Processes of a verification, in a directory of their own, and their end.

Every process of a verification has the directory's name in its environment, so that :meth:`Stage.close` finds all of them,
whatever process started them and is their parent now.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing import forkserver, process, resource_tracker
from pathlib import Path
from typing import Any

from shared_rpc import Client
from shared_rpc.errors import ConnectError, ConnectionClosed, SharedRPCError
from shared_rpc.extras.verification.clients import LOG, VerifyClient
from shared_rpc.extras.verification.interrupts import Interrupts
from shared_rpc.protocol.infos import ServerInfo
from shared_rpc.settings import SOCKET_PATH_LIMIT, environment_of_children, program, server_environment

__all__ = ["CannotRun", "Stage", "marked", "within"]

#: Seconds for a process to start, which imports torch, perhaps from a cold disk; and to end.
_STARTUP, _END = 120.0, 3.0
#: Seconds between two polls of another process.
_PAUSE = 0.002
#: Lines of a log that are shown.
_LINES = 20
#: Seconds after which a server ends by itself if its verification was killed with SIGKILL.
_ORPHANED = 60.0
#: The longest name that a socket has in the directory: the fork server's.
_LONGEST = "listener-xxxxxxxx"
#: The library's module of which one instance is the process's fork server.
_SERVER: Any = forkserver._forkserver


class CannotRun(Exception):
    """Lack of something to verify: the server does not start, or there is no such device, or not enough memory."""


def within(seconds: float, condition: Callable[[], bool], interrupts: Interrupts) -> float | None:
    """Wait for a condition that another process makes true. Returns the seconds it took, None if it took too long."""
    begin = time.monotonic()
    while True:
        good, taken = condition(), time.monotonic() - begin
        if good or taken > seconds:
            return taken if good else None
        interrupts.check()
        time.sleep(_PAUSE)


def marked(mark: str) -> list[int]:
    """List the processes with ``mark`` in their environment at their start, and forks of them, but no zombies."""
    found = []
    for entry in os.listdir("/proc"):
        # An error if it is another user's, or has ended meanwhile. A zombie has no environment.
        with suppress(OSError):
            if entry.isdecimal() and mark.encode() in Path("/proc", entry, "environ").read_bytes():
                found.append(int(entry))
    return found


def _make_directory() -> Path:
    """Make a directory for temporary files; where ``TMPDIR`` is too long for a socket's address, one below /tmp.

    :raises CannotRun: if that is too long, too.
    """
    for parent in (None, "/tmp"):
        directory = Path(tempfile.mkdtemp(prefix="shared-rpc-verify-", dir=parent))
        if len(os.fsencode(directory / _LONGEST)) <= SOCKET_PATH_LIMIT:
            return directory
        directory.rmdir()
    raise CannotRun(f"the directory for temporary files has too long a name for sockets: {tempfile.gettempdir()}; set TMPDIR")


class Stage:
    """A server (a broker and its worker) and client processes. They end with the block, and the directory with them.

    :param device: as ``serve --device`` takes it.
    :param subject: ``module:class`` of what the client processes do, see ``Subject`` of clients.py.
    """

    def __init__(self, device: str, subject: str, interrupts: Interrupts) -> None:
        self._device = device
        self._subject = subject
        self.interrupts = interrupts
        self.directory: Path | None = None
        self._brokers: list[subprocess.Popen[bytes]] = []
        self._client: Client | None = None

    def __enter__(self) -> Stage:
        if _SERVER._forkserver_pid is not None:
            raise CannotRun("this program has a fork server of multiprocessing; verify in a process that has none")
        with self.interrupts.deferred():
            self.directory = _make_directory()
            self._environ = {**server_environment(), "SHARED_TENSOR_BASE_PATH": str(self.folder / "s")}
            self.socket_path = str(self.folder / "s.sock")
            self._start_server()
            self._start_forkserver()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start_forkserver(self) -> None:
        resource_tracker.ensure_running()  # it outlives the verification, and must not have the mark
        subject, _, _ = self._subject.partition(":")
        # The library starts it with the environment of this process. A directory that it makes for the socket would stay until
        # this process ends: Python 3.11 to 3.14 look here for another one.
        own: Any = process.current_process()
        configured = own._config
        before = configured.get("tempdir")
        configured["tempdir"] = str(self.folder)
        forkserver.set_forkserver_preload(["shared_rpc.extras.verification.forkserver", subject])
        try:
            with environment_of_children({name: self._environ[name] for name in ("PYTHONPATH", "SHARED_TENSOR_BASE_PATH")}):
                forkserver.ensure_running()
        finally:
            forkserver.set_forkserver_preload(["__main__"])  # the default
            configured["tempdir"] = before

    # The server.

    def _start_server(self) -> None:
        words = ["serve", "shared_rpc.extras.verification.app", "--no-preload", "--device", self._device]
        with self.interrupts.deferred(), open(self.folder / "server.log", "ab") as log:
            broker = subprocess.Popen(
                program("shared_rpc.cli", *words, "--socket", self.socket_path, "--idle-exit", str(_ORPHANED)),
                cwd=self.folder,
                env=self._environ,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=log,
                start_new_session=True,  # Ctrl-C is for the verification alone
            )
            self._brokers.append(broker)

    @property
    def folder(self) -> Path:
        """The directory, while there is one."""
        assert self.directory is not None, "the stage is open"
        return self.directory

    @property
    def broker_pid(self) -> int:
        """Id of the server's process."""
        return self._brokers[-1].pid

    def worker_pid(self) -> int:
        """Ask for the id of the process that runs the server's endpoints."""
        return int(self.info()["workers"][0]["pid"])

    def wait_for_server(self) -> None:
        """Wait until the server answers.

        :raises ConnectError: if the server ends, or does not answer in time.
        """
        begin = time.monotonic()
        while True:
            self.interrupts.check()
            try:
                self.client().ping()
                return
            except (ConnectError, ConnectionClosed):
                time.sleep(_PAUSE)
            code = self._brokers[-1].poll()
            if code is not None:
                raise ConnectError(f"the server ended with exit code {code}; {self.last_words('server.log')}")
            if time.monotonic() - begin > _STARTUP:
                raise ConnectError(f"no answer from the server after {_STARTUP:g} s; {self.last_words('server.log')}")

    def restart_server(self) -> None:
        """Replace a server that has ended or does not answer, and wait for the new one."""
        self._brokers[-1].kill()
        self._brokers[-1].wait()
        self._start_server()
        self.wait_for_server()

    def ensure_server(self) -> None:
        """Ensure that a server answers, and has closed the sessions of the check before."""
        try:
            self.client().ping()
        except SharedRPCError:
            self.restart_server()
        within(_END, lambda: self.info()["sessions"] <= 1, self.interrupts)

    def client(self) -> Client:
        """Return this process's own client."""
        if self._client is None:
            self._client = Client(socket_path=self.socket_path, timeout=30.0, connect_timeout=0.0)
        return self._client

    def info(self) -> ServerInfo:
        """Ask the server about itself."""
        return self.client().get_server_info()

    def log(self, name: str = "server.log") -> str:
        """Return the last lines of a log."""
        try:
            lines = (self.folder / name).read_text(errors="replace").splitlines()
        except OSError:
            return ""
        return "\n".join([line.rstrip() for line in lines if line.strip()][-_LINES:])

    def last_words(self, name: str) -> str:
        """Return the end of a log, for an error."""
        said = self.log(name).splitlines()[-3:]
        return f"its last words: {' | '.join(line.strip() for line in said)}" if said else "it said nothing"

    # Client processes.

    def connect(self) -> VerifyClient:
        """Start a new client process.

        :raises CannotRun: if the fork server has ended.
        """
        try:
            return VerifyClient(self.socket_path, self._subject, self.folder)
        except (EOFError, OSError) as error:
            raise CannotRun(f"the process that forks clients has ended; {self.last_words(LOG)}") from error

    @contextmanager
    def clients(self, count: int) -> Iterator[list[VerifyClient]]:
        """Start new client processes, which end with the block."""
        with ExitStack() as stack:
            yield [stack.enter_context(self.connect()) for _ in range(count)]

    # All of them.

    def pids(self) -> list[int]:
        """List all processes of the verification but this one."""
        return [pid for pid in marked(self.folder.name) if pid != os.getpid()]

    def close(self) -> None:
        """End all processes, and remove the directory. A second call does nothing."""
        with self.interrupts.deferred():
            if self.directory is None:
                return
            if self._client is not None:
                self._client.close()
            for broker in self._brokers:
                broker.terminate()
            for broker in self._brokers:
                with suppress(subprocess.TimeoutExpired):
                    broker.wait(_END)
            within(_END, self._kill_all, self.interrupts)
            for broker in self._brokers:
                broker.wait()
            if _SERVER._forkserver_pid is not None:
                with suppress(OSError):
                    os.kill(_SERVER._forkserver_pid, signal.SIGKILL)  # a restarted one has no mark
                _SERVER._stop()  # collects it; no public name for that up to 3.14
            multiprocessing.active_children()  # collects what has ended
            shutil.rmtree(self.directory, ignore_errors=True)
            self.directory = None

    def _kill_all(self) -> bool:
        left = self.pids()
        for pid in left:
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        return not left
