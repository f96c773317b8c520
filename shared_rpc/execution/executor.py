"""The contract of executors, which run endpoints for the server core. The core gets records, made here or elsewhere."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Protocol

from shared_rpc.execution.outcomes import Completed, Failure
from shared_rpc.execution.run import Run
from shared_rpc.memory.records import Record
from shared_rpc.protocol.infos import ExecutorInfo
from shared_rpc.protocol.tasks import Progress

__all__ = ["Executor", "Owner"]


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
    def busy(self) -> int:
        """Threads of this process that run an endpoint now."""

    def lend_thread(self) -> AbstractContextManager[None]:
        """Allow one thread more while an endpoint waits for another one, so that waiting does not use up ``max_workers``."""

    def info(self) -> ExecutorInfo:
        """Return the processes that run endpoints."""

    def close(self) -> None:
        """End idle threads: the loop has ended. One that runs an endpoint ends with it, or with the process."""

    def reclaim(self) -> None:
        """Give back the memory that only the live value of a dropped object held. Does not wait."""

    async def finish(self) -> None:
        """End the runs on the loop, which ends after this."""

    def start(self, run: Run[Any], owner: Owner) -> None:
        """Run an endpoint, and notify the owner.

        The arguments' descriptors belong to the executor from here on.
        """

    def withdraw(self, run: Run[Any]) -> bool:
        """Drop a run that has not begun, without notifying the owner. False if it had begun."""

    def cancel(self, run: Run[Any]) -> None:
        """Ask a run that has begun to stop."""

    def abandon(self, run: Run[Any]) -> bool:
        """Drop a result that waits for memory, without notifying the owner; False if there is none."""

    def take_back(self, run: Run[Any], record: Record) -> None:
        """Free the pool's chunks of a result without a receiver."""
