"""The public API as type checkers see it. Checked by mypy, never run.

A line that must be an error carries ``type: ignore`` with its code; were it none, the unused comment would be.
"""

from __future__ import annotations

from collections.abc import Coroutine
from pathlib import Path
from typing import Any, Literal, assert_type

import torch

from shared_rpc import (
    AsyncClient,
    AsyncHandle,
    AsyncSource,
    AsyncTensorChannel,
    Client,
    DeviceInfo,
    EndpointSpec,
    EndpointStatistics,
    ExportedRecord,
    Generation,
    Handle,
    HolderInfo,
    ListedObjectInfo,
    Miss,
    MoveInfo,
    ObjectInfo,
    Provider,
    RecordHeader,
    ReloadInfo,
    RunInfo,
    RuntimeInfo,
    Server,
    ServerInfo,
    SessionInfo,
    SharedFunction,
    Source,
    SourceInfo,
    StopInfo,
    TaskInfo,
    TensorChannel,
    TensorMessage,
    Ticket,
    materialize,
)
from shared_rpc.extras import safetensors

provider = Provider()
Provider(Path("/run/app"), enabled=True, execution_mode="client", device="cuda:1", timeout=None, server_startup_timeout=5)
Provider(execution_mode="clinet")  # type: ignore[arg-type]
Provider(base="/run/app")  # type: ignore[call-arg]


class Net(torch.nn.Module):
    """A user's module."""

    hidden: int


# Decorated without parentheses.


@provider.share
def bare(size: int, *, scale: float = 1.0) -> torch.Tensor:
    """Without parentheses."""
    return torch.ones(size) * scale


assert_type(bare(4, scale=2.0), torch.Tensor)
assert_type(bare.name, str)
assert_type(bare.invalidate(4, scale=2.0), int)
bare()  # type: ignore[call-arg]
bare("4")  # type: ignore[arg-type]
bare(4, 2.0)  # type: ignore[call-arg]
bare.invalidate()  # type: ignore[call-arg]
bare.invalidate("4")  # type: ignore[arg-type]
bare.invalidate(4, factor=2.0)  # type: ignore[call-arg]


def takes(function: SharedFunction[[int], torch.Tensor]) -> torch.Tensor:
    """A shared function can be passed around with its type."""
    return assert_type(function(4), torch.Tensor)


takes(bare)


# With options.


@provider.share()
def empty(size: int) -> torch.Tensor:
    """With nothing in them."""
    return torch.ones(size)


@provider.share("models.options", cache=False, concurrency="serialized", access="read", idle_ttl=60, singleflight=False)
def options(size: int) -> dict[str, torch.Tensor]:
    """With some of them."""
    return {"ones": torch.ones(size)}


@provider.share(name="models.template", cache_format_key="{size}", managed=False, execution="task", tensors="parameters")
def template(size: int) -> tuple[torch.Tensor, int]:
    """With the others."""
    return torch.ones(size), size


assert_type(empty(4), torch.Tensor)
takes(empty)
assert_type(options(size=4), dict[str, torch.Tensor])
assert_type(template(4), tuple[torch.Tensor, int])
options()  # type: ignore[call-arg]
options.invalidate(siez=4)  # type: ignore[call-arg]
provider.share(manged=True)  # type: ignore[call-overload]
provider.share(concurrency="serial")  # type: ignore[call-overload]
provider.share(access="write")  # type: ignore[call-overload]
provider.share(tensors="buffers")  # type: ignore[call-overload]
provider.share(4)  # type: ignore[call-overload]


# Managed: a handle, in every role.


@provider.share(managed=True)
def load(size: int, name: str = "base") -> Net:
    """By its own name."""
    return Net()


@provider.share("models.named", managed=True, idle_ttl=None)
def named() -> torch.Tensor:
    """By another name."""
    return torch.ones(1)


assert_type(load(4), Handle[Net])
assert_type(load(4, name="big").value, Net)
assert_type(load(4).value.hidden, int)
assert_type(named().value, torch.Tensor)
assert_type(load.invalidate(4), int)
assert_type(load.refresh(4, name="big"), Generation)
load.refresh("4")  # type: ignore[arg-type]
load("4")  # type: ignore[arg-type]
load.invalidate()  # type: ignore[call-arg]
takes(load)  # type: ignore[arg-type]
load(4).forward(torch.ones(1))  # type: ignore[attr-defined]

with load(4) as handle:
    assert_type(handle, Handle[Net])
    assert_type(handle.value, Net)
    assert_type(handle.get_object_info(refresh=True), ObjectInfo)
    assert_type((handle.object_id, handle.server_id, handle.generation), tuple[str, str, int])
    assert_type((handle.released, handle.is_stale()), tuple[bool, bool])
    assert_type((handle.is_current(), handle.revision, handle.wait_revision(2, timeout=1)), tuple[bool, int, int])
    assert_type(handle.latest(), Handle[Net])
    assert_type(handle.read_consistent(lambda net: net.hidden), int)
    with provider.update(handle, timeout=1) as net:
        assert_type(net, Net)
    handle.suspend()
    handle.resume(timeout=1)
    assert_type(handle.suspended, bool)
    with handle.active(timeout=1) as net:
        assert_type(net, Net)
    handle.revision = 4  # type: ignore[misc]
    handle.value = Net()  # type: ignore[misc]
    handle.released = True  # type: ignore[misc]
    handle.release(now=True)  # type: ignore[call-arg]


# async def.


@provider.share
async def embed(text: str) -> torch.Tensor:
    """Gives an awaitable in every role."""
    return torch.ones(len(text))


@provider.share(managed=True)
async def load_later(size: int) -> Net:
    """Gives an awaitable of a handle."""
    return Net()


awaitable = assert_type(embed("a"), Coroutine[Any, Any, torch.Tensor])


async def awaiting() -> None:
    """What awaiting gives."""
    assert_type(await embed("a"), torch.Tensor)
    assert_type(await load_later(4), Handle[Net])
    with await load_later(4) as later:
        assert_type(later.value, Net)
    assert_type(embed.invalidate("a"), int)
    await embed(4)  # type: ignore[arg-type]
    await load_later()  # type: ignore[call-arg]


# The provider by name.

assert_type(provider.execution_mode, Literal["local", "server", "client", "spawn"])
assert_type(provider.invalidate_call_cache("load", 4, name="big"), int)
assert_type(provider.invalidate_endpoint_cache("load"), int)
assert_type(provider.get_endpoint("load"), EndpointSpec)
assert_type(provider.list_endpoints(), dict[str, EndpointSpec])
assert_type(provider.get_runtime_info(), RuntimeInfo)
assert_type(provider.call("load", 4, name="big"), Any)
assert_type(provider.execute("load", 4, wait=False, timeout=1), Any)
assert_type(provider.wait_for_task("1", timeout=2), Any)
assert_type(provider.list_tasks("failed"), list[TaskInfo])
assert_type(provider.list_runs(limit=3), list[RunInfo])
assert_type(provider.create_buffer((2, 3), torch.float16, keep=True), Handle[torch.Tensor])
assert_type(provider.latest(load(4)), Handle[Net])
assert_type(provider.release_many([load(4), "an id"]), int)
assert_type(provider.refresh("load", 4), Generation)
for generation in provider.refreshes():
    assert_type(generation, Generation)
provider.list_runs("3")  # type: ignore[arg-type]
provider.create_buffer(4, tll=3)  # type: ignore[call-arg]
provider.reload("some")  # type: ignore[arg-type]
provider.call()  # type: ignore[call-arg]


# Server and client.

with Server(
    provider, socket_path=Path("/run/app.sock"), max_workers=4, max_bytes=1 << 30, quotas={"cuda:0": 0.5, "cpu": 1 << 30}
) as server:
    assert_type(server, Server)
    assert_type(server.socket_path, str)
    assert_type(server.running, bool)
    assert_type(server.start(blocking=True), Server)
Server()  # type: ignore[call-arg]
Server(provider, workers=4)  # type: ignore[call-arg]
Server(provider, quotas={"cpu": 0.5}, when_full="evict", host_quota=0.25)
Server(provider, when_full="wait")  # type: ignore[arg-type]

with Client("/run/app", device="cpu", timeout=None, connect_timeout=0) as client:
    assert_type(client, Client)
    assert_type(client.ping(), float)
    with client.create_buffer((2, 3), torch.float16, "cuda:1", zero=True, ttl=60) as buffer:
        assert_type(buffer, Handle[torch.Tensor])
        assert_type(buffer.value, torch.Tensor)
        assert_type(client.get_buffer(buffer.object_id), Handle[torch.Tensor])
        assert_type(client.free_buffer(buffer), bool)
    with client.create_channel("weights", 1 << 20, slots=2, readers=1, device="cpu") as channel:
        assert_type(channel, TensorChannel)
        channel.send({"x": torch.ones(1)}, meta={"step": 1}, timeout=1)
        channel.send([torch.ones(1)])  # type: ignore[arg-type]
        with client.open_channel("weights").receive(timeout=1) as message:
            assert_type(message, TensorMessage)
            assert_type(dict(message), dict[str, torch.Tensor])
    client.create_buffer("4")  # type: ignore[arg-type]
    client.create_buffer(4, ttl="soon")  # type: ignore[arg-type]
    assert_type(client.call("load", 4), Any)
    assert_type(client.latest(handle), Handle[Net])
    assert_type(client.invalidate_object(handle.object_id), int)
    assert_type(client.release(handle), bool)
    assert_type(client.release_many([handle, handle.object_id]), int)
    assert_type(client.watch_task("1", 4, lambda info: print(info.progress)), TaskInfo)
    assert_type(client.refresh("load", 4).generation, int)
    for made in client.refreshes():
        assert_type(made, Generation)
    with client.export(handle) as record, client.allocate(record.header, ttl=60) as room:
        assert_type((record, room), tuple[ExportedRecord, ExportedRecord])
        assert_type(record.header, RecordHeader)
        assert_type((room.segments[0].tensor(), room.segments[0].buffer()), tuple[torch.Tensor, memoryview])
        assert_type(client.adopt(room), Generation)
        assert_type(client.adopt(record, "load", 4), Generation)
        assert_type(client.adopt_candidate(record, "load", 4), Handle[Generation])
    assert_type(client.evict(handle), list[MoveInfo])
    assert_type(client.evict("load", "host") + client.restore(handle.object_id), list[MoveInfo])
    client.evict(handle, to="device")  # type: ignore[arg-type]
    assert_type(client.promote(client.prepare("load", 4)), Generation)
    client.export(4)  # type: ignore[arg-type]
    client.adopt(handle)  # type: ignore[arg-type]
    with client.update(handle) as weights:
        assert_type(weights, Net)
    client.ensure_handle_live(handle)
    client.ensure_handle_live(handle.object_id)  # type: ignore[arg-type]
    client.release(4)  # type: ignore[arg-type]
    client.call()  # type: ignore[call-arg]


async def coroutines(asynchronous: AsyncClient, held: AsyncHandle[Net]) -> None:
    """The same of the other client."""
    assert_type(await asynchronous.refresh("load", 4), Generation)
    assert_type(await asynchronous.call("load", 4), Any)
    assert_type(await asynchronous.ping(), float)
    assert_type(await asynchronous.execute("load", 4, callback=lambda info: print(info.progress)), Any)
    assert_type(await asynchronous.list_tasks(), list[TaskInfo])
    assert_type(await asynchronous.get_server_info(), ServerInfo)
    assert_type(await held.get_object_info(), ObjectInfo)
    async with await asynchronous.create_buffer(4, ttl=60) as buffer:
        assert_type(buffer, AsyncHandle[torch.Tensor])
    async with await asynchronous.open_channel("weights", timeout=1) as channel:
        assert_type(channel, AsyncTensorChannel)
        async for message in channel:
            assert_type(await message.copy_to({}), list[str])
    assert_type(await asynchronous.get_buffer("an id"), AsyncHandle[torch.Tensor])
    assert_type(await asynchronous.latest(held), AsyncHandle[Net])
    assert_type(await asynchronous.release(held), bool)
    assert_type(await asynchronous.open_ticket("model.ticket"), AsyncHandle[Any])
    await asynchronous.list_runs("3")  # type: ignore[arg-type]
    await asynchronous.create_buffer(4, tll=3)  # type: ignore[call-arg]
    await asynchronous.call()  # type: ignore[call-arg]
    assert_type((await held.is_current(), await held.revision, await held.wait_revision(2)), tuple[bool, int, int])
    assert_type(await held.latest(), AsyncHandle[Net])
    assert_type(await held.read_consistent(lambda net: net.hidden), int)
    with await asynchronous.export(held) as record, await asynchronous.allocate(record.header) as room:
        assert_type(room, ExportedRecord)
        assert_type(await asynchronous.adopt(room), Generation)
        assert_type(await asynchronous.adopt_candidate(record), AsyncHandle[Generation])
    assert_type(await asynchronous.prepare("load", 4), AsyncHandle[Generation])
    async with asynchronous.update(held) as net:
        assert_type(net, Net)
    async for made in asynchronous.refreshes():
        assert_type(made, Generation)
    held.revision + 1  # type: ignore[operator]


# Replies: dicts whose keys are known, the same of all three by one description of each operation.


def replies(client: Client, handle: Handle[Net]) -> None:
    """By a client."""
    provider.get_runtime_info()["role"]  # type: ignore[typeddict-item]
    assert_type(client.get_server_info(), ServerInfo)
    assert_type(client.list_endpoints(), dict[str, EndpointSpec])
    assert_type(client.list_objects(), list[ListedObjectInfo])
    assert_type(client.get_object_info(handle), ObjectInfo)
    assert_type(client.holders(handle), list[HolderInfo])
    client.holders(4)  # type: ignore[arg-type]
    assert_type(client.list_devices(), list[DeviceInfo])
    assert_type(client.list_sessions(), list[SessionInfo])
    assert_type(client.list_runs(10), list[RunInfo])
    assert_type(client.get_statistics(), dict[str, EndpointStatistics])
    assert_type(client.reload("all"), ReloadInfo)
    assert_type(client.stop_server(if_idle=True), StopInfo)
    assert_type(client.list_objects()[0]["holders"], list[HolderInfo])
    assert_type(client.get_server_info()["workers"][0]["state"], Literal["starting", "ready", "draining", "ended"])
    client.get_server_info()["object"]  # type: ignore[misc]
    client.list_runs()[0]["lease"]  # type: ignore[misc]


# Sources of records.


def sources(client: Client, record: ExportedRecord) -> None:
    """Their answers are leases without values."""
    with client.source() as source:
        assert_type(source, Source)
        for miss in source:
            assert_type(miss, Miss)
            assert_type(source.build(miss), Handle[None])
            assert_type(source.adopt(miss, record), Handle[None])
            source.fail(miss, "no")
            source.fail(miss, 4)  # type: ignore[arg-type]
        source.report({"nodes": 3})
        source.report({"node": 3})  # type: ignore[typeddict-item]
    assert_type(provider.source(), Source)
    assert_type(client.get_server_info()["source"], SourceInfo | None)


async def sources_awaited(client: AsyncClient, record: ExportedRecord) -> None:
    """The same, to be awaited."""
    async with client.source() as source:
        assert_type(source, AsyncSource)
        async for miss in source:
            assert_type(await source.build(miss), AsyncHandle[None])
            assert_type(await source.adopt(miss, record), AsyncHandle[None])


# Tickets, and models built around shared tensors.


def tickets(client: Client, handle: Handle[Net]) -> None:
    """A ticket leads to an object whose type it does not know."""
    ticket = assert_type(handle.ticket("model.ticket"), Ticket)
    assert_type(handle.ticket(), Ticket)
    assert_type(client.open_ticket(ticket), Handle[Any])
    assert_type(client.open_ticket(Path("model.ticket")), Handle[Any])
    assert_type(provider.open_ticket("model.ticket"), Handle[Any])
    assert_type(Client.from_ticket(ticket, timeout=5), Client)
    assert_type(AsyncClient.from_ticket("model.ticket"), AsyncClient)


def build(handle: Handle[Net], later: AsyncHandle[Net], weights: dict[str, torch.Tensor]) -> None:
    """Sources of several kinds."""
    with materialize(handle, rename={"a": "b"}.get, own=["*.lora_*"]):
        assert_type(Net(), Net)
    materialize(later, rename=lambda name: name.removeprefix("model."))
    materialize(weights)
    materialize(Net())
    materialize(3)  # type: ignore[arg-type]


assert_type(safetensors.load(Path("net.safetensors"), "cpu", wanted=lambda name: name == "w"), dict[str, torch.Tensor])
safetensors.load("net.safetensors", wanted=["w"])  # type: ignore[arg-type]
