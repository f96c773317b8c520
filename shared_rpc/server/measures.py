"""Metrics read from the tables of servers. On their loop, in one step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal, get_args

from shared_rpc.observability.metrics import Numbers, Read, Reading
from shared_rpc.protocol.records import SegmentInfo, Tier
from shared_rpc.protocol.tasks import TaskStatus
from shared_rpc.server.core import Core
from shared_rpc.server.state.objects import usage_of
from shared_rpc.server.state.tiers import LOWER

_Read = Callable[[Sequence[Core]], Numbers]


def measures(cores: Sequence[Core]) -> Reading:
    """Return the sums over all servers of a process."""
    endpoints = {spec.name for core in cores for spec in core.registry.all()}
    endpoints |= {endpoint for core in cores for endpoint, _ in core.runs.statistics}
    return Reading(endpoints, {metric.name: metric.read(cores) for metric in SERVERS})


def _sum(read: Callable[[Core], float]) -> _Read:
    return lambda cores: {(): sum(map(read, cores))}


def _sums(read: Callable[[Core], Iterable[tuple[str, float]]]) -> _Read:
    """Sum the numbers by label."""

    def added(cores: Sequence[Core]) -> Numbers:
        found: Counter[tuple[str, ...]] = Counter()
        for core in cores:
            for label, number in read(core):
                found[label,] += number  # type: ignore[assignment]  # bytes are whole numbers
        return found

    return added


def _calls(key: Literal["hits", "misses", "joined", "adopted", "builds"]) -> _Read:
    return _sums(lambda core: ((endpoint, counts[key]) for endpoint, counts in core.runs.statistics))


def _runs(state: Literal["running", "asked", "queued"]) -> _Read:
    return _sums(
        lambda core: (
            (run.spec.name, 1)
            for run in core.state.runs
            if state == ("running" if run.running else "asked" if run.miss else "queued")
        )
    )


def _objects(core: Core) -> Iterable[tuple[str, float]]:
    buffers = len(core.buffers.table)
    return [("result", len(core.objects) - buffers), ("buffer", buffers)]


def _active(core: Core) -> int:
    return sum(bool(core.leases.users(stored.object_id)) for stored in core.objects)


def _object_bytes(cores: Sequence[Core]) -> Numbers:
    segments: dict[str, SegmentInfo] = {}  # objects of several servers may share memory
    for core in cores:
        segments |= core.objects.segments()
    return {(device,): nbytes for device, nbytes in {**{core.device: 0 for core in cores}, **usage_of(segments)}.items()}


def _status(name: Literal["nodes", "objects", "bytes_received", "bytes_sent"]) -> Callable[[Core], int]:
    """Return a reader of a number reported by a core's source."""
    return lambda core: source["status"].get(name, 0) if (source := core.sources.info()) is not None else 0


def _largest(read: Callable[[Core], float]) -> _Read:
    """Read a value that all servers of a process share, such as their cluster's."""
    return lambda cores: {(): max(map(read, cores), default=0)}


def _has_source(core: Core) -> bool:
    source = core.sources.info()
    return source is not None and source["session"] is not None


def _joiner_starts(core: Core) -> int:
    source = core.sources.info()
    return source["joiner"]["starts"] if source is not None and source["joiner"] is not None else 0


_ENDPOINT: Mapping[str, Sequence[str]] = {"endpoint": ()}

#: The metrics of :func:`measures`.
SERVERS: Sequence[Read[Sequence[Core]]] = (
    Read("cache_hits", "Calls answered from the cache.", "counter", _calls("hits"), labels=_ENDPOINT),
    Read("cache_misses", "Calls of cached endpoints that began a run.", "counter", _calls("misses"), labels=_ENDPOINT),
    Read("joined_calls", "Calls that joined a run under way (singleflight).", "counter", _calls("joined"), labels=_ENDPOINT),
    Read("adopted", "Runs that ended with a record of the source of records.", "counter", _calls("adopted"), labels=_ENDPOINT),
    Read("builds", "Started runs of the endpoint.", "counter", _calls("builds"), labels=_ENDPOINT),
    Read("builds_running", "Runs under way.", "gauge", _runs("running"), labels=_ENDPOINT),
    Read("builds_queued", "Runs that wait for their turn or for a worker.", "gauge", _runs("queued"), labels=_ENDPOINT),
    Read("builds_asked", "Runs that wait for the source of records.", "gauge", _runs("asked"), labels=_ENDPOINT),
    Read("objects", "Kept results and buffers.", "gauge", _sums(_objects), labels={"kind": ()}),
    Read("object_bytes", "Memory of all objects.", "gauge", _object_bytes, labels={"device": ()}),
    Read(
        "tier_objects",
        "Kept results and buffers, by the tier of their bytes.",
        "gauge",
        _sums(lambda core: ((stored.tier, 1) for stored in core.objects)),
        labels={"tier": get_args(Tier)},
    ),
    Read(
        "copy_bytes",
        "Memory and files of the copies of objects.",
        "gauge",
        _sums(lambda core: ((tier, core.objects.copies.nbytes(tier)) for tier in LOWER)),
        labels={"tier": LOWER},
    ),
    Read("active_objects", "Objects that some client holds and has not suspended.", "gauge", _sum(_active)),
    Read("capacity_waiting", "Requests that wait for capacity on a device.", "gauge", _sum(lambda core: len(core.capacity))),
    Read("pool_bytes", "Memory of the pools for short results.", "gauge", _sum(lambda core: core.transfers.info()["nbytes"])),
    Read(
        "pool_chunks",
        "Results in these pools that clients have not released.",
        "gauge",
        _sum(lambda core: core.transfers.info()["chunks"]),
    ),
    Read("leases", "Leases of clients and of unfetched results.", "gauge", _sum(lambda core: len(core.leases))),
    Read("sessions", "Open sessions, one for each client.", "gauge", _sum(lambda core: len(core.sessions))),
    Read(
        "tasks",
        "Remembered tasks, by status.",
        "gauge",
        _sums(lambda core: core.tasks.table.counts().items()),
        labels={"status": [*TaskStatus]},
    ),
    Read("sources", "Attached sources of records.", "gauge", _sum(_has_source)),
    Read("joiner_starts", "Started processes that join a cluster.", "counter", _sum(_joiner_starts)),
    Read("cluster_nodes", "Nodes of the cluster, as the source reports them.", "gauge", _largest(_status("nodes"))),
    Read("cluster_objects", "Objects of the cluster, as the source reports them.", "gauge", _largest(_status("objects"))),
    Read(
        "cluster_received_bytes",
        "Bytes received from other nodes, as the source reports them.",
        "counter",
        _sum(_status("bytes_received")),
    ),
    Read(
        "cluster_sent_bytes",
        "Bytes sent to other nodes, as the source reports them.",
        "counter",
        _sum(_status("bytes_sent")),
    ),
)
