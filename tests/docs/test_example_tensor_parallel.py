"""The tensor-parallel example: for any number of ranks, on the host and on one or several GPUs."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch

from shared_rpc import Client, Handle
from shared_rpc.extras.sharding import shard_state_dict
from tests.kit.examples import Example, importing
from tests.kit.processes import Child

pytestmark = pytest.mark.timeout(150)

#: The device of each rank, and the backend by which they talk.
SITES = {
    "host": (["cpu", "cpu"], "gloo"),
    "one GPU": (["cuda:0", "cuda:0"], "gloo"),
    "two GPUs": (["cuda:0", "cuda:1"], "nccl"),
}
#: Of float32 sums in another order.
CLOSE = {"rtol": 0.0, "atol": 1e-5}

Modules = Callable[[str], ModuleType]


@pytest.fixture
def modules() -> Iterator[Modules]:
    """The example's modules, by name."""
    with importing("tensor_parallel") as modules:
        yield modules


@torch.inference_mode()
def test_the_parts_compute_the_whole_models_result(modules: Modules) -> None:
    """For 8 ranks, two of which have the same key and value head."""
    world = 8
    model, rules = modules("model"), modules("shards").RULES
    torch.manual_seed(0)
    whole = model.Transformer().eval()
    ranks = []
    for rank in range(world):
        ranks.append(model.Transformer(world=world).eval())
        ranks[rank].load_state_dict(shard_state_dict(whole.state_dict(), rules, rank, world))

    torch.testing.assert_close(modules("one_client").forward(ranks, model.prompts()), whole(model.prompts()), **CLOSE)


class Site(NamedTuple):
    """Two servers, and this process, which has attached to both."""

    example: Example
    backend: str
    clients: list[Client]
    handles: list[Handle[Any]]
    #: Of the whole model.
    expected: torch.Tensor
    #: Bytes of each rank's part.
    needs: list[int]

    def start(self, rank: int) -> Child:
        """Start the process of a rank."""
        return self.example.start("rank.py", str(self.example.folder), str(rank))

    def logits(self, rank: int) -> torch.Tensor:
        """Read the logits computed by a process."""
        return torch.load(self.example.folder / f"logits{rank}.pt", weights_only=True)


@pytest.fixture(params=["host", *(pytest.param(name, marks=pytest.mark.gpu) for name in SITES if name != "host")])
def site(request: pytest.FixtureRequest, modules: Modules, tmp_path: Path) -> Iterator[Site]:
    """A checkpoint and the servers of two ranks."""
    devices, backend = SITES[request.param]
    gpus = "" if request.param == "host" else visible(len(set(devices)))
    with Example("tensor_parallel", tmp_path, devices[0], gpus) as example, ExitStack() as stack:
        assert example.start("model.py", str(tmp_path)).close()[0] == 0
        state = torch.load(tmp_path / "model.pt", weights_only=True)
        model, rules = modules("model"), modules("shards").RULES
        whole = model.Transformer().requires_grad_(False).eval()
        whole.load_state_dict(state)
        expected = whole.to(devices[0])(model.prompts().to(devices[0])).cpu()
        clients, handles, needs = [], [], []
        for rank, device in enumerate(devices):
            base_path = str(tmp_path / f"rank{rank}")
            example.serve("shards.py", "--base-path", base_path, "--device", device)
            clients.append(stack.enter_context(Client(base_path, device=device, timeout=60)))
            handles.append(stack.enter_context(clients[rank].call("load_shard", str(tmp_path / "model.pt"), rank, 2)))
            needs.append(sum(tensor.nbytes for tensor in shard_state_dict(state, rules, rank, 2).values()))
        yield Site(example, backend, clients, handles, expected, needs)


def visible(count: int) -> str:
    """Make this many of the process's GPUs visible."""
    if torch.cuda.device_count() < count:
        pytest.skip(f"needs {count} GPUs")
    return ",".join(os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[:count]) or ",".join(map(str, range(count)))


def test_ranks_and_one_client_compute_with_parts_that_exist_once(site: Site, modules: Modules) -> None:
    """A server has one object, its rank's part, held by the rank and this process; all logits are the whole model's."""
    ranks = []
    for number, client in enumerate(site.clients):
        ranks.append(site.start(number))
        # The rank waits for the other one.
        ranks[number].expect("is attached")
        (part,) = client.list_objects()
        assert part["nbytes"] == site.needs[number]
        if number == 0:
            assert {holder["pid"] for holder in part["holders"]} == {os.getpid(), ranks[0].pid}

    for number, rank in enumerate(ranks):
        assert f"by {site.backend}" in rank.expect("next tokens")
        assert rank.close()[0] == 0
        torch.testing.assert_close(site.logits(number), site.expected, **CLOSE)

    logits = modules("one_client").forward([handle.value for handle in site.handles], modules("model").prompts())
    torch.testing.assert_close(logits.cpu(), site.expected, **CLOSE)
    program = site.example.start("one_client.py", str(site.example.folder))
    assert str(site.expected[:, -1].argmax(-1).tolist()) in program.expect("next tokens")
