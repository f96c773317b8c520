"""One set of behaviours, tried in every role: local, server, and client of a server.

The author of an endpoint need not know which role the process will play.
"""

from __future__ import annotations

import gc
import os
import pickle
import threading
import weakref

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest
import torch

from shared_rpc import Client, Provider
from shared_rpc.errors import CapabilityError, ConfigurationError, ConnectError, RemoteTraceback, StaleHandleError
from tests.kit.processes import eventually
from tests.kit.world import World, at_once, shares_memory


def test_a_replaced_endpoint_has_keys_of_its_own(world: World, role: str) -> None:
    """The same call has another key once a function with another default has taken the endpoint's name."""
    results = []
    for scale in (1, 2):

        def scaled(size: int, scale: int = scale) -> torch.Tensor:
            return torch.full((size,), scale)

        results.append(world.share("scaled")(scaled)(3).tolist())
    assert results == [[1] * 3, [2] * 3]


def test_other_code_of_an_endpoint_drops_its_results(world: World, role: str) -> None:
    """As after a reload: a notebook's cell is edited, and run again. The same code keeps the results."""

    def twos() -> torch.Tensor:
        return torch.full((2,), 2)

    first = world.share("make")(lambda: torch.full((2,), 1))()
    second = world.share("make")(twos)()
    assert [first.tolist(), second.tolist()] == [[1, 1], [2, 2]]
    assert shares_memory(world.share("make")(twos)(), second)


def test_none_is_a_result(world: World, role: str) -> None:
    """Also for managed and cached endpoints, and for tasks."""
    ran = []
    warm_up = world.share("warm_up")(lambda: ran.append("cached"))
    act = world.share("act", cache=False)(lambda: ran.append("not cached"))
    once = world.share("once", managed=True)(lambda: ran.append("managed"))
    assert [warm_up(), warm_up(), act(), act()] == [None] * 4
    assert world.provider.execute("act", timeout=10) is None
    with once() as handle, once() as again, world.provider.execute("once", timeout=10) as third:
        assert handle.value is None
        assert handle.object_id == again.object_id == third.object_id
    assert ran == ["cached", *["not cached"] * 3, "managed"]


def test_failure_is_not_cached(world: World, role: str) -> None:
    """After an exception the next call tries again."""
    built = []

    @world.share()
    def load() -> torch.Tensor:
        built.append(1)
        if len(built) == 1:
            raise ValueError("no weights yet")
        return torch.ones(1)

    with pytest.raises(ValueError, match="no weights yet"):
        load()
    assert torch.equal(load(), torch.ones(1))


def test_dropped_results_are_freed_at_once(world: World, role: str) -> None:
    """The library keeps no reference cycles to them: their memory does not wait for the collector."""
    load = world.share("load", cache=False)(lambda: torch.ones(4))
    cached = world.share("cached", managed=True)(lambda: torch.ones(4))
    gc.disable()
    try:
        value = load()
        handle = cached()
        storages = [weakref.ref(value.untyped_storage()), weakref.ref(handle.value.untyped_storage())]
        cached.invalidate()
        handle.release()
        del value, handle
        eventually(lambda: [storage() for storage in storages] == [None, None], what="both results gone")
    finally:
        gc.enable()


def test_invalidation_drops_one_call(world: World, role: str) -> None:
    """``invalidate`` takes the call's arguments, returns the number of dropped results, and keeps those of other calls."""
    built = []

    @world.share()
    def load(size: int) -> torch.Tensor:
        built.append(size)
        return torch.ones(size)

    load(2)
    load(3)
    assert load.invalidate(size=2) == 1
    assert load.invalidate(2) == 0
    load(2)
    load(3)
    assert built == [2, 3, 2]


def test_identical_calls_in_flight_join_one_run(world: World, role: str) -> None:
    """Threads that request a result being built wait for it."""
    built, go = [], threading.Event()

    @world.share()
    def load() -> torch.Tensor:
        built.append(1)
        go.wait(10)
        return torch.ones(4)

    *results, _ = at_once(load, load, load, load, world.once_waiting(4, go.set))
    assert len(built) == 1
    assert all(shares_memory(results[0], result) for result in results)
    load()
    if world.role != "local":
        info = world.owner.get_runtime_info()["server"]
        assert (info["builds"], info["joined"], info["cache_hits"]) == (1, 3, 1)


def test_without_singleflight_identical_calls_run_at_once(world: World, role: str) -> None:
    """``singleflight=False`` starts a run for each call; later calls find a result."""
    meeting, built = threading.Barrier(2, timeout=10), []

    @world.share(singleflight=False)
    def load() -> torch.Tensor:
        built.append(1)
        meeting.wait()
        return torch.ones(4)

    one, other = at_once(load, load)
    assert torch.equal(one, other)
    load()
    assert len(built) == 2


def test_followers_get_the_leader_s_exception(world: World, role: str) -> None:
    """All waiters of a failed run get its exception, with its own type and, in a client, the server's traceback."""
    built, go = [], threading.Event()

    @world.share()
    def load() -> torch.Tensor:
        built.append(1)
        go.wait(10)
        raise FileNotFoundError("weights.safetensors")

    *errors, _ = at_once(load, load, load, world.once_waiting(3, go.set))
    assert [(type(error), str(error)) for error in errors] == [(FileNotFoundError, "weights.safetensors")] * 3
    if world.role == "client":
        causes = [error.__cause__ for error in errors]
        assert all(isinstance(cause, RemoteTraceback) and "raise FileNotFoundError(" in str(cause) for cause in causes)
    assert len(built) == 1


def test_first_calls_of_many_threads(base_path: str) -> None:
    """Threads that use a provider first at the same time get one role between them, and one server."""
    provider = Provider(base_path, execution_mode="server", device="cpu")
    start = threading.Barrier(8, timeout=10)

    @provider.share
    def load() -> torch.Tensor:
        return torch.ones(1)

    def first() -> torch.Tensor:
        start.wait()
        return load()

    results = at_once(*[first] * 8)
    assert all(shares_memory(results[0], result) for result in results)
    provider.close()


def test_async_endpoints_are_awaited(world: World, role: str) -> None:
    """The caller awaits an ``async def`` endpoint, managed or not, and gets its body's result."""

    @world.share()
    async def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @world.share(managed=True)
    async def load() -> torch.Tensor:
        await anyio.lowlevel.checkpoint()
        return torch.ones(2)

    async def main() -> None:
        assert torch.equal(await double(torch.ones(2)), torch.full((2,), 2.0))
        with await load() as one, await load() as other:
            assert shares_memory(one.value, other.value)

    anyio.run(main)


def test_async_endpoints_by_name_block(world: World, role: str) -> None:
    """``provider.call`` waits for the result, also in a thread that runs a loop, as every cell of a notebook does."""

    @world.share()
    async def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    def call() -> torch.Tensor:
        result: torch.Tensor = world.provider.call("double", torch.ones(1))
        return result

    async def main() -> torch.Tensor:
        return call()

    assert call() == anyio.run(main) == 2


def test_endpoints_may_nest_deeper_than_there_are_threads(world: World, role: str) -> None:
    """An endpoint that waits for another one does not use up a thread that the other needs."""

    @world.share()
    def tower(height: int) -> torch.Tensor:
        if height == 0:
            return torch.zeros(1)
        below: torch.Tensor = world.inside["tower"](height - 1)
        return below + 1

    assert tower(50).item() == 50


def test_sync_calls_on_the_servers_loop_are_refused(base_path: str) -> None:
    """An ``async def`` endpoint that calls a ``def`` one on the loop would deadlock: the error gives the remedy."""
    provider = Provider(base_path, execution_mode="server", device="cpu")

    @provider.share
    def base() -> torch.Tensor:
        return torch.ones(1)

    @provider.share
    async def load() -> torch.Tensor:
        return base()

    @provider.share
    async def load_by_a_task() -> torch.Tensor:
        return provider.execute("base")

    @provider.share
    async def load_in_a_thread() -> torch.Tensor:
        return await anyio.to_thread.run_sync(base)

    with pytest.raises(ConfigurationError, match=r"base\(\) was called on the server's event loop.*anyio\.to_thread"):
        provider.call("load")
    with pytest.raises(ConfigurationError, match=r"execute\('base'\) was called on the server's event loop"):
        provider.call("load_by_a_task")
    assert provider.list_tasks() == []
    assert torch.equal(provider.call("load_in_a_thread"), torch.ones(1))
    provider.close()


def test_runtime_info_describes_the_role(world: World, role: str) -> None:
    """Role, device, mechanism and process, and in two roles the server; in the local role there is no socket."""
    world.share("load")(lambda: torch.ones(1))()
    info = world.provider.get_runtime_info()
    assert world.provider.ping() >= 0
    assert (world.provider.get_server_info()["socket_path"] is None) == (world.role == "local")
    assert (info["execution_mode"], info["device"]) == (world.role, "cpu")
    assert info["mechanism"] == {"name": "memfd", "reason": "host memory is a memfd", "mps": False}
    if world.role == "local":
        assert (set(info), info["objects"]) == ({"execution_mode", "device", "mechanism", "pid", "objects"}, 1)
    else:
        assert info["socket_path"].endswith("s-cpu.sock")
        assert (info["server"]["objects"], info["server"]["endpoints"]) == (1, ["load"])
        assert info["server"]["pid"] == info["pid"]


def test_closed_providers_refuse_calls(world: World, role: str) -> None:
    """Every call gives the same error, in every role; closing again is harmless."""
    load = world.share("load")(lambda: torch.ones(1))
    load()
    world.provider.close()
    world.provider.close()
    for call in (load, load.invalidate, world.provider.get_runtime_info):
        with pytest.raises(ConfigurationError, match="this provider is closed"):
            call()


def test_leases_are_released_by_handle_or_id(world: World, role: str) -> None:
    """One or several in one request; the count is that of the existing leases. A second release takes no other handle's."""
    world.share("kept", managed=True)(lambda n: torch.zeros(n) + 1)
    one, two, three, four = (world.provider.call("kept", n) for n in (1, 2, 2, 3))
    world.provider.ensure_handle_live(one)
    assert [world.provider.release(one), world.provider.release(one)] == [True, False]
    two.release()
    two.release()
    assert not three.is_stale()
    assert world.provider.release_many([three, four.object_id, four.object_id]) == 2
    with pytest.raises(StaleHandleError):
        world.provider.ensure_handle_live(one)
    assert world.provider.get_server_info()["leases"] == 0


def test_servers_within_a_process_are_neither_reloaded_nor_stopped(world: World, role: str) -> None:
    """A server in a script has no workers, and its process may do more; there is none in the local role."""
    world.share("ones")(lambda: torch.ones(1))
    with pytest.raises(ConfigurationError, match="whose code cannot be reloaded"):
        world.provider.reload()
    with pytest.raises((ConfigurationError, CapabilityError)) as refused:
        world.provider.stop_server()
    if world.role == "local":
        kind, words = CapabilityError, "this process plays the local role: there is no server to be stopped"
    else:
        kind, words = ConfigurationError, f"this server is part of process {os.getpid()}, which may run other code too"
    assert type(refused.value) is kind
    assert str(refused.value).startswith(words)


def test_handles_release_at_the_end_of_their_block(world: World, role: str) -> None:
    """However the block ends, the value is gone, and the error gives the reason."""

    @world.share(managed=True)
    def load() -> torch.Tensor:
        return torch.ones(4)

    with pytest.raises(ZeroDivisionError), load() as handle:
        kept = handle.value
        raise ZeroDivisionError
    with pytest.raises(StaleHandleError, match=f"object {handle.object_id} was released") as caught:
        _ = handle.value
    assert caught.value.reason == "released"
    assert (handle.released, handle.is_stale()) == (True, True)
    assert torch.equal(kept, torch.ones(4))


def test_object_info(world: World, role: str) -> None:
    """``get_object_info`` has these keys and no others."""

    @world.share(managed=True)
    def load(size: int) -> torch.Tensor:
        return torch.ones(size)

    handle = load(256)
    info = handle.get_object_info()
    created, accessed = info.pop("created_at"), info.pop("last_accessed_at")
    # In the local role it has no other holder, and nothing is copied; else it is the reference to the one tensor.
    assert (info.pop("private_nbytes") == 0) == (world.role == "local")
    identity = {"object_id": handle.object_id, "server_id": handle.server_id, "endpoint": "load", "cache_key": "load(size=256)"}
    place = {"kind": "result", "nbytes": 1024, "device": "cpu", "tier": "device", "pinned": False, "copies": {}}
    use = {"generation": 1, "current": True, "stale": False, "leases": 1, "active": 1}
    assert info == identity | place | use
    assert 1.7e9 < created <= accessed


def test_handles_cannot_be_pickled(world: World, role: str) -> None:
    """A handle is a lease of this process: the error gives the remedy."""
    world.share("load", managed=True)(lambda: torch.ones(1))
    handle = world.provider.call("load")
    with pytest.raises(CapabilityError, match=f"handle of object {handle.object_id}.*call the endpoint"):
        pickle.dumps(handle)
    assert not handle.is_stale()


def test_an_unused_client_disconnects(world: World) -> None:
    """As after the reload of a module with a provider. Its handles keep the connection."""
    world.owner.share("kept", managed=True)(lambda: torch.ones(1))
    sessions = world.client().list_sessions
    before = len(sessions())
    handle = Provider(world.base_path, execution_mode="client", device=world.device).call("kept")
    gc.collect()
    assert not handle.is_stale()
    assert len(sessions()) == before + 1
    del handle
    gc.collect()
    eventually(lambda: len(sessions()) == before)


def test_children_without_a_server_learn_what_their_parent_lacks(base_path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server's process serves its children from its first call on."""
    monkeypatch.setattr("shared_rpc.client.session.is_child", lambda: True)
    with Client(base_path, device="cpu", connect_timeout=0) as client, pytest.raises(ConnectError, match="in the parent first"):
        client.list_objects()


def test_clients_cannot_be_pickled(base_path: str) -> None:
    """A session belongs to its process: the error gives the remedy."""
    with Client(base_path, device="cpu") as client, pytest.raises(CapabilityError, match="cannot pickle or copy a client"):
        pickle.dumps(client)
