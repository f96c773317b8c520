"""One run between broker and worker: what is known of it, its message, and its outcome."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from shared_rpc.broker.lanes import RelayedLane
from shared_rpc.broker.worker import Worker
from shared_rpc.memory.segments import Segment
from shared_rpc.protocol import worker as w
from shared_rpc.protocol.frames import Frame
from shared_rpc.protocol.records import Arguments, Record
from shared_rpc.protocol.values import encode
from shared_rpc.server.executor import Invocation
from shared_rpc.server.outcomes import Failure, Produced

if TYPE_CHECKING:
    from shared_rpc.broker.executor import WorkerExecutor

__all__ = ["Relayed", "message_of", "outcome_of"]


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


def message_of(run: Relayed, worker: Worker, lane: RelayedLane | None) -> tuple[w.Run, tuple[int, ...]]:
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
