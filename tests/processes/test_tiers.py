"""Tiers of a server: suspended leases, objects that are evicted and restored, and calls that wait for them."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from shared_rpc import Client, Server
from shared_rpc.client.steps import query
from shared_rpc.errors import CapabilityError, ServerBusy, StaleHandleError
from shared_rpc.execution.device_memory import DeviceMemory
from shared_rpc.protocol import generations as g
from shared_rpc.protocol import messages as m
from shared_rpc.protocol import tiers as t
from shared_rpc.server.capacity import Move
from shared_rpc.server.core import Core
from shared_rpc.server.tiers import Tiers
from tests.kit.closings import late_closings
from tests.kit.processes import eventually
from tests.kit.raw import Raw
from tests.kit.world import World


@pytest.fixture
def world(world: World, tmp_path: Path) -> World:
    """A server with a directory for files."""
    options: dict[str, dict[str, Any]] = {
        "model": {},
        "ahead": {"host_copy": "at_build"},
        "kept": {"host_copy": "never"},
        "pinned": {"pinned": True},
    }
    for name, more in options.items():
        world.share(name, managed=True, **more)(lambda size: torch.arange(size, dtype=torch.float32))
    world.serve(spill_dir=tmp_path)
    return world


@pytest.fixture
def raw(world: World) -> Iterator[Raw]:
    """A session that sends arbitrary messages."""
    with Raw(world.server.socket_path) as end:
        yield end


def held(raw: Raw, client: Client) -> str:
    """Return an object on which only the raw session has a lease."""
    with client.call("model", 4) as handle:
        object_id = handle.object_id
        assert raw.ask(m.Hold([object_id])) == m.Held([object_id])
    return str(object_id)


def test_an_eviction_ends_when_the_memory_is_free(client: Client, threads: ThreadPoolExecutor) -> None:
    """The requester may need the memory now; another thread closes the descriptors."""
    with client.create_buffer(1 << 20, "float32", keep=True) as handle:
        object_id = handle.object_id
    with late_closings() as free:
        answer = threads.submit(client.evict, object_id)
        eventually(lambda: client.get_object_info(object_id)["tier"] == "file")
        with pytest.raises(TimeoutError):
            answer.result(0.2)
        free.set()
        assert [move["tier"] for move in answer.result(30)] == ["file"]


def test_only_holders_can_resume(raw: Raw, client: Client) -> None:
    """A session without a lease gets an error, and a dropped object is named."""
    with client.call("model", 4) as handle:
        answer = raw.ask(t.Resume(handle.object_id))
        assert isinstance(answer, m.Error) and (answer.code, answer.detail["reason"]) == (StaleHandleError.code, "released")
    answer = raw.ask(t.Resume("0" * 24))
    assert isinstance(answer, m.Error) and answer.detail["reason"] == "object_gone" and "0" * 24 in answer.text


class Gate:
    """Blocks copies to a lower tier and back, and counts them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls = 0
        self.begun, self.open = threading.Event(), threading.Event()
        for name in ("lower", "raise_"):
            monkeypatch.setattr(DeviceMemory, name, self.blocking(getattr(DeviceMemory, name)))

    def blocking(self, real: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function of the memory that begins when the gate is open."""

        async def copying(memory: DeviceMemory, *args: Any) -> Any:
            self.calls += 1
            self.begun.set()
            assert await memory._threads.run(lambda: self.open.wait(30))
            return await real(memory, *args)

        return copying


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    """Blocks copies until it is opened."""
    gate = Gate(monkeypatch)
    yield gate
    gate.open.set()


def cold(client: Client, size: int = 1000) -> str:
    """The id of an object that is in a file."""
    with client.call("model", size) as handle:
        object_id = str(handle.object_id)
    assert [move["object_id"] for move in client.evict(object_id)] == [object_id]
    return object_id


def test_evicted_objects_are_restored_by_the_next_call(client: Client) -> None:
    """The same object with the same bytes, in other memory; until then it counts as a copy only."""
    with client.call("model", 1000) as handle:
        object_id = handle.object_id
    (moved,) = client.evict(object_id)
    assert (moved["object_id"], moved["tier"]) == (object_id, "file")
    assert moved["nbytes"] >= 4000 and moved["copied"] >= 4000
    info, server, device = client.get_object_info(object_id), client.get_server_info(), client.list_devices()[0]
    assert (info["tier"], info["active"]) == ("file", 0)
    assert server["nbytes"] == device["used"] == 0
    assert info["copies"] == server["copies"] == device["copies"] == {"file": moved["nbytes"]}
    with client.call("model", 1000) as handle:
        assert handle.object_id == object_id
        assert torch.equal(handle.value, torch.arange(1000.0))
    assert client.get_object_info(object_id)["tier"] == "device"


def test_objects_are_evicted_and_restored_by_endpoint(client: Client) -> None:
    """All of them; those already in the tier are not moved."""
    ids = {cold(client, size) for size in (10, 20)}
    assert client.evict("model") == []
    assert {(move["object_id"], move["tier"]) for move in client.restore("model")} == {(each, "device") for each in ids}
    assert client.restore("model") == []
    with pytest.raises(StaleHandleError):
        client.restore("0" * 24)


@pytest.mark.parametrize("way", ["task", "latest", "ticket", "export"])
def test_every_access_restores_the_object(client: Client, way: str) -> None:
    """The bytes are the same, in memory that later accesses share."""
    with client.call("model", 10) as first:
        ticket = first.ticket()
        # The lease alone: the memory stays mapped.
        assert client._run(query(t.Suspend([first.object_id]), "suspend")) == 1
        client.evict(first)
        assert client.get_object_info(first)["tier"] == "file"
        if way == "export":
            with client.export(first) as record:
                found = torch.frombuffer(bytearray(record.segments[0].buffer()[:40]), dtype=torch.float32)
        elif way == "task":
            found = client.wait_for_task(client.submit("model", 10)).value
        else:
            found = (first.latest() if way == "latest" else client.open_ticket(ticket)).value
        assert client.get_object_info(first)["tier"] == "device"
    assert found.sum() == 45


@pytest.mark.parametrize(
    ("endpoint", "to", "error", "says"),
    [
        ("pinned", None, ServerBusy, "pinned=True"),
        ("kept", None, CapabilityError, "host_copy='never'"),
        ("model", "host", CapabilityError, "use to='file'"),
    ],
)
def test_unevictable_objects_are_refused(client: Client, endpoint: str, to: Any, error: type[Exception], says: str) -> None:
    """The error gives the reason; the object stays."""
    client.call(endpoint, 4).release()
    with pytest.raises(error, match=says):
        client.evict(endpoint, to)
    assert client.list_objects()[0]["tier"] == "device"


def test_a_call_during_an_eviction_cancels_it(client: Client, gate: Gate, threads: ThreadPoolExecutor) -> None:
    """Even if its handle is released before the copy is complete: the process may have written in the meantime."""
    client.call("model", 4).release()
    evicted = threads.submit(client.evict, "model")
    assert gate.begun.wait(30)
    with client.call("model", 4) as handle:
        handle.value.fill_(9)
    gate.open.set()
    with pytest.raises(ServerBusy, match="requested during the move"):
        evicted.result()
    client.evict("model")
    with client.call("model", 4) as handle:
        assert handle.value.tolist() == [9] * 4


def test_a_restore_cancels_an_eviction(
    client: Client, world: World, gate: Gate, threads: ThreadPoolExecutor, tmp_path: Path
) -> None:
    """Before its copy is complete."""
    world.serve(spill_dir=tmp_path, when_full="evict", quotas={"cpu": 1 << 20})
    client.call("model", 4).release()
    evicted = threads.submit(client.evict, "model")
    assert gate.begun.wait(30)
    assert client.restore("model") == []
    with pytest.raises(ServerBusy, match="requested during the move"):
        evicted.result(30)


def test_writes_during_a_copy_cause_another_copy(client: Client, raw: Raw, gate: Gate, threads: ThreadPoolExecutor) -> None:
    """A page outlives the lease of a process that has it mapped."""
    object_id = held(raw, client)
    raw.say(g.GetRevision(object_id), 5)
    with contextlib.closing(raw.hear_frame()) as frame:
        raw.ask(t.Suspend([object_id]))
        evicted = threads.submit(client.evict, object_id)
        assert gate.begun.wait(30)
        os.pwrite(frame.fds[0], (2).to_bytes(8, sys.byteorder), 0)
        gate.open.set()
        (moved,) = evicted.result()
    assert gate.calls == 2
    assert moved["copied"] == 2 * moved["nbytes"]


def test_copies_can_be_made_at_the_build(client: Client, gate: Gate) -> None:
    """In the background, after the object is available. Its eviction copies nothing, until an update makes the copy old."""
    client.call("ahead", 4).release()
    gate.open.set()
    eventually(lambda: list(client.list_objects()[0]["copies"]) == ["file"])
    assert client.evict("ahead")[0]["copied"] == 0
    with client.call("ahead", 4) as handle:
        with client.update(handle) as value:
            value.fill_(5)
        assert client.get_object_info(handle)["copies"] == {}
    assert client.evict("ahead")[0]["copied"] > 0
    with client.call("ahead", 4) as handle:
        assert handle.value.tolist() == [5] * 4


def test_damaged_files_cause_a_rebuild(client: Client, world: World, caplog: pytest.LogCaptureFixture) -> None:
    """Their bytes are not used. A call gets a new object, and the log has the reason."""
    object_id = cold(client)
    damage(world.server, object_id)
    with caplog.at_level(logging.ERROR), client.call("model", 1000) as handle:
        assert handle.object_id != object_id
        assert torch.equal(handle.value, torch.arange(1000.0))
    assert f"object {object_id}" in caplog.text and "damaged" in caplog.text


def test_damaged_files_fail_a_resumption(client: Client, world: World, raw: Raw) -> None:
    """The object is dropped, since its bytes are lost."""
    object_id = held(raw, client)
    assert raw.ask(t.Suspend([object_id])) == m.Answer.of(1)
    client.evict(object_id)
    damage(world.server, object_id)
    answer = raw.ask(t.Resume(object_id))
    assert isinstance(answer, m.Error) and answer.detail["reason"] == "object_gone" and "damaged" in answer.text
    assert client.list_objects() == []


def damage(server: Server, object_id: str) -> None:
    """Change a byte of an object's file."""

    def change(core: Core) -> None:
        stored = core.state.stored(object_id)
        copy = core.objects.copies.highest(stored.record.segments[0].info.id)
        os.pwrite(copy.segment.fileno(), b"\xff", 1)

    server.engine.ask(change)


def test_objects_dropped_during_an_eviction_are_not_moved(
    client: Client, world: World, gate: Gate, threads: ThreadPoolExecutor
) -> None:
    """Nothing is left of the copy. Others that wait for the move get the same error."""
    with client.call("model", 4) as handle:
        assert handle.revision == 0  # now it has a page
    first = threads.submit(client.evict, "model")
    assert gate.begun.wait(30)
    others = [
        threads.submit(client.restore, client.list_objects()[0]["object_id"]),
        threads.submit(client.evict, "model"),
    ]
    eventually(lambda: world.server.engine.ask(lambda core: len(core.state.waits)) == 2)
    assert client.invalidate_endpoint_cache("model") == 1
    gate.open.set()
    assert [request.result() for request in (first, *others)] == [[], [], []]
    info = client.get_server_info()
    assert (info["copies"], gate.calls) == ({}, 1)


@pytest.mark.parametrize(("way", "step"), [("evict", "_lower"), ("restore", "_restore")])
def test_objects_dropped_before_their_move_begins_are_not_moved(
    client: Client, monkeypatch: pytest.MonkeyPatch, way: str, step: str
) -> None:
    """A move begins in the next turn of the loop."""
    object_id, move = cold(client), getattr(Tiers, step)
    if way == "evict":
        client.restore(object_id)

    async def dropped(tiers: Tiers, begun: Move, more: Any) -> Any:
        tiers._objects.unlist(begun.group[0])
        return await move(tiers, begun, more)

    monkeypatch.setattr(Tiers, step, dropped)
    assert getattr(client, way)(object_id) == []


def test_objects_dropped_during_a_restore_are_built_again(
    client: Client, world: World, gate: Gate, threads: ThreadPoolExecutor
) -> None:
    """The caller gets a new one; nothing is left of the earlier one."""
    gate.open.set()
    object_id = cold(client, 10)
    gate.begun.clear()
    gate.open.clear()
    called = threads.submit(client.call, "model", 10)
    assert gate.begun.wait(30)
    restored = threads.submit(world.client().restore, object_id)
    assert client.invalidate_call_cache("model", 10) == 1
    gate.open.set()
    with called.result() as handle:
        assert handle.object_id != object_id
        assert handle.value.sum() == 45
    with contextlib.suppress(StaleHandleError):  # it arrived after the end
        assert restored.result() == []
    assert [info["object_id"] for info in client.list_objects()] == [handle.object_id]
    assert client.get_server_info()["copies"] == {}
