"""Subjects of comparison, in the terms of the benchmarks."""

from __future__ import annotations

from typing import Any, Protocol

__all__ = ["Held", "Subject"]


class Held(Protocol):
    """A managed object in the hands of a client."""

    @property
    def value(self) -> Any:
        """The object."""

    def release(self) -> object:
        """Give it back."""


class Subject(Protocol):
    """A client of one of the servers, in the measuring process."""

    name: str

    def ping(self) -> object:
        """Make one round trip."""

    def call(self, endpoint: str, *args: Any) -> Any:
        """Call a direct endpoint of :class:`benchmarks.workload.Workload`."""

    def attach(self, endpoint: str, *args: Any) -> Held:
        """Call a managed endpoint."""

    def task(self, endpoint: str) -> Any:
        """Submit an endpoint, and wait for its result."""

    def close(self) -> None:
        """Hang up."""
