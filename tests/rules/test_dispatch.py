"""Runs between broker and workers, message by message: no message that crosses another one is lost."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from shared_rpc.broker.dispatch import WorkerExecutor
from shared_rpc.broker.requests import WorkerRequests
from shared_rpc.broker.worker import Worker
from shared_rpc.errors import ConnectionClosed, ProtocolError, WorkerCrashed
from shared_rpc.execution.outcomes import Completed, Failure
from shared_rpc.execution.run import Run
from shared_rpc.memory.backends.host import HOST
from shared_rpc.memory.records import Arguments
from shared_rpc.memory.segments import Descriptor
from shared_rpc.protocol import worker as w
from shared_rpc.protocol.frames import Frame
from shared_rpc.protocol.messages import Message
from shared_rpc.protocol.records import EMPTY_TABLE
from shared_rpc.protocol.specs import EndpointSpec

KEY, SESSION = "provider", "session"


class Peer:
    """A passive worker, with the messages that it was sent, and the executor's state of it."""

    state = "ready"
    congested = False
    pid = 1
    kill: Callable[[str], None]

    def __init__(self) -> None:
        self.sent: list[tuple[Message, int]] = []
        self.runs: set[Run[Any]] = set()
        self.requests = WorkerRequests(self.send)
        self.arenas: dict[str, set[str]] = {}

    def serves(self, key: str, endpoint: str) -> bool:
        """Whether the worker has loaded the app."""
        return True

    def send(
        self,
        message: Message,
        number: int = 0,
        payload: bytes = b"",
        owners: tuple[Descriptor, ...] = (),
    ) -> None:
        """See :class:`Worker`."""
        self.sent.append((message, number))

    def last(self, kind: type[Message]) -> Any:
        """Return the last message, which must be of that kind."""
        assert isinstance(self.sent[-1][0], kind)
        return self.sent[-1][0]


class Setting:
    """An executor, its workers, and the outcomes of runs."""

    def __init__(self) -> None:
        self.peers = [Peer()]
        supervisor: Any = SimpleNamespace(workers=self.peers, refusal=lambda: None)
        self.executor = WorkerExecutor(KEY, supervisor, None, Counter())
        self.transfer = self.executor.transfers.of(SESSION)
        self.outcomes: list[Completed | Failure] = []
        self.begun = 0

    def start(self, *chunks: int) -> Run[Any]:
        """Start a run with chunks of the client's in its arguments."""
        return self.start_with(Arguments(chunks=list(chunks), pooled=self.transfer.lent(chunks)), session=SESSION)

    def start_with(self, arguments: Arguments, session: str, **options: bool) -> Run[Any]:
        """Start a run made by the test."""
        run: Run[Any] = Run(EndpointSpec("f"), None, arguments, session=session, **{"pooled": True, **options})
        self.executor.start(run, self)
        return run

    def began(self, run: Run[Any]) -> None:
        """See :class:`Owner`."""
        run.running = True
        self.begun += 1

    def ended(self, run: Run[Any], outcome: Completed | Failure) -> None:
        """See :class:`Owner`."""
        self.outcomes.append(outcome)

    def progressed(self, *_: object) -> None:
        """See :class:`Owner`."""

    def said(self, message: Message, number: int, fds: list[int] | None = None) -> None:
        """Deliver a worker's message about a run."""
        frame = Frame(0, number, b"", b"", fds or [])
        with closing(frame):
            self.peers[0].requests.take(message, frame)


@pytest.fixture
def setting() -> Setting:
    """One worker, and no run."""
    return Setting()


@pytest.fixture
def ran() -> Callable[..., tuple[w.RunFinished, list[int]]]:
    """``ran(chunks, returned)``: a result in chunks of an arena, and its descriptors."""

    def make(chunks: list[int], returned: list[int]) -> tuple[w.RunFinished, list[int]]:
        with HOST.create(4096) as segment:
            info, number = msgspec.structs.replace(segment.info, arena=True), os.dup(segment.fileno())
        message = w.RunFinished(msgspec.Raw(EMPTY_TABLE), [info], chunks=chunks, freed=returned, nbytes=4096, private_nbytes=0)
        return message, [number]

    return make


def test_a_result_that_crosses_its_withdrawal_is_released(
    setting: Setting, ran: Callable[..., tuple[w.RunFinished, list[int]]], no_leaks: None
) -> None:
    """The worker had finished the run: no notification, chunks of both pools are returned, descriptors are closed."""
    started = setting.start(7, 8)
    (_, number) = setting.peers[0].sent[-1]
    assert setting.executor.withdraw(started)
    setting.peers[0].last(w.Withdraw)
    setting.said(w.RunStarted(), number)
    message, fds = ran([100], [7, 8])
    setting.said(message, number, fds)
    give = setting.peers[0].last(w.ReleaseChunks)
    assert (give.session, give.chunks) == (SESSION, [100])
    assert setting.transfer.returned() == [7, 8]
    assert (setting.outcomes, setting.begun, setting.peers[0].runs) == ([], 0, set())
    setting.transfer.close()


@pytest.mark.asyncio
async def test_a_run_that_crosses_its_withdrawal_has_a_build_timeout(setting: Setting) -> None:
    """Otherwise a run that hangs would occupy its worker."""
    setting.executor._build_timeout = 0.001
    killed = asyncio.Event()
    setting.peers[0].kill = lambda why: killed.set()
    assert setting.executor.withdraw(setting.start())
    setting.said(w.RunStarted(), setting.peers[0].sent[-1][1])
    await asyncio.wait_for(killed.wait(), 5)
    assert setting.begun == 0


def test_an_arena_is_sent_once(setting: Setting, ran: Callable[..., tuple[w.RunFinished, list[int]]], no_leaks: None) -> None:
    """Later results use the first one's descriptor by the arena's name; a result in an arena that was never sent is refused."""
    first, fds = ran([100], [])
    setting.start(7)
    setting.said(first, setting.peers[0].sent[-1][1], fds)
    again = msgspec.structs.replace(first, chunks=[101], segments=[first.segments[0].id])
    unknown = msgspec.structs.replace(again, segments=["another"])
    for message in (again, unknown):
        setting.start(7)
        setting.said(message, setting.peers[0].sent[-1][1])
    done, known, lost = setting.outcomes
    assert isinstance(done, Completed) and done.record is not None
    assert isinstance(known, Completed) and known.record is not None
    assert known.record.segments[0].info == done.record.segments[0].info
    assert known.record.segments[0].fileno() == done.record.segments[0].fileno()
    assert isinstance(lost, Failure) and lost.code == ConnectionClosed.code
    done.record.close()
    known.record.close()
    setting.transfer.close()


@pytest.mark.parametrize("received", [0, 2])
def test_results_with_a_wrong_number_of_descriptors_are_errors(
    setting: Setting, ran: Callable[..., tuple[w.RunFinished, list[int]]], no_leaks: None, received: int
) -> None:
    """The descriptors are closed; the worker's end, which follows, ends the run."""
    setting.start()
    (_, number) = setting.peers[0].sent[-1]
    setting.said(w.RunStarted(), number)
    message, [fd] = ran([], [])
    fds = [os.dup(fd) for _ in range(received)]
    os.close(fd)
    with pytest.raises(ProtocolError, match=f"{received} descriptors instead of 1"):
        setting.said(message, number, fds)
    setting.peers[0].requests.fail(WorkerCrashed("it was killed"))
    (failure,) = setting.outcomes
    assert isinstance(failure, Failure) and failure.code == WorkerCrashed.code


def test_a_withdrawal_in_time_returns_the_chunks(setting: Setting) -> None:
    """With the worker's confirmation."""
    started = setting.start(7)
    (_, number) = setting.peers[0].sent[-1]
    assert setting.executor.withdraw(started)
    assert setting.transfer.returned() == []
    setting.said(w.RunWithdrawn([7]), number)
    assert setting.transfer.returned() == [7]
    assert setting.peers[0].runs == set()


def test_a_started_run_is_not_withdrawn(setting: Setting) -> None:
    """Others may join it, and its result is cached."""
    started = setting.start()
    (_, number) = setting.peers[0].sent[-1]
    setting.said(w.RunStarted(), number)
    assert not setting.executor.withdraw(started)


def test_the_same_chunks_go_to_the_next_worker(setting: Setting) -> None:
    """With a run that had not begun: they are not returned in between."""
    setting.start(7)
    first = setting.peers.pop()
    first.requests.fail(WorkerCrashed("it was killed"))
    setting.executor.lost(cast("Worker", first))
    assert setting.transfer.returned() == []
    setting.peers.append(Peer())
    setting.executor.send_waiting()
    assert setting.peers[0].last(w.StartRun).chunks == [7]
    second = setting.peers.pop()
    second.requests.fail(WorkerCrashed("it was killed"))
    setting.executor.lost(cast("Worker", second))
    (failure,) = setting.outcomes
    assert isinstance(failure, Failure) and failure.code == WorkerCrashed.code
    assert setting.transfer.returned() == [7]


def test_calls_go_to_the_worker_with_the_least_to_do(setting: Setting) -> None:
    """Each of three gets two of six."""
    setting.peers += [Peer(), Peer()]
    for _ in range(6):
        setting.start()
    assert [len(peer.sent) for peer in setting.peers] == [2, 2, 2]


def test_a_task_uses_its_submitters_memory(setting: Setting) -> None:
    """Its run has no session, but its arguments do: the worker returns them to that session."""
    arguments = Arguments(chunks=[7], pooled=setting.transfer.lent([7]), session=SESSION)
    setting.start_with(arguments, "task 1", background=True, pooled=False)
    run = setting.peers[0].last(w.StartRun)
    assert (run.session, run.chunks) == (SESSION, [7])
    (_, number) = setting.peers[0].sent[-1]
    setting.said(w.RunStarted(), number)
    setting.said(w.RunFailed("error", "", {}, [7]), number)
    assert setting.transfer.returned() == [7]
    assert setting.peers[0].arenas == {}
