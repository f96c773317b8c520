"""The zygote of a broker's workers: created once a worker has reported the app's imports, replaced when these change."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from typing import Any, Literal

import anyio
import anyio.to_thread

from shared_rpc.broker.worker import Begun, WorkerCommand, start_linked
from shared_rpc.execution.child import Child, last_lines
from shared_rpc.protocol.infos import ZygoteInfo
from shared_rpc.protocol.worker import Loaded
from shared_rpc.settings import environment, program
from shared_rpc.zygote.process import WatchedProcess, resident_bytes
from shared_rpc.zygote.wire import GO, PADDING, Lost, ask, framed, receive, send

_log = logging.getLogger("shared_rpc.broker")

#: Seconds between a worker's report of its imports and the start of a zygote with them: several workers report in sequence,
#: and a short-lived broker needs no zygote.
_SETTLE = 2.0
#: Maximum seconds for all imports of a zygote.
_PREPARATION = 600.0
#: Descriptor number of a worker's link: libraries that the zygote imports may have opened files with the lowest numbers.
_LINK = 100
#: Seconds without an answer after which a zygote counts as stuck. A fork takes 0.02 to 0.1 s.
_PATIENCE = 2.0
#: Seconds for a killed zygote to end.
_ENDING = 0.5
#: Maximum number of packages excluded from zygotes because they made an earlier one unfit for forks.
_LEFT_OUT = 7
#: Consecutive failures of zygotes or forks after which no more are started.
_FAILURES = 3


class _Failed(Exception):
    """A failure of a zygote; the text is the reason."""


class _Running:
    """A zygote's process, watched by the loop without blocking it.

    :param imports: the imports of its creation.
    :param lost: called when the process has ended.
    :raises OSError, RuntimeError: if it cannot be started or watched.
    """

    def __init__(self, imports: Loaded, lost: Callable[[_Running], object]) -> None:
        self.imports = imports
        #: The number of its modules, and those that it could not import, with the reasons.
        self.modules = 0
        self.dropped: dict[str, str] = {}
        words = ("--parent", str(os.getpid()), PADDING)
        begun = start_linked(lambda fd: program("shared_rpc.zygote", "--fd", str(fd), *words), subprocess.DEVNULL)
        process, errors, self._socket = begun
        with ExitStack() as opened:
            opened.enter_context(self._socket)
            self.child = Child(process, errors, lambda: lost(self), passes_on=False)
            opened.pop_all()

    async def prepare(self, **request: Any) -> dict[str, Any]:
        """Import modules in it; return the answer. See :meth:`shared_rpc.zygote.serving.Zygote.prepare`.

        :raises _Failed: if there is no answer; the zygote has been ended then.
        """

        def prepared() -> dict[str, Any]:
            send(self._socket, framed({"type": "Preload", **request}))
            return receive(self._socket)[0]

        return await self._exchange(self._socket, prepared, _PREPARATION)

    async def fork(self, request: dict[str, Any], fds: Sequence[int]) -> tuple[dict[str, Any], socket.socket]:
        """Fork a process from it; return the answer, and the connection to the watcher. One at a time.

        On cancellation the process ends and the zygote continues.

        :raises _Failed: if there is no answer; the zygote has been ended then.
        """
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                socket.send_fds(self._socket, [GO], [theirs.fileno()])
            answer = await self._exchange(ours, lambda: ask(ours, request, fds), _PATIENCE)
            if answer["type"] == "Forked":
                ours.sendall(GO)
            return answer, ours
        except BaseException:
            with suppress(OSError):
                ours.shutdown(socket.SHUT_RDWR)  # wakes the thread, and the fork ends, if this is cancelled
            ours.close()
            raise

    async def _exchange(self, sock: socket.socket, exchange: Callable[[], dict[str, Any]], seconds: float) -> dict[str, Any]:
        """Exchange messages in a thread, with a timeout of ``seconds`` for each, and return the answer."""
        sock.settimeout(seconds)
        try:
            return await anyio.to_thread.run_sync(exchange, abandon_on_cancel=True)
        except TimeoutError:
            self.end()
            raise _Failed(f"the zygote (pid {self.child.pid}) did not answer within {seconds:g} s") from None
        except (OSError, Lost) as error:
            with anyio.move_on_after(_ENDING):
                await self.child.exited.wait()
            raise _Failed(f"{self.ended()}: {error}") from error

    def ended(self) -> str:
        """End the process if it is running; describe its end."""
        how = self.child.how()
        text = last_lines(self.child.last_output()) if self.child.exited.is_set() else ""
        self.end()
        return f"the zygote (pid {self.child.pid}) {how}" + (f": {text}" if text else "")

    def end(self) -> None:
        """Kill the zygote. Its forks continue. The kernel needs time to free its memory."""
        self._socket.close()
        self.child.kill()


class WorkerZygote:
    """Starts workers as forks where possible. On the broker's loop only.

    :param command: its options say whether there is a zygote; otherwise every worker is a new process.
    """

    def __init__(self, command: WorkerCommand) -> None:
        enabled = command.options.preload
        self._command = command
        self._state: Literal["off", "waiting", "starting", "ready"] = "waiting" if enabled else "off"
        self._why = f"it is started {_SETTLE:g} s after a worker has loaded the app" if enabled else "--no-preload"
        self._imports: Loaded | None = None
        #: Packages that make a zygote unfit for forks, and the reasons.
        self._left_out: dict[str, str] = {}
        self._running: _Running | None = None
        #: Set if a zygote, or another one, must be made.
        self._due = asyncio.Event()
        #: True after a fork that may have ended because of its zygote: the next worker is a new process.
        self._suspected = False
        self._asking = anyio.Lock()
        self._failures = 0

    def info(self) -> ZygoteInfo:
        """Describe the zygote."""
        info: ZygoteInfo = {"state": self._state}
        if self._why:
            info["why"] = self._why
        if self._running is not None and self._state == "ready":
            info |= {"pid": self._running.child.pid, "modules": self._running.modules}
            info["rss"] = resident_bytes(self._running.child.pid)
            info["dropped"] = self._running.dropped | self._left_out
        return info

    async def run(self) -> None:
        """Create zygotes on demand until cancelled."""
        try:
            while True:
                await self._due.wait()
                await anyio.sleep(_SETTLE)
                self._due.clear()
                if self._state != "off" and self._imports is not None:
                    await self._make(self._imports)
        finally:
            running, self._running = self._running, None
            if running is not None:
                running.end()
                await running.child.reap(_ENDING)

    def _end(self, state: Literal["off", "waiting", "starting"], why: str) -> None:
        """End the zygote, if there is one."""
        if self._running is not None:
            self._running.end()
            self._running = None
        self._state, self._why = state, why

    def learn(self, imports: Loaded, forked: bool) -> None:
        """Record the imports of a worker that has loaded the app: the next zygote gets those of the last new process.

        :param forked: True if it began as a fork. If the app set environment variables, it has restarted as a new process.
        """
        if self._state == "off":
            return
        if not forked:
            self._imports = imports
        elif imports.variables:
            self._give_up(_sets(imports.variables))
        else:
            self._failures = 0
        if self._running is None or self._running.imports != self._imports:
            self._due.set()

    def ended(self, loaded: bool, by_signal: bool) -> None:
        """Handle the end of a fork. If it had not loaded the app, the zygote may be the cause: it is replaced, and the next
        worker is a new process.
        """
        if loaded or self._state != "ready":
            return
        self._suspected = True
        why = "a fork of the zygote ended before it had loaded the app"
        if by_signal:
            self._fail(why)
        else:
            self._end("waiting", why)
            self._due.set()

    def _lost(self, running: _Running) -> None:
        # A pending request to it fails as well, and replaces it.
        if running is self._running and self._state == "ready" and not self._asking.locked():
            self._fail(running.ended())

    def _fail(self, why: str) -> None:
        """Replace the zygote because of a failure; after too many, there is no other one."""
        self._failures += 1
        if self._failures >= _FAILURES:
            self._give_up(f"{why}; {self._failures} failures in a row")
        else:
            _log.warning("%s", why)
            self._end("waiting", why)
            self._due.set()

    def _give_up(self, why: str) -> None:
        self._end("off", why)
        _log.warning("from now on workers are new processes instead of forks of a zygote: %s", why)

    async def _make(self, imports: Loaded) -> None:
        """Start a zygote with the app's imports in place of an earlier one."""
        async with self._asking:
            self._end("starting", "")
        begin = time.monotonic()
        try:
            running = self._running = _Running(imports, self._lost)
            modules = [name for name in imports.installed if _top(name) not in self._left_out]
            answer = await running.prepare(modules=modules, own=imports.own)
        except (_Failed, OSError, RuntimeError) as error:
            if self._state == "starting":
                self._fail(f"cannot start a zygote: {error}")
            return
        if running is not self._running:  # given up since
            return
        dropped: dict[str, str] = answer.get("dropped", {})
        if by_app := imports.variables.items() - answer.get("variables", imports.variables).items():
            self._give_up(_sets(dict(by_app)))
        elif answer["type"] == "Ready":
            running.modules, running.dropped = answer["modules"], dropped
            self._state = "ready"
            took = time.monotonic() - begin
            _log.info("zygote (pid %d) ready with %d modules in %.1f s", running.child.pid, running.modules, took)
            if running.child.exited.is_set():
                self._lost(running)
        elif (top := _top(answer["module"])) and len(self._left_out) < _LEFT_OUT:
            dropped = {top: answer["why"]}
            self._left_out |= dropped
            self._end("waiting", answer["why"])
            self._due.set()  # the next one is made without that package
        else:
            self._give_up(answer["why"])
        for name, why in dropped.items():
            _log.warning("the zygote does not import %s, which workers do: %s", name, why)

    async def begin(self, number: int) -> Begun | None:
        """Start a worker as a fork; return None if it must be a new process."""
        async with self._asking:
            suspected, self._suspected = self._suspected, False
            if suspected or self._running is None or self._state != "ready":
                return None
            try:
                return await self._fork(self._running, number)
            except (_Failed, OSError) as error:
                self._fail(str(error))
                return None

    async def _fork(self, running: _Running, number: int) -> Begun | None:
        request = {
            "type": "Fork",
            "words": ["-m", "shared_rpc.worker", *self._command.words(number, _LINK), "--forked"],
            "options": program("")[1:-2],
            "variables": environment(),
            "fds": [0, 1, 2, _LINK],
            "folders": [self._command.folder],
            "blocked": [int(one) for one in signal.pthread_sigmask(signal.SIG_BLOCK, ())],
        }
        with ExitStack() as ours:
            with ExitStack() as theirs:
                link, other = socket.socketpair()
                ours.enter_context(link)
                theirs.enter_context(other)
                reading, writing = os.pipe2(os.O_CLOEXEC)
                theirs.callback(os.close, writing)
                errors = ours.enter_context(os.fdopen(reading, "rb", 0))
                nothing = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
                theirs.callback(os.close, nothing)
                folder = os.open(".", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
                theirs.callback(os.close, folder)
                answer, watcher = await running.fork(request, [nothing, 1, writing, other.fileno(), folder])
            if answer["type"] == "Forked":
                ours.pop_all()
                return WatchedProcess(answer["pid"], watcher), errors, link
            watcher.close()
        if answer.get("stale"):
            _log.info("the zygote (pid %d) is replaced: %s", running.child.pid, answer["why"])
            self._end("waiting", answer["why"])
            self._left_out.clear()
            self._due.set()
        else:
            _log.warning("a worker starts as a new process instead of a fork: %s", answer.get("why", answer))
        return None


def _top(module: str) -> str:
    """Return the top-level package of a module."""
    return module.partition(".")[0]


def _sets(variables: Iterable[str]) -> str:
    names = ", ".join(sorted(variables))
    return (
        f"the app sets {names} while it is loaded, which imports of a zygote could not have read; to have one, set it in the "
        "environment of 'shared-rpc serve'"
    )
