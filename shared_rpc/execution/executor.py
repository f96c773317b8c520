"""The contract of executors, which run endpoints for the server core. The core gets records, made here or elsewhere."""

from __future__ import annotations

from typing import Any, Protocol

from shared_rpc.execution.outcomes import Completed, Failure
from shared_rpc.execution.run import Run
from shared_rpc.memory.records import Record
from shared_rpc.protocol.infos import ExecutorInfo
from shared_rpc.protocol.tasks import Progress


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

    def info(self) -> ExecutorInfo:
        """Return the processes that run endpoints."""

    def reclaim(self) -> None:
        """Give back the memory that only the live value of a dropped object held. Does not wait."""

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
