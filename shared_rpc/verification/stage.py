"""The processes of a verification, in a directory of their own, and their end.

Every process below a verification has the directory's name in its environment, so all of them can be found, whoever started
them and whoever their parent is now. That is how :meth:`Stage.close` leaves nothing running.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from shared_rpc import Client
from shared_rpc.errors import ConnectError, ConnectionClosed, SharedRPCError
from shared_rpc.settings import SOCKET_PATH_LIMIT, server_environment
from shared_rpc.verification.clients import ClientFailed, RemoteClient
from shared_rpc.verification.interrupts import Interrupts
from shared_rpc.verification.processes import marked

__all__ = ["CannotRun", "Stage", "within"]

#: Seconds for a process to start, which imports torch, perhaps from a cold disk; and for one to end.
_STARTUP, _END = 120.0, 3.0
#: Seconds between two looks at what another process does.
_PAUSE = 0.002
#: Lines of a log that are shown.
_LINES = 20
#: Seconds after which a server ends by itself that a verification left which was killed with SIGKILL.
_ORPHANED = 60.0


class CannotRun(Exception):
    """There is nothing to verify: no server comes up, or there is no such device, or not enough memory."""


def within(seconds: float, condition: Callable[[], bool], interrupts: Interrupts | None = None) -> float | None:
    """Seconds until another process has made a condition true; None if it has not in time."""
    begin = time.monotonic()
    while True:
        good = condition()
        taken = time.monotonic() - begin
        if good:
            return taken
        if taken > seconds:
            return None
        if interrupts is not None:
            interrupts.check()
        time.sleep(_PAUSE)


#: The longest name that a socket has in the directory.
_LONGEST = "nursery.new"


def _make_directory() -> Path:
    """A directory for temporary files; where ``TMPDIR`` is too long for a socket's address, one below /tmp.

    :raises CannotRun: if that is too long, too.
    """
    for parent in (None, "/tmp"):
        directory = Path(tempfile.mkdtemp(prefix="shared-rpc-verify-", dir=parent))
        if len(os.fsencode(directory / _LONGEST)) <= SOCKET_PATH_LIMIT:
            return directory
        directory.rmdir()
    raise CannotRun(f"the directory for temporary files has too long a name for sockets: {tempfile.gettempdir()}; set TMPDIR")


class Stage:
    """A server (a broker and its worker), and client processes. They end with the block, and the directory with them.

    :param device: as ``serve --device`` takes it.
    :param subject: ``module:class`` of what the client processes do, see :class:`~shared_rpc.verification.subject.Subject`.
    """

    def __init__(self, device: str, subject: str, interrupts: Interrupts) -> None:
        self._device = device
        self._subject = subject
        self.interrupts = interrupts
        self.directory: Path | None = None
        self._processes: list[subprocess.Popen[str]] = []
        #: How client processes ended, and what the nursery has said of it that is no whole line yet.
        self._ended: dict[int, int] = {}
        self._said = b""
        self._client: Client | None = None

    def __enter__(self) -> Stage:
        with self.interrupts.held():
            self.directory = _make_directory()
            self._environ = {**server_environment(), "SHARED_TENSOR_BASE_PATH": str(self.folder / "s")}
        self.socket_path = str(self.folder / "s.sock")
        self._broker = self._start_server()
        words = [str(self.folder / "nursery"), self.socket_path, self._subject]
        self._nursery = self._start("nursery", "-m", "shared_rpc.verification.nursery", *words)
        assert self._nursery.stdout is not None, "it is a pipe"
        os.set_blocking(self._nursery.stdout.fileno(), False)
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self, name: str, *words: str) -> subprocess.Popen[str]:
        with self.interrupts.held(), open(self.folder / f"{name}.log", "ab") as log:
            process = subprocess.Popen(
                [sys.executable, *words],
                cwd=self.folder,
                env=self._environ,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,  # Ctrl-C is for the verification alone
            )
            self._processes.append(process)
        return process

    def wait_until_ready(self) -> None:
        """Return when server and nursery are there.

        :raises CannotRun: if they do not come up.
        """
        try:
            self.wait_for_server()
        except SharedRPCError as error:
            raise CannotRun(f"the server does not start: {error}") from error
        nursery = self.folder / "nursery"
        if within(_STARTUP, lambda: nursery.exists() or self._nursery.poll() is not None, self.interrupts) is None:
            raise CannotRun(f"the process that forks clients is not ready after {_STARTUP:g} s; {self.last_words('nursery')}")
        if self._nursery.poll() is not None:
            raise CannotRun(f"the process that forks clients has ended; {self.last_words('nursery')}")

    # The server.

    def _start_server(self) -> subprocess.Popen[str]:
        words = ["serve", "shared_rpc.verification.app", "--no-preload", "--device", self._device, "--socket", self.socket_path]
        return self._start("server", "-m", "shared_rpc.cli", *words, "--idle-exit", str(_ORPHANED))

    @property
    def folder(self) -> Path:
        """The directory, while there is one."""
        assert self.directory is not None, "the stage is open"
        return self.directory

    @property
    def broker_pid(self) -> int:
        """The server's process."""
        return self._broker.pid

    def worker_pid(self) -> int:
        """The process that runs the server's endpoints, and has made what it holds."""
        return int(self.client().get_server_info()["workers"][0]["pid"])

    def wait_for_server(self) -> None:
        """Return when it answers.

        :raises ConnectError: if it ends, or does not answer in time.
        """
        client = self.client()
        begin = time.monotonic()
        while True:
            self.interrupts.check()
            try:
                client.ping()
                return
            except (ConnectError, ConnectionClosed):
                time.sleep(_PAUSE)
            if self._broker.poll() is not None:
                code = self._broker.returncode
                raise ConnectError(f"the server ended with exit code {code}; {self.last_words('server')}")
            if time.monotonic() - begin > _STARTUP:
                raise ConnectError(f"no answer from the server after {_STARTUP:g} s; {self.last_words('server')}")

    def restart_server(self) -> None:
        """Another one in place of one that has ended or is beyond help; return when it answers."""
        if self._broker.poll() is None:
            self._broker.kill()
        self._broker.wait()
        self._broker = self._start_server()
        self.wait_for_server()

    def ensure_server(self) -> None:
        """One that answers, whatever the check before has left."""
        try:
            self.client().ping()
        except SharedRPCError:
            self.restart_server()

    def wait_until_quiet(self) -> None:
        """Give the server a moment to notice that the clients of the check before have gone."""
        within(_END, lambda: self.info()["sessions"] <= 1, self.interrupts)

    def client(self) -> Client:
        """This process' own, for asking."""
        if self._client is None:
            self._client = Client(socket_path=self.socket_path, timeout=30.0, connect_timeout=0.0)
        return self._client

    def info(self) -> dict[str, Any]:
        """What the server tells of itself."""
        return self.client().get_server_info()

    def log(self, name: str) -> str:
        """What a process wrote to standard error, the last lines of it."""
        try:
            lines = (self.folder / f"{name}.log").read_text(errors="replace").splitlines()
        except OSError:
            return ""
        return "\n".join([line.rstrip() for line in lines if line.strip()][-_LINES:])

    def last_words(self, name: str) -> str:
        """The end of its log, for an error."""
        said = self.log(name).splitlines()[-3:]
        return f"its last words: {' | '.join(line.strip() for line in said)}" if said else "it said nothing"

    # Client processes.

    def connect(self) -> RemoteClient:
        """A new client process."""
        return RemoteClient(self.folder / "nursery", self._exit_code)

    @contextmanager
    def clients(self, count: int) -> Iterator[list[RemoteClient]]:
        """So many new client processes."""
        with ExitStack() as stack:
            yield [stack.enter_context(self.connect()) for _ in range(count)]

    def _exit_code(self, pid: int) -> int:
        if within(_STARTUP, lambda: self._has_ended(pid), self.interrupts) is None:
            raise ClientFailed(f"client process {pid} does not end")
        return self._ended.pop(pid)

    def _has_ended(self, pid: int) -> bool:
        assert self._nursery.stdout is not None, "it is a pipe"
        with suppress(BlockingIOError):
            said = os.read(self._nursery.stdout.fileno(), 1 << 16)
            if not said:
                raise ClientFailed(f"the process that forks clients has ended; {self.last_words('nursery')}")
            self._said += said
        *lines, self._said = self._said.split(b"\n")
        for ended in map(json.loads, lines):
            self._ended[ended["pid"]] = ended["code"]
        return pid in self._ended

    # All of them.

    def pids(self) -> list[int]:
        """All processes there are now."""
        return [pid for pid in marked(self.folder.name) if pid != os.getpid()]

    def close(self) -> None:
        """End all processes, and remove the directory. To do it once more does no harm."""
        with self.interrupts.held():
            if self.directory is None:
                return
            if self._client is not None:
                self._client.close()
            for process in self._processes:
                process.terminate()
            for process in self._processes:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(_END)
            within(_END, self._kill_all)
            for process in self._processes:
                process.wait()
                for pipe in (process.stdin, process.stdout):
                    assert pipe is not None, "both are pipes"
                    pipe.close()
            shutil.rmtree(self.directory, ignore_errors=True)
            self.directory = None

    def _kill_all(self) -> bool:
        left = self.pids()
        for pid in left:
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        return not left
