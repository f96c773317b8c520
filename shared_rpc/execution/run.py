"""One run of an endpoint, shared by an executor and the server's table of runs; and the contract of executors.

Executors run endpoints for the server core, which receives records from this or another process.
"""

from __future__ import annotations

from typing import Any, Generic, Protocol, TypeVar

import msgspec

from shared_rpc.execution.outcomes import Completed, Failure
from shared_rpc.execution.transfer import SessionTransfer, Transfers
from shared_rpc.memory.records import Arguments
from shared_rpc.observability.events import HOOKS, BuildFinished, BuildStarted
from shared_rpc.protocol.infos import ExecutorInfo
from shared_rpc.protocol.specs import EndpointSpec
from shared_rpc.protocol.tasks import Progress

W = TypeVar("W")

#: Arguments for an executor: lowered, or the live ``(args, kwargs)`` of a caller in this process.
CallArguments = Arguments | tuple[tuple[Any, ...], dict[str, Any]]


class Run(msgspec.Struct, Generic[W], eq=False):
    """One run of an endpoint, from the call that starts it to its outcome.

    ``key`` is None if its call has none; ``cached`` is True if the cache would list the result.
    ``refreshes`` is the identity of a refresh's arguments, None if they have none. ``number`` is the run's place in the order
    of opening, from 1 on; in a worker, its number in the broker.

    For the executor: ``publish``: True if a record is needed; a caller in this process needs only the value.
    ``chain``: see :class:`shared_rpc.context.RunContext`. ``background``: True if the run may take long and must not hold up
    calls with waiting callers. ``session`` is the caller's session; ``pooled``: True if the result is for this session alone
    and may lie in its pool; ``shares_slab``: True if a small result may share a segment with others. For events,
    ``request_id`` is that of the call that started it.

    ``begun_at`` is the start of its work on the caller's clock; ``progress`` is its latest progress.
    """

    spec: EndpointSpec
    key: str | None
    arguments: CallArguments
    #: In order of arrival; removal takes constant time.
    waiters: dict[W, None] = msgspec.field(default_factory=dict)
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
    #: True if it builds a candidate; and True if that was invalidated since.
    prepares: bool = False
    invalidated: bool = False
    #: When the run was opened, in Unix seconds.
    created_at: float = 0.0
    running: bool = False
    #: The number of its miss while it waits for a source of records, else 0; and True once the source has that miss.
    miss: int = 0
    offered: bool = False
    #: True if its record came from a source.
    adopted: bool = False
    begun_at: float = 0.0
    progress: Any = None
    #: True once its executor has finished with the run.
    over: bool = False
    #: Private data of the executor.
    place: Any = None

    def report_start(self, server_id: str = "") -> None:
        """Report the start of its work to hooks."""
        if HOOKS.registered:
            HOOKS.emit(BuildStarted(**self._facts(server_id)))

    def report_end(self, seconds: float, error: str, server_id: str = "") -> None:
        """Report the end of its work to hooks.

        :param error: the code of its error, ``""`` for success.
        """
        if HOOKS.registered:
            HOOKS.emit(BuildFinished(**self._facts(server_id), seconds=seconds, error=error))

    def _facts(self, server_id: str) -> dict[str, Any]:
        return {
            "server_id": server_id,
            "endpoint": self.spec.name,
            "request_id": self.request_id,
            "cached": self.cached,
        }


class Owner(Protocol):
    """Starts runs and receives their notifications; on the loop."""

    def began(self, run: Run[Any]) -> None:
        """Handle the start of the run's work: set its ``running``."""

    def progressed(self, run: Run[Any], progress: Progress) -> None:
        """Handle progress reported by the endpoint."""

    def ended(self, run: Run[Any], outcome: Completed | Failure) -> None:
        """Handle the end of the run; an endpoint's exception arrives as a Failure."""


class Executor(Protocol):
    """Runs endpoints."""

    @property
    def transfers(self) -> Transfers[SessionTransfer]:
        """The pools of sessions."""

    def info(self) -> ExecutorInfo:
        """Describe the processes that run endpoints."""

    def reclaim(self) -> None:
        """Release memory held only by the live values of dropped objects. Does not wait."""

    def start(self, run: Run[Any], owner: Owner) -> None:
        """Run an endpoint, and notify the owner.

        The executor takes ownership of the arguments' descriptors.
        """

    def withdraw(self, run: Run[Any]) -> bool:
        """Drop a run that has not begun, without notifying the owner; return False for any other."""

    def cancel(self, run: Run[Any]) -> None:
        """Ask a begun run to stop."""
