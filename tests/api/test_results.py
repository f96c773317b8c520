"""Results of endpoints: any object that holds memory, in every role, bit for bit the same in another process."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from shared_rpc import Client, Handle, materialize
from shared_rpc.errors import ConfigurationError
from tests.kit.deep import deep
from tests.kit.models import State, Tied, same_memory
from tests.kit.modes import MODES
from tests.kit.processes import eventually
from tests.kit.world import World


class Weakless:
    """An object without support for weak references."""

    __slots__ = ("tensor",)

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def __getstate__(self) -> Any:
        return self.tensor

    def __setstate__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def _self_holding() -> list[Any]:
    value: list[Any] = [torch.ones(1)]
    value.append(value)
    return value


#: The codec's tests have others.
OBJECTS: dict[str, tuple[Callable[[], Any], Callable[[Any], torch.Tensor]]] = {
    "dataclass": (lambda: State(1, {"m": torch.ones(1)}), lambda v: v.moments["m"]),
    "without weak references": (lambda: Weakless(torch.ones(1)), lambda v: v.tensor),
    "method": (lambda: State(1, {"m": torch.ones(1)}).__repr__, lambda v: v.__self__.moments["m"]),
    "holds itself": (_self_holding, lambda v: v[1][1][0]),
    "no tensor": (lambda: State(1, {"m": torch.nn.Identity()}), lambda v: torch.zeros(1)),
}


@pytest.mark.parametrize("kind", OBJECTS)
def test_objects_with_memory_are_results_in_every_role(every_world: list[World], kind: str) -> None:
    """Of the same size, cached and not, and by way of a task."""
    make, tensor_of = OBJECTS[kind]
    sizes = set()
    for world in every_world:
        cached, fresh = world.share("cached")(make), world.share("fresh", cache=False)(make)
        held = world.share("held", managed=True)(make)
        for value in (cached(), cached(), fresh(), world.provider.wait_for_task(cached.submit())):
            assert type(value) is type(make())
            assert tensor_of(value).shape == (1,)
        tensor_of(cached()).fill_(7)
        if kind != "no tensor":
            assert tensor_of(cached()).item() == 7
        with held() as handle:
            assert isinstance(handle, Handle)
            sizes.add(handle.get_object_info()["nbytes"])
    assert len(sizes) == 1


def test_materialize_requires_the_module(world: World) -> None:
    """It works with an object's module; for the object itself the error gives the remedy."""
    world.share("held", managed=True)(lambda: State(1, {"m": torch.nn.Linear(2, 2)}))
    with world.client().call("held") as handle:
        with (
            pytest.raises(ConfigurationError, match=r"is a State: use a module"),
            materialize(handle),
        ):
            torch.nn.Linear(2, 2)
        with materialize(handle.value.moments["m"]):
            model = torch.nn.Linear(2, 2)
        assert model.weight.data_ptr() == handle.value.moments["m"].weight.data_ptr()


@pytest.mark.parametrize("mode", ["FakeTensorMode", *deep(*(mode for mode in MODES if mode != "FakeTensorMode"))])
def test_small_results_are_real_under_modes(world: World, mode: str) -> None:
    """They have a separate fast path."""
    world.share("double", cache=False)(lambda x: x * 2)
    client, x = world.client(), torch.arange(4.0)
    for _ in range(2):
        result = MODES[mode](lambda: client.call("double", x))
        assert result.tolist() == [0, 2, 4, 6]
        assert not result.is_inference()


@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace")
@pytest.mark.parametrize("tensors", ["all", *deep("parameters")])
def test_compiled_functions_can_call_endpoints(world: World, tensors: Any) -> None:
    """A compiled function calls endpoints and attaches models, with the same results as without compilation."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).eval()
    world.share("load", managed=True, tensors=tensors)(lambda: model)
    world.share("double", cache=False)(lambda x: x * 2)
    client, x = world.client(), torch.ones(1, 4)

    def use(x: torch.Tensor) -> torch.Tensor:
        with_model = client.call("load").value(x + 1)
        return client.call("double", with_model.detach()) + 1

    torch._dynamo.reset()
    expected = use(x)
    assert torch.equal(torch.compile(use, backend="eager")(x), expected)
    handle = client.call("load")
    assert torch.equal(torch.compile(handle.value.forward, backend="eager", fullgraph=True)(x), handle.value(x))


class Net(nn.Module):
    """A module whose output is tied to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.tied = Tied()


@pytest.fixture
def shared(world: World) -> Client:
    """A client of a server that has a module and a dict of tensors, each with a lease, read-only."""
    world.share("net", managed=True, access="read")(Net)
    world.share("state", managed=True)(lambda: dict(Net().state_dict()))
    return world.client()


def test_handles_are_sources_of_materialize(shared: Client) -> None:
    """The handle's memory is mapped, and both models share it."""
    handle = shared.call("net")
    with materialize(handle):
        model = Net()
    assert same_memory(model.tied.embed.weight, handle.value.tied.embed.weight)
    state = shared.call("state")
    with materialize(state):
        other = Net()
    state.value["tied.embed.weight"].fill_(7.0)
    assert (other.tied.head.weight == 7).all()


def test_materialized_models_keep_their_lease(shared: Client) -> None:
    """Until they are collected; their tensors outlive a handle that is released earlier."""

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


def test_training_leaves_read_only_memory_unchanged(shared: Client) -> None:
    """Gradients of a read-only source are private to this process."""
    with materialize(shared.call("net")):
        model = Net()
    model.tied(torch.tensor([1, 2])).sum().backward()
    assert model.tied.embed.weight.grad is not None
