"""Attaching and calling under torch's modes: what comes is what would come without them, and is of use after them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from shared_rpc import Provider
from tests.kit.apps import Connect, Serve
from tests.kit.deep import deep
from tests.kit.modes import MODES


@pytest.mark.parametrize("mode", ["FakeTensorMode", *deep(*(mode for mode in MODES if mode != "FakeTensorMode"))])
def test_calls_under_a_mode(provider: Provider, serve: Serve, connect: Connect, mode: str) -> None:
    """A small result, which comes by a way of its own, is real too."""
    provider.share("double", cache=False)(lambda x: x * 2)
    serve()
    client, x = connect(), torch.arange(4.0)
    for _ in range(2):
        result = MODES[mode](lambda: client.call("double", x))
        assert result.tolist() == [0, 2, 4, 6]
        assert not result.is_inference()


@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace")
@pytest.mark.parametrize("tensors", ["all", *deep("parameters")])
def test_calls_in_what_torch_compiles(provider: Provider, serve: Serve, connect: Connect, tensors: Any) -> None:
    """A compiled function calls endpoints and attaches models, and computes what it would without being compiled."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).eval()
    provider.share("load", managed=True, tensors=tensors)(lambda: model)
    provider.share("double", cache=False)(lambda x: x * 2)
    serve()
    client, x = connect(), torch.ones(1, 4)

    def use(x: torch.Tensor) -> torch.Tensor:
        with_model = client.call("load").value(x + 1)
        return client.call("double", with_model.detach()) + 1

    torch._dynamo.reset()
    expected = use(x)
    assert torch.equal(torch.compile(use, backend="eager")(x), expected)
    handle = client.call("load")
    assert torch.equal(torch.compile(handle.value.forward, backend="eager", fullgraph=True)(x), handle.value(x))
