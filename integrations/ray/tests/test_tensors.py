"""Tensors that a host's server keeps for other processes: by reference if they are in its memory, otherwise copied once."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest
import torch

from shared_rpc import Client, Provider, Server
from shared_rpc.codec.reducers import rebuild_tensor
from shared_rpc.errors import BufferNotFound, CapabilityError
from shared_rpc.memory.mapping import MAPPINGS
from shared_rpc.operations import tensors
from shared_rpc_ray.tensors import HeldTensors, TensorClient, let_go
from tests.kit.processes import eventually
from tests.kit.world import World

#: A process that keeps tensors, and prints their id.
MAKER = """
    import sys
    import torch
    from shared_rpc_ray import tensors

    tensors.LINGER = {linger}
    held = tensors.TensorClient({device!r}).hold([torch.arange(100, device={device!r})])
    print("held:", held.handle.object_id, flush=True)
    sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def received(no_leaks: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Close the clients for named memory of this process after the test."""
    clients: dict[str, Client] = {}
    monkeypatch.setattr(tensors, "_clients", clients)
    yield
    for client in clients.values():
        client.close()


@pytest.fixture
def server(device: str, base_path: str) -> Iterator[Server]:
    """A server with a managed object, in this process."""
    provider = Provider(base_path, device=device)

    @provider.share(managed=True)
    def weights(nbytes: int) -> torch.Tensor:
        return torch.zeros(nbytes, dtype=torch.uint8, device=device)

    with Server(provider) as server:
        yield server


@pytest.fixture
def client(server: Server, device: str) -> Iterator[TensorClient]:
    """A client of the server that keeps tensors."""
    with TensorClient(device) as client:
        yield client


@pytest.fixture
def other(server: Server, device: str) -> Iterator[Client]:
    """A client with its own session."""
    with Client(device=device) as client:
        yield client


def again(held: HeldTensors) -> list[torch.Tensor]:
    """Rebuild the tensors by their names, like any process."""
    return [rebuild_tensor(*name) for name in held.names]


def killed_maker(world: World, linger: float) -> str:
    """Return the id of a held list of a killed process."""
    maker = world.process(MAKER.format(device=world.device, linger=linger))
    object_id = maker.expect("held:").split()[1]
    os.kill(maker.process.pid, signal.SIGKILL)
    return object_id


def segment_of(tensor: torch.Tensor) -> str:
    """Return the segment of a tensor."""
    found = MAPPINGS.find(tensor.untyped_storage().data_ptr())
    assert found is not None
    return found[0].info.id


def test_a_private_tensor_is_copied_once(client: TensorClient, other: Client, device: str) -> None:
    """All receivers share one copy, and see each other's writes."""
    own = torch.arange(1000, device=device)
    held = client.hold([own])
    [one] = again(held)
    assert torch.equal(one, own) and held.handle is not None
    one[7] = -1
    with other.get_buffer(held.handle.object_id) as handle:
        assert handle.value[0].view(torch.int64)[7] == -1 and own[7] == 7


def test_tensors_in_the_server_are_not_copied(client: TensorClient, other: Client) -> None:
    """Views of a buffer and of an endpoint's result are sent by reference, with their offsets and strides."""
    used = other.list_devices()[0]["used"]
    buffer, handle = other.create_buffer((64, 64), "float32"), other.call("weights", 4096)
    before = other.list_devices()[0]["used"]
    held = client.hold([buffer.value[3:9, 5].t(), handle.value[100:], buffer.value.t()])
    assert other.list_devices()[0]["used"] == before > used
    [column, tail, turned] = again(held)
    assert segment_of(column) == segment_of(buffer.value) != segment_of(tail) == segment_of(handle.value)
    assert turned.stride() == (1, 64)
    column[2] = 5.0
    tail[0] = 9
    assert buffer.value[5, 5] == 5.0 and handle.value[100] == 9 and turned[5, 5] == 5.0


def test_received_tensors_are_sent_by_reference(client: TensorClient, device: str) -> None:
    """Also after their maker has dropped them."""
    held = client.hold([torch.ones(1000, device=device)])
    [received] = again(held)
    let_go(held)
    with TensorClient(device) as third:
        passed = third.hold([received[10:20]])
        [final] = again(passed)
        final.fill_(4)
        let_go(passed)
    assert received[9:21].tolist() == [1.0] + [4.0] * 10 + [1.0]


def test_tensors_dropped_by_the_server_are_copied(client: TensorClient, other: Client, device: str) -> None:
    """Their memory is mapped here, but belongs to no object of the server."""
    buffer = other.create_buffer(1000)
    kept = buffer.value
    kept.fill_(3)
    other.free_buffer(buffer)
    buffer.release()
    [copy] = again(client.hold([kept]))
    assert torch.equal(copy, kept) and segment_of(copy) != segment_of(kept)


def test_tensors_of_one_storage_share_it_again(client: TensorClient, device: str) -> None:
    """Like in the process of their maker."""
    whole = torch.zeros(8, 8, device=device)
    [row, turned] = again(client.hold([whole[2], whole.t()]))
    row[5] = 1.0
    assert turned[5, 2] == 1.0 and turned.stride() == (1, 8)


def test_a_thin_slice_is_copied_alone(client: TensorClient, other: Client, device: str) -> None:
    """A column of a large matrix is copied without the matrix."""
    matrix = torch.arange(1 << 20, device=device).reshape(1024, 1024)
    held = client.hold([matrix[:, 3]])
    [column] = again(held)
    assert torch.equal(column, matrix[:, 3])
    assert held.handle is not None
    assert other.get_object_info(held.handle.object_id)["nbytes"] < 3 << 20


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.bool, torch.complex64, torch.float8_e4m3fn, torch.int64, torch.uint8])
def test_dtypes(client: TensorClient, device: str, dtype: torch.dtype) -> None:
    """Every dtype is preserved bit by bit, among others."""
    one = torch.arange(33, device=device).to(dtype)
    [first, second, third] = again(client.hold([torch.ones(3, device=device), one, one[1:]]))
    assert (first.dtype, second.dtype, third.dtype) == (torch.float32, dtype, dtype)
    assert torch.equal(second.view(torch.uint8), one.view(torch.uint8)) and third.numel() == 32


def test_odd_tensors(client: TensorClient, device: str) -> None:
    """Empty ones, scalars, expanded, conjugated and negated ones, and those that require a gradient."""
    values = torch.arange(6.0, device=device)
    odd = [
        torch.empty(0, 3, device=device),
        torch.tensor(7.0, device=device),
        values[:1].expand(5),
        (values + 1j * values).conj(),
        torch.ones(2, device=device, requires_grad=True),
        torch.nn.Parameter(torch.ones(2, device=device)),
    ]
    got = again(client.hold(odd))
    assert client.hold(odd[:1]).handle is None  # a tensor without bytes is only described
    assert [tensor.shape for tensor in got] == [tensor.shape for tensor in odd]
    assert all(torch.equal(one, two) for one, two in zip(got, odd, strict=True))
    assert [tensor.requires_grad for tensor in got] == [False, False, False, False, True, True]
    assert type(got[-1]) is torch.nn.Parameter


def test_many_tensors_are_one_object(client: TensorClient, other: Client, device: str) -> None:
    """Thousands of them take one descriptor of the server."""
    many = [torch.full((number % 7 + 1,), number, device=device) for number in range(3000)]
    before = len(other.list_objects())
    got = again(client.hold(many))
    assert all(torch.equal(one, two) for one, two in zip(got, many, strict=True))
    assert len(other.list_objects()) == before + 1


@pytest.mark.parametrize("kind", ["graph", "sparse", "meta"])
def test_unsupported_tensors_are_refused(client: TensorClient, device: str, kind: str) -> None:
    """With the number of the tensor and a remedy."""
    made: dict[str, Callable[[], Any]] = {
        "graph": lambda: torch.ones(2, device=device, requires_grad=True) * 2,
        "sparse": lambda: torch.eye(2, device=device).to_sparse(),
        "meta": lambda: torch.ones(2, device="meta"),
    }
    words = {"graph": "detach", "sparse": "not a plain strided tensor", "meta": "on no device"}
    with pytest.raises(CapabilityError, match=f"tensor 1 of 2 .*{words[kind]}"):
        client.hold([torch.ones(1, device=device), made[kind]()])


def test_tensors_survive_their_killed_maker(server: Server, other: Client, device: str, world: World) -> None:
    """Other processes can get and keep them."""
    object_id = killed_maker(world, linger=600)
    eventually(lambda: other.get_object_info(object_id)["leases"] == 0)
    with other.get_buffer(object_id) as handle:
        assert handle.value[0].view(torch.int64)[:100].sum() == 4950


def test_tensors_of_a_killed_maker_expire(server: Server, other: Client, device: str, world: World) -> None:
    """Some time after their last holder has ended."""
    object_id = killed_maker(world, linger=0.2)
    eventually(lambda: object_id not in {info["object_id"] for info in other.list_objects()})
    with pytest.raises(BufferNotFound, match="last holder"):
        other.get_buffer(object_id)


def test_freed_tensors_stay_with_their_holders(client: TensorClient, other: Client, device: str) -> None:
    """No other process can get them."""
    held = client.hold([torch.ones(100, device=device)])
    assert held.handle is not None
    object_id = held.handle.object_id
    [got] = again(held)
    let_go(held)
    eventually(lambda: other.get_object_info(object_id)["leases"] == 1)
    with pytest.raises(BufferNotFound, match="freed"):
        other.get_buffer(object_id)
    assert got.sum() == 100
    del got
    eventually(lambda: object_id not in {info["object_id"] for info in other.list_objects()})


def test_a_server_is_started_if_none_listens(base_path: str, device: str) -> None:
    """An empty one, for all processes with this base path."""
    with closing(TensorClient(device)) as client:
        held = client.hold([torch.ones(10, device=device)])
        with Client(device=device) as other:
            assert again(held)[0].sum() == 10
            assert not other.list_endpoints()
            held.handle = None
            other.stop_server()


def test_tensors_of_two_devices_are_refused(client: TensorClient, device: str) -> None:
    """One device at a time."""
    if device == "cpu":
        pytest.skip("needs a GPU beside the host")
    with pytest.raises(CapabilityError, match="on another device than the first"):
        client.hold([torch.ones(1, device=device), torch.ones(1)])
