"""Runs on their way to workers and back: who gets which, what waits, and what becomes of them when a worker ends."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import msgspec

from shared_rpc.broker.lanes import RelayedLane
from shared_rpc.broker.worker import Handler, Worker
from shared_rpc.errors import CapabilityError, ConnectionClosed, EndpointNotFound, ProtocolError, ServerBusy, SharedRPCError
from shared_rpc.memory.segments import Segment
from shared_rpc.protocol import worker as w
from shared_rpc.protocol.frames import Frame
from shared_rpc.protocol.messages import Message
from shared_rpc.protocol.records import Arguments, Record
from shared_rpc.server.executor import Invocation
from shared_rpc.server.outcomes import Failure, Produced
from shared_rpc.server.session_lanes import Lanes
from shared_rpc.server.state.descriptors import open_limit

__all__ = ["Backlog", "Dispatcher", "Relayed", "WorkerExecutor"]

#: Calls that wait, and bytes of what came with them. A call that comes alone is taken whatever it brings.
_RUNS, _NBYTES = 10_000, 1 << 30


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


class Backlog:
    """Runs that no worker has been sent, oldest first. What is taken out leaves nothing behind: its arguments are all there is.

    Of the descriptors that this process may have, waiting arguments take at most a quarter: objects and clients need some too.
    """

    def __init__(self, runs: int = _RUNS, nbytes: int = _NBYTES) -> None:
        #: With what each took of the limits when it came: its arguments may have been let go since.
        self._runs: dict[Invocation, tuple[Relayed, dict[str, int]]] = {}
        self._limits = {"calls": runs, "bytes": nbytes, "descriptors": open_limit() // 4}
        self._held = dict.fromkeys(self._limits, 0)

    def check(self, run: Relayed, why: str) -> None:
        """See that one more may wait.

        :param why: what all of them wait for.
        :raises ServerBusy: if not.
        """
        for unit, amount in _weight(run).items():
            if self._runs and self._held[unit] + amount > self._limits[unit]:
                raise ServerBusy(
                    f"{len(self._runs)} calls wait to be run, with {self._held['bytes']} bytes and {self._held['descriptors']} "
                    f"descriptors of arguments, and there is no room for more (at most {self._limits[unit]} {unit}): {why}"
                )

    def add(self, run: Relayed) -> None:
        """It waits from now on."""
        weight = _weight(run)
        self._runs[run.invocation] = run, weight
        for unit, amount in weight.items():
            self._held[unit] += amount

    def take(self, invocation: Invocation) -> Relayed | None:
        """It waits no more; None if it did not."""
        run, weight = self._runs.pop(invocation, (None, {}))
        for unit, amount in weight.items():
            self._held[unit] -= amount
        return run

    def __iter__(self) -> Iterator[Relayed]:
        return iter([run for run, _ in self._runs.values()])

    def __len__(self) -> int:
        return len(self._runs)


def _weight(run: Relayed) -> dict[str, int]:
    return {"calls": 1, "bytes": run.arguments.nbytes, "descriptors": len(run.arguments.segments)}


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

    @property
    def handlers(self) -> Mapping[type[Message], Handler]:
        """What is to be called with each message about a run."""
        return {
            w.Begun: self._began,
            w.Said: self._progressed,
            w.Hungry: self._starved,
            w.Ran: self.ended,
            w.Failed: self.ended,
            w.Withdrawn: self._withdrawn,
        }

    def _began(self, worker: Worker, message: w.Begun, frame: Frame) -> None:
        run = worker.runs.get(frame.request_id)
        if run is None or run.forgotten:
            return
        run.begun = True
        # Until now it might have gone to another worker.
        run.arguments.take_loans()
        run.arguments.close()
        if self._build_timeout is not None:
            run.timer = asyncio.get_running_loop().call_later(self._build_timeout, self._overdue, run)
        run.invocation.on_begin()

    def _progressed(self, worker: Worker, message: w.Said, frame: Frame) -> None:
        run = worker.runs.get(frame.request_id)
        if run is not None and not run.forgotten:
            run.invocation.on_progress(message.progress)

    def _starved(self, worker: Worker, message: w.Hungry, frame: Frame) -> None:
        run = worker.runs.get(frame.request_id)
        if run is None or run.forgotten:
            return
        run.hungry = True
        if run.timer is not None:
            run.timer.cancel()
        run.invocation.on_starved(message.why)

    def _withdrawn(self, worker: Worker, message: w.Withdrawn, frame: Frame) -> None:
        run = worker.runs.pop(frame.request_id, None)
        if run is not None:
            run.executor.came_back(run, message.returned)

    def _overdue(self, run: Relayed) -> None:
        assert run.worker is not None, "it has begun"
        run.worker.kill(f"{run.invocation.spec.name}() took longer than the build timeout of {self._build_timeout:g} s")

    def ended(self, worker: Worker, message: w.Ran | w.Failed, frame: Frame) -> None:
        """Take the outcome of a run."""
        run = worker.runs.pop(frame.request_id, None)
        if run is None:
            return
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


class WorkerExecutor:
    """Runs the endpoints of one provider in the broker's workers.

    :param key: the provider's.
    :param zygote: tells of what workers are forks of.
    """

    def __init__(
        self, key: str, dispatcher: Dispatcher, workers: Callable[[], list[Worker]], zygote: Callable[[], dict[str, Any]]
    ) -> None:
        self.key = key
        self.lanes: Lanes[RelayedLane] = Lanes(lambda session: RelayedLane(key, session))
        self._dispatcher = dispatcher
        self._workers = workers
        self._zygote = zygote

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
        return {"workers": [worker.facts() for worker in self._workers()], "zygote": self._zygote()}

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
            worker.reclaim()

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


def message_of(run: Relayed, worker: Worker, lane: RelayedLane | None) -> tuple[w.Run, tuple[int, ...]]:
    """A run as it travels, and the descriptors that go with it."""
    invocation, arguments = run.invocation, run.arguments
    known = worker.arenas.get(run.session, set())
    #: Of a session that has ended nothing comes back: its memory is that of any caller.
    arenas = sorted(arguments.arenas) if lane is not None and arguments.chunks else []
    kept = [number for number in arenas if arguments.segments[number].info.id in known]
    message = w.Run(
        invocation.spec.name,
        arguments.args,
        arguments.kwargs,
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
        request_id=invocation.request_id,
        cached=invocation.cached,
    )
    fds = tuple(segment.fileno() for number, segment in enumerate(arguments.segments) if number not in kept)
    return message, fds


def outcome_of(message: w.Ran | w.Failed, frame: Frame) -> Produced | Failure:
    """How a run ended, by its worker's word. The frame's descriptors belong to the record."""
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
            private_nbytes=message.private_nbytes,
        ),
        None,
    )


def _awaited(able: list[Worker]) -> str:
    """What runs wait for that some workers could do."""
    if not able:
        return "no worker has loaded the app yet"
    pids = ", ".join(str(worker.pid) for worker in able)
    return (
        f"worker {pids} does not read what it is sent: 'kill -CONT' lets one go on that is stopped, 'kill -KILL' has another "
        f"one take the place of one that is stuck"
    )
