"""One run of an endpoint, as an executor and the server's table of runs have it; and the contract of executors.

Executors run endpoints for the server core, which gets records, made here or elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from shared_rpc.execution.outcomes import Completed, Failure
from shared_rpc.execution.session_transfer import SessionTransfer, Transfers
from shared_rpc.memory.records import Arguments
from shared_rpc.protocol.infos import ExecutorInfo
from shared_rpc.protocol.specs import EndpointSpec
from shared_rpc.protocol.tasks import Progress

W = TypeVar("W")

#: The arguments for an executor: lowered, or the live ``(args, kwargs)`` of a caller in this process.
CallArguments = Arguments | tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(eq=False, slots=True)
class Run(Generic[W]):
    """One run of an endpoint, from the call that starts it to its outcome.

    ``key`` is None where its result is not to be cached, or no longer, and then ``former_key`` is the earlier key.
    ``refreshes`` is for a refresh the identity of its arguments, None if they have none. ``number`` is its place in the
    order in which runs were opened, from 1 on; in a worker, its broker's number for it.

    For the executor: ``publish``: whether a record is needed; a caller in this process needs only the value.
    ``chain``: see :class:`shared_rpc.context.RunContext`. ``background``: whether it may take long, and must not hold up calls
    that are waited for. ``session`` is whose call it is, and ``pooled`` whether the result is for this session alone, and may
    lie in its pool; ``shares_slab`` whether it may share a segment with others if it is small. ``request_id`` is that of the
    call which it was started for, ``cached`` whether the cache would list its result: both are for events.

    ``begun_at`` is when its work began, on the caller's clock; ``progress`` is its latest progress.
    """

    spec: EndpointSpec
    key: str | None
    arguments: CallArguments
    #: In the order in which they came; leaving takes constant time.
    waiters: dict[W, None] = field(default_factory=dict)
    refreshes: str | None = None
    publish: bool = True
    chain: frozenset[str] = frozenset()
    background: bool = False
    session: str = ""
    pooled: bool = False
    shares_slab: bool = False
    request_id: str = ""
    cached: bool = False
    number: int = 0
    former_key: str | None = None
    #: Whether it builds a candidate, whose key is ``former_key``, and whether that was invalidated since.
    prepares: bool = False
    invalidated: bool = False
    #: When the run was opened, in Unix seconds.
    created_at: float = 0.0
    running: bool = False
    #: The number of its miss while it waits for a source of records, else 0; and whether the source was given that.
    miss: int = 0
    offered: bool = False
    #: Whether its record came from a source.
    adopted: bool = False
    begun_at: float = 0.0
    progress: Any = None
    #: Whether its executor has finished with the run.
    over: bool = False
    #: The reservation for its result.
    reservation: Any = None
    #: The executor's own data about the run.
    place: Any = None


class Owner(Protocol):
    """The owner of a run, which had it started and is notified of it; on the loop."""

    def began(self, run: Run[Any]) -> None:
        """Note that the run's work starts."""

    def progressed(self, run: Run[Any], progress: Progress) -> None:
        """Note progress that the endpoint reports."""

    def out_of_memory(self, run: Run[Any], why: str) -> None:
        """Note that the endpoint has ended, and that its result waits until its reader gives memory back."""

    def ended(self, run: Run[Any], outcome: Completed | Failure) -> None:
        """Note that the run ended; nothing is raised that the endpoint raised."""


class Executor(Protocol):
    """The place where endpoints run."""

    @property
    def transfers(self) -> Transfers[SessionTransfer]:
        """The pools of sessions."""

    def info(self) -> ExecutorInfo:
        """Return the processes that run endpoints."""

    def reclaim(self) -> None:
        """Give back the memory that only the live value of a dropped object held. Does not wait."""

    def start(self, run: Run[Any], owner: Owner) -> None:
        """Run an endpoint, and notify the owner.

        The arguments' descriptors belong to the executor from here on.
        """

    def withdraw(self, run: Run[Any]) -> bool:
        """Drop a run that has not begun, or a result that waits for memory, without notifying the owner. False for others."""

    def cancel(self, run: Run[Any]) -> None:
        """Ask a run that has begun to stop."""
