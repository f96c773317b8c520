"""Three nodes of a Ray cluster on this machine, each with its broker, a process that loads, and an actor that is Ray alone."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Any

import numpy as np
import ray
from ray.cluster_utils import Cluster
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from benchmarks.servers import Process, environ
from shared_rpc import Client
from shared_rpc_ray.membership import connect

__all__ = ["COUNT", "Nodes"]

#: Nodes of the cluster.
COUNT = 3
#: Seconds that anything here may take.
_PATIENCE = 300.0
#: Nothing is collected, drawn or sent home, and objects are spilled whatever the level of the disk. Ray kills no
#: worker for what other processes of the machine take: whether there is memory is checked before.
_RAY = {
    "RAY_memory_monitor_refresh_ms": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_enable_metrics_collection": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_local_fs_capacity_threshold": "1",
}
_SYSTEM = {"enable_metrics_collection": False}

#: Layers of 4 MiB with torch's own initial values. Each build says how long it took, in a file.
APP = """
import time
from pathlib import Path

import torch
from shared_rpc import Provider

provider = Provider(device="cpu")

@provider.share(managed=True)
def module(name, mebibytes):
    begin = time.perf_counter()
    layers = [torch.nn.Linear(1024, 1024, bias=False) for _ in range(mebibytes // 4)]
    built = torch.nn.Sequential(*layers).requires_grad_(False)
    with open(Path(__file__).with_name("builds"), "a") as file:
        file.write(f"{name} {time.perf_counter() - begin}\\n")
    return built
"""


class Node:
    """A node: its broker's socket, a process that loads from it, and an actor of Ray there."""

    def __init__(self, socket: str, environment: dict[str, str], process: Process, actor: Any) -> None:
        self.socket = socket
        self.environment = environment
        self.process = process
        self.actor = actor


class _Alone:
    """Ray's object store, used by itself: arrays are put on a node, and got on another."""

    def put(self, mebibytes: int) -> tuple[float, float, list[Any]]:
        """Put arrays of 4 MiB; return when that began and ended, and the reference."""
        arrays = [np.full((1024, 1024), number, np.float32) for number in range(mebibytes // 4)]
        begin = time.monotonic()
        reference = ray.put(arrays)
        return begin, time.monotonic(), [reference]

    def get(self, references: list[Any]) -> tuple[float, float]:
        """Get what was put, as Ray gives it: in its store, without a copy; return when that began and ended."""
        begin = time.monotonic()
        arrays = ray.get(references[0])
        assert arrays[-1][-1, -1] == len(arrays) - 1, "the last array is the last one"
        return begin, time.monotonic()


class Nodes:
    """The nodes, in a folder of their own. They end with the block.

    :param store: bytes of a node's object store.
    """

    def __init__(self, store: int) -> None:
        self._store = store
        self._stack = ExitStack()
        self.nodes: list[Node] = []

    def __enter__(self) -> Nodes:
        before = dict(os.environ)
        self._stack.callback(os.environ.update, before)
        self._stack.callback(os.environ.clear)
        # Nodes, and the actors there, have the environment of this process.
        os.environ.update({**environ(), **_RAY})
        # A socket address has room for 107 bytes: a short prefix.
        self.folder = Path(self._stack.enter_context(TemporaryDirectory(prefix="bench-")))
        (self.folder / "app.py").write_text(APP)
        try:
            self._start()
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._stack.close()

    def _start(self) -> None:
        options = {"num_cpus": 1, "object_store_memory": self._store, "include_dashboard": False}
        cluster = Cluster(initialize_head=True, head_node_args={**options, "_system_config": _SYSTEM})
        self._stack.callback(cluster.shutdown)
        del options["include_dashboard"]
        ray_nodes = [cluster.head_node, *(cluster.add_node(**options) for _ in range(COUNT - 1))]
        connect(str(cluster.address))
        self._stack.callback(ray.shutdown)
        for number, ray_node in enumerate(ray_nodes):
            self.nodes.append(self._node(number, str(ray_node.node_id), str(cluster.address)))
        for node in self.nodes:
            self._wait_until_joined(node)

    def _node(self, number: int, ray_node: str, address: str) -> Node:
        socket = str(self.folder / f"{number}.sock")
        environment = {
            **environ(),
            "SHARED_TENSOR_BASE_PATH": str(self.folder / str(number)),
            "SHARED_TENSOR_CLUSTER": "bench",
            "SHARED_TENSOR_CLUSTER_NODE": ray_node,
            "RAY_ADDRESS": address,
        }
        broker = subprocess.Popen(
            [sys.executable, "-m", "shared_rpc.cli", "serve", "app.py", "--socket", socket],
            cwd=self.folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self._stack.callback(_ended, broker)
        assert broker.stdout is not None, "stdout is a pipe"
        if "serving" not in broker.stdout.readline():
            raise RuntimeError(f"the broker ended with exit code {broker.wait()}: run 'shared-rpc serve --cluster' on the app")
        process = self._stack.enter_context(self.process(socket))
        process.read()
        strategy = NodeAffinitySchedulingStrategy(ray_node, soft=False)
        actor = ray.remote(num_cpus=0, scheduling_strategy=strategy)(_Alone).remote()
        return Node(socket, environment, process, actor)

    def process(self, socket: str) -> Process:
        """Start a process that loads from a broker; it says when it is ready."""
        return Process("cluster_client", os.sched_getaffinity(0), socket=socket)

    def _wait_until_joined(self, node: Node) -> None:
        until = time.monotonic() + _PATIENCE
        with Client(socket_path=node.socket, timeout=_PATIENCE) as client:
            while True:
                source = client.get_server_info()["source"]
                if source is not None and source["status"].get("state") == "joined":
                    return
                if time.monotonic() > until:
                    raise RuntimeError(f"the broker at {node.socket} has not become part of the cluster")
                time.sleep(0.1)

    def built(self, name: str) -> list[float]:
        """Return the seconds of each build of a name, the function alone."""
        lines = [line.split() for line in (self.folder / "builds").read_text().splitlines()]
        return [float(seconds) for found, seconds in lines if found == name]


def _ended(broker: subprocess.Popen[str]) -> None:
    broker.terminate()
    broker.wait(_PATIENCE)
    assert broker.stdout is not None, "stdout is a pipe"
    broker.stdout.close()
