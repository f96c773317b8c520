"""Runs on their way to workers and back: who gets which, and what becomes of them when a worker ends."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from shared_rpc.broker.backlog import Backlog
from shared_rpc.broker.relay import Relayed, message_of, outcome_of
from shared_rpc.broker.worker import Worker
from shared_rpc.errors import CapabilityError, ConnectionClosed, EndpointNotFound, ProtocolError, ServerBusy, SharedRPCError
from shared_rpc.protocol import worker as w
from shared_rpc.protocol.frames import Frame
from shared_rpc.protocol.messages import Message
from shared_rpc.server.executor import Invocation
from shared_rpc.server.outcomes import Failure, Produced

if TYPE_CHECKING:
    from shared_rpc.broker.executor import WorkerExecutor

__all__ = ["Dispatcher"]

_log = logging.getLogger("shared_rpc.broker")


class Dispatcher:
    """All runs of a broker. On its loop only.

    :param workers: those that get new runs.
    :param refusal: why no worker will come, None where one is there or may come.
    :param build_timeout: seconds after which a run that has begun costs its worker its life; None for never.
    """

    def __init__(
        self, workers: Callable[[], list[Worker]], refusal: Callable[[], SharedRPCError | None], build_timeout: float | None
    ) -> None:
        self._workers = workers
        self._refusal = refusal
        self._build_timeout = build_timeout
        self._numbers = itertools.cycle(range(1, 1 << 32))
        self._waiting = Backlog()
        self._sent: dict[Invocation, Relayed] = {}

    def start(self, executor: WorkerExecutor, invocation: Invocation, done: Callable[[Produced | Failure], None]) -> None:
        """Have a worker do a run, as soon as there is one."""
        run = Relayed(next(self._numbers), executor, invocation, done)
        able = self._able(run)
        if self._place(run, able):
            return
        try:
            self._waiting.check(run, _awaited(able))
        except ServerBusy as error:
            self._end(run, Failure.of(error))
        else:
            self._waiting.add(run)

    def look(self) -> None:
        """A worker is there that was not, or reads again, or none will come any more."""
        for run in self._waiting:
            self._place(run, self._able(run))

    def _able(self, run: Relayed) -> list[Worker]:
        """The workers that can do a run."""
        held = run.executor.lane_owner(run)
        able = [worker for worker in self._workers() if worker.serves(run.executor.key, run.invocation.spec.name)]
        return [held] if held in able else able

    def _place(self, run: Relayed, able: list[Worker]) -> bool:
        """Send a run, or end it where no worker will ever do it; False if it has to wait.

        A worker that does not read gets nothing more: what waits here can be taken back, and go to another one.
        """
        reading = [worker for worker in able if not worker.congested]
        if reading:
            self._send(run, min(reading, key=lambda worker: len(worker.runs)))
            return True
        if able:
            return False
        workers, refusal = self._workers(), self._refusal()
        if refusal is None and workers and all(worker.state == "ready" for worker in workers):
            refusal = EndpointNotFound(f"no worker has the endpoint {run.invocation.spec.name!r}")
        if refusal is None:
            return False
        self._waiting.take(run.invocation)
        self._end(run, Failure.of(refusal))
        return True

    def _send(self, run: Relayed, worker: Worker) -> None:
        arguments, lane = run.arguments, run.executor.lanes.find(run.session)
        message, fds = message_of(run, worker, lane)
        try:
            worker.send(message, run.number, b"".join(arguments.skeletons), fds)
        except (ProtocolError, OSError) as error:
            self._waiting.take(run.invocation)
            self._end(run, Failure.of(CapabilityError(f"the call cannot be handed to a worker: {error}")))
            return
        if message.arenas:
            known = worker.arenas.setdefault(run.session, set())
            known.update(arguments.segments[number].info.id for number in message.arenas)
        self._waiting.take(run.invocation)
        self._sent[run.invocation] = worker.runs[run.number] = run
        run.worker = worker
        if lane is not None:
            lane.sent(worker, arguments.chunks)

    def withdraw(self, invocation: Invocation) -> bool:
        """See :class:`Executor`."""
        run = self._waiting.take(invocation)
        if run is not None:
            run.arguments.close()
            return True
        run = self._sent.get(invocation)
        if run is None or run.begun:
            return False
        self._forget(run, w.Withdraw())
        return True

    def cancel(self, invocation: Invocation) -> None:
        """See :class:`Executor`."""
        run = self._sent.get(invocation)
        if run is not None and run.worker is not None:
            run.worker.send(w.Stop(), run.number)

    def abandon(self, invocation: Invocation) -> bool:
        """See :class:`Executor`."""
        run = self._sent.get(invocation)
        if run is None or not run.hungry:
            return False
        self._forget(run, w.Drop())
        return True

    def _forget(self, run: Relayed, message: Message) -> None:
        """Nobody is to be told how a run ends; its worker still has it."""
        run.forgotten = True
        self._let_go(run)
        assert run.worker is not None, "it was sent to one"
        run.worker.send(message, run.number)

    def _let_go(self, run: Relayed) -> None:
        self._sent.pop(run.invocation, None)
        if run.timer is not None:
            run.timer.cancel()
        # What a worker was given of the client's comes back from there.
        run.arguments.take_loans()
        run.arguments.close()

    # What workers say.

    def take(self, worker: Worker, message: Message, frame: Frame) -> bool:
        """A message about a run; False if it is about none."""
        run = worker.runs.get(frame.request_id)
        if isinstance(message, (w.Ran, w.Failed)):
            if run is not None:
                self._ended(worker, run, message, frame)
        elif isinstance(message, w.Withdrawn):
            if run is not None:
                del worker.runs[run.number]
                run.executor.came_back(run, message.returned)
        elif isinstance(message, (w.Begun, w.Said, w.Hungry)):
            if run is not None and not run.forgotten:
                self._went_on(run, message)
        else:
            return False
        return True

    def _went_on(self, run: Relayed, message: w.Begun | w.Said | w.Hungry) -> None:
        if isinstance(message, w.Begun):
            run.begun = True
            # Until now it might have gone to another worker.
            run.arguments.take_loans()
            run.arguments.close()
            if self._build_timeout is not None:
                run.timer = asyncio.get_running_loop().call_later(self._build_timeout, self._overdue, run)
            run.invocation.on_begin()
        elif isinstance(message, w.Said):
            run.invocation.on_progress(message.progress)
        else:
            run.hungry = True
            if run.timer is not None:
                run.timer.cancel()
            run.invocation.on_starved(message.why)

    def _overdue(self, run: Relayed) -> None:
        assert run.worker is not None, "it has begun"
        run.worker.kill(f"{run.invocation.spec.name}() took longer than the build timeout of {self._build_timeout:g} s")

    def _ended(self, worker: Worker, run: Relayed, message: w.Ran | w.Failed, frame: Frame) -> None:
        del worker.runs[run.number]
        outcome = outcome_of(message, frame)
        record = outcome.record if isinstance(outcome, Produced) else None
        lane = run.executor.lanes.find(run.session)
        if lane is not None and record is not None:
            lane.made(worker, record)
        run.executor.came_back(run, message.returned)
        if not run.forgotten:
            self._let_go(run)
            run.done(outcome)
        elif record is not None:
            run.executor.take_back(run.invocation, record)
            record.close()

    def _end(self, run: Relayed, failure: Failure) -> None:
        run.arguments.close()
        run.done(failure)

    def lost(self, worker: Worker, crash: SharedRPCError) -> None:
        """A worker has ended. What had not begun there is for another one, once: see :meth:`look`."""
        for run in tuple(worker.runs.values()):
            self._sent.pop(run.invocation, None)
            del worker.runs[run.number]
            if run.timer is not None:
                run.timer.cancel()
            if run.forgotten:
                continue
            if run.begun or run.again:
                run.arguments.take_loans()
                self._end(run, Failure.of(crash))
            else:
                run.worker, run.again = None, True
                self._waiting.add(run)
                lane = run.executor.lanes.find(run.session)
                if lane is not None:
                    lane.not_begun(run.arguments.chunks)

    def stop(self) -> None:
        """The broker ends."""
        gone = Failure.of(ConnectionClosed("the broker was stopped before the call ended"))
        for run in (*self._waiting, *self._sent.values()):
            self._waiting.take(run.invocation)
            self._let_go(run)
            run.done(gone)


def _awaited(able: list[Worker]) -> str:
    """What runs wait for that some workers could do."""
    if not able:
        return "no worker has loaded the app yet"
    pids = ", ".join(str(worker.pid) for worker in able)
    return (
        f"worker {pids} does not read what it is sent: 'kill -CONT' lets one go on that is stopped, 'kill -KILL' has another "
        f"one take the place of one that is stuck"
    )
