"""Declarations of metrics, and the metrics counted from events. Each is declared once: here, or by the part that owns it.

The declarations need no prometheus-client; :mod:`shared_rpc.observability.collector` exports them. The names are those of
``docs/reference/metrics.md``. Labels have bounded values: the name of a registered endpoint, a device, a state, a code of an
error, the number of a worker.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, Generic, Literal, NamedTuple, TypeVar, get_args

from shared_rpc.errors import class_of
from shared_rpc.observability import events as e
from shared_rpc.protocol.tasks import TaskStatus

#: The numbers of one metric at one time, by values of its labels.
Numbers = Mapping[tuple[str, ...], float]
S = TypeVar("S")

#: Seconds. From a short call on an idle machine to a call that loads a checkpoint.
_CALL_BUCKETS = (
    *(50e-6, 100e-6, 250e-6, 500e-6),
    *(1e-3, 2.5e-3, 5e-3, 10e-3, 25e-3, 50e-3, 100e-3, 250e-3, 500e-3),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0),
)
_BUILD_BUCKETS = (1e-3, 10e-3, 100e-3, 500e-3, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0)
#: From an eviction with an existing copy to a restore of a large model from a slow disk.
_MOVE_BUCKETS = (1e-3, 2.5e-3, 5e-3, 10e-3, 25e-3, 50e-3, 100e-3, 250e-3, 500e-3, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


class Reading(NamedTuple):
    """The numbers of a process's servers at one time, by metric, and the names of their endpoints."""

    endpoints: Collection[str]
    numbers: Mapping[str, Numbers]


@dataclass(frozen=True)
class Metric:
    """One metric.

    :ivar name: without the prefix ``shared_rpc_``, and without the ``_total`` of a counter.
    :ivar labels: with their values if these are known, so that a series begins with 0; those of ``endpoint`` come with a
        :class:`Reading`.
    """

    name: str
    help: str
    labels: Mapping[str, Sequence[str]] = field(default_factory=dict, kw_only=True)

    def zeros(self, endpoints: Iterable[str]) -> Iterator[tuple[str, ...]]:
        """Yield the label values known before any count."""
        return itertools.product(*({**self.labels, "endpoint": endpoints}[name] for name in self.labels))


@dataclass(frozen=True)
class Read(Metric, Generic[S]):
    """A metric that is read from a subject on each scrape."""

    kind: Literal["counter", "gauge"]
    read: Callable[[S], Numbers]


@dataclass(frozen=True)
class Counted(Metric):
    """A metric counted with each event of a type: a histogram if it has buckets. Its labels are fields of the event."""

    event: type[e.Event]
    amount: Callable[[Any], float] = lambda event: 1
    buckets: Sequence[float] = ()

    def labels_of(self, event: Any) -> tuple[str, ...]:
        """Return the values of the labels for an event."""
        return tuple(_FIELDS.get((self.event, name), attrgetter(name))(event) for name in self.labels)


#: Labels with a value other than the field of that name.
_FIELDS: Mapping[tuple[type[e.Event], str], Callable[[Any], str]] = {
    # Codes unknown to this library, which a worker may send, would make unbounded labels.
    (e.RequestFailed, "code"): lambda event: class_of(event.code).code,
    (e.ObjectEvicted, "tier"): attrgetter("to_tier"),
    (e.ObjectRestored, "tier"): attrgetter("from_tier"),
}
_NBYTES: Callable[[Any], float] = attrgetter("nbytes")
_SECONDS: Callable[[Any], float] = attrgetter("seconds")
_ENDPOINT: Mapping[str, Sequence[str]] = {"endpoint": ()}
_CALL: Mapping[str, Sequence[str]] = {"endpoint": (), "outcome": get_args(e.Outcome)}
_TIER: Mapping[str, Sequence[str]] = {"tier": ("host", "file")}

EVENTS: Sequence[Counted] = (
    Counted("calls", "Finished calls and submits, by outcome.", e.CallFinished, labels=_CALL),
    Counted(
        "call_duration_seconds",
        "Time from call to answer, in the server.",
        e.CallFinished,
        _SECONDS,
        _CALL_BUCKETS,
        labels=_CALL,
    ),
    Counted(
        "build_failures",
        "Runs that ended with an error.",
        e.BuildFinished,
        lambda event: bool(event.error),
        labels=_ENDPOINT,
    ),
    Counted("build_duration_seconds", "Duration of runs.", e.BuildFinished, _SECONDS, _BUILD_BUCKETS, labels=_ENDPOINT),
    Counted("errors", "Requests answered with an error, by code.", e.RequestFailed, labels={"code": ()}),
    Counted("objects_published", "Published objects.", e.ObjectPublished),
    Counted("objects_freed", "Freed objects.", e.ObjectFreed),
    Counted(
        "evictions",
        "Objects that moved to a lower tier.",
        e.ObjectEvicted,
        labels={**_TIER, "reason": ("request", "capacity")},
    ),
    Counted("evicted_bytes", "Bytes that evicted objects gave back to the tier above.", e.ObjectEvicted, _NBYTES, labels=_TIER),
    Counted("eviction_duration_seconds", "Duration of evictions.", e.ObjectEvicted, _SECONDS, _MOVE_BUCKETS, labels=_TIER),
    Counted(
        "restores",
        "Objects that moved back to their device.",
        e.ObjectRestored,
        labels={**_TIER, "reason": ("request", "resume", "use")},
    ),
    Counted("restored_bytes", "Bytes of restored objects.", e.ObjectRestored, _NBYTES, labels=_TIER),
    Counted("restore_duration_seconds", "Duration of restores.", e.ObjectRestored, _SECONDS, _MOVE_BUCKETS, labels=_TIER),
    Counted("leases_given", "Granted leases.", e.LeaseGiven),
    Counted("leases_ended", "Ended leases.", e.LeaseEnded),
    Counted(
        "leases_reclaimed",
        "Leases of clients that ended without closing, for example by a signal.",
        e.LeaseEnded,
        attrgetter("reclaimed"),
    ),
    Counted("sessions_opened", "Opened sessions.", e.SessionOpened),
    Counted("sessions_closed", "Sessions closed by their client.", e.SessionClosed, attrgetter("clean")),
    Counted("sessions_lost", "Sessions of clients that ended without closing.", e.SessionClosed, lambda event: not event.clean),
    Counted("task_changes", "Changes of tasks to a status.", e.TaskChanged, labels={"status": [*TaskStatus]}),
)
