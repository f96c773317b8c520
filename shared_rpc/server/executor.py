"""Running endpoints: what the server core asks for. It gets a record back, and does not know where that was made."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from shared_rpc.protocol.records import Arguments, Record
from shared_rpc.protocol.specs import EndpointSpec
from shared_rpc.protocol.tasks import Progress
from shared_rpc.server.outcomes import Failure, Produced

__all__ = ["Executor", "Invocation"]


@dataclass(eq=False, slots=True)
class Invocation:
    """One run to do. ``arguments`` are lowered, or the live ``(args, kwargs)`` of a caller in this process.

    ``publish``: whether a record is needed; a caller in this process can do with the value alone. ``chain``: see
    :class:`Run`. ``background``: whether it may take long, and must not hold up calls that are waited for.

    ``session`` is whose call it is, and ``pooled`` whether the result is for this session alone, and may lie in its pool.

    ``on_begin`` is called when its work starts, ``on_progress`` with what the endpoint says, and ``on_starved`` with why, if
    the result has to wait until its reader gives memory back; all of them on the loop. ``request_id`` is that of the call which
    it was started for, ``cached`` whether the cache would list its result: both are for those who listen.
    """

    spec: EndpointSpec
    arguments: Arguments | tuple[tuple[Any, ...], dict[str, Any]]
    publish: bool
    chain: frozenset[str]
    background: bool
    session: str
    pooled: bool
    on_starved: Callable[[str], None]
    on_begin: Callable[[], None]
    on_progress: Callable[[Progress], None]
    request_id: str = ""
    cached: bool = False


class Executor(Protocol):
    """Where endpoints run."""

    @property
    def busy(self) -> int:
        """Threads of this process that run an endpoint now."""

    def lend_thread(self) -> AbstractContextManager[None]:
        """Entered by an endpoint that waits for another one, so that waiting does not use up ``max_workers``."""

    def facts(self) -> dict[str, Any]:
        """What ``get_server_info`` tells of it: ``workers``, where endpoints run in processes of their own."""

    def close(self) -> None:
        """The loop has ended. Idle threads end, one that runs an endpoint ends with it, or with the process."""

    def reclaim(self) -> None:
        """An object was dropped: give back the memory that only its live value held. Does not wait."""

    async def finish(self) -> None:
        """End what runs on the loop, which ends after this."""

    def start(self, invocation: Invocation, done: Callable[[Produced | Failure], None]) -> None:
        """Run an endpoint. ``done`` is called on the loop with the outcome; nothing is raised that the endpoint raised.

        The arguments' descriptors belong to the executor from here on.
        """

    def withdraw(self, invocation: Invocation) -> bool:
        """Drop a run that has not begun: ``done`` is not called for it. False if it had begun."""

    def cancel(self, invocation: Invocation) -> None:
        """Ask a run that has begun to stop."""

    def abandon(self, invocation: Invocation) -> bool:
        """Drop a result that waits for memory; False if there is none. ``done`` is not called for it then."""

    def take_back(self, invocation: Invocation, record: Record) -> None:
        """Nobody was there to take a result: free what it has of a pool."""
