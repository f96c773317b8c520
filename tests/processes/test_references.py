"""Arguments in memory that the server shared: they are sent by name, without a copy."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest
import torch

from shared_rpc import Provider, Server
from shared_rpc.protocol import messages as m
from shared_rpc.protocol.records import SegmentInfo, StorageEntry, TensorEntry, TensorTable
from shared_rpc.protocol.values import TensorRef, encode
from tests.kit.apps import Connect
from tests.kit.models import Tied
from tests.kit.processes import Child, python
from tests.kit.raw import Raw

#: A client process. ``copied`` counts the bytes that its arguments were copied into.
CLIENT = """
import anyio, torch
from shared_rpc import AsyncClient, Client
from shared_rpc.memory.mapping import MAPPINGS

copied = 0
create = MAPPINGS.create

def counted(nbytes, device):
    global copied
    copied += nbytes
    return create(nbytes, device)

MAPPINGS.create = counted
client = Client(device=DEVICE)
"""


@pytest.fixture
def shared(device: str, no_leaks: None, base_path: str) -> Iterator[Provider]:
    """The server's script, served. Its endpoints return the places of their arguments."""
    provider = Provider(base_path, device=device)

    provider.share("weights", managed=True)(lambda size: torch.arange(float(size), device=device))
    provider.share("model", managed=True)(lambda: Tied().to(device))

    @provider.share(cache=False)
    def where(*tensors: torch.Tensor) -> torch.Tensor:
        return torch.tensor([tensor.data_ptr() for tensor in tensors], device=device)

    @provider.share(cache=False)
    def where_model(module: torch.nn.Module) -> torch.Tensor:
        return torch.tensor([module.tag, *(tensor.data_ptr() for tensor in module.parameters())], device=device)

    @provider.share(cache=False)
    def add(target: torch.Tensor, other: torch.Tensor) -> None:
        target += other

    @provider.share(cache=False)
    def add_late(target: torch.Tensor, other: torch.Tensor) -> None:
        busy(target.device)
        target += other

    @provider.share(cache=False)
    async def add_later(target: torch.Tensor, other: torch.Tensor) -> None:
        busy(target.device)
        target += other

    with Server(provider):
        yield provider


def busy(device: torch.device) -> None:
    """Occupy a GPU for a while, like a model."""
    if device.type == "cuda":
        torch.cuda._sleep(200_000_000)


def own(provider: Provider, endpoint: str, *args: object) -> torch.Tensor:
    """Return the server's own object."""
    with provider.call(endpoint, *args) as handle:
        value: torch.Tensor = handle.value
        return value


def client(children: list[Child], device: str, code: str) -> Child:
    """Start a client process that runs ``code``, and reports the number of copied bytes."""
    child = python(CLIENT.replace("DEVICE", repr(device)) + code + "\nprint('copied', copied)\n")
    children.append(child)
    return child


@pytest.mark.parametrize("call", ["client.call", "asynchronously", "as_a_task"])
def test_tensors_of_the_server_are_sent_by_reference(shared: Provider, device: str, children: list[Child], call: str) -> None:
    """The endpoint gets the server's own memory, including views, by any kind of call."""
    child = client(
        children,
        device,
        f"""
def asynchronously(*args):
    async def call():
        async with AsyncClient(device={device!r}) as other:
            return await other.call(*args)
    return anyio.run(call)

def as_a_task(*args):
    return client.wait_for_task(client.submit(*args), 20)

with client.call("weights", 1000) as handle:
    value = handle.value
    print("at", {call}("where", value, value[10:20], value.view(10, 100).T, torch.nn.Parameter(value)).tolist())
""",
    )
    start = own(shared, "weights", 1000).data_ptr()
    assert child.expect("at").split("at ")[1].strip() == str([start, start + 40, start, start])
    assert child.expect("copied").strip() == "copied 0"


def test_modules_of_the_server_are_sent_by_reference(shared: Provider, device: str, children: list[Child]) -> None:
    """Their weights stay in place; the client's changes in Python are sent."""
    child = client(
        children,
        device,
        """
with client.call("model") as handle:
    handle.value.tag = 7
    print("at", client.call("where_model", handle.value).tolist())
""",
    )
    with shared.call("model") as handle:
        theirs = [parameter.data_ptr() for parameter in handle.value.parameters()]
    assert child.expect("at").split("at ")[1].strip() == str([7, *theirs])
    assert child.expect("copied").strip() == "copied 0"


def test_references_can_be_mixed_with_other_memory(shared: Provider, device: str, children: list[Child]) -> None:
    """Only the client's own memory is sent; a write to the server's memory is visible to all."""
    child = client(
        children,
        device,
        f"""
with client.call("weights", 1000) as handle:
    client.call("add", handle.value, torch.ones(1000, device={device!r}))
    print("first", handle.value[:3].tolist())
""",
    )
    assert child.expect("first").strip() == "first [1.0, 2.0, 3.0]"
    assert int(child.expect("copied").split()[1]) >= 4000
    assert own(shared, "weights", 1000)[:3].tolist() == [1, 2, 3]


@pytest.mark.parametrize("endpoint", ["add_late", "add_later"])
def test_writes_of_endpoints_are_complete_at_the_reply(
    shared: Provider, device: str, children: list[Child], endpoint: str
) -> None:
    """Even without a result: the reply waits for the GPU."""
    child = client(
        children,
        device,
        f"""
with client.call("weights", 1000) as handle:
    for _ in range(3):
        client.call({endpoint!r}, handle.value, torch.ones(1000, device={device!r}))
        print("sum", handle.value.sum().item())
""",
    )
    begin = sum(range(1000))
    assert [float(child.expect("sum").split()[1]) for _ in range(3)] == [begin + 1000, begin + 2000, begin + 3000]


def test_memory_dropped_by_the_server_is_sent(shared: Provider, device: str, children: list[Child]) -> None:
    """The client's mapping outlives the server's object; it is copied then, transparently."""
    child = client(
        children,
        device,
        """
handle = client.call("weights", 1 << 19)
value = handle.value
handle.release()
client.invalidate_call_cache("weights", 1 << 19)
target = client.call("weights", 4)
client.call("add", target.value, value[100:104])
print("sum", target.value.tolist())
target.release()
""",
    )
    assert child.expect("sum").strip() == "sum [100.0, 102.0, 104.0, 106.0]"
    assert int(child.expect("copied").split()[1]) >= 16


def test_another_server_gets_a_copy(shared: Provider, device: str, children: list[Child], base_path: str) -> None:
    """It does not have the first one's memory."""
    other = Provider(f"{base_path}-other", device=device)

    other.share("doubled", cache=False)(lambda x: x * 2)

    with Server(other):
        child = client(
            children,
            device,
            f"""
with client.call("weights", 10) as handle, Client({base_path + "-other"!r}, device={device!r}) as other:
    print("doubled", other.call("doubled", handle.value[:3]).tolist())
""",
        )
        assert child.expect("doubled").strip() == "doubled [0.0, 2.0, 4.0]"
        assert int(child.expect("copied").split()[1]) > 0


# By hand.


def named(segment_id: str, kept: list[int], segments: int = 1, nbytes: int = 16) -> m.Call:
    """A call of ``where`` with a tensor in a segment that is sent by name."""
    infos = [SegmentInfo(segment_id, 4096, "cpu")] * segments
    table = TensorTable(("cpu",), (StorageEntry(0, 0, nbytes),), (TensorEntry(0, "float32", 0, (4,), (1,)),))
    return m.Call("where", [encode(TensorRef(0))], table=encoded(table), segments=infos, kept=kept)


def encoded(table: TensorTable) -> msgspec.Raw:
    """Return the encoding in a message."""
    return msgspec.Raw(msgspec.msgpack.encode(table))


@pytest.mark.parametrize("device", ["cpu"], indirect=True)
def test_tensors_that_exceed_the_named_segment_are_refused(shared: Provider, connect: Connect) -> None:
    """The server uses its own sizes, whatever the client sends."""
    with connect() as good, Raw(good.socket_path) as raw, good.call("weights", 4):
        result = raw.ask(m.Call("weights", [4]))
        assert isinstance(result, m.Result)
        (info,) = result.segments
        error = raw.ask(named(info.id, [0], nbytes=info.nbytes + 16))
        assert isinstance(error, m.Error)
        assert error.code == "codec"
        found = raw.ask(named(info.id, [0]))
        assert isinstance(found, m.Result)
