"""Memory of a server in its clients: objects of any class and size, which are sent back by name, without a copy."""

from __future__ import annotations

import importlib
import os
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from shared_rpc import Provider, Server
from shared_rpc.codec import by_value, placement
from shared_rpc.codec.by_value import pickle_by_value
from shared_rpc.codec.storages import whole_tensor
from shared_rpc.errors import CapabilityError
from shared_rpc.memory.backends.host import HOST
from shared_rpc.memory.layout import pack
from shared_rpc.memory.mapping import MAPPINGS
from shared_rpc.memory.records import Record
from shared_rpc.memory.segments import Segment
from shared_rpc.protocol import messages as m
from shared_rpc.protocol.records import Access, sent_infos
from tests.kit.raw import Raw, tensor_call
from tests.kit.world import World

on_the_host = pytest.mark.parametrize("device", ["cpu"], indirect=True)
Elsewhere = Callable[..., Any]
Remote = Callable[[str], tuple[Any, int]]

#: Runs code in a client process, and counts the bytes that its arguments were copied into.
COUNTED = """
import anyio
from shared_rpc import AsyncClient, Client
from shared_rpc.memory.mapping import MAPPINGS

copied, create = [], MAPPINGS.create
MAPPINGS.create = lambda *args, **options: copied.append(args[0]) or create(*args, **options)
try:
{code}
finally:
    MAPPINGS.create = create
answer = [answer, sum(copied)]
"""


@pytest.fixture
def world(device: str, world: World) -> World:
    """A server whose endpoints return the places of their arguments."""
    world.share("weights", managed=True)(lambda size: torch.arange(float(size), device=device))

    @world.share(cache=False)
    def where(*tensors: torch.Tensor) -> torch.Tensor:
        return torch.tensor([tensor.data_ptr() for tensor in tensors], device=device)

    @world.share(cache=False)
    async def add_later(target: torch.Tensor, other: torch.Tensor) -> None:
        if device == "cuda":
            torch.cuda._sleep(200_000_000)
        target += other

    return world


@pytest.fixture
def remote(world: World) -> Remote:
    """``remote(code)`` runs code of a client process; returns its ``answer``, and the number of bytes copied for arguments."""
    return lambda code: tuple(world.run(COUNTED.format(code=textwrap.indent(textwrap.dedent(code), "    "))))


@pytest.mark.parametrize(
    "call",
    [
        "client.call('where', *tensors)",
        "client.wait_for_task(client.submit('where', *tensors), 20)",
        "anyio.run(asynchronously)",
    ],
    ids=["call", "task", "coroutine"],
)
def test_tensors_of_the_server_are_sent_by_reference(world: World, remote: Remote, call: str) -> None:
    """The endpoint gets the server's own memory, including views, by any kind of call."""
    start = world.provider.call("weights", 1000).value.data_ptr()
    assert remote(f"""
        async def asynchronously():
            async with AsyncClient(base_path, device=device) as other:
                return await other.call("where", *tensors)

        with client.call("weights", 1000) as handle:
            value = handle.value
            tensors = value, value[10:20], value.view(10, 100).T, torch.nn.Parameter(value)
            answer = {call}.tolist()
    """) == ([start, start + 40, start, start], 0)


def test_references_can_be_mixed_with_other_memory(world: World, remote: Remote) -> None:
    """Only the client's own memory is sent; writes to the server's memory are complete at the reply, also on a GPU."""
    sums, copied = remote("""
        answer = []
        with client.call("weights", 1000) as handle:
            for _ in range(3):
                client.call("add_later", handle.value, torch.ones(1000, device=device))
                answer.append(handle.value.sum().item())
    """)
    begin = sum(range(1000))
    assert (sums, copied >= 12_000) == ([begin + 1000, begin + 2000, begin + 3000], True)
    assert world.provider.call("weights", 1000).value[:3].tolist() == [3, 4, 5]


@on_the_host
def test_tensors_over_read_only_arrays_are_copied(world: World, remote: Remote) -> None:
    """The server's own array lies elsewhere, and the segment that its clients map is sealed."""
    world.share("table", access="read", managed=True)(lambda: [numpy.arange(8192), torch.zeros(1)])
    world.share("total", cache=False)(lambda values: values.sum())
    total, copied = remote("""
        import warnings
        with client.call("table") as handle, warnings.catch_warnings(action="ignore"):
            answer = client.call("total", torch.from_numpy(handle.value[0])[4096:]).item()
    """)
    assert total == sum(range(4096, 8192)) and copied >= 4096 * 8


def test_memory_dropped_by_the_server_is_sent(remote: Remote) -> None:
    """The client's mapping outlives the server's object; it is copied then, transparently."""
    total, copied = remote("""
        with client.call("weights", 1 << 19) as handle:
            value = handle.value
        client.invalidate_call_cache("weights", 1 << 19)
        with client.call("weights", 4) as target:
            client.call("add_later", target.value, value[100:104])
            answer = target.value.tolist()
        del value, handle
    """)
    assert (total, copied >= 16) == ([100, 102, 104, 106], True)


def test_another_server_gets_a_copy(remote: Remote, device: str, base_path: str) -> None:
    """It does not have the first one's memory."""
    other = Provider(f"{base_path}-other", device=device)
    other.share("doubled", cache=False)(lambda x: x * 2)
    with Server(other):
        doubled, copied = remote("""
            with client.call("weights", 10) as handle, Client(base_path + "-other", device=device) as other:
                answer = other.call("doubled", handle.value[:3]).tolist()
        """)
    assert (doubled, copied > 0) == ([0, 2, 4], True)


# By hand.


def named(segment_id: str, nbytes: int = 16) -> m.Call:
    """A call of ``where`` with a tensor in a segment that is sent by name."""
    return tensor_call("where", storage=(0, 0, nbytes), segments=[segment_id])


@on_the_host
def test_tensors_that_exceed_the_named_segment_are_refused(world: World) -> None:
    """The server uses its own sizes, whatever the client sends."""
    with world.client() as good, Raw(good.socket_path) as raw, good.call("weights", 4):
        result = raw.ask(m.Call("weights", [4]))
        assert isinstance(result, m.Result)
        (info,) = sent_infos(result.segments)
        error = raw.ask(named(info.id, info.nbytes + 16))
        assert isinstance(error, m.Error)
        assert error.code == "codec"
        found = raw.ask(named(info.id))
        assert isinstance(found, m.Result)


# Objects of any class and size.


def test_more_segments_than_a_message_carries_arrive(device: str, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """An object in 260 segments; a message carries 253 descriptors at most."""
    monkeypatch.setattr(placement, "pack", partial(pack, limit=1))
    world.serve_result([torch.full((2,), number, device=device) for number in range(260)])
    answer = world.run('answer = [tensor.unique().tolist() for tensor in client.call("get")]')
    assert answer == [[number] for number in range(260)]


@pytest.mark.filterwarnings("ignore:RNN module weights are not part of single contiguous chunk")
def test_recurrent_layers_stay_in_shared_memory(device: str, world: World) -> None:
    """On a GPU torch would move their weights into one block, on either side."""
    model = nn.LSTM(4, 4, device=device)
    world.serve_result(model)
    for number in (2, 3):
        world.run(
            """
            import warnings
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                model = client.call("get")
                model.flatten_parameters()
                model.to(device)(torch.ones(1, 1, 4, device=device))
                model.weight_ih_l0.data.fill_(number)
                answer = model.weight_ih_l0.sum().item()  # waits for the GPU
            """,
            number=number,
        )
        assert model.weight_ih_l0.unique().tolist() == [number]
        model.flatten_parameters()


def test_modules_registered_by_value_are_not_needed(
    device: str, world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those given to ``pickle_by_value`` need not exist in the client."""
    (tmp_path / "only_in_the_server.py").write_text("import torch\n\nclass Net(torch.nn.Linear):\n    answer = 42\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    private = importlib.import_module("only_in_the_server")
    pickle_by_value(private)
    try:
        world.serve_result(private.Net(2, 2, device=device))
        assert world.run('answer = client.call("get").answer') == 42
    finally:
        by_value._names.discard(private.__name__)
        del sys.modules[private.__name__]


# Memory that is shared with access="read" although a process had write access before.


#: See the fixture.
Received = Callable[..., tuple[Segment, torch.Tensor]]
NBYTES = 8192


@pytest.fixture
def received(no_leaks: None) -> Iterator[Received]:
    """``received(access, owner)`` is memory of another process, announced with that access, and a tensor over it here."""
    with ExitStack() as stack:

        def received(access: Access = "read_write", owner: str = "") -> tuple[Segment, torch.Tensor]:
            made = stack.enter_context(HOST.create(NBYTES))
            segment = stack.enter_context(made.duplicate(access))
            with MAPPINGS.attach([segment], keep=True, owner=owner) as [mapping]:
                return segment, whole_tensor(mapping, NBYTES)

        yield received


@on_the_host
@pytest.mark.parametrize("access", ["read_write", "read"])
def test_memory_of_a_caller_is_copied(received: Received, published: Callable[..., Record], access: Access) -> None:
    """Whatever access the caller announced, it can still write to it: readers get other, sealed memory."""
    segment, tensor = received(access)
    (shared,) = published(tensor, "read").segments
    os.pwrite(segment.fileno(), b"changed", 0)
    assert os.pread(shared.fileno(), 7, 0) == bytes(7)
    with pytest.raises(CapabilityError, match="shared read-only"):
        HOST.map(shared.fileno(), NBYTES, "read_write")


@on_the_host
@pytest.mark.parametrize(("access", "owner"), [("read_write", ""), ("read", "a server")])
def test_other_memory_is_not_copied(received: Received, published: Callable[..., Record], access: Access, owner: str) -> None:
    """Memory shared for writing, and memory already sealed by a server, such as another one's result returned by a worker."""
    segment, tensor = received(access, owner)
    (shared,) = published(tensor, access).segments
    assert os.path.samestat(os.fstat(shared.fileno()), os.fstat(segment.fileno()))


@on_the_host
def test_clients_cannot_seal_writable_memory(published: Callable[..., Record]) -> None:
    """A seal would keep every later client from mapping the memory as shared."""
    with pytest.raises(PermissionError):
        HOST.seal(published(torch.zeros(NBYTES)).segments[0].fileno())
