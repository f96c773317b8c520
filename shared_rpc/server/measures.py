"""Numbers for metrics that stand in a server's tables already."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import Literal, get_args

from shared_rpc.protocol.infos import SourceInfo
from shared_rpc.protocol.records import SegmentInfo, Tier
from shared_rpc.server.core import Core
from shared_rpc.server.state.objects import usage_of
from shared_rpc.server.state.tiers import LOWER

__all__ = ["Measures", "measures"]

#: By metric and by values of its labels; see :mod:`shared_rpc.observability.metrics`.
Measures = defaultdict[str, Counter[tuple[str, ...]]]

#: Metrics of each endpoint, by the key of :class:`~shared_rpc.protocol.infos.EndpointStatistics`.
_COUNTS: dict[str, Literal["hits", "misses", "joined", "adopted", "builds"]] = {
    "cache_hits": "hits",
    "cache_misses": "misses",
    "joined_calls": "joined",
    "adopted": "adopted",
    "builds": "builds",
}


def measures(cores: Iterable[Core]) -> Measures:
    """Return the numbers of all servers of a process together. On their loop, in one step."""
    found: Measures = defaultdict(Counter)
    segments: dict[str, SegmentInfo] = {}  # objects of several servers may share memory
    for core in cores:
        for spec in core.registry.all():
            for name in (*_COUNTS, "builds_running", "builds_queued", "builds_asked"):
                found[name][spec.name,] += 0
        for endpoint, counts in core.runs.statistics:
            for name, key in _COUNTS.items():
                found[name][endpoint,] += counts[key]
        for run in core.runs.calls:
            state = "builds_running" if run.running else "builds_asked" if run.miss else "builds_queued"
            found[state][run.spec.name,] += 1
        buffers, pools = len(core.buffers.table), core.transfers.info()
        found["objects"]["result",] += len(core.objects) - buffers
        found["objects"]["buffer",] += buffers
        found["object_bytes"][core.device,] += 0
        _add_tiers(found, core)
        segments |= core.objects.segments()
        for status, count in core.tasks.table.counts().items():
            found["tasks"][status,] += count
        found["pool_bytes"][()] += pools["nbytes"]
        found["pool_chunks"][()] += pools["chunks"]
        found["leases"][()] += len(core.leases)
        found["sessions"][()] += len(core.sessions)
        found["connections"][()] += core.sessions.connections
        _add_source(found, core.sources.info())
        # Of the process: its servers share them.
        found["object_descriptors"][()] = core.objects.descriptors.used
        found["object_descriptors_limit"][()] = core.objects.descriptors.limit
    for device, nbytes in usage_of(segments).items():
        found["object_bytes"][device,] += nbytes
    return found


def _add_tiers(found: Measures, core: Core) -> None:
    for tier in get_args(Tier):
        found["tier_objects"][tier,] += 0
    for tier in LOWER:
        found["copy_bytes"][tier,] += core.objects.copies.nbytes(tier)
    for stored in core.objects:
        found["tier_objects"][stored.tier,] += 1
        found["active_objects"][()] += bool(core.tiers.active(stored.object_id))
    found["active_objects"][()] += 0
    found["room_waiting"][()] += len(core.room)


def _add_source(found: Measures, source: SourceInfo | None) -> None:
    status = source["status"] if source is not None else {}
    joiner = source["joiner"] if source is not None else None
    found["sources"][()] += source is not None and source["session"] is not None
    found["joiner_starts"][()] += joiner["starts"] if joiner is not None else 0
    # Of the cluster: the servers of a process are in the same one.
    for name, number in (("cluster_nodes", status.get("nodes", 0)), ("cluster_objects", status.get("objects", 0))):
        found[name][()] = max(found[name][()], number)
    found["cluster_received_bytes"][()] += status.get("bytes_received", 0)
    found["cluster_sent_bytes"][()] += status.get("bytes_sent", 0)
    found["cluster_moved_bytes"]["objects",] += 0
    for mover, nbytes in status.get("bytes_by_mover", {}).items():
        # The names are the source's: others would make unbounded labels.
        found["cluster_moved_bytes"][mover if mover in ("objects", "nixl") else "other",] += nbytes
