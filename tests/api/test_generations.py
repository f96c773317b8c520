"""Generations: the next one is built while the present one is served, and replaces it atomically."""

from __future__ import annotations

import gc
import queue
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from anyio import move_on_after

from shared_rpc import AsyncClient, Client, Handle
from shared_rpc.errors import (
    ConfigurationError,
    ConnectionClosed,
    DeadlineExceeded,
    RefreshError,
    StaleHandleError,
)
from tests.kit.processes import eventually, mapped_segments
from tests.kit.world import World, at_once


class Builds:
    """The builds of an endpoint: tensors with the number of their build, made when the test allows it.

    ``fails`` makes the next one raise it.
    """

    def __init__(self) -> None:
        self.count = 0
        self.fails: Exception | None = None
        self.go = threading.Event()
        self.go.set()

    def build(self, size: int = 3) -> dict[str, torch.Tensor]:
        """Make the next build."""
        if self.fails is not None:
            error, self.fails = self.fails, None
            raise error
        self.count += 1
        number = float(self.count)
        assert self.go.wait(30)
        return {str(size): torch.full((size,), number) for size in (size, 1000, 50_000)}


@pytest.fixture
def builds() -> Iterator[Builds]:
    """Counted builds, which are all allowed at the end."""
    builds = Builds()
    yield builds
    builds.go.set()


@pytest.fixture
def load(world: World, builds: Builds) -> Any:
    """The endpoint."""
    return world.share("load", managed=True)(builds.build)


def number(value: dict[str, torch.Tensor]) -> float:
    """Return the number of the one build that all of a value belongs to."""
    (found,) = {float(one) for tensor in value.values() for one in tensor.unique()}
    return found


# In every role.


def test_a_refresh_makes_the_next_generation_current(world: World, load: Any, builds: Builds, role: str) -> None:
    """Later calls get it; existing handles keep theirs, and report that another one is current."""
    old = load()
    made = load.refresh()
    new = load()
    assert (made.endpoint, made.cache_key, made.object_id) == ("load", "load(size=3)", new.object_id)
    assert (made.generation, made.previous_id, made.server_id) == (2, old.object_id, new.server_id)
    assert (old.generation, new.generation, world.provider.refresh("load").generation) == (1, 2, 3)
    assert (number(old.value), number(new.value), builds.count) == (1, 2, 3)
    assert not (old.is_stale() or old.is_current() or new.is_current())
    assert (old.get_object_info()["current"], old.get_object_info()["generation"]) == (False, 1)


def test_stale_handles_are_not_current(world: World, load: Any, role: str) -> None:
    """Neither released ones, nor those of dropped objects; an invalidated object has no latest one."""
    released, kept = load(), load()
    released.release()
    assert (released.is_current(), kept.is_current()) == (False, True)
    with pytest.raises(StaleHandleError, match="was released") as caught:
        released.latest()
    assert caught.value.reason == "released"
    load.invalidate()
    assert not kept.is_current()
    with pytest.raises(StaleHandleError, match=r"load\(size=3\) was invalidated") as caught:
        kept.latest()
    assert caught.value.reason == "invalidated"
    assert load().generation == kept.latest().generation == 2
    world.close()
    with pytest.raises(ConnectionError):
        kept.is_current()


def test_uncached_results_have_no_generations(world: World, role: str) -> None:
    """Each is current, and refreshing gives an error with the reason."""
    world.share("plain", cache=False, managed=True)(lambda: torch.ones(1))
    world.share("add")(lambda x: x + 1)
    one, other = world.provider.call("plain"), world.provider.call("plain")
    assert one.is_current() and other.is_current() and one.latest().object_id == one.object_id
    with pytest.raises(ConfigurationError, match=r"'plain' .*cache=True"):
        world.provider.refresh("plain")
    with pytest.raises(ConfigurationError, match=r"'add' .*cache_format_key"):
        world.provider.refresh("add", torch.ones(1))


def test_a_failed_refresh_changes_nothing(world: World, load: Any, builds: Builds, role: str) -> None:
    """The endpoint's own error is raised, and the earlier generation is still served."""
    handle = load()
    builds.fails = ZeroDivisionError("no weights today")
    with pytest.raises(ZeroDivisionError, match="no weights today"):
        load.refresh()
    assert (load().object_id, handle.is_current(), builds.count) == (handle.object_id, True, 1)
    assert load.refresh().generation == 2


def test_simultaneous_refreshes_join_one_build(world: World, load: Any, builds: Builds, role: str) -> None:
    """With nothing in the cache a call joins it too."""
    builds.go.clear()
    join, let_go = world.once_waiting(3, load), world.once_waiting(4, builds.go.set)
    *made, handle, _ = at_once(load.refresh, load.refresh, load.refresh, join, let_go)
    assert [one.object_id for one in made] == [handle.object_id] * 3
    assert (builds.count, handle.generation, handle.get_object_info()["leases"]) == (1, 1, 1)


def test_later_runs_are_newer(world: World, role: str) -> None:
    """A run that began before a refresh and ends after it is not made current: a call gets its result, a refresh an error."""
    begun, go = queue.Queue[int](), {version: threading.Event() for version in (1, 2, 3)}

    def build(version: int = 1) -> torch.Tensor:
        begun.put(version)
        assert go[version].wait(20)
        return torch.full((3,), float(version))

    serving = world.share("serving", managed=True, cache_format_key="serving")(build)
    with ThreadPoolExecutor(3) as threads:
        running = []
        for version, ask in ((1, serving), (2, serving.refresh), (3, serving.refresh)):
            running.append(threads.submit(ask, version))
            assert begun.get(timeout=20) == version
        call, earlier, later = running
        go[3].set()
        made = later.result(20)
        go[2].set()
        with pytest.raises(RefreshError, match=f"ended first: .* is .object {made.object_id}"):
            earlier.result(20)
        go[1].set()
        with call.result(20) as handle:
            assert float(handle.value[0]) == 1.0 and not handle.is_current()
    with serving() as handle:
        assert (handle.object_id, float(handle.value[0])) == (made.object_id, 3.0)


def test_an_invalidation_discards_active_builds(world: World, load: Any, builds: Builds, role: str) -> None:
    """Their results are not made current; the refresh fails, and joined calls get theirs as stale."""
    builds.go.clear()
    join, invalidate = world.once_waiting(1, load), world.once_waiting(2, load.invalidate, builds.go.set)
    error, handle, _ = at_once(load.refresh, join, invalidate)
    assert isinstance(error, RefreshError) and "load() was invalidated while" in str(error)
    assert (number(handle.value), handle.is_current()) == (1, False)
    assert (load().generation, handle.latest().object_id) == (2, load().object_id)


def test_a_refresh_outlives_its_requester(load: Any, world: World, builds: Builds) -> None:
    """After the requester's timeout, the build continues and becomes current; until then calls get the present one at once."""
    client = world.client()
    handle = client.call("load")
    builds.go.clear()
    with pytest.raises(DeadlineExceeded):
        world.client(timeout=0.1).refresh("load")
    assert handle.is_current() and client.call("load").object_id == handle.object_id
    builds.go.set()
    eventually(lambda: not handle.is_current())
    assert (handle.latest().generation, builds.count) == (2, 2)


# Memory.


def test_old_memory_is_freed_with_its_last_holder(world: World, builds: Builds) -> None:
    """The server releases it at once; it stays until both sessions have."""
    world.share("load", managed=True, pinned=True)(builds.build)
    server, one, other = world.serve(), world.client(), world.client()
    held, also = one.call("load"), other.call("load")
    one.refresh("load")
    assert server.info()["objects"] == 2
    held.release()
    assert [left["leases"] for left in one.list_objects() if not left["current"]] == [1]
    other.close()
    eventually(lambda: server.info()["objects"] == 1)
    assert number(also.value) == 1  # this process's mapping keeps it
    mapped = mapped_segments()
    del also
    gc.collect()
    assert mapped_segments() < mapped


# Under load.

#: Five clients, each in a separate thread.
READERS = """
    import threading
    import torch
    from shared_rpc import Client

    torch.set_num_threads(1)

    def read(client):
        seen = []
        while len(seen) < 40 or seen[-1] < 8:
            with client.call("load") as handle:
                bounds = [float(bound) for tensor in handle.value.values() for bound in tensor.aminmax()]
                assert set(bounds) == {handle.generation}, (bounds, handle.generation)
                seen.append(handle.generation)
        assert seen == sorted(seen), seen
        print(f"saw {seen[-1]}\\n", end="", flush=True)  # in one write, as other threads print too
        client.close()

    clients = [Client(device="cpu", timeout=30) for _ in range(5)]
    for client in clients:
        client.call("load").release()
    print("ready", flush=True)
    for client in clients:
        threading.Thread(target=read, args=(client,)).start()
"""


def test_readers_see_whole_generations_during_refreshes(load: Any, world: World, client: Client) -> None:
    """Ten clients attach in a loop: never a mix, never an earlier one again, nothing left."""
    client.call("load").release()
    size = world.server.info()["nbytes"]
    children = [world.process(READERS) for _ in range(2)]
    for child in children:
        child.expect("ready")
    assert [client.refresh("load").generation for _ in range(7)] == list(range(2, 9))
    for child in children:
        for _ in range(5):
            assert child.expect("saw").endswith("8")
        assert child.close() == (0, "")
    eventually(lambda: [world.server.info()[key] for key in ("objects", "leases", "nbytes")] == [1, 0, size])


# Notifications.


def test_later_generations_are_reported_in_every_role(world: World, load: Any, role: str) -> None:
    """Neither the first generation of a call nor earlier refreshes."""
    load(5)
    load.refresh(5)
    with world.provider.refreshes() as news:
        load(1)
        load.refresh(2)
        made = [load.refresh(1), load.refresh(2)]
        assert [next(news), next(news)] == made
        load.invalidate(1)
        load(1)
        last = next(news)
    assert (last.cache_key, last.generation, last.previous_id) == ("load(size=1)", 3, "")


def test_slow_readers_get_the_latest_of_each(load: Any, client: Client) -> None:
    """The server buffers nothing for them."""
    for size in (1, 2):
        client.call("load", size)
    with client.refreshes() as news:
        for _ in range(50):
            client.refresh("load", 2)
        for _ in range(20):
            client.refresh("load", 1)
        reported = [next(news) for _ in range(2)]
    assert [(made.cache_key, made.generation) for made in reported] == [("load(size=2)", 51), ("load(size=1)", 21)]


def test_the_blocking_iterator_misses_nothing(load: Any, client: Client) -> None:
    """From its entry on, until another thread closes the client."""
    client.call("load")
    with client.refreshes() as news:
        made = client.refresh("load")
        assert next(news) == made
        threading.Timer(0.05, client.close).start()
        with pytest.raises(ConnectionClosed):
            next(news)


def test_the_end_of_the_server_is_reported(load: Any, world: World, client: Client) -> None:
    """An iterator ends with an exception; a later one starts again."""
    with client.refreshes() as news:
        world.server.stop()
        with pytest.raises(ConnectionClosed, match="refreshes are not reported any more"):
            next(news)
    world.server.start()
    with client.refreshes() as again:
        client.call("load")
        client.refresh("load")
        assert next(again).generation == 2


# In coroutines.


@pytest.mark.anyio
async def test_coroutines_can_refresh(load: Any, world: World) -> None:
    """With the same names; the iterator continues after a cancelled scope, and gives the latest of several."""
    async with (
        AsyncClient(socket_path=world.server.socket_path) as client,
        AsyncClient(socket_path=world.server.socket_path) as listener,
    ):
        old = await client.call("load")
        async with listener.refreshes() as news:
            with move_on_after(0.02):
                await anext(news)
            made = [await client.refresh("load") for _ in range(3)]
            assert await anext(news) == made[-1]
        async with await old.latest() as new:
            assert (number(new.value), new.generation, await new.is_current(), await old.is_current()) == (4, 4, True, False)


# Candidates: generations that exist, but are not current until they are promoted.


def test_candidates_are_private_until_promoted(world: World, load: Any, builds: Builds, role: str) -> None:
    """Calls get the earlier generation; after the promotion, which happens once, it is current, and reported like a refresh."""
    present = load()
    candidate = world.provider.prepare("load")
    assert (candidate.generation, candidate.value.object_id, candidate.value.endpoint) == (2, candidate.object_id, "load")
    assert (number(load().value), present.is_current(), candidate.is_current()) == (1, True, False)
    with world.provider.refreshes() as news:
        made = world.provider.promote(candidate)
        assert next(news) == made
    assert (made.object_id, made.generation, made.previous_id) == (candidate.object_id, 2, present.object_id)
    assert (number(load().value), number(present.latest().value), number(present.value), builds.count) == (2, 2, 1, 2)
    assert not present.is_current() and candidate.is_current()
    with pytest.raises(RefreshError, match="is no candidate"):
        world.provider.promote(candidate)
    candidate.release()
    assert number(load().value) == 2


def test_candidates_end_with_their_handle(world: World, load: Any, builds: Builds, role: str) -> None:
    """Nothing else keeps them."""
    load().release()
    candidate = world.provider.prepare("load")
    assert [info.get("candidate", False) for info in world.provider.list_objects()] == [False, True]
    candidate.release()
    eventually(lambda: len(world.provider.list_objects()) == 1)
    with pytest.raises(RefreshError, match=f"object {candidate.object_id} is no candidate"):
        world.provider.promote(candidate)
    assert load().generation == 1


def test_later_generations_are_not_replaced(world: World, load: Any, role: str) -> None:
    """Neither by an earlier candidate, nor by a run that began before."""
    load()
    first, second = world.provider.prepare("load"), world.provider.prepare("load")
    world.provider.promote(second)
    with pytest.raises(RefreshError, match=r"generation 3 .* is later than candidate 2"):
        world.provider.promote(first)
    third = world.provider.prepare("load")
    load.refresh()
    with pytest.raises(RefreshError, match="is later than candidate 4"):
        world.provider.promote(third)
    assert load().generation == 5


def test_invalidations_discard_candidates(world: World, load: Any, builds: Builds, role: str) -> None:
    """An invalidated call's earlier candidates are outdated, also those that are being built; those of other calls are not."""
    load()
    candidate, another = world.provider.prepare("load"), world.provider.prepare("load", 4)
    load.invalidate()
    with pytest.raises(RefreshError, match=r"load\(size=3\) was invalidated"):
        world.provider.promote(candidate)
    assert world.provider.promote(another).generation == 1
    assert world.provider.promote(world.provider.prepare("load")).previous_id == ""
    builds.go.clear()
    invalidate = world.once_waiting(1, load.invalidate, builds.go.set)
    error, _ = at_once(lambda: world.provider.prepare("load"), invalidate)
    assert isinstance(error, RefreshError) and "therefore is no candidate" in str(error)


def test_calls_do_not_join_preparations(world: World, load: Any, builds: Builds, role: str) -> None:
    """With nothing in the cache a call builds its own object, which is newer than the earlier candidate."""
    builds.go.clear()

    def let_go() -> None:
        eventually(lambda: builds.count == 2)
        builds.go.set()

    def call() -> Handle[Any]:
        eventually(lambda: builds.count == 1)
        return load()

    candidate, handle, _ = at_once(lambda: world.provider.prepare("load"), call, let_go)
    assert (builds.count, number(handle.value)) == (2, 2)
    with pytest.raises(RefreshError, match="is later than candidate"):
        world.provider.promote(candidate)
