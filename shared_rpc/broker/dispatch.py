"""The runs of a broker: their assignment to workers, the queue, and recovery from a worker's end."""

from __future__ import annotations

import asyncio
import functools
import os
from collections import Counter
from collections.abc import Iterator
from typing import Any

import msgspec

from shared_rpc.broker.supervisor import Supervisor
from shared_rpc.broker.transfer import ForwardedTransfer
from shared_rpc.broker.worker import Worker
from shared_rpc.errors import CapabilityError, ConnectionClosed, EndpointNotFound, ProtocolError, ServerBusy, SharedRPCError
from shared_rpc.execution.outcomes import Completed, Failure
from shared_rpc.execution.run import Owner, Run
from shared_rpc.execution.transfer import Transfers
from shared_rpc.memory.records import Arguments, Record
from shared_rpc.memory.segments import Segment, refer
from shared_rpc.protocol import worker as w
from shared_rpc.protocol.frames import Frame
from shared_rpc.protocol.infos import ExecutorInfo
from shared_rpc.protocol.messages import Message
from shared_rpc.protocol.records import sent_infos
from shared_rpc.server.state.descriptors import open_limit

#: Maximum number of queued calls, and of bytes of their arguments. If none is queued, a call is always admitted.
_RUNS, _NBYTES = 10_000, 1 << 30


class _Place(msgspec.Struct, eq=False):
    """The place of a run: with a worker, or in the backlog.

    ``session`` is the owner of its memory: a task's arguments belong to the session that submitted it.
    """

    owner: Owner
    arguments: Arguments
    session: str
    #: The worker that has the run, and the number of the request there.
    worker: Worker | None = None
    number: int = 0
    #: True if a worker ended before the run had begun there.
    again: bool = False
    #: True if the run's outcome is not reported. Its chunks of the session's pools are returned nevertheless.
    forgotten: bool = False
    timer: asyncio.TimerHandle | None = None


class Backlog:
    """Queued runs, oldest first, within limits on their number, bytes and descriptors.

    Their arguments take at most a quarter of this process's descriptors: objects and clients need some too.

    :param held: the units that queued runs hold; all backlogs of a process share it, and its limits.
    """

    def __init__(self, held: Counter[str], runs: int = _RUNS, nbytes: int = _NBYTES) -> None:
        #: Each run with its weight when it was added: its arguments may have been released since.
        self._runs: dict[Run[Any], dict[str, int]] = {}
        self._limits = {"calls": runs, "bytes": nbytes, "descriptors": open_limit() // 4}
        self._held = held

    def check(self, run: Run[Any], why: str) -> None:
        """Check that one more run may wait.

        :param why: the reason of the wait.
        :raises ServerBusy: if it may not.
        """
        for unit, amount in _weight(run).items():
            if self._held["calls"] and self._held[unit] + amount > self._limits[unit]:
                raise ServerBusy(
                    f"the backlog of calls is full: {self._held['calls']} calls wait, with {self._held['bytes']} bytes and "
                    f"{self._held['descriptors']} descriptors of arguments (at most {self._limits[unit]} {unit}): {why}"
                )

    def add(self, run: Run[Any]) -> None:
        """Add a run."""
        weight = self._runs[run] = _weight(run)
        self._held.update(weight)

    def remove(self, run: Run[Any]) -> bool:
        """Remove a run; return True if it was queued."""
        weight = self._runs.pop(run, None)
        if weight is None:
            return False
        self._held.subtract(weight)
        return True

    def __iter__(self) -> Iterator[Run[Any]]:
        return iter(tuple(self._runs))


def _weight(run: Run[Any]) -> dict[str, int]:
    assert isinstance(run.arguments, Arguments), "calls of a broker come from sessions"
    return {"calls": 1, "bytes": run.arguments.nbytes, "descriptors": len(run.arguments.segments)}


class WorkerExecutor:
    """Runs the endpoints of one provider in the broker's workers. On its loop only.

    :param key: the provider's key.
    :param supervisor: of the workers.
    :param build_timeout: seconds after which the worker of a run that has begun is killed; None for never.
    :param queued: the units that queued runs of all providers hold.
    """

    def __init__(
        self,
        key: str,
        supervisor: Supervisor,
        build_timeout: float | None,
        queued: Counter[str],
    ) -> None:
        self.key = key
        self.transfers: Transfers[ForwardedTransfer] = Transfers(lambda session: ForwardedTransfer(key, session))
        self._supervisor = supervisor
        self._build_timeout = build_timeout
        self._waiting = Backlog(queued)
        #: Runs that workers have, without the withdrawn and abandoned ones.
        self._sent: set[Run[Any]] = set()

    def start(self, run: Run[Any], owner: Owner) -> None:
        """Send a run to a worker as soon as one is available."""
        arguments = run.arguments
        assert isinstance(arguments, Arguments), "calls of a broker come from sessions"
        run.place = _Place(owner, arguments, arguments.session or run.session)
        if self._send_or_end(run):
            return
        try:
            self._waiting.check(run, _awaited(self._able(run)))
        except ServerBusy as error:
            self._end(run, Failure.of(error))
        else:
            self._waiting.add(run)

    def send_waiting(self) -> None:
        """Send queued runs to available workers; fail them if no worker will become available."""
        for run in self._waiting:
            self._send_or_end(run)

    def _able(self, run: Run[Any]) -> list[Worker]:
        """Return the workers that can execute a run."""
        return [worker for worker in self._supervisor.workers if worker.serves(self.key, run.spec.name)]

    def _send_or_end(self, run: Run[Any]) -> bool:
        """Send a run, or end it if no worker will ever execute it; return False if it must wait.

        A worker that does not read gets no more: a queued run can be withdrawn, or sent to another one.
        """
        able = self._able(run)
        worker = min((one for one in able if not one.congested), key=lambda one: len(one.runs), default=None)
        if worker is not None:
            self._send(run, worker)
            return True
        if able:
            return False
        workers, refusal = self._supervisor.workers, self._supervisor.refusal()
        if refusal is None and workers and all(worker.state == "ready" for worker in workers):
            refusal = EndpointNotFound(f"no worker has the endpoint {run.spec.name!r}: the app does not share it any more")
        if refusal is None:
            return False
        self._waiting.remove(run)
        self._end(run, Failure.of(refusal))
        return True

    def _send(self, run: Run[Any], worker: Worker) -> None:
        place: _Place = run.place
        arguments, transfer = place.arguments, self.transfers.find(place.session)
        # Chunks are not returned to a session that has ended.
        lent = transfer is not None
        refs, owners = refer(arguments.segments, worker.arenas.get(place.session, ()) if lent else ())
        body = arguments.body()
        if not lent:
            body["chunks"], refs = [], [msgspec.structs.replace(info, arena=False) for info in sent_infos(refs)]
        message = w.StartRun(
            run.spec.name,
            **body,
            segments=refs,
            pooled=run.pooled and lent,
            chain=sorted(run.chain),
            key=self.key,
            session=place.session,
            background=run.background,
            shares_slab=run.shares_slab,
            request_id=run.request_id,
            cached=run.cached,
        )
        self._waiting.remove(run)
        take, lost = functools.partial(self._take, run), functools.partial(self._lost, run)
        try:
            place.number = worker.requests.begin(message, take, lost, b"".join(arguments.skeletons), owners=owners)
        except ProtocolError as error:
            refusal = CapabilityError(f"cannot send the call of {run.spec.name!r} to worker {worker.pid}: {error}")
            self._end(run, Failure.of(refusal))
            return
        if lent and (arenas := [info.id for info in sent_infos(refs) if info.arena]):
            worker.arenas.setdefault(place.session, set()).update(arenas)
        place.worker = worker
        worker.runs.add(run)
        self._sent.add(run)
        if transfer is not None:
            transfer.sent(worker, arguments.chunks)

    def withdraw(self, run: Run[Any]) -> bool:
        """Drop a run that has not begun; return False for any other."""
        if self._waiting.remove(run):
            run.place.arguments.close()
            return True
        if run not in self._sent or run.running:
            return False
        # Its worker still has it, and its outcome is not reported.
        run.place.forgotten = True
        self._release(run)
        run.place.worker.send(w.Withdraw(), run.place.number)
        return True

    def cancel(self, run: Run[Any]) -> None:
        """Ask a run to stop."""
        if run in self._sent:
            run.place.worker.send(w.Stop(), run.place.number)

    def _release(self, run: Run[Any]) -> None:
        self._sent.discard(run)
        if not run.running:
            # The worker returns the client's chunks itself.
            run.place.arguments.pooled = {}
            run.place.arguments.close()

    # Messages of workers.

    def _take(self, run: Run[Any], message: Message, frame: Frame) -> bool:
        """Handle a message about a run; return True if it was the last one."""
        place: _Place = run.place
        if isinstance(message, (w.RunFinished, w.RunFailed, w.RunWithdrawn)):
            assert place.worker is not None, "it has sent the message"
            place.worker.runs.discard(run)
            if place.timer is not None:
                place.timer.cancel()
            freed, transfer = message.freed, self.transfers.find(place.session)
            if freed and transfer is not None:
                transfer.came_back(place.worker, freed)
            if not isinstance(message, w.RunWithdrawn):
                self._ended(run, message, frame)
            return True
        if isinstance(message, w.RunStarted):
            self._began(run)
        elif isinstance(message, w.RunProgress) and not place.forgotten:
            place.owner.progressed(run, message.progress)
        return False

    def _began(self, run: Run[Any]) -> None:
        place: _Place = run.place
        # Kept until now: the run could still have moved to another worker.
        place.arguments.pooled = {}
        place.arguments.close()
        if self._build_timeout is not None:
            place.timer = asyncio.get_running_loop().call_later(self._build_timeout, self._overdue, run)
        if not place.forgotten:
            place.owner.began(run)

    def _overdue(self, run: Run[Any]) -> None:
        run.place.worker.kill(f"{run.spec.name}() took longer than the build timeout of {self._build_timeout:g} s")

    def _ended(self, run: Run[Any], message: w.RunFinished | w.RunFailed, frame: Frame) -> None:
        place: _Place = run.place
        transfer = self.transfers.find(place.session)
        outcome = _outcome(message, frame, transfer)
        record = outcome.record if isinstance(outcome, Completed) else None
        if transfer is not None and record is not None:
            assert place.worker is not None, "it has sent the message"
            transfer.made(place.worker, record)
        if not place.forgotten:
            self._release(run)
            place.owner.ended(run, outcome)
        elif record is not None:
            self.transfers.release_results(run.session, record.chunks)
            record.close()

    def _end(self, run: Run[Any], failure: Failure) -> None:
        run.place.arguments.close()
        run.place.owner.ended(run, failure)

    def _lost(self, run: Run[Any], crash: SharedRPCError) -> None:
        """Retry the run of an ended worker on another one, once; fail a run that had begun."""
        place: _Place = run.place
        self._sent.discard(run)
        if place.timer is not None:
            place.timer.cancel()
        if place.forgotten:
            return
        if run.running or place.again:
            place.arguments.pooled = {}
            self._end(run, Failure.of(crash))
        else:
            place.worker, place.again = None, True
            self._waiting.add(run)
            if (transfer := self.transfers.find(place.session)) is not None:
                transfer.not_begun(place.arguments.chunks)

    def stop(self) -> None:
        """End all runs at the end of the broker."""
        gone = Failure.of(ConnectionClosed(f"the broker (pid {os.getpid()}) was stopped before the call ended"))
        for run in (*self._waiting, *self._sent):
            self._waiting.remove(run)
            self._release(run)
            run.place.owner.ended(run, gone)

    def info(self) -> ExecutorInfo:
        """Describe the workers and their zygote."""
        return {
            "workers": [worker.info() for worker in self._supervisor.workers],
            "zygote": self._supervisor.zygote.info(),
        }

    def lost(self, worker: Worker) -> None:
        """Release the sessions' memory in an ended worker."""
        for transfer in self.transfers.all():
            transfer.lost(worker)

    def reclaim(self) -> None:
        """Notify the workers that an object was dropped."""
        for worker in self._supervisor.workers:
            worker.reclaim()


def _outcome(message: w.RunFinished | w.RunFailed, frame: Frame, transfer: ForwardedTransfer | None) -> Completed | Failure:
    """Return the outcome reported by a worker. Its record owns the frame's descriptors.

    :raises ProtocolError: if there are too few descriptors, or too many.
    """
    if isinstance(message, w.RunFailed):
        return Failure(message.code, message.text, message.detail, frame.payload)
    new = len(sent_infos(message.segments))
    if len(frame.fds) != new:
        raise ProtocolError(f"the worker sent a result with {len(frame.fds)} descriptors instead of {new}")
    for number, ref in enumerate(message.segments):
        if isinstance(ref, str):
            arena = transfer.result_segment(ref) if transfer is not None else None
            if arena is None:
                return Failure.of(ConnectionClosed("the client's session ended before its call"))
            frame.known[number] = arena.owner
    segments = Segment.received(message.segments, frame)
    return Completed(
        Record(
            frame.payload,
            bytes(message.table),
            segments,
            message.nbytes,
            message.device,
            message.chunks,
            private_nbytes=message.private_nbytes,
        ),
        None,
    )


def _awaited(able: list[Worker]) -> str:
    """Describe the reason of a wait, with the workers able to execute the runs."""
    if not able:
        return "no worker has loaded the app yet: wait and call again"
    pids = ", ".join(str(worker.pid) for worker in able)
    return (
        f"worker {pids} does not read its connection: if it is stopped, 'kill -CONT' resumes it; if it is stuck, 'kill -KILL' "
        f"replaces it"
    )
