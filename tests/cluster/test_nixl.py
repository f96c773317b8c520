"""Ray's transport NIXL between the servers of two nodes: from segments of the one into segments of the other, in place.

``python -m tests.cluster.test_nixl cuda|cpu [MIB ...]`` measures it; for two GPUs beside a copy by CUDA between them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

ray = pytest.importorskip("ray")
pytest.importorskip("nixl")

from shared_rpc import Client, Provider, Server  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # Ray's and NIXL's own
    pytest.mark.timeout(300),
]

#: An odd number of bytes in odd places: nothing is a multiple of what it is copied by.
_SHAPES = [(1 << 20, "float32"), (999, "bfloat16"), (3, "float64"), (1 << 22, "uint8")]


def _at(tensor: torch.Tensor) -> tuple[int, int]:
    """Where a tensor is, and how much it is."""
    return tensor.data_ptr(), tensor.nbytes


class Agent:
    """A process with a server of its device, whose buffers NIXL reads and fills."""

    def __init__(self, device: str, base: str, seed: int) -> None:
        self.device = device
        self.provider = Provider(base, device=device, execution_mode="server")
        self.server = Server(self.provider)
        self.server.start(blocking=False)
        self.client = Client(base, device=device)
        self.seed = seed
        self.buffers: list[Any] = []
        self.references: list[Any] = []

    def facts(self) -> dict[str, Any]:
        """Its device, and the mechanism by which that's memory is shared."""
        info = self.client.get_server_info()
        return {"device": info["device"], "mechanism": info["mechanism"], "visible": os.environ.get("CUDA_VISIBLE_DEVICES")}

    def allocate(self, shapes: list[tuple[int, str]]) -> list[tuple[int, int]]:
        """Make a buffer of each shape, of zeros; return where they are."""
        for old in self.buffers:
            old.release()
        self.buffers = [self.client.create_buffer((size,), dtype, zero=True) for size, dtype in shapes]
        return [_at(buffer.value) for buffer in self.buffers]

    def fill(self) -> list[int]:
        """Write random bits; return a digest of each buffer."""
        generator = torch.Generator(self.device).manual_seed(self.seed)
        for buffer in self.buffers:
            flat = buffer.value.view(torch.uint8)
            flat.copy_(torch.randint(0, 256, flat.shape, dtype=torch.uint8, device=self.device, generator=generator))
        self._synchronize()
        return self.digests()

    def _synchronize(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()

    def digests(self) -> list[int]:
        """A number for each buffer that depends on each of its bytes and on where it is."""
        found = []
        for buffer in self.buffers:
            flat = buffer.value.view(torch.uint8)
            total = 0
            for start in range(0, flat.numel(), 1 << 26):
                part = flat[start : start + (1 << 26)].long()
                places = torch.arange(start, start + part.numel(), device=self.device) % 65521 + 1
                total += int((part * places).sum())
            found.append(total)
        return found

    def put(self) -> tuple[list[Any], float]:
        """Pass the buffers on by NIXL; return the reference and the seconds that took."""
        begin = time.perf_counter()
        self.references = [ray.put([buffer.value for buffer in self.buffers], _tensor_transport="nixl")]
        return self.references, time.perf_counter() - begin

    def get(self, references: list[Any]) -> tuple[list[tuple[int, int]], float]:
        """Receive into this process's own buffers; return where the tensors are that Ray gives, and the seconds."""
        targets = [buffer.value for buffer in self.buffers]
        ray.experimental.set_target_for_ref(references[0], targets)
        begin = time.perf_counter()
        got = ray.get(references[0])
        self._synchronize()
        return [_at(tensor) for tensor in got], time.perf_counter() - begin

    def register(self) -> float:
        """Register the buffers with NIXL for good; return the seconds."""
        begin = time.perf_counter()
        for buffer in self.buffers:
            ray.experimental.register_nixl_memory(buffer.value)
        return time.perf_counter() - begin

    def seen(self, base: str) -> list[int]:
        """The digests of the buffers as another process has them that attaches to them by the server."""
        code = (
            "import sys, torch; from shared_rpc import Client\n"
            "client = Client(sys.argv[1], device=sys.argv[2])\n"
            "for name in sys.argv[3:]:\n"
            "    flat = client.get_buffer(name).value.view(torch.uint8).long()\n"
            "    print(int((flat * (torch.arange(flat.numel(), device=flat.device) % 65521 + 1)).sum()))\n"
        )
        words = [sys.executable, "-c", code, base, self.device, *(buffer.object_id for buffer in self.buffers)]
        return [int(line) for line in subprocess.run(words, capture_output=True, text=True, check=True).stdout.split()]

    def close(self) -> None:
        """Release the buffers and stop the server."""
        self.references.clear()
        for buffer in self.buffers:
            buffer.release()
        self.client.close()
        self.server.stop()


class Pair:
    """Two nodes of Ray, for GPUs with one each, and an agent on each."""

    def __init__(self, device: str, folder: Path) -> None:
        from ray.cluster_utils import Cluster
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        self.device = device
        gpus = 1 if device == "cuda" else 0
        self.cluster = Cluster()
        # Each raylet hands out the GPUs that its own CUDA_VISIBLE_DEVICES names.
        nodes = [
            self.cluster.add_node(
                num_cpus=1,
                num_gpus=gpus,
                object_store_memory=256 << 20,
                include_dashboard=False,
                env_vars={"CUDA_VISIBLE_DEVICES": str(number)} if gpus else None,
            )
            for number in range(2)
        ]
        self.cluster.wait_for_nodes()
        ray.init(address=self.cluster.address, log_to_driver=True)
        self.bases = [str(folder / f"node{number}") for number in range(2)]
        kind = ray.remote(num_gpus=gpus, num_cpus=0, enable_tensor_transport=True)(Agent)
        self.agents = [
            kind.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node.node_id, soft=False)).remote(
                device, base, seed
            )
            for seed, (node, base) in enumerate(zip(nodes, self.bases, strict=True))
        ]
        ray.get([agent.facts.remote() for agent in self.agents])

    def close(self) -> None:
        """End the agents and Ray."""
        try:
            ray.get([agent.close.remote() for agent in self.agents], timeout=30)
        finally:
            ray.shutdown()
            self.cluster.shutdown()


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def pair(ray_of_its_own: None, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """Two nodes, on host memory or with a GPU each."""
    if request.param == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    folder = tmp_path_factory.mktemp("nixl")
    folder.chmod(0o700)
    pair = Pair(request.param, folder)
    yield pair
    pair.close()


def test_the_agents_have_a_gpu_each(pair: Pair) -> None:
    """Of which the memory is shared by virtual memory management."""
    one, two = ray.get([agent.facts.remote() for agent in pair.agents])
    names = {one["mechanism"]["name"], two["mechanism"]["name"]}
    assert names == ({"vmm"} if pair.device == "cuda" else {"memfd"})
    assert (one["device"] != two["device"]) == (pair.device == "cuda")


def test_buffers_are_received_in_place(pair: Pair) -> None:
    """The tensors that Ray gives are the target's buffers, and every bit is the source's."""
    source, target = pair.agents
    ray.get(source.allocate.remote(_SHAPES))
    places = ray.get(target.allocate.remote(_SHAPES))
    digests = ray.get(source.fill.remote())
    assert ray.get(target.digests.remote()) != digests
    references, _ = ray.get(source.put.remote())
    got, _ = ray.get(target.get.remote(references))
    assert got == places
    assert ray.get(target.digests.remote()) == digests


def test_what_was_received_is_seen_by_others_of_its_node(pair: Pair) -> None:
    """It lies in the server's memory: another process that attaches to it has the same bits."""
    source, target = pair.agents
    ray.get(source.allocate.remote(_SHAPES))
    ray.get(target.allocate.remote(_SHAPES))
    digests = ray.get(source.fill.remote())
    references, _ = ray.get(source.put.remote())
    ray.get(target.get.remote(references))
    assert ray.get(target.seen.remote(pair.bases[1])) == digests


def test_buffers_travel_back_and_again(pair: Pair) -> None:
    """Either side is source and target, with memory that was registered before, and with new memory."""
    for source, target in (pair.agents, pair.agents[::-1], pair.agents):
        ray.get([agent.allocate.remote(_SHAPES) for agent in pair.agents])
        digests = ray.get(source.fill.remote())
        references, _ = ray.get(source.put.remote())
        ray.get(target.get.remote(references))
        assert ray.get(target.digests.remote()) == digests


def measure(pair: Pair, mib: int, repeat: int = 5) -> dict[str, Any]:
    """Seconds and GiB/s of one buffer of that size."""
    source, target = pair.agents
    shapes = [(mib << 20, "uint8")]
    ray.get(source.allocate.remote(shapes))
    places = ray.get(target.allocate.remote(shapes))
    digests = ray.get(source.fill.remote())
    registered = ray.get([agent.register.remote() for agent in pair.agents])
    references, put = ray.get(source.put.remote())
    seconds = []
    for _ in range(repeat):
        got, taken = ray.get(target.get.remote(references))
        assert got == places
        seconds.append(taken)
    assert ray.get(target.digests.remote()) == digests
    best = min(seconds)
    return {
        "mib": mib,
        "register_s": registered,
        "put_s": put,
        "get_s": seconds,
        "gib_per_s": mib / 1024 / best,
        "cuda_copy_gib_per_s": _cuda_copy(mib) if pair.device == "cuda" else None,
    }


def _cuda_copy(mib: int) -> float:
    """GiB/s of a copy between the two GPUs by torch, in this process: what the link can do."""
    one, two = (torch.empty(mib << 20, dtype=torch.uint8, device=f"cuda:{number}") for number in range(2))
    best = float("inf")
    for _ in range(5):
        torch.cuda.synchronize(0)
        torch.cuda.synchronize(1)
        begin = time.perf_counter()
        two.copy_(one)
        torch.cuda.synchronize(0)
        torch.cuda.synchronize(1)
        best = min(best, time.perf_counter() - begin)
    return mib / 1024 / best


def main() -> None:
    """Measure, and print a line of JSON for each size."""
    import tempfile

    folder = Path(tempfile.mkdtemp(prefix="nixl-"))
    folder.chmod(0o700)
    pair = Pair(sys.argv[1], folder)
    try:
        print(json.dumps(ray.get([agent.facts.remote() for agent in pair.agents])), flush=True)
        for mib in map(int, sys.argv[2:] or ("64", "1024", "8192")):
            print(json.dumps(measure(pair, mib)), flush=True)
    finally:
        pair.close()


if __name__ == "__main__":
    main()
