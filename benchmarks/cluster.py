"""A deploy to three nodes of a Ray cluster on this machine, beside what Ray alone takes to bring the same bytes there."""

from __future__ import annotations

from collections import defaultdict
from typing import Annotated

import ray
import typer

from benchmarks.cluster_nodes import COUNT, Nodes
from benchmarks.runner import OURS, Json, Report, Sample, numbers, timed
from shared_rpc.memory.devices import free_bytes
from shared_rpc_ray import Cluster

RAY = "ray put, get"

#: Times of a row, by subject, in the order in which they are measured.
Times = defaultdict[tuple[str, str], list[float]]

#: The names of the rows.
_WHOLE = "call until all have it, build included"
_BUILD = "the build, the function alone"
_MOVE = "from the build until all have it"
_REFRESH = "refresh until all are current"
_SWAP = "from all prepared to all current"
_FRESH = "first attach of another process of a node"
_AGAIN = "attach again"
#: MiB of the deploy that comes before all others.
_FIRST = 8
#: MiB up to which a refresh is measured: it has two versions on each node, and a cluster of one machine has little memory.
_REFRESHED = 256


def run(
    megabytes: Annotated[str, typer.Option(help="MiB of the modules.")] = "64,1024",
    rounds: Annotated[int, typer.Option(help="Deploys of each, and as many turns of Ray alone.")] = 5,
    fresh: Annotated[int, typer.Option(help="Other processes that attach, of each.")] = 3,
    json: Json = None,
) -> None:
    """Measure deploys and refreshes on three Ray nodes of this machine, beside Ray's own transfer of the same bytes."""
    report = Report("cluster", f"Deploys to {COUNT} nodes of this machine", [OURS, RAY], divided=False)
    sizes = numbers(megabytes)
    store = (max(sizes) * 5 // 4 + 512) << 20  # parts are as large as on hosts, whose stores are larger still
    needed, free = COUNT * (store + (max(sizes) << 20)), free_bytes("cpu") or 0
    if free < needed:  # Ray is not to kill anything for it
        raise typer.BadParameter(f"{max(sizes)} MiB on {COUNT} nodes need {needed >> 20} MiB of memory, {free >> 20} are free")
    with Nodes(store) as nodes, Cluster("bench") as cluster:
        first: Times = defaultdict(list)
        _deploy(nodes, "first", _FIRST, first)
        _alone(nodes, _FIRST, first)
        report.row(f"{_FIRST} MiB, the first of all: call until all have it", _samples(first, _WHOLE))
        for mebibytes in sizes:
            times: Times = defaultdict(list)
            for number in range(rounds):
                _alone(nodes, mebibytes, times)
                name = f"m{mebibytes}-{number}"
                _deploy(nodes, name, mebibytes, times)
                _attach(nodes, name, mebibytes, times, new=number < fresh)
                if mebibytes <= _REFRESHED:
                    _refresh(nodes, cluster, name, mebibytes, times)
                cluster.invalidate("module", name, mebibytes)
            _add(report, f"{mebibytes} MiB: ", times)
    report.note(
        f"medians of {rounds} rounds, each of a new key; in each, Ray has its turn before ours; nodes, brokers and "
        f"processes share the cores, and bytes between nodes go through sockets of this machine"
    )
    report.note(
        f"{RAY}: arrays of the same sizes, put on one node and got on the other {COUNT - 1}, where they stay in Ray's store; "
        f"the goal is about what remains of a deploy without its build"
    )
    report.finish(json)


def _deploy(nodes: Nodes, name: str, mebibytes: int, times: Times) -> None:
    """Have a process of every node call at once."""
    for node in nodes.nodes:
        node.process.tell(load=name, mebibytes=mebibytes)
    answers = [node.process.read()["times"] for node in nodes.nodes]
    whole = max(end for _, end in answers) - min(begin for begin, _ in answers)
    [build] = nodes.built(name)
    times[_WHOLE, OURS].append(whole)
    times[_BUILD, OURS].append(build)
    times[_MOVE, OURS].append(whole - build)


def _alone(nodes: Nodes, mebibytes: int, times: Times) -> None:
    """Put on one node, and get on the others at once."""
    source, *others = (node.actor for node in nodes.nodes)
    begin, _, references = ray.get(source.put.remote(mebibytes))
    whole = max(end for _, end in ray.get([other.get.remote(references) for other in others])) - begin
    times[_MOVE, RAY].append(whole)
    begin, end = ray.get(others[0].get.remote(references))
    times[_AGAIN, RAY].append(end - begin)


def _attach(nodes: Nodes, name: str, mebibytes: int, times: Times, *, new: bool) -> None:
    node = nodes.nodes[-1]
    if new:
        with nodes.process(node.socket) as process:
            process.read()
            begin, end = process.ask(load=name, mebibytes=mebibytes)["times"]
        times[_FRESH, OURS].append(end - begin)
    begin, end = node.process.ask(load=name, mebibytes=mebibytes)["times"]
    times[_AGAIN, OURS].append(end - begin)


def _refresh(nodes: Nodes, cluster: Cluster, name: str, mebibytes: int, times: Times) -> None:
    for node in nodes.nodes:
        node.process.ask(watch=name)
    times[_REFRESH, OURS].append(timed(lambda: cluster.refresh("module", name, mebibytes)))
    answers = [node.process.ask(changed=name)["times"] for node in nodes.nodes]
    times[_SWAP, OURS].append(max(current for _, current in answers) - max(prepared for prepared, _ in answers))


def _samples(times: Times, name: str) -> dict[str, Sample]:
    return {subject: Sample([taken]) for (found, subject), taken in times.items() if found == name}


def _add(report: Report, prefix: str, times: Times) -> None:
    for name in (_WHOLE, _BUILD, _MOVE, _REFRESH, _SWAP, _FRESH, _AGAIN):
        samples = _samples(times, name)
        if name == _MOVE:
            report.row(prefix + name, samples, "s", "cluster_move", samples[OURS].p50 / samples[RAY].p50, "ratio")
        elif samples:
            report.row(prefix + name, samples)
