"""Running endpoints: what the server core asks for. It gets a record back, and does not know where that was made."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Protocol

from shared_rpc.memory.records import Record
from shared_rpc.protocol.infos import ExecutorInfo
from shared_rpc.protocol.tasks import Progress
from shared_rpc.server.outcomes import Completed, Failure
from shared_rpc.server.state.runs import Run

__all__ = ["Executor", "Owner"]


class Owner(Protocol):
    """Who had a run started, and is told of it; on the loop."""

    def began(self, run: Run[Any]) -> None:
        """Its work starts, and it is running."""

    def progressed(self, run: Run[Any], progress: Progress) -> None:
        """The endpoint said something."""

    def out_of_memory(self, run: Run[Any], why: str) -> None:
        """The endpoint has ended, and its result waits until its reader gives memory back."""

    def ended(self, run: Run[Any], outcome: Completed | Failure) -> None:
        """The run ended; nothing is raised that the endpoint raised."""


class Executor(Protocol):
    """Where endpoints run."""

    @property
    def busy(self) -> int:
        """Threads of this process that run an endpoint now."""

    def lend_thread(self) -> AbstractContextManager[None]:
        """Entered by an endpoint that waits for another one, so that waiting does not use up ``max_workers``."""

    def info(self) -> ExecutorInfo:
        """Return the processes that run endpoints."""

    def close(self) -> None:
        """The loop has ended. Idle threads end, one that runs an endpoint ends with it, or with the process."""

    def reclaim(self) -> None:
        """An object was dropped: give back the memory that only its live value held. Does not wait."""

    async def finish(self) -> None:
        """End what runs on the loop, which ends after this."""

    def start(self, run: Run[Any], owner: Owner) -> None:
        """Run an endpoint, and tell the owner of it.

        The arguments' descriptors belong to the executor from here on.
        """

    def withdraw(self, run: Run[Any]) -> bool:
        """Drop a run that has not begun: the owner is not told of its end. False if it had begun."""

    def cancel(self, run: Run[Any]) -> None:
        """Ask a run that has begun to stop."""

    def abandon(self, run: Run[Any]) -> bool:
        """Drop a result that waits for memory; False if there is none. The owner is not told of its end then."""

    def take_back(self, run: Run[Any], record: Record) -> None:
        """Nobody was there to take a result: free what it has of a pool."""
