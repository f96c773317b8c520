"""Runs on their way to workers and back: who gets which, and what becomes of them when a worker ends."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import msgspec

from shared_rpc.broker.lanes import RelayedLane
from shared_rpc.broker.worker import Worker
from shared_rpc.errors import CapabilityError, ConnectionClosed, EndpointNotFound, ProtocolError, SharedRPCError
from shared_rpc.memory.segments import Segment
from shared_rpc.records import Arguments, Record
from shared_rpc.server.executor import Invocation
from shared_rpc.server.outcomes import Failure, Produced
from shared_rpc.server.session_lanes import Lanes
from shared_rpc.wire import worker as w
from shared_rpc.wire.frames import Frame
from shared_rpc.wire.messages import Message
from shared_rpc.wire.values import encode

__all__ = ["Dispatcher", "Relayed", "WorkerExecutor"]

_log = logging.getLogger("shared_rpc.broker")


@dataclass(eq=False)
class Relayed:
    """One run. It is with a worker, or waits for one."""

    number: int
    executor: WorkerExecutor
    invocation: Invocation
    done: Callable[[Produced | Failure], None]
    worker: Worker | None = None
    begun: bool = False
    hungry: bool = False
    #: Whether a worker has ended under it before it had begun.
    again: bool = False
    #: Whether nobody is to be told how it ends: what it had of the session's pools comes back all the same.
    forgotten: bool = False
    timer: asyncio.TimerHandle | None = field(default=None, repr=False)

    @property
    def arguments(self) -> Arguments:
        """Those of a caller in another process, as all callers of a broker are."""
        assert isinstance(self.invocation.arguments, Arguments), "a broker has no callers of its own"
        return self.invocation.arguments

    @property
    def session(self) -> str:
        """Whose memory it has: a task's arguments are those of the session that submitted it."""
        return self.arguments.session or self.invocation.session


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
        self._waiting: dict[Invocation, Relayed] = {}
        self._sent: dict[Invocation, Relayed] = {}

    def start(self, executor: WorkerExecutor, invocation: Invocation, done: Callable[[Produced | Failure], None]) -> None:
        """Have a worker do a run, as soon as there is one."""
        run = Relayed(next(self._numbers), executor, invocation, done)
        self._waiting[invocation] = run
        self._place(run)

    def look(self) -> None:
        """A worker is there that was not, or none will come any more."""
        for run in tuple(self._waiting.values()):
            self._place(run)

    def _place(self, run: Relayed) -> None:
        workers = self._workers()
        held = run.executor.lane_owner(run)
        able = [worker for worker in workers if worker.serves(run.executor.key, run.invocation.spec.name)]
        if held in able:
            able = [held]
        if able:
            self._send(run, min(able, key=lambda worker: len(worker.runs)))
            return
        refusal = self._refusal()
        if refusal is None and workers and all(worker.state == "ready" for worker in workers):
            refusal = EndpointNotFound(f"no worker has the endpoint {run.invocation.spec.name!r}")
        if refusal is not None:
            del self._waiting[run.invocation]
            self._end(run, Failure.of(refusal))

    def _send(self, run: Relayed, worker: Worker) -> None:
        arguments, lane = run.arguments, run.executor.lanes.find(run.session)
        message, fds = _message(run, worker, lane)
        try:
            worker.send(message, run.number, b"".join(arguments.skeletons), fds)
        except (ProtocolError, OSError) as error:
            del self._waiting[run.invocation]
            self._end(run, Failure.of(CapabilityError(f"the call cannot be handed to a worker: {error}")))
            return
        if message.arenas:
            known = worker.arenas.setdefault(run.session, set())
            known.update(arguments.segments[number].info.id for number in message.arenas)
        del self._waiting[run.invocation]
        self._sent[run.invocation] = worker.runs[run.number] = run
        run.worker = worker
        if lane is not None:
            lane.sent(worker, arguments.chunks)

    def withdraw(self, invocation: Invocation) -> bool:
        """See :class:`Executor`."""
        run = self._waiting.pop(invocation, None)
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
        outcome = _outcome(message, frame)
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
                self._waiting[run.invocation] = run
                lane = run.executor.lanes.find(run.session)
                if lane is not None:
                    lane.not_begun(run.arguments.chunks)

    def stop(self) -> None:
        """The broker ends."""
        gone = Failure.of(ConnectionClosed("the broker was stopped before the call ended"))
        for run in (*self._waiting.values(), *self._sent.values()):
            self._let_go(run)
            run.done(gone)
        self._waiting.clear()


class WorkerExecutor:
    """Runs the endpoints of one provider in the broker's workers.

    :param key: the provider's.
    """

    def __init__(self, key: str, dispatcher: Dispatcher, workers: Callable[[], list[Worker]]) -> None:
        self.key = key
        self.lanes: Lanes[RelayedLane] = Lanes(lambda session: RelayedLane(key, session))
        self._dispatcher = dispatcher
        self._workers = workers

    @property
    def busy(self) -> int:
        """See :class:`Executor`."""
        return 0

    def lend_thread(self) -> AbstractContextManager[None]:
        """See :class:`Executor`."""
        return nullcontext()

    def close(self) -> None:
        """See :class:`Executor`."""

    def facts(self) -> dict[str, Any]:
        """See :class:`Executor`."""
        return {"workers": [worker.facts() for worker in self._workers()]}

    def came_back(self, run: Relayed, chunks: Sequence[int]) -> None:
        """A worker has done with chunks of the client whose run it is."""
        lane = self.lanes.find(run.session)
        if lane is not None and run.worker is not None:
            lane.came_back(run.worker, chunks)

    def lost(self, worker: Worker) -> None:
        """A worker has ended: nobody has anything of its."""
        for lane in self.lanes.all():
            lane.lost(worker)

    async def finish(self) -> None:
        """See :class:`Executor`."""

    def reclaim(self) -> None:
        """See :class:`Executor`."""
        for worker in self._workers():
            worker.send(w.Reclaim())

    def start(self, invocation: Invocation, done: Callable[[Produced | Failure], None]) -> None:
        """See :class:`Executor`."""
        self._dispatcher.start(self, invocation, done)

    def withdraw(self, invocation: Invocation) -> bool:
        """See :class:`Executor`."""
        return self._dispatcher.withdraw(invocation)

    def cancel(self, invocation: Invocation) -> None:
        """See :class:`Executor`."""
        self._dispatcher.cancel(invocation)

    def abandon(self, invocation: Invocation) -> bool:
        """See :class:`Executor`."""
        return self._dispatcher.abandon(invocation)

    def take_back(self, invocation: Invocation, record: Record) -> None:
        """See :class:`Executor`."""
        lane = self.lanes.find(invocation.session)
        if lane is not None:
            lane.give(record.chunks)

    def lane_owner(self, run: Relayed) -> Worker | None:
        """The worker whose results a run takes as arguments: no other one can hold them."""
        lane = self.lanes.find(run.session)
        return lane.owner(run.arguments.held) if lane is not None and run.arguments.held else None


def _message(run: Relayed, worker: Worker, lane: RelayedLane | None) -> tuple[w.Run, tuple[int, ...]]:
    """A run as it travels, and the descriptors that go with it."""
    invocation, arguments = run.invocation, run.arguments
    known = worker.arenas.get(run.session, set())
    #: Of a session that has ended nothing comes back: its memory is that of any caller.
    arenas = sorted(arguments.arenas) if lane is not None and arguments.chunks else []
    kept = [number for number in arenas if arguments.segments[number].info.id in known]
    message = w.Run(
        invocation.spec.name,
        [encode(value) for value in arguments.args],
        {name: encode(value) for name, value in arguments.kwargs.items()},
        table=msgspec.Raw(arguments.table),
        segments=[segment.info for segment in arguments.segments],
        skeletons=[len(skeleton) for skeleton in arguments.skeletons],
        kept=kept,
        arenas=arenas,
        chunks=list(arguments.chunks) if lane is not None else [],
        held=list(arguments.held) if lane is not None else [],
        pooled=invocation.pooled and lane is not None,
        returnable=arguments.returnable and lane is not None,
        chain=sorted(invocation.chain),
        key=run.executor.key,
        session=run.session,
        background=invocation.background,
    )
    fds = tuple(segment.fileno() for number, segment in enumerate(arguments.segments) if number not in kept)
    return message, fds


def _outcome(message: w.Ran | w.Failed, frame: Frame) -> Produced | Failure:
    if isinstance(message, w.Failed):
        return Failure(message.code, message.text, message.detail, frame.payload)
    segments = [Segment(info, fd) for info, fd in zip(message.segments, frame.take_fds(), strict=True)]
    return Produced(
        Record(
            frame.payload,
            bytes(message.table),
            segments,
            message.nbytes,
            message.device,
            message.chunks,
            frozenset(message.arenas),
            own=message.own,
        ),
        None,
    )
