"""Deploys and refreshes of a cluster that exists in memory: the time to all nodes, and what slow and lost ones do to it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.report import Report, Row, size
from benchmarks.simulated_cluster import Hardware, SimulatedCluster
from benchmarks.targets import GOALS
from shared_rpc.cluster.directory import Rules
from shared_rpc.cluster.orders import Version

__all__ = ["run"]

#: Seconds after which a cluster that is not done is given up.
_MOST = 7200.0
#: How much slower a slow node's link is.
_SLOWER = 20

Change = Callable[[SimulatedCluster], None]


@dataclass(frozen=True)
class _Outcome:
    """A deploy or a refresh: the seconds until the last node that is not slow had it, and what it cost the directory."""

    seconds: float
    messages: int
    busy: float
    longest: float
    nodes: int
    swap: float = 0.0
    left_out: int = 0


def run(
    *, nodes: list[int], fan_outs: list[int], mebibytes: int, build: float, gigabits: float, stream: float, path: Path | None
) -> None:
    """Simulate, print, write."""
    bandwidth = gigabits * 1e9 / 8
    hardware = Hardware(nbytes=mebibytes << 20, build=build, bandwidth=bandwidth, stream=stream * bandwidth)
    every = {f"K={number}": Rules(fan_out=number) for number in fan_outs}
    every |= {f"K={number}, relay": Rules(fan_out=number, relay=True) for number in fan_outs}
    report = Report("cluster-simulation", "A simulated cluster", list(every))
    report.note(
        f"{size(hardware.nbytes)} in {hardware.parts} parts, built in {build:g} s; links of {gigabits:g} Gbit/s, of which one "
        f"transfer gets {stream:g}: it takes {hardware.transfer:.3g} s"
    )
    report.note(
        f"{hardware.latency * 1e3:g} ms for a message one way, {hardware.message * 1e3:g} ms of the directory for each; "
        f"a lost node is known to be lost after {hardware.detection:g} s, a slow one has 1/{_SLOWER} of a link"
    )
    report.note("K: transfers that a node serves at a time; relay: a node sends parts on while it receives the others")
    report.note("times are from the end of the build, of nodes that are neither lost nor slow")
    for number in nodes:
        outcomes = {name: _deploy(number, hardware, rules) for name, rules in every.items()}
        _add(report, f"{number:,} nodes: until all have it", outcomes, hardware)
        report.add(_row(f"{number:,} nodes: messages of the directory", outcomes, "messages", "number"))
        report.add(_row(f"{number:,} nodes: the directory's own time", outcomes, "busy", "s"))
    most = max(nodes)
    for what, change in _bad_luck(most, hardware).items():
        _add(
            report, f"{most:,} nodes, {what}", {name: _deploy(most, hardware, every[name], change) for name in every}, hardware
        )
    for what, change in {"refresh": _nothing, "refresh, one slow node": _slow([most - 1])}.items():
        outcomes = {name: _refresh(most, hardware, rules, change) for name, rules in every.items()}
        _add(report, f"{most:,} nodes, {what}: until all change over", outcomes, hardware)
        report.add(_row("… from the first to the last change", outcomes, "swap", "s"))
        report.add(_row("… nodes left out", outcomes, "left_out", "number"))
    report.finish(path)


def _add(report: Report, name: str, outcomes: dict[str, _Outcome], hardware: Hardware) -> None:
    extra = {"transfers": {subject: outcome.seconds / hardware.transfer for subject, outcome in outcomes.items()}}
    report.add(Row(name, {subject: outcome.seconds for subject, outcome in outcomes.items()}, extra=extra))


def _row(name: str, outcomes: dict[str, _Outcome], field: str, unit: Any) -> Row:
    values = {subject: float(getattr(outcome, field)) for subject, outcome in outcomes.items()}
    if field != "messages":
        return Row(name, values, unit)
    each = max(outcome.messages / outcome.nodes for outcome in outcomes.values())
    judged = each if next(iter(outcomes.values())).nodes >= 10 else None
    return Row(name, values, unit, goal=GOALS["directory_messages"], judged=judged)


# What happens to nodes; ``n0`` builds, and ``n1`` is the first to receive.


def _nothing(cluster: SimulatedCluster) -> None:
    pass


def _slow(numbers: Iterable[int]) -> Change:
    def change(cluster: SimulatedCluster) -> None:
        for number in numbers:
            cluster.nodes[f"n{number}"].speed = 1 / _SLOWER

    return change


def _lost(share: float, begin: float, end: float) -> Change:
    def change(cluster: SimulatedCluster) -> None:
        names = [name for name in cluster.nodes if name != "n0"]
        for name in cluster.random.sample(names, max(1, round(len(names) * share))):
            cluster.at(cluster.random.uniform(begin, end), cluster.lose, name)

    return change


def _builder_lost(moment: float) -> Change:
    return lambda cluster: cluster.at(moment, cluster.lose, "n0")


def _bad_luck(nodes: int, hardware: Hardware) -> dict[str, Change]:
    built = hardware.build
    return {
        "the first to receive is slow": _slow([1]),
        "5 % are slow": _slow(range(2, nodes, 20)),
        "the builder's link is slow": _slow([0]),
        "5 % are lost meanwhile": _lost(0.05, built, built + 2 * hardware.transfer),
        "the builder is lost in its build": _builder_lost(built / 2),
        "the builder is lost when it begins to send": _builder_lost(built + hardware.transfer / 2),
    }


def _deploy(nodes: int, hardware: Hardware, rules: Rules, change: Change = _nothing) -> _Outcome:
    """Call the model at all nodes at once."""
    cluster = SimulatedCluster(nodes, hardware, rules)
    change(cluster)
    slow = {name for name, node in cluster.nodes.items() if node.speed < 1}
    slow -= {"n0"}
    for name in cluster.nodes:
        cluster.miss(name)
    cluster.run(until=_MOST, done=lambda: cluster.now > hardware.build and not cluster.waiting - slow)
    if cluster.failed or cluster.waiting - slow:
        raise RuntimeError(f"not all nodes have it after {cluster.now:.0f} s: {cluster.waiting - slow} {cluster.failed}")
    times = [when for served in cluster.served.values() for name, when in served.items() if name not in slow]
    return _Outcome(max(times) - hardware.build, cluster.messages, cluster.busy, cluster.longest, nodes)


def _refresh(nodes: int, hardware: Hardware, rules: Rules, change: Change) -> _Outcome:
    """Refresh what all nodes hold."""
    cluster = SimulatedCluster(nodes, hardware, rules)
    cluster.hold(Version(1, "1"))
    change(cluster)
    begin = cluster.now
    cluster.refresh("n0")
    cluster.run(until=begin + _MOST, done=lambda: bool(cluster.answers))
    ((_, answer),) = cluster.answers
    (result,) = answer.results
    if result.error:
        raise RuntimeError(f"the refresh failed: {result.error}")
    times = [cluster.served[2][node] for node in result.nodes]
    seconds = max(times) - begin - hardware.build
    swap = max(times) - min(times)
    return _Outcome(seconds, cluster.messages, cluster.busy, cluster.longest, nodes, swap=swap, left_out=len(result.left_out))
