"""A model that is built around shared memory, of transformers, or on a GPU; and what that takes."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

from shared_rpc import Client, Provider, Server, materialize
from tests.kit.apps import Connect, Serve
from tests.kit.models import Tied
from tests.kit.processes import eventually


class Net(nn.Module):
    """A module with an output that is tied to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.tied = Tied()


def same_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors see the same bytes in the same way."""
    return (one.data_ptr(), one.shape, one.stride(), one.dtype) == (other.data_ptr(), other.shape, other.stride(), other.dtype)


@pytest.fixture
def shared(provider: Provider, serve: Serve, connect: Connect) -> Client:
    """A client of a server that has a module and a dict of tensors, each with a lease, read-only."""
    provider.share("net", managed=True, access="read")(Net)
    provider.share("state", managed=True)(lambda: dict(Net().state_dict()))
    serve()
    return connect()


def test_a_handle_is_a_source(shared: Client) -> None:
    """Its memory is mapped, and both models see it."""
    handle = shared.call("net")
    with materialize(handle):
        model = Net()
    assert same_memory(model.tied.embed.weight, handle.value.tied.embed.weight)
    state = shared.call("state")
    with materialize(state):
        other = Net()
    state.value["tied.embed.weight"].fill_(7.0)
    assert (other.tied.head.weight == 7).all()


def test_a_model_keeps_its_lease(shared: Client) -> None:
    """Until it has gone; and its tensors outlive a handle that is released earlier."""

    def build() -> nn.Module:
        with materialize(shared.call("net")):
            return Net()

    model = build()
    (held,) = shared.list_objects()
    assert held["leases"] == 1
    expected = model.tied.embed.weight.clone()
    del model
    gc.collect()
    eventually(lambda: shared.list_objects()[0]["leases"] == 0)  # a finaliser's work is done by a thread
    handle = shared.call("net")
    with materialize(handle):
        model = Net()
    handle.release()
    shared.invalidate_endpoint_cache("net")
    assert torch.equal(model.tied.embed.weight, expected)


def test_training_leaves_read_only_memory_alone(shared: Client) -> None:
    """Gradients of a read-only source are this process's own."""
    with materialize(shared.call("net")):
        model = Net()
    model.tied(torch.tensor([1, 2])).sum().backward()
    assert model.tied.embed.weight.grad is not None


@pytest.mark.gpu
def test_a_shared_gpu_model(base_path: str) -> None:
    """A handle's memory, mapped by VMM, under another class: nothing allocated, and the same results."""
    provider = Provider(base_path, device="cuda")
    provider.share("net", managed=True, access="read")(lambda: nn.Linear(2048, 2048, device="cuda"))
    with Server(provider), Client(base_path, device="cuda") as client:
        handle = client.call("net")
        x = torch.randn(2, 2048, device="cuda")
        expected = handle.value(x)
        before = torch.cuda.memory_allocated()
        with materialize(handle), torch.device("cuda"):
            model = nn.Linear(2048, 2048)
        assert torch.cuda.memory_allocated() == before
        assert torch.equal(model(x), expected)
