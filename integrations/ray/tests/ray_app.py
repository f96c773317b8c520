"""The app of the tests of the transport: two nodes on this machine, each with its own base path, and actors on them.

The actors are in a separate module, because Ray's workers import them.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import ray
import torch
from ray._private import internal_api
from ray.cluster_utils import Cluster
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from shared_rpc import Client
from shared_rpc.codec.reducers import StorageName
from shared_rpc.memory.mapping import MAPPINGS
from shared_rpc_ray import transport
from shared_rpc_ray.tensors import client_of
from tests.kit.processes import PYTHONPATH

__all__ = ["STORE", "Holder", "Nodes", "segment_of"]

# Before the first class that uses it.
transport.register()

#: Bytes of each node's object store; Ray requires at least 75 MiB.
STORE = 128 << 20


def segment_of(tensor: torch.Tensor) -> str:
    """Return the segment of a tensor, ``""`` for private memory."""
    found = MAPPINGS.find(tensor.untyped_storage().data_ptr()) if tensor.numel() else None
    return found[0].info.id if found is not None else ""


@ray.remote(num_cpus=0, enable_tensor_transport=True)
class Holder:
    """A process that creates tensors, and receives those of others."""

    def __init__(self) -> None:
        self.kept: Any = None

    def pid(self) -> int:
        """Return its id."""
        return os.getpid()

    @ray.method(tensor_transport="SHARED_RPC")
    def make(self, count: int) -> torch.Tensor:
        """Return a private tensor, which Ray keeps."""
        return torch.arange(count, dtype=torch.float32)

    @ray.method(tensor_transport="SHARED_RPC")
    def odd(self) -> dict[str, Any]:
        """Return tensors of every kind, with other values."""
        whole = torch.arange(24.0).reshape(4, 6)
        return {
            "turned": whole.t(),
            "part": whole[1:3, 2:],
            "bfloat16": torch.full((3,), 1.5, dtype=torch.bfloat16),
            "empty": torch.empty(0, 3),
            "scalar": torch.tensor(7),
            "gradient": torch.ones(2, requires_grad=True),
            "parameter": torch.nn.Parameter(torch.ones(2)),
            "number": 7,
        }

    @ray.method(tensor_transport="SHARED_RPC")
    def graph(self) -> torch.Tensor:
        """Return a tensor that cannot be shared."""
        return torch.ones(2, requires_grad=True) * 2

    @ray.method(tensor_transport="SHARED_RPC")
    def view_of_buffer(self) -> torch.Tensor:
        """Return a view of memory of the node's server."""
        self.kept = client_of("cpu").create_buffer((8, 8), "float32")
        self.kept.value.fill_(1)
        return self.kept.value[2:4, 3].t()

    def buffer(self) -> tuple[str, float]:
        """Return the segment of that memory, and its sum."""
        return segment_of(self.kept.value), float(self.kept.value.sum())

    def put(self, count: int) -> list[Any]:
        """Put a tensor, and return its reference."""
        self.kept = ray.put(torch.arange(count, dtype=torch.float32), _tensor_transport="SHARED_RPC")
        return [self.kept]

    def write(self, tensor: torch.Tensor, value: float) -> tuple[str, float]:
        """Write to a received tensor; return its segment and its sum."""
        tensor.view(-1)[0] = value
        return segment_of(tensor), float(tensor.double().sum())

    def described(self, odd: dict[str, Any]) -> dict[str, Any]:
        """Return each tensor as a list, with its dtype, its strides and ``requires_grad``."""
        return {
            name: (value.tolist(), str(value.dtype), value.stride(), value.requires_grad)
            if isinstance(value, torch.Tensor)
            else value
            for name, value in odd.items()
        }

    def fetched(self, references: list[Any]) -> tuple[str, float]:
        """Get the tensor of a reference in a list; return its segment and its sum."""
        tensor = ray.get(references[0])
        return segment_of(tensor), float(tensor.double().sum())

    def into(self, references: list[Any], count: int) -> tuple[bool, float]:
        """Receive a tensor into memory of this process."""
        target = torch.zeros(count)
        ray.experimental.set_target_for_ref(references[0], [target])
        got = ray.get(references[0])
        return got.data_ptr() == target.data_ptr(), float(target.double().sum())


class Nodes:
    """Two Ray nodes on this machine; the driver is on the first."""

    def __init__(self, folder: Path, monkeypatch: Any) -> None:
        self.bases = [str(folder / "first"), str(folder / "second")]
        # The workers of a node inherit the environment of its raylet.
        monkeypatch.setenv("SHARED_TENSOR_BASE_PATH", self.bases[0])
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parent), PYTHONPATH]))
        monkeypatch.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        monkeypatch.setenv("RAY_memory_monitor_refresh_ms", "0")
        monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        self.cluster = Cluster()
        first = self.cluster.add_node(num_cpus=1, include_dashboard=False, object_store_memory=STORE)
        second = self.cluster.add_node(
            num_cpus=1, object_store_memory=STORE, env_vars={"SHARED_TENSOR_BASE_PATH": self.bases[1]}
        )
        self.ids = [first.node_id, second.node_id]
        self.cluster.wait_for_nodes()
        ray.init(address=self.cluster.address, log_to_driver=False)

        # Shared by the tests that do not kill them, because starting an actor takes seconds.
        self.makers = [self.actor(0), self.actor(1)]
        self.readers = [self.actor(0), self.actor(1)]

    def actor(self, node: int) -> Any:
        """Return a new actor on a node."""
        strategy = NodeAffinitySchedulingStrategy(self.ids[node], soft=False)
        return Holder.options(scheduling_strategy=strategy).remote()

    def objects(self, node: int) -> set[str]:
        """Return the ids of the objects of a node's server."""
        with Client(self.bases[node], device="cpu", timeout=10) as client:
            return {info["object_id"] for info in client.list_objects()}

    def ids_of(self, *references: Any) -> list[str]:
        """Return the ids of the server's objects behind references."""
        manager = ray._private.worker.global_worker.rdt_manager
        found = [manager.get_rdt_metadata(reference.hex()).tensor_transport_meta for reference in references]
        return [StorageName(*metadata.names[0][9:]).object_id for metadata in found]

    def spilled(self) -> int:
        """Return the number of bytes spilled by the nodes' object stores."""
        state = internal_api.get_state_from_address(self.cluster.address)
        return int(internal_api.get_memory_info_reply(state).store_stats.spilled_bytes_total)

    def close(self) -> None:
        """Stop Ray and the started servers."""
        ray.shutdown()
        self.cluster.shutdown()
        for base in self.bases:
            words = [sys.executable, "-m", "shared_rpc.cli", "stop", "--socket", f"{base}-cpu.sock"]
            subprocess.run(words, check=False, capture_output=True, timeout=30)
