"""Metrics for Prometheus: what there is to tell of a server is read on its loop, at once, and put into words elsewhere.

The names here, in the same order, are those of ``docs/reference/metrics.md``. A label is one of a bounded set: the name of a
registered endpoint, a device, a state, a code of an error, the number of a worker.
"""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, get_args

from shared_rpc.instrumentation import Outcome
from shared_rpc.memory.segments import SegmentInfo
from shared_rpc.server.meter import BUILD_BUCKETS, CALL_BUCKETS, Durations, Meter
from shared_rpc.server.state.objects import usage_of

if TYPE_CHECKING:
    from prometheus_client.core import Metric

    from shared_rpc.server.acceptor import Acceptor
    from shared_rpc.server.core import Core

__all__ = ["Reading", "WorkersReading", "families", "read"]

_PREFIX = "shared_rpc_"
_NO_CALLS, _NO_BUILDS = Durations(CALL_BUCKETS), Durations(BUILD_BUCKETS)


@dataclass
class WorkersReading:
    """The workers of a broker: how many there are in each state, how often they ended, and by number what each has."""

    states: Counter[str] = field(default_factory=Counter)
    crashes: int = 0
    restarts: int = 0
    runs: dict[int, int] = field(default_factory=dict)
    resident: dict[int, int] = field(default_factory=dict)


@dataclass
class Reading:
    """One server at one moment, or several together. It shares nothing with what it was read from."""

    #: By endpoint: of :class:`shared_rpc.server.statistics.EndpointCounts` each field. All are there that are registered.
    endpoints: dict[str, Counter[str]] = field(default_factory=dict)
    #: By endpoint and outcome.
    calls: dict[tuple[str, str], Durations] = field(default_factory=dict)
    #: By endpoint.
    builds: dict[str, Durations] = field(default_factory=dict)
    failed_builds: Counter[str] = field(default_factory=Counter)
    running: Counter[str] = field(default_factory=Counter)
    queued: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    objects: Counter[str] = field(default_factory=Counter)
    #: By id; those of several servers may be the same.
    segments: dict[str, SegmentInfo] = field(default_factory=dict)
    devices: set[str] = field(default_factory=set)
    #: Of the process, which all its servers share: those that objects have, and may have.
    descriptors: int = 0
    descriptors_limit: int = 0
    tasks: Counter[str] = field(default_factory=Counter)
    task_changes: Counter[str] = field(default_factory=Counter)
    #: Whatever has no label.
    plain: Counter[str] = field(default_factory=Counter)
    totals: Counter[str] = field(default_factory=Counter)

    def add(self, other: Reading) -> None:
        """Another server of this process, whose endpoints may have the same names."""
        for name, counts in other.endpoints.items():
            self.endpoints.setdefault(name, Counter()).update(counts)
        _merge(self.calls, other.calls)
        _merge(self.builds, other.builds)
        self.segments |= other.segments
        self.devices |= other.devices
        self.descriptors, self.descriptors_limit = other.descriptors, other.descriptors_limit
        for name in (
            *("failed_builds", "running", "queued", "errors", "objects"),
            *("tasks", "task_changes", "plain", "totals"),
        ):
            getattr(self, name).update(getattr(other, name))


def _merge(into: dict[Any, Durations], other: dict[Any, Durations]) -> None:
    for key, durations in other.items():
        into[key] = into[key].plus(durations) if key in into else durations


def read(core: Core, acceptor: Acceptor, meter: Meter) -> Reading:
    """A server as it is now. On its loop; of its whole work this is what must be done there."""
    reading = Reading()
    reading.endpoints = {spec.name: Counter() for spec in core.registry.all()}
    reading.endpoints |= {name: Counter(counts.facts()) for name, counts in core.runs.statistics}
    reading.calls = {call: durations.plus() for call, durations in meter.calls.items()}
    reading.builds = {name: durations.plus() for name, durations in meter.builds.items()}
    reading.failed_builds.update(meter.failed_builds)
    for flight in core.runs.calls:
        (reading.running if flight.running else reading.queued)[flight.endpoint] += 1
    reading.errors.update(meter.errors)
    reading.objects.update({"result": len(core.objects) - len(core.buffers.table), "buffer": len(core.buffers.table)})
    reading.segments = core.objects.segments()
    reading.devices = {core.device}
    reading.descriptors, reading.descriptors_limit = core.objects.descriptors.used, core.objects.descriptors.limit
    reading.tasks.update(core.tasks.table.counts())
    reading.task_changes.update(meter.task_changes)
    pools = core.lanes.facts()
    reading.plain.update(
        {
            "leases": len(core.leases),
            "sessions": acceptor.sessions,
            "connections": acceptor.connections,
            "pool_bytes": pools["nbytes"],
            "pool_chunks": pools["chunks"],
        }
    )
    reading.totals.update(meter.totals)
    return reading


def families(reading: Reading, workers: WorkersReading | None, version: str) -> Iterator[Metric]:
    """What Prometheus is told. Needs prometheus-client."""
    yield from _of_endpoints(reading)
    yield from _of_memory(reading)
    yield from _of_clients(reading)
    if workers is not None:
        yield from _of_workers(workers)
    labels = {"version": version, "python_version": platform.python_version()}
    yield _gauge("build_info", "Always 1: the release that runs.", labels, [(tuple(labels.values()), 1)])


def _of_endpoints(reading: Reading) -> Iterator[Metric]:
    # What has not happened yet is told with zeros, so that rates begin with the first time.
    names = reading.endpoints
    calls = {(name, outcome): _NO_CALLS for name in names for outcome in get_args(Outcome)} | reading.calls
    builds = dict.fromkeys(names, _NO_BUILDS) | reading.builds
    ended = [(call, durations.count) for call, durations in calls.items()]
    yield _counter("calls", "Calls and submits that ended, by how.", ("endpoint", "outcome"), ended)
    yield _histogram("call_duration_seconds", "From call to answer, in the server.", ("endpoint", "outcome"), calls)
    for name, counted, text in (
        ("cache_hits", "hits", "Calls that were answered from the cache."),
        ("cache_misses", "misses", "Calls that the cache could have answered, and that began a run."),
        ("joined_calls", "joined", "Calls that joined a run that went on (singleflight)."),
        ("builds", "builds", "Runs of the endpoint that began."),
    ):
        yield _counter(name, text, ("endpoint",), [((endpoint,), counts[counted]) for endpoint, counts in names.items()])
    failed = {name: reading.failed_builds[name] for name in names}
    yield _counter("build_failures", "Runs that ended with an error.", ("endpoint",), _one(failed))
    took = {(endpoint,): durations for endpoint, durations in builds.items()}
    yield _histogram("build_duration_seconds", "How long runs took.", ("endpoint",), took)
    running, queued = ({name: counts[name] for name in names} for counts in (reading.running, reading.queued))
    yield _gauge("builds_running", "Runs that go on now.", ("endpoint",), _one(running))
    yield _gauge("builds_queued", "Runs that wait for their turn or for a worker.", ("endpoint",), _one(queued))
    yield _counter("errors", "Requests that were answered with an error, by its code.", ("code",), _one(reading.errors))


def _of_memory(reading: Reading) -> Iterator[Metric]:
    yield _gauge("objects", "Results and buffers that are kept.", ("kind",), _one(reading.objects))
    memory = dict.fromkeys(reading.devices, 0) | usage_of(reading.segments)
    yield _gauge("object_bytes", "Memory of all objects.", ("device",), _one(memory))
    yield _gauge("object_descriptors", "File descriptors that objects have.", (), [((), reading.descriptors)])
    limit = reading.descriptors_limit
    yield _gauge("object_descriptors_limit", "File descriptors that objects may have.", (), [((), limit)])
    yield _total("objects_published", "Objects that came.", reading)
    yield _total("objects_freed", "Objects that went.", reading)
    yield _plain("pool_bytes", "Memory of the pools for short results.", reading)
    yield _plain("pool_chunks", "Results in these pools that clients have not given back.", reading)


def _of_clients(reading: Reading) -> Iterator[Metric]:
    yield _plain("leases", "Leases of clients, and of results that wait to be fetched.", reading)
    yield _total("leases_given", "Leases that were given.", reading)
    yield _total("leases_ended", "Leases that ended, in whatever way.", reading)
    yield _total("leases_reclaimed", "Leases of clients that ended without having closed, as one does that is killed.", reading)
    yield _plain("sessions", "Client processes.", reading)
    yield _plain("connections", "Their connections.", reading)
    yield _total("sessions_opened", "Sessions that began.", reading)
    yield _total("sessions_closed", "Sessions whose client closed.", reading)
    yield _total("sessions_lost", "Sessions whose client ended without having closed.", reading)
    yield _gauge("tasks", "Tasks that are remembered, by status.", ("status",), _one(reading.tasks))
    changes = {status: reading.task_changes[status] for status in reading.tasks}
    yield _counter("task_changes", "Tasks that came to a status.", ("status",), _one(changes))


def _of_workers(workers: WorkersReading) -> Iterator[Metric]:
    yield _gauge("workers", "Worker processes, by state.", ("state",), _one(workers.states))
    yield _counter("worker_crashes", "Workers that ended though nobody had asked for it.", (), [((), workers.crashes)])
    yield _counter("worker_restarts", "Workers that were started in place of one that crashed.", (), [((), workers.restarts)])
    yield _gauge("worker_runs", "Runs that a worker has.", ("worker",), _one(workers.runs))
    yield _gauge("worker_resident_bytes", "Resident memory of a worker.", ("worker",), _one(workers.resident))


Samples = Iterable[tuple[Sequence[str], float]]


def _one(counts: dict[Any, int]) -> Samples:
    return [((str(name),), count) for name, count in counts.items()]


def _counter(name: str, text: str, labels: Iterable[str], samples: Samples) -> Metric:
    from prometheus_client.core import CounterMetricFamily

    family = CounterMetricFamily(_PREFIX + name, text, labels=tuple(labels))
    for values, number in samples:
        family.add_metric(values, number)
    return family


def _gauge(name: str, text: str, labels: Iterable[str], samples: Samples) -> Metric:
    from prometheus_client.core import GaugeMetricFamily

    family = GaugeMetricFamily(_PREFIX + name, text, labels=tuple(labels))
    for values, number in samples:
        family.add_metric(values, number)
    return family


def _histogram(
    name: str, text: str, labels: Iterable[str], found: Mapping[tuple[str, str], Durations] | Mapping[tuple[str], Durations]
) -> Metric:
    from prometheus_client.core import HistogramMetricFamily

    family = HistogramMetricFamily(_PREFIX + name, text, labels=tuple(labels))
    for values, durations in found.items():
        family.add_metric(values, durations.cumulated(), durations.sum)
    return family


def _plain(name: str, text: str, reading: Reading) -> Metric:
    return _gauge(name, text, (), [((), reading.plain[name])])


def _total(name: str, text: str, reading: Reading) -> Metric:
    return _counter(name, text, (), [((), reading.totals[name])])
