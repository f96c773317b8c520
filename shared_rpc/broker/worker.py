"""One worker process, from its broker's side: its providers, its runs, and its end."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any, Literal
from weakref import WeakSet

from shared_rpc.broker.requests import WorkerRequests
from shared_rpc.errors import WorkerCrashed
from shared_rpc.execution.child import Child, Process, last_lines
from shared_rpc.execution.stream import FramedStream
from shared_rpc.memory.segments import Descriptor
from shared_rpc.protocol import worker as w
from shared_rpc.protocol.catalogue import decode_message
from shared_rpc.protocol.frames import Frame
from shared_rpc.protocol.infos import WorkerInfo
from shared_rpc.protocol.messages import Message
from shared_rpc.protocol.options import ServeOptions
from shared_rpc.settings import program
from shared_rpc.zygote.process import WatchedProcess

_log = logging.getLogger("shared_rpc.broker")

#: Seconds for a worker to exit after its broker has closed the connection.
_GRACE = 0.6
#: The kernel's counters; `oom_kill` counts kills of the whole host and of control groups at their limits. Linux 4.13, proc(5).
_COUNTS = Path("/proc/vmstat")


#: A handler of a worker's message and its frame.
Handler = Callable[["Worker", Any, Frame], None]
#: Replaces the target on the command line of a worker without an app.
BARE = "--bare"


@dataclass(frozen=True)
class WorkerCommand:
    """The command line of a broker's workers.

    :param target: ``app.py``, ``package.module``, or either with ``:provider``.
    """

    target: str
    options: ServeOptions = field(default_factory=ServeOptions)

    @property
    def bare(self) -> WorkerCommand:
        """The command line of a worker without the app."""
        return replace(self, target=BARE)

    @property
    def folder(self) -> str:
        """The directory of the app's modules."""
        place = self.target.partition(":")[0]
        return os.path.dirname(os.path.realpath(place)) if place.endswith(".py") else os.getcwd()

    def words(self, number: int, fd: int) -> list[str]:
        """Return the arguments after the module's name in a worker's command line.

        :param number: the worker's number, from 0.
        :param fd: its end of the socket pair.
        """
        return [self.target, "--fd", str(fd), "--number", str(number), *self.options.words]

    def program(self, number: int, fd: int) -> list[str]:
        """Return the command line of a new process, see :meth:`words`."""
        return program("shared_rpc.worker", *self.words(number, fd), "--parent", str(os.getpid()))

    def start(self, number: int) -> Begun:
        """Start a worker as a new process."""
        return start_linked(lambda fd: self.program(number, fd))


#: A process, its standard error, and this end of its socket pair.
Begun = tuple[Process, IO[bytes] | None, socket.socket]


def start_linked(words: Callable[[int], Sequence[str]], stdout: int | None = None) -> Begun:
    """Start a process with one end of a socket pair, in its own process group: Ctrl-C at a terminal is for the broker.

    :param words: returns the command line, for the number of the descriptor.
    """
    ours, theirs = socket.socketpair()
    with theirs, ExitStack() as undo:
        undo.callback(ours.close)
        fd, pipe, null = theirs.fileno(), subprocess.PIPE, subprocess.DEVNULL
        process = subprocess.Popen(
            words(fd), pass_fds=(fd,), stdin=null, stdout=stdout, stderr=pipe, process_group=0, bufsize=0
        )
        undo.pop_all()
    return process, process.stderr, ours


class Worker:
    """A worker process. On the broker's loop only.

    :param number: the worker's number, from 0.
    :param begun: its process if it is a fork; otherwise a new one is started.
    :param restarts: number of earlier restarts of this worker number after crashes.
    :param handlers: handlers of its messages outside of requests.
    :param ended: called once, when the process has ended and all its messages are processed.
    :param caught_up: called when a congested worker reads again.
    """

    def __init__(
        self,
        command: WorkerCommand,
        number: int,
        handlers: Mapping[type[Message], Handler],
        ended: Callable[[Worker], None],
        caught_up: Callable[[], None],
        restarts: int = 0,
        begun: Begun | None = None,
    ) -> None:
        self.number = number
        self.restarts = restarts
        #: True for a worker without the app.
        self.bare = command.target == BARE
        self.device = command.options.device_of(number)
        self.state: Literal["starting", "ready", "draining", "ended"] = "starting"
        self.started = time.monotonic()
        self._kills = _oom_kills()
        #: The worker's latest message about each provider, by the provider's key.
        self.served: dict[str, w.Serve] = {}
        #: Runs sent to the worker.
        self.runs: set[Any] = set()
        #: Arenas of clients that the worker has mapped, by session.
        self.arenas: dict[str, set[str]] = {}
        #: Open descriptors of memory that ends with it.
        self.memory: WeakSet[Descriptor] = WeakSet()
        #: The reason why the broker ended the worker.
        self.condemned = ""
        #: The worker's reason for refusing the app.
        self.refusal: Exception | None = None
        self._handlers = handlers
        self._ended = ended
        self._caught_up = caught_up
        self._loop = asyncio.get_running_loop()
        process, errors, ours = begun or command.start(number)
        self.forked = isinstance(process, WatchedProcess)
        #: True once the worker has reported that the app is loaded.
        self.loaded = False
        #: Done with the outcome of loading the app, or once no start or reload waits for that any more.
        self.loading: asyncio.Future[None] = self._loop.create_future()
        self.loading.add_done_callback(lambda loading: loading.exception())  # of several failures only one is reported
        with ExitStack() as undo:
            undo.callback(ours.close)
            fd = process.fileno() if isinstance(process, WatchedProcess) else -1
            self.child = Child(process, errors, self._on_exit, fd=fd)
            undo.callback(self.child.end, 0.0)
            self._link = FramedStream(ours, self._handle, self._hung_up, self._reads)
            #: Sends nothing to an ended worker.
            self.send = self._link.send
            self.requests = WorkerRequests(self.send)
            self._link.start()
            undo.pop_all()

    @property
    def pid(self) -> int:
        """Its process id."""
        return self.child.pid

    def serves(self, key: str, endpoint: str) -> bool:
        """Return True if it can be sent a run of an endpoint now."""
        served = self.served.get(key)
        if served is None or self.state == "ended":
            return False
        return self.state == "ready" or any(spec.name == endpoint for spec in served.endpoints)

    @property
    def congested(self) -> bool:
        """True if sent bytes are unread: the worker is stopped, its loop is stuck, or it has not been scheduled yet."""
        return self._link.congested

    def reclaim(self) -> None:
        """Notify it of a dropped object, now or when it reads again."""
        if not self._link.congested:
            self.send(w.Reclaim())

    def _reads(self) -> None:
        self.send(w.Reclaim())
        self._caught_up()

    def info(self) -> WorkerInfo:
        """Describe the worker."""
        return {
            "pid": self.pid,
            "number": self.number,
            "device": self.device,
            "state": self.state,
            "runs": len(self.runs),
            "restarts": self.restarts,
            "uptime": time.monotonic() - self.started,
        }

    def settle(self, error: Exception | None = None) -> None:
        """End the wait for the worker to load the app."""
        if self.loading.done():
            return
        if error is None:
            self.loading.set_result(None)
        else:
            self.loading.set_exception(error)

    def kill(self, why: str) -> None:
        """Kill it now; callers of its runs get ``why`` as the reason."""
        if self.state != "ended":
            self.condemned = self.condemned or why
            self.child.kill()

    def retire(self) -> None:
        """End it as soon as it has no request left."""
        if self.state != "ended":
            self.state = "draining"
            if not len(self.requests):
                self.hang_up()

    def hang_up(self) -> None:
        """Close the connection, so that it exits soon."""
        self.state = "draining"
        self._link.close()
        self._loop.call_later(_GRACE, self.kill, "it did not exit in time")

    def end(self, until: float) -> None:
        """End it with its broker.

        :param until: the time of the monotonic clock at which it is killed.
        """
        self.child.end(until)
        self.state = "ended"

    def _handle(self, frame: Frame) -> None:
        message = decode_message(frame)
        if frame.request_id:
            self.requests.take(message, frame)
        else:
            self._handlers[type(message)](self, message, frame)
        if self.state == "draining":
            self.retire()

    def _hung_up(self, error: Exception | None) -> None:
        if error is not None:
            _log.error("cannot handle a message of worker %d: %s", self.pid, error, exc_info=error)
            self.kill(f"the broker cannot handle a message of it: {error}")
        self._link.close()
        # Most have ended. A worker that has closed its connection is useless, whatever it still does.
        self._loop.call_later(_GRACE, self.kill, "it closed its connection to the broker")

    def _on_exit(self) -> None:
        self._link.drain()
        self._link.close()
        self.state = "ended"
        self._ended(self)

    def crash(self) -> WorkerCrashed:
        """Describe its end as an error."""
        code, name = self.child.code, self.child.signal_name
        assert code is not None, "wait() has returned"
        reason = self.condemned or (self._memory_shortage() if name == "SIGKILL" else "")
        why = f" ({reason})" if reason else ""
        tail = self.child.last_output()
        last = f"; last lines of its standard error: {last_lines(tail)}" if tail else ""
        return WorkerCrashed(
            f"the worker (pid {self.pid}) {self.child.how()}{why}{last}",
            signal=name,
            exit_code=code if code >= 0 else None,
            stderr=tail,
        )

    def _memory_shortage(self) -> str:
        killed = _oom_kills() - self._kills
        if not killed:
            return ""
        return (
            f"probably for lack of memory: {killed} OOM kill(s) since the worker began. The limit of its control group or the "
            f"host's memory is reached, and cached objects use a part of it: see 'shared-rpc objects', max_bytes= and quotas="
        )


def _oom_kills() -> int:
    """Return the number of processes killed by the kernel for lack of memory since boot; 0 if the counter is missing."""
    with suppress(OSError):
        for line in _COUNTS.read_text().splitlines():
            name, _, count = line.partition(" ")
            if name == "oom_kill":
                return int(count)
    return 0
