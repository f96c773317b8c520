"""What only events tell, added up: how calls ended and how long they took, errors by code, leases reclaimed."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable

from shared_rpc.errors import SharedRPCError, class_of
from shared_rpc.instrumentation import (
    BuildFinished,
    CallFinished,
    Event,
    LeaseEnded,
    LeaseGiven,
    ObjectFreed,
    ObjectPublished,
    RequestFailed,
    SessionClosed,
    SessionOpened,
    TaskChanged,
)

__all__ = ["BUILD_BUCKETS", "CALL_BUCKETS", "Durations", "Meter"]

#: Seconds. From a short call on an idle machine to one that loads a checkpoint.
CALL_BUCKETS = (
    *(50e-6, 100e-6, 250e-6, 500e-6),
    *(1e-3, 2.5e-3, 5e-3, 10e-3, 25e-3, 50e-3, 100e-3, 250e-3, 500e-3),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0),
)
BUILD_BUCKETS = (1e-3, 10e-3, 100e-3, 500e-3, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0)


class Durations:
    """A histogram of seconds.

    :param bounds: of the buckets; there is one more for what took longer.
    """

    __slots__ = ("_bounds", "_counts", "sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def plus(self, *others: Durations) -> Durations:
        """All of them together, in a histogram of its own."""
        made = Durations(self._bounds)
        made._counts = [sum(counts) for counts in zip(self._counts, *(other._counts for other in others), strict=True)]
        made.sum = sum((other.sum for other in others), self.sum)
        return made

    def add(self, seconds: float) -> None:
        """One more."""
        self._counts[bisect_left(self._bounds, seconds)] += 1
        self.sum += seconds

    @property
    def count(self) -> int:
        """How many."""
        return sum(self._counts)

    def cumulated(self) -> list[tuple[str, int]]:
        """How many took at most so many seconds, the last of them any number."""
        names = [*(f"{bound:g}" for bound in self._bounds), "+Inf"]
        total, found = 0, []
        for name, count in zip(names, self._counts, strict=True):
            total += count
            found.append((name, total))
        return found


class Meter:
    """A hook that adds up the events of one server; it is called in the thread of that server's loop, and read there.

    Of endpoints it knows those that events name, and events name registered ones only: there are no more than these.
    """

    def __init__(self, server_id: str) -> None:
        self._server_id = server_id
        #: By endpoint and outcome.
        self.calls: defaultdict[tuple[str, str], Durations] = defaultdict(lambda: Durations(CALL_BUCKETS))
        #: By endpoint.
        self.builds: defaultdict[str, Durations] = defaultdict(lambda: Durations(BUILD_BUCKETS))
        self.failed_builds: Counter[str] = Counter()
        #: By code.
        self.errors: Counter[str] = Counter()
        #: By status; every task was once pending.
        self.task_changes: Counter[str] = Counter()
        #: Whatever else there is to count, by its name.
        self.totals: Counter[str] = Counter()
        self._handlers: dict[type[Event], Callable[..., None]] = {
            CallFinished: self._call_finished,
            BuildFinished: self._build_finished,
            RequestFailed: self._request_failed,
            TaskChanged: self._task_changed,
            LeaseEnded: self._lease_ended,
            LeaseGiven: lambda event: self._count("leases_given"),
            ObjectPublished: lambda event: self._count("objects_published"),
            ObjectFreed: lambda event: self._count("objects_freed"),
            SessionOpened: lambda event: self._count("sessions_opened"),
            SessionClosed: self._session_closed,
        }

    def __call__(self, event: Event) -> None:
        """See :data:`shared_rpc.instrumentation.Hook`."""
        handler = self._handlers.get(type(event))
        if handler is not None and event.server_id == self._server_id:
            handler(event)

    def _count(self, name: str) -> None:
        self.totals[name] += 1

    def _call_finished(self, event: CallFinished) -> None:
        self.calls[event.endpoint, event.outcome].add(event.seconds)

    def _build_finished(self, event: BuildFinished) -> None:
        self.builds[event.endpoint].add(event.seconds)
        if event.error:
            self.failed_builds[event.endpoint] += 1

    def _request_failed(self, event: RequestFailed) -> None:
        self.errors[_known(event.code)] += 1

    def _task_changed(self, event: TaskChanged) -> None:
        self.task_changes[event.status] += 1

    def _lease_ended(self, event: LeaseEnded) -> None:
        self._count("leases_ended")
        if event.reclaimed:
            self._count("leases_reclaimed")

    def _session_closed(self, event: SessionClosed) -> None:
        self._count("sessions_closed" if event.clean else "sessions_lost")


def _known(code: str) -> str:
    """A code of this library's: what a worker says must not make labels without end."""
    kind = class_of(code)
    return kind.code if issubclass(kind, SharedRPCError) else code
