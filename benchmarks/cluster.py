"""A deploy to three nodes of a Ray cluster on this machine, compared with Ray's own transfer of the same bytes."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Annotated, Any
from unittest import mock

import numpy as np
import ray
import torch  # noqa: F401  # so that its import is not measured as part of an attach
import typer
from ray.cluster_utils import Cluster as RayCluster
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from benchmarks.processes import Process, ask_all
from benchmarks.runner import APP, OURS, PATIENCE, Json, Run, Times, numbers, wait_for
from shared_rpc import Client
from shared_rpc.memory.devices import free_bytes
from shared_rpc_ray import Cluster
from shared_rpc_ray.membership import connect

RAY = "ray put, get"
#: Nodes of the cluster.
COUNT = 3
#: Seconds between two polls of a broker's objects.
_LOOK = 0.002
#: Disables Ray's metrics, usage statistics and disk check, and its memory monitor, which would kill workers because of
#: other processes of the machine: free memory is checked before.
_RAY = {
    "RAY_memory_monitor_refresh_ms": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_enable_metrics_collection": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_local_fs_capacity_threshold": "1",
}
#: The row with two sides.
_MOVE = "from the build until all nodes have it"
#: MiB of the first deploy, which includes one-time costs.
_FIRST = 8
#: MiB up to which a refresh is measured: each node holds two versions, and all nodes share the memory of this machine.
_REFRESHED = 256


def run(
    megabytes: Annotated[str, typer.Option(help="MiB of the modules.")] = "64,1024",
    rounds: Annotated[int, typer.Option(help="Deploys of each size, and as many turns of Ray alone.")] = 5,
    json: Json = None,
) -> None:
    """Measure deploys and refreshes on three Ray nodes of this machine, compared with Ray's own transfer of the same bytes."""
    sizes = numbers(megabytes)
    store = (max(sizes) * 5 // 4 + 512) << 20  # large enough for parts of the maximum size, as in production
    needed, free = COUNT * (store + (max(sizes) << 20)), free_bytes("cpu") or 0
    if free < needed:  # the memory monitor is disabled
        raise typer.BadParameter(f"{max(sizes)} MiB on {COUNT} nodes need {needed >> 20} MiB of memory, {free >> 20} are free")
    title = f"Deploys to {COUNT} nodes of this machine"
    with (
        Run("cluster", title, [RAY, OURS], json=json, base=RAY, pinned=False) as run,
        _nodes(run, store) as nodes,
        Cluster("bench") as cluster,
    ):
        _alone(nodes, _FIRST, Times())
        _deploy(nodes, "first", _FIRST, Times())
        for mebibytes in sizes:
            times = Times()
            for number in range(rounds):
                _alone(nodes, mebibytes, times)
                name = f"m{mebibytes}-{number}"
                _deploy(nodes, name, mebibytes, times)
                begin, end, _ = nodes[-1][0].ask("load", name=name, mebibytes=mebibytes)
                times["attach again", OURS].append(end - begin)
                if mebibytes <= _REFRESHED:
                    _refresh(nodes, cluster, name, mebibytes, times)
                cluster.invalidate("layers", mebibytes, name)
            for row in dict.fromkeys(row for row, _ in times):
                goal = 2 if row == _MOVE else None
                run.row(f"{mebibytes} MiB: {row}", times.samples(row), goal=goal, of=RAY)
        run.note(
            f"nodes, brokers and processes share the cores and the sockets of this machine; {RAY}: arrays of the same sizes, "
            f"put on one node and got on the other {COUNT - 1}, where they stay in Ray's store; no deploy includes its build"
        )


# The nodes.


#: A node: a client process of its broker, and a Ray actor.
Node = tuple[Process, Any]


class _Alone:
    """Ray's object store alone: arrays are put on one node, and got on another."""

    def put(self, mebibytes: int) -> tuple[float, list[Any]]:
        """Put arrays of 4 MiB; return the start time and the reference."""
        arrays = [np.full((1024, 1024), number, np.float32) for number in range(mebibytes // 4)]
        begin = time.monotonic()
        return begin, [ray.put(arrays)]

    def get(self, references: list[Any]) -> float:
        """Get the arrays without copying them out of Ray's store; return the end time."""
        arrays = ray.get(references[0])
        assert arrays[-1][-1, -1] == len(arrays) - 1, "the last array is wrong"
        return time.monotonic()


def _joined(info: Any) -> bool:
    return info["source"] is not None and info["source"]["status"].get("state") == "joined"


@contextmanager
def _nodes(run: Run, store: int) -> Iterator[list[Node]]:
    """Run the nodes, each with an object store of that many bytes."""
    with ExitStack() as stack:
        # Nodes and their actors inherit the environment of this process.
        stack.enter_context(mock.patch.dict(os.environ, _RAY))
        options = {"num_cpus": 1, "object_store_memory": store}
        head = {**options, "include_dashboard": False, "_system_config": {"enable_metrics_collection": False}}
        cluster = RayCluster(initialize_head=True, head_node_args=head)
        stack.callback(cluster.shutdown)
        ray_nodes = [cluster.head_node, *(cluster.add_node(**options) for _ in range(COUNT - 1))]
        connect(str(cluster.address))
        stack.callback(ray.shutdown)
        clients, nodes = [], []
        for number, ray_node in enumerate(ray_nodes):
            ray_id = str(ray_node.node_id)
            variables = {
                "SHARED_TENSOR_BASE_PATH": str(run.folder / str(number)),
                "SHARED_TENSOR_CLUSTER": "bench",
                "SHARED_TENSOR_CLUSTER_NODE": ray_id,
                "RAY_ADDRESS": str(cluster.address),
            }
            clients.append(stack.enter_context(run.broker(APP, name=str(number), variables=variables)))
            strategy = NodeAffinitySchedulingStrategy(ray_id, soft=False)
            actor = ray.remote(num_cpus=0, scheduling_strategy=strategy)(_Alone).remote()
            process = stack.enter_context(Process(Loader, address=clients[-1].socket_path))
            nodes.append((process.ready(), actor))
        for client in clients:
            wait_for(client.get_server_info, _joined, 0.1)
        yield nodes


# The measurements.


def _deploy(nodes: list[Node], name: str, mebibytes: int, times: Times) -> None:
    """Measure concurrent calls from a process of every node, without the build."""
    begins, ends, builds = zip(*ask_all([process for process, _ in nodes], "load", name=name, mebibytes=mebibytes), strict=True)
    times[_MOVE, OURS].append(max(ends) - min(begins) - builds[0])


def _alone(nodes: list[Node], mebibytes: int, times: Times) -> None:
    """Measure Ray: put on one node, and get on the others concurrently."""
    source, *others = (actor for _, actor in nodes)
    begin, references = ray.get(source.put.remote(mebibytes))
    times[_MOVE, RAY].append(max(ray.get([other.get.remote(references) for other in others])) - begin)


def _refresh(nodes: list[Node], cluster: Cluster, name: str, mebibytes: int, times: Times) -> None:
    for process, _ in nodes:
        process.tell("watch", name=name, before=process.ask("versions", name=name))
    with times.of("refresh until all are current"):
        cluster.refresh("layers", mebibytes, name)
    answers = [process.read() for process, _ in nodes]
    swap = max(current for _, current in answers) - max(prepared for prepared, _ in answers)
    times["from all prepared to all current", OURS].append(swap)


class Loader:
    """A client process of a node, which calls, and polls its broker for other versions."""

    def __init__(self, address: str) -> None:
        self._client = Client(socket_path=address, timeout=PATIENCE)
        self.close = self._client.close

    def load(self, name: str, mebibytes: int) -> tuple[float, float, float]:
        """Call, and attach the module; return the start and end times, and the seconds of the build."""
        begin = time.monotonic()
        with self._client.call("layers", mebibytes, name) as handle:
            assert len(handle.value) == mebibytes // 4, "layers are missing"
            return begin, time.monotonic(), handle.value.seconds

    def versions(self, name: str) -> dict[str, bool]:
        """Return the broker's versions of a module, and whether each is current."""
        results = [found for found in self._client.list_objects() if found["kind"] == "result"]
        return {found["object_id"]: found["cached"] for found in results if repr(name) in (found["cache_key"] or "")}

    def watch(self, name: str, before: dict[str, bool]) -> tuple[float, float]:
        """Wait until a version not in ``before`` is current; return when the broker had it and when it was."""
        prepared = 0.0
        while True:
            news = [current for version, current in self.versions(name).items() if version not in before]
            if news and not prepared:
                prepared = time.monotonic()
            if any(news):
                return prepared, time.monotonic()
            time.sleep(_LOOK)
