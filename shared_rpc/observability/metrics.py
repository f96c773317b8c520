"""Metrics of the servers of a process, for prometheus-client: counted from events, and read off the servers' tables.

The names are those of ``docs/reference/metrics.md``. A label has bounded values: the name of a registered endpoint, a device, a
state, a code of an error, the number of a worker. Imported only where metrics are asked for.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator, Mapping
from typing import get_args

from prometheus_client import Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.samples import Sample

from shared_rpc.errors import class_of
from shared_rpc.observability import events as e

__all__ = ["Metrics", "Reading"]

#: Numbers of the servers at one moment, by metric and by values of its labels.
Reading = Mapping[str, Mapping[tuple[str, ...], float]]

_PREFIX = "shared_rpc"
#: Seconds. From a short call on an idle machine to a call that loads a checkpoint.
_CALL_BUCKETS = (
    *(50e-6, 100e-6, 250e-6, 500e-6),
    *(1e-3, 2.5e-3, 5e-3, 10e-3, 25e-3, 50e-3, 100e-3, 250e-3, 500e-3),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0),
)
_BUILD_BUCKETS = (1e-3, 10e-3, 100e-3, 500e-3, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0)
#: From an eviction whose copy is there to a restore of a large model from a slow disk.
_MOVE_BUCKETS = (1e-3, 2.5e-3, 5e-3, 10e-3, 25e-3, 50e-3, 100e-3, 250e-3, 500e-3, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)

_Family = type[CounterMetricFamily] | type[GaugeMetricFamily]
#: Metrics that are read, most of them from a server's tables: kind, text and labels.
_READ: dict[str, tuple[_Family, str, tuple[str, ...]]] = {
    "calls": (CounterMetricFamily, "Finished calls and submits, by outcome.", ("endpoint", "outcome")),
    "cache_hits": (CounterMetricFamily, "Calls answered from the cache.", ("endpoint",)),
    "cache_misses": (CounterMetricFamily, "Calls of cached endpoints that began a run.", ("endpoint",)),
    "joined_calls": (CounterMetricFamily, "Calls that joined a run under way (singleflight).", ("endpoint",)),
    "adopted": (CounterMetricFamily, "Runs that ended with a record of the source of records.", ("endpoint",)),
    "builds": (CounterMetricFamily, "Started runs of the endpoint.", ("endpoint",)),
    "builds_running": (GaugeMetricFamily, "Runs under way.", ("endpoint",)),
    "builds_queued": (GaugeMetricFamily, "Runs that wait for their turn or for a worker.", ("endpoint",)),
    "builds_asked": (GaugeMetricFamily, "Runs that wait for the source of records.", ("endpoint",)),
    "objects": (GaugeMetricFamily, "Kept results and buffers.", ("kind",)),
    "object_bytes": (GaugeMetricFamily, "Memory of all objects.", ("device",)),
    "tier_objects": (GaugeMetricFamily, "Kept results and buffers, by the tier of their bytes.", ("tier",)),
    "copy_bytes": (GaugeMetricFamily, "Memory and files of the copies of objects.", ("tier",)),
    "room_waiting": (GaugeMetricFamily, "Requests that wait for room on a device.", ()),
    "active_objects": (GaugeMetricFamily, "Objects that some client holds and has not suspended.", ()),
    "object_descriptors": (GaugeMetricFamily, "File descriptors of objects.", ()),
    "object_descriptors_limit": (GaugeMetricFamily, "The limit of file descriptors of objects.", ()),
    "pool_bytes": (GaugeMetricFamily, "Memory of the pools for short results.", ()),
    "pool_chunks": (GaugeMetricFamily, "Results in these pools that clients have not released.", ()),
    "leases": (GaugeMetricFamily, "Leases of clients and of unfetched results.", ()),
    "sessions": (GaugeMetricFamily, "Client processes.", ()),
    "connections": (GaugeMetricFamily, "Connections of clients.", ()),
    "tasks": (GaugeMetricFamily, "Remembered tasks, by status.", ("status",)),
    "workers": (GaugeMetricFamily, "Worker processes, by state.", ("state",)),
    "worker_crashes": (CounterMetricFamily, "Workers that ended without a request.", ()),
    "worker_restarts": (CounterMetricFamily, "Workers started in place of crashed ones.", ()),
    "worker_runs": (GaugeMetricFamily, "Runs of a worker.", ("worker",)),
    "worker_resident_bytes": (GaugeMetricFamily, "Resident memory of a worker.", ("worker",)),
    "sources": (GaugeMetricFamily, "Attached sources of records.", ()),
    "joiner_starts": (CounterMetricFamily, "Started processes that join a cluster.", ()),
    "cluster_nodes": (GaugeMetricFamily, "Nodes of the cluster, as the source reports them.", ()),
    "cluster_objects": (GaugeMetricFamily, "Objects of the cluster, as the source reports them.", ()),
    "cluster_received_bytes": (CounterMetricFamily, "Bytes received from other nodes, as the source reports them.", ()),
    "cluster_sent_bytes": (CounterMetricFamily, "Bytes sent to other nodes, as the source reports them.", ()),
    "cluster_moved_bytes": (CounterMetricFamily, "Bytes received from other nodes, by what has carried them.", ("mover",)),
}


class Metrics:
    """Hook that counts the events of servers, and collector of a registry.

    Events and readings name registered endpoints only, so the number of labels is bounded.

    :param version: the running release.
    """

    def __init__(self, version: str) -> None:
        #: Ids of the servers whose events are counted.
        self.servers: set[str] = set()
        self._reading: Reading = {}
        self._endpoints: set[str] = set()
        self._call_seconds = _histogram(
            _CALL_BUCKETS, "call_duration_seconds", "Time from call to answer, in the server.", "endpoint", "outcome"
        )
        self._build_failures = _counter("build_failures", "Runs that ended with an error.", "endpoint")
        self._build_seconds = _histogram(_BUILD_BUCKETS, "build_duration_seconds", "Duration of runs.", "endpoint")
        self._errors = _counter("errors", "Requests answered with an error, by code.", "code")
        self._published = _counter("objects_published", "Published objects.")
        self._freed = _counter("objects_freed", "Freed objects.")
        self._evictions = _counter("evictions", "Objects that moved to a lower tier.", "tier", "reason")
        self._evicted_bytes = _counter("evicted_bytes", "Bytes that evicted objects gave back to the tier above.", "tier")
        self._eviction_seconds = _histogram(_MOVE_BUCKETS, "eviction_duration_seconds", "Duration of evictions.", "tier")
        self._restores = _counter("restores", "Objects that moved back to their device.", "tier", "reason")
        self._restored_bytes = _counter("restored_bytes", "Bytes of restored objects.", "tier")
        self._restore_seconds = _histogram(_MOVE_BUCKETS, "restore_duration_seconds", "Duration of restores.", "tier")
        for tier in ("host", "file"):
            self._evicted_bytes.labels(tier), self._eviction_seconds.labels(tier)
            self._restored_bytes.labels(tier), self._restore_seconds.labels(tier)
            for reason in ("request", "room"):
                self._evictions.labels(tier, reason)
            for reason in ("request", "resume", "use"):
                self._restores.labels(tier, reason)
        self._leases_given = _counter("leases_given", "Granted leases.")
        self._leases_ended = _counter("leases_ended", "Ended leases.")
        self._leases_reclaimed = _counter(
            "leases_reclaimed", "Leases of clients that ended without closing, for example by a signal."
        )
        self._sessions_opened = _counter("sessions_opened", "Opened sessions.")
        self._sessions_closed = _counter("sessions_closed", "Sessions closed by their client.")
        self._sessions_lost = _counter("sessions_lost", "Sessions of clients that ended without closing.")
        self._task_changes = _counter("task_changes", "Changes of tasks to a status.", "status")
        build_info = Gauge(
            f"{_PREFIX}_build_info", "Always 1: the release that runs.", ("version", "python_version"), registry=None
        )
        build_info.labels(version, platform.python_version()).set(1)
        self._counted = [found for found in vars(self).values() if isinstance(found, Counter | Histogram)] + [build_info]

    def __call__(self, event: e.Event) -> None:
        """Count an event."""
        if event.server_id not in self.servers:
            return
        match event:
            case e.CallFinished():
                self._call_seconds.labels(event.endpoint, event.outcome).observe(event.seconds)
            case e.CallStarted() | e.BuildStarted():  # counted when they end
                pass
            case e.BuildFinished():
                self._build_seconds.labels(event.endpoint).observe(event.seconds)
                self._build_failures.labels(event.endpoint).inc(bool(event.error))
            case e.RequestFailed():
                self._errors.labels(_known(event.code)).inc()
            case e.TaskChanged():
                self._task_changes.labels(event.status).inc()
            case e.LeaseGiven():
                self._leases_given.inc()
            case e.LeaseEnded():
                self._leases_ended.inc()
                self._leases_reclaimed.inc(event.reclaimed)
            case e.ObjectPublished():
                self._published.inc()
            case e.ObjectFreed():
                self._freed.inc()
            case e.ObjectEvicted():
                self._evictions.labels(event.to_tier, event.reason).inc()
                self._evicted_bytes.labels(event.to_tier).inc(event.nbytes)
                self._eviction_seconds.labels(event.to_tier).observe(event.seconds)
            case e.ObjectRestored():
                self._restores.labels(event.from_tier, event.reason).inc()
                self._restored_bytes.labels(event.from_tier).inc(event.nbytes)
                self._restore_seconds.labels(event.from_tier).observe(event.seconds)
            case e.SessionOpened():
                self._sessions_opened.inc()
            case e.SessionClosed():
                (self._sessions_closed if event.clean else self._sessions_lost).inc()

    def update(self, reading: Reading) -> None:
        """Set the numbers for :meth:`collect`, with zeros of events that have not happened yet, so that rates begin with 1."""
        self._reading = reading
        for endpoint in {endpoint for (endpoint,) in reading.get("builds", ())} - self._endpoints:
            self._endpoints.add(endpoint)
            self._build_seconds.labels(endpoint)
            self._build_failures.labels(endpoint)
            for outcome in get_args(e.Outcome):
                self._call_seconds.labels(endpoint, outcome)
        for (status,) in reading.get("tasks", ()):
            self._task_changes.labels(status)

    def describe(self) -> Iterator[Metric]:
        """Yield every metric without numbers, by which a registry finds their names."""
        for counted in self._counted:
            yield from counted.describe()
        for name in _READ:
            yield _family(name)

    def collect(self) -> Iterator[Metric]:
        """Yield every metric with its numbers."""
        for counted in self._counted:
            for metric in counted.collect():
                metric.samples = [_named(sample) for sample in metric.samples if not sample.name.endswith("_created")]
                yield metric
        for name, numbers in {"calls": self._ended(), **self._reading}.items():
            family = _family(name)
            for labels, number in numbers.items():
                family.add_metric(labels, number)
            yield family

    def _ended(self) -> dict[tuple[str, ...], float]:
        """Return how many calls ended, by endpoint and outcome: every one has its duration."""
        samples = [sample for metric in self._call_seconds.collect() for sample in metric.samples]
        return {tuple(sample.labels.values()): sample.value for sample in samples if sample.name.endswith("_count")}


def _counter(name: str, text: str, *labels: str) -> Counter:
    return Counter(f"{_PREFIX}_{name}", text, labels, registry=None)


def _histogram(buckets: tuple[float, ...], name: str, text: str, *labels: str) -> Histogram:
    return Histogram(f"{_PREFIX}_{name}", text, labels, registry=None, buckets=buckets)


def _family(name: str) -> CounterMetricFamily | GaugeMetricFamily:
    kind, text, labels = _READ[name]
    return kind(f"{_PREFIX}_{name}", text, labels=labels)


def _named(sample: Sample) -> Sample:
    """Name buckets as ``le="1"``, where prometheus-client has ``"1.0"``: queries compare text."""
    le = sample.labels.get("le", "")
    return sample._replace(labels={**sample.labels, "le": le.removesuffix(".0")}) if le.endswith(".0") else sample


def _known(code: str) -> str:
    """Return a code of this library: other codes, which a worker may send, would make unbounded labels."""
    return class_of(code).code
