"""A model that is built around shared memory, of transformers, or on a GPU; and what that takes."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shared_rpc import Client, Provider, Server, materialize
from shared_rpc.errors import StaleHandleError
from tests.kit.apps import Connect, Serve
from tests.kit.models import Tied
from tests.kit.processes import eventually, python

MIB = 1 << 20


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


def test_a_released_handle(shared: Client) -> None:
    """There is nothing to take from it."""
    handle = shared.call("net")
    handle.release()
    with pytest.raises(StaleHandleError), materialize(handle):
        raise AssertionError("the block is not entered")


def test_training_leaves_read_only_memory_alone(shared: Client) -> None:
    """Gradients of a read-only source are this process's own."""
    with materialize(shared.call("net")):
        model = Net()
    model.tied(torch.tensor([1, 2])).sum().backward()
    assert model.tied.embed.weight.grad is not None


BIG = """
    import resource, sys, torch
    from shared_rpc import materialize
    from torch import nn

    class Big(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(8192, 8192) for _ in range(4))
            for layer in self.layers:
                nn.init.normal_(layer.weight)
            angles = torch.outer(torch.arange(4096), 10000 ** (-torch.arange(0, 128, 2).float() / 128))
            self.register_buffer("cos", angles.cos(), persistent=False)

    def resident():
        return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()

    source = {name: torch.empty(shape) for number in range(4) for name, shape in
              ((f"layers.{number}.weight", (8192, 8192)), (f"layers.{number}.bias", (8192,)))}
    with materialize({"weight": torch.ones(3, 3), "bias": torch.ones(3)}):
        nn.init.normal_(nn.Linear(3, 3).weight)
        warm = nn.Linear(3, 3)
    before, peak_before = resident(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with materialize(source):
        model = Big()
        inside = resident()
    total = sum(parameter.nbytes for parameter in model.parameters())
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print("compiler", "torch._dynamo" in sys.modules)
    print("grown", total >> 20, (inside - before) >> 20, (resident() - before) >> 20, (peak - peak_before) >> 10)
"""


def test_a_gigabyte_takes_nothing() -> None:
    """A model of 1 GiB is built with no growth of the process, neither meanwhile nor after."""
    child = python(BIG, fresh=True)
    assert child.expect("compiler") == "compiler False"  # which takes seconds to load, for shapes of the meta device
    total, inside, after, peak = map(int, child.expect("grown").split()[1:])
    assert child.close() == (0, "")
    assert total >= 1024
    assert max(inside, after, peak) < 64


@pytest.mark.gpu
def test_a_gpu_takes_nothing() -> None:
    """A model of 1 GiB around mapped memory: nothing is left allocated, and what is computed lies beside the weights.

    Only a constructor that asks for the GPU itself has each weight there until it is registered.
    """
    size = 8192
    with torch.device("cuda"):
        source = {"weight": torch.ones(size, size, 4), "bias": torch.ones(size)}

    class Big(nn.Module):
        def __init__(self, device: str | None) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty(size, size, 4, device=device))
            self.bias = nn.Parameter(torch.zeros(size, device=device))
            nn.init.normal_(self.weight)
            self.register_buffer("table", torch.arange(4.0, device=self.bias.device).cos(), persistent=False)

    for device, move in (("cuda", False), (None, True), (None, False)):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        with materialize(source):
            model = Big(device)
            model = model.cuda() if move else model
        torch.cuda.synchronize()
        assert torch.cuda.memory_allocated() - before < MIB
        assert torch.cuda.max_memory_allocated() - before < (source["weight"].nbytes if device else 0) + MIB
        assert same_memory(model.weight, source["weight"])
        assert model.table.device == model.weight.device == source["weight"].device
        assert torch.allclose(model.table.cpu(), torch.arange(4.0).cos())
        del model


@pytest.mark.gpu
def test_a_buffer_that_numpy_made_goes_to_the_gpu() -> None:
    """It has memory before anybody could say where; the model is on one device all the same."""
    numpy = pytest.importorskip("numpy")

    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty(2))
            self.register_buffer("table", torch.from_numpy(numpy.arange(4.0)), persistent=False)

    weight = torch.ones(2, device="cuda")
    with materialize({"weight": weight}):
        model = Positions()
    assert model.table.device == model.weight.device == weight.device
    assert model.table.tolist() == [0.0, 1.0, 2.0, 3.0]


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


@pytest.fixture
def transformers() -> Any:
    """The library, where it is installed."""
    return pytest.importorskip("transformers")


@pytest.mark.parametrize("tied", [False, True])
def test_a_model_of_transformers(transformers: Any, tied: bool, tmp_path: Path) -> None:
    """A LLaMA from its configuration, around a module and around a checkpoint without tables and tied names."""
    config = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=64,
        bos_token_id=1,
        eos_token_id=2,
        tie_word_embeddings=tied,
    )
    source = transformers.LlamaForCausalLM(config).eval()
    tokens = torch.arange(12)[None]
    checkpoint = {name: tensor for name, tensor in source.state_dict().items() if not (tied and name == "lm_head.weight")}
    for tensors in (source, checkpoint):
        with materialize(tensors):
            model = transformers.AutoModelForCausalLM.from_config(config)
        model.eval()
        assert same_memory(model.model.layers[1].mlp.up_proj.weight, source.model.layers[1].mlp.up_proj.weight)
        with torch.no_grad():
            assert torch.equal(model(tokens).logits, source(tokens).logits)
        expected = source.generate(tokens, max_new_tokens=5, do_sample=False)
        assert torch.equal(model.generate(tokens, max_new_tokens=5, do_sample=False), expected)
