"""Ways to use read-only weights where torch would write to them in place, as the docs name them."""

from __future__ import annotations

import pytest
import torch

from tests.kit.world import World

#: The beginning of every child, and its end.
BEGIN = """
import copy
import torch
from torch import nn
from shared_rpc import Client

client = Client(device="cpu", connect_timeout=5)
model = client.call({endpoint!r})
x = torch.randn(3, 64)
{code}
print("survived", flush=True)
"""

TRAIN = """
step = torch.optim.SGD([one for one in trained.parameters() if one.requires_grad], lr=0.1)
trained(x).sum().backward()
step.step()
"""

#: By what would write to the weights in place: the endpoint, and the alternatives.
WAYS: dict[str, tuple[str, list[str]]] = {
    "optimizer": (
        "linear",
        [
            f"trained = nn.Sequential(model, nn.Linear(64, 4))\n{TRAIN}",
            f"trained = copy.deepcopy(model).requires_grad_(True)\n{TRAIN}",
        ],
    ),
    "load_state_dict": (
        "linear",
        [
            "state = nn.Linear(64, 64).state_dict()\nmodel.load_state_dict(state, assign=True)\n"
            "assert torch.equal(model.weight, state['weight'])",
            "copy.deepcopy(model).load_state_dict(nn.Linear(64, 64).state_dict())",
        ],
    ),
    "batch norm": (
        "normed",
        [
            "model.train()\nfor part in model.modules():\n    if isinstance(part, nn.BatchNorm1d): part.eval()\nmodel(x)",
            "model.train()\nmodel[1] = copy.deepcopy(model[1])\nmodel(x)",
        ],
    ),
    "max_norm": (
        "embedding",
        ["model.max_norm = None\nmodel(torch.arange(5))", "model = copy.deepcopy(model)\nmodel(torch.arange(5))"],
    ),
    "torch.compile": ("linear", ["torch.compile(lambda x: (model.weight * 2) @ x.T, backend='aot_eager')(x)"]),
}


@pytest.fixture
def world(world: World) -> World:
    """A server of small models that clients may only read."""

    world.share("linear", access="read")(lambda: torch.nn.Linear(64, 64).requires_grad_(False))

    @world.share(access="read")
    def normed() -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.BatchNorm1d(64)).eval().requires_grad_(False)

    @world.share(access="read")
    def embedding() -> torch.nn.Module:
        module = torch.nn.Embedding(8, 64, max_norm=0.1).eval().requires_grad_(False)
        module(torch.arange(8))
        return module

    return world


@pytest.mark.parametrize(("endpoint", "code"), [(endpoint, way) for endpoint, ways in WAYS.values() for way in ways])
def test_documented_ways_leave_the_weights_unchanged(world: World, endpoint: str, code: str) -> None:
    """The alternatives that the page gives. For the message after a write, see `processes/test_faults.py`."""
    child = world.process(BEGIN.format(endpoint=endpoint, code=code))
    assert child.expect("survived")
    assert child.close() == (0, "")
