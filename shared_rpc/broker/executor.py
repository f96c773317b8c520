"""An executor whose endpoints run in worker processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from shared_rpc.broker.dispatch import Dispatcher
from shared_rpc.broker.lanes import RelayedLane
from shared_rpc.broker.relay import Relayed
from shared_rpc.broker.worker import Worker
from shared_rpc.protocol.records import Record
from shared_rpc.server.executor import Invocation
from shared_rpc.server.outcomes import Failure, Produced
from shared_rpc.server.session_lanes import Lanes

__all__ = ["WorkerExecutor"]


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
