"""A source of records answers the misses of its server: results of callers, and the end of the source."""

from __future__ import annotations

import os
import pickle
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import anyio
import msgspec
import pytest
import torch

from shared_rpc import AsyncClient, Client, Miss, Provider, Server, Source
from shared_rpc.errors import (
    CapabilityError,
    ClusterError,
    ConnectionClosed,
    ProtocolError,
    RecordError,
    RemoteError,
)
from tests.kit.processes import eventually
from tests.kit.raw import disconnect
from tests.kit.world import World

pytestmark = pytest.mark.usefixtures("admitted_source")

#: A grace that no test outlives.
LONG = 600.0


class Model:
    """The endpoint ``load``, which counts its builds, and fails with ``error`` if that is set."""

    def __init__(self, provider: Provider | World) -> None:
        self.builds = 0
        self.error: Exception | None = None
        provider.share("load", managed=True)(self._load)

    def _load(self, size: int = 4) -> torch.Tensor:
        if self.error is not None:
            raise self.error
        self.builds += 1
        return torch.full((size,), float(self.builds))


@pytest.fixture
def model(world: World) -> Model:
    """An endpoint of a server that waits for sources."""
    model = Model(world)
    world.serve(source_grace=LONG)
    return model


@pytest.fixture
def source_client(model: Model, world: World) -> Client:
    """The client that is the source."""
    return world.client()


@pytest.fixture
def source(source_client: Client) -> Iterator[Source]:
    """A source that is attached to it."""
    with source_client.source() as source:
        yield source


@contextmanager
def other_server(base_path: str) -> Iterator[Client]:
    """A server with the same endpoint, as on another node, and a client of it."""
    path = f"{base_path}-other"
    provider = Provider(path, device="cpu")
    Model(provider)
    with Server(provider), Client(path, device="cpu", timeout=30.0) as client:
        yield client


def asked(client: Client) -> int:
    """Return the number of runs that wait for a source."""
    return sum(run["status"] == "asked" for run in client.list_runs())


def test_objects_built_by_the_source_answer_the_miss(
    source: Source, client: Client, model: Model, threads: ThreadPoolExecutor
) -> None:
    """The miss names the call; the source holds the object too, and the next call finds it in the cache."""
    call = threads.submit(client.call, "load", 8)
    miss = next(source)
    endpoint = client.list_endpoints()["load"]
    assert (miss.id, miss.endpoint, miss.cache_key, miss.device) == (1, "load", "load(size=8)", "cpu")
    assert miss.fingerprint == endpoint.fingerprint
    with source.build(miss) as built, call.result(10) as handle, client.call("load", 8) as again:
        assert built.object_id == handle.object_id == again.object_id
        assert (built.value, handle.value.tolist(), model.builds) == (None, [1.0] * 8, 1)
        assert len(client.list_objects()[0]["holders"]) == 2


def test_only_processes_started_by_the_server_can_be_its_source(
    model: Model, source_client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Callers unpickle its answers, so other clients are refused, with the way to start a source."""
    for token in ("", "guessed"):
        monkeypatch.setenv("SHARED_TENSOR_SOURCE_TOKEN", token)
        with pytest.raises(CapabilityError, match="--cluster "):
            source_client.source().__enter__()
    source_client.call("load").release()


def test_errors_of_the_source_reach_all_waiters(
    source: Source, client: Client, model: Model, threads: ThreadPoolExecutor
) -> None:
    """The next call is a miss again."""
    calls = [threads.submit(client.call, "load") for _ in range(3)]
    miss = next(source)
    eventually(lambda: client.list_runs()[0]["calls"] == 3)
    source.fail(miss, "no node can build it")
    for call in calls:
        with pytest.raises(ClusterError, match="no node can build it") as caught:
            call.result(10)
        assert caught.value.reason == "failed"
    again = threads.submit(client.call, "load")
    source.build(next(source)).release()
    again.result(10).release()
    assert model.builds == 1


def test_records_of_another_server_answer_misses(
    source: Source, client: Client, model: Model, base_path: str, threads: ThreadPoolExecutor
) -> None:
    """The record is copied into allocated memory, and the endpoint does not run here; the counts show that."""
    with other_server(base_path) as elsewhere, elsewhere.call("load", 8) as there, elsewhere.export(there) as record:
        call = threads.submit(client.call, "load", 8)
        miss = next(source)
        with source.adopt(miss, record) as adopted, call.result(10) as handle:
            assert torch.equal(handle.value, there.value) and handle.value.data_ptr() != there.value.data_ptr()
            assert (adopted.object_id, adopted.value) == (handle.object_id, None)
            with client.call("load", 8) as again:
                assert again.object_id == handle.object_id
    counts = client.get_statistics()["load"]
    assert (model.builds, counts["adopted"], counts["builds"], counts["misses"], counts["hits"]) == (0, 1, 0, 1, 1)


def test_misses_of_a_lost_source_go_to_the_next(
    source: Source, source_client: Client, world: World, client: Client, model: Model, threads: ThreadPoolExecutor
) -> None:
    """Including those that it had received; each is built once. The lost one ends, and does not attach itself again."""
    calls = [threads.submit(client.call, "load", size) for size in (1, 2)]
    next(source), next(source)
    waiting = threads.submit(next, source)
    eventually(lambda: world.ask(lambda core: len(core.state.waits) > 0))
    disconnect(source_client)
    assert isinstance(waiting.exception(10), (ConnectionClosed, ClusterError))
    eventually(lambda: client.get_server_info()["source"]["session"] is None)  # type: ignore[index]
    assert asked(client) == 2
    with world.client().source() as second:
        for _ in calls:
            second.build(next(second)).release()
    for call in calls:
        call.result(10).release()
    assert model.builds == 2


def test_builds_continue_after_their_source_is_lost(
    source: Source, source_client: Client, world: World, client: Client, threads: ThreadPoolExecutor, go: threading.Event
) -> None:
    """Callers get the object; the lost source holds nothing."""
    world.share_held(go, managed=True)
    call = threads.submit(client.call, "held")
    build = threads.submit(source.build, next(source))
    eventually(lambda: [run["status"] for run in client.list_runs()] == ["running"])
    disconnect(source_client)
    assert build.exception(10) is not None
    go.set()
    call.result(10).release()
    eventually(lambda: client.get_server_info()["leases"] == 0)


def test_only_managed_and_cached_calls_are_misses(source: Source, world: World, client: Client, model: Model) -> None:
    """Others are built at once, as are refreshes and candidates, even of a call without an object."""
    world.share("plain")(lambda: torch.ones(1))
    world.share("new", cache=False, managed=True)(lambda: torch.ones(1))
    world.share("add", managed=True)(lambda x: x + 1)
    client.call("plain")
    client.call("new").release()
    client.call("add", torch.ones(1)).release()
    client.refresh("load", 1)
    with client.prepare("load", 2) as candidate:
        client.promote(candidate)
    assert model.builds == 2 and client.get_server_info()["source"]["misses"] == 0  # type: ignore[index]


def test_identical_calls_are_one_miss(source: Source, client: Client, model: Model, threads: ThreadPoolExecutor) -> None:
    """From clients and tasks alike; another call is a separate miss."""
    same = [threads.submit(client.call, "load", 8) for _ in range(3)]
    first = next(source)
    task, other = client.submit("load", 8), threads.submit(client.call, "load", 9)
    second = next(source)
    assert (first.cache_key, second.cache_key) == ("load(size=8)", "load(size=9)")
    run = next(run for run in client.list_runs() if run["cache_key"] == first.cache_key)
    assert (run["status"], run["started_at"], run["tasks"]) == ("asked", None, [task])
    assert client.get_task_status(task).status == "pending"
    source.build(second).release()
    source.build(first).release()
    handles = [call.result(10) for call in (*same, other)] + [client.wait_for_task(task)]
    assert len({handle.object_id for handle in handles}) == model.builds == 2


def test_misses_of_a_serialized_endpoint_are_offered_at_once(
    world: World, go: threading.Event, threads: ThreadPoolExecutor
) -> None:
    """Those built here are run in turn, in the order of the answers; an unanswered one delays no other."""
    began = world.share_held(go, managed=True, concurrency="serialized")
    world.serve(source_grace=LONG)
    client = world.client()
    with world.client().source() as source:
        calls = [threads.submit(client.call, "held", key) for key in range(3)]
        misses = {miss.cache_key: miss for miss in (next(source), next(source), next(source))}
        builds = []
        for key in (2, 1):
            builds.append(threads.submit(source.build, misses[f"held(number={key})"]))
            eventually(lambda: asked(client) == 3 - len(builds))
        eventually(lambda: began == [2])
        source.fail(misses["held(number=0)"], "not now")
        go.set()
        for build in builds:
            build.result(10).release()
        assert began == [2, 1]
        for call in calls[1:]:
            call.result(10).release()
        assert isinstance(calls[0].exception(10), ClusterError)


def test_answers_to_invalidated_misses_are_not_cached(
    source: Source, client: Client, model: Model, threads: ThreadPoolExecutor
) -> None:
    """Waiters get the object; the next call is a separate miss."""
    call = threads.submit(client.call, "load")
    first = next(source)
    assert client.invalidate_call_cache("load") == 0
    again = threads.submit(client.call, "load")
    second = next(source)
    assert first.cache_key == second.cache_key and first.id != second.id
    with source.build(first) as old, source.build(second) as new, call.result(10) as handle, again.result(10) as current:
        assert (handle.object_id, current.object_id) == (old.object_id, new.object_id)
        assert (handle.is_current(), current.is_current()) == (False, True)


def test_misses_survive_a_reload(source: Source, world: World, client: Client, threads: ThreadPoolExecutor) -> None:
    """Waiters get the answer; a call of the new code is a miss of the new code."""
    call = threads.submit(client.call, "load")
    first = next(source)
    spec = world.ask(lambda core: core.registry.get("load"))
    changed = msgspec.structs.replace(spec, fingerprint="another")
    world.ask(lambda core: core.replace_endpoints([changed], "changed"))
    again = threads.submit(client.call, "load")
    second = next(source)
    assert (first.fingerprint, second.fingerprint) == (spec.fingerprint, "another")
    for miss, waiting in ((first, call), (second, again)):
        source.build(miss).release()
        waiting.result(10).release()


def test_endpoint_exceptions_are_forwarded_unread(
    source: Source, client: Client, model: Model, base_path: str, threads: ThreadPoolExecutor
) -> None:
    """Callers get the exception, even on another server to which the source forwards it; the source gets a text."""
    model.error = KeyError("no such weights")
    call = threads.submit(client.call, "load")
    with pytest.raises(RemoteError, match="no such weights") as caught:
        source.build(next(source))
    assert caught.value.type_name == "KeyError"
    with pytest.raises(KeyError, match="no such weights"):
        call.result(10)
    travelled = pickle.loads(pickle.dumps(caught.value))
    with other_server(base_path) as elsewhere, elsewhere.source() as other:
        call = threads.submit(elsewhere.call, "load")
        other.fail(next(other), travelled)
        with pytest.raises(KeyError, match="no such weights"):
            call.result(10)


def test_a_refused_record_leaves_the_miss_open(
    source: Source, client: Client, model: Model, base_path: str, threads: ThreadPoolExecutor
) -> None:
    """The source gets an error, and may answer otherwise."""
    with other_server(base_path) as elsewhere, elsewhere.call("load") as there, elsewhere.export(there) as record:
        call = threads.submit(client.call, "load")
        miss = next(source)
        record.header = msgspec.structs.replace(record.header, torch="1.0")
        with pytest.raises(RecordError) as caught:
            source.adopt(miss, record)
        assert caught.value.reason == "version"
        source.build(miss).release()
        call.result(10).release()
        with pytest.raises(ClusterError) as late:
            source.build(miss)
        assert late.value.reason == "answered"
    assert client.get_server_info()["buffers"] == 0


def test_an_object_that_becomes_current_answers_its_misses(
    source: Source, source_client: Client, client: Client, base_path: str, threads: ThreadPoolExecutor
) -> None:
    """Including those from before an invalidation; the source's own late answer is refused."""
    with other_server(base_path) as elsewhere, elsewhere.call("load", 8) as there, elsewhere.export(there) as record:
        early = threads.submit(client.call, "load", 8)
        missed = [next(source)]
        client.invalidate_call_cache("load", 8)
        late = threads.submit(client.call, "load", 8)
        missed.append(next(source))
        with source_client.adopt_candidate(record) as candidate:
            current = source_client.promote(candidate)
        with early.result(10) as first, late.result(10) as second:
            assert {first.object_id, second.object_id} == {current.object_id}
        for miss in missed:
            with pytest.raises(ClusterError) as answered:
                source.build(miss)
            assert answered.value.reason == "answered"
    assert client.get_statistics()["load"]["adopted"] == 2


def test_a_stopping_server_ends_all_waits(source: Source, world: World, client: Client, threads: ThreadPoolExecutor) -> None:
    """Of callers and of the source."""
    calls = [threads.submit(client.call, "load", key) for key in (1, 2)]
    next(source), next(source)
    waiting = threads.submit(next, source)
    eventually(lambda: world.ask(lambda core: len(core.state.waits) > 0))
    world.server.stop()
    for wait in (*calls, waiting):
        assert isinstance(wait.exception(10), ConnectionClosed)


def test_closing_a_source_ends_its_iteration(source: Source, world: World, threads: ThreadPoolExecutor) -> None:
    """Even in another thread; closing twice is harmless."""
    iteration = threads.submit(list, source)
    eventually(lambda: world.ask(lambda core: len(core.state.waits) > 0))
    source.close()
    assert iteration.result(10) == []
    source.close()


def test_a_source_without_a_block_is_attached_by_its_first_step(
    model: Model, world: World, client: Client, threads: ThreadPoolExecutor
) -> None:
    """And detached when it is closed."""
    source = world.client().source()
    first = threads.submit(next, source)
    eventually(lambda: (client.get_server_info()["source"] or {}).get("session") is not None)
    call = threads.submit(client.call, "load", 1)
    source.build(first.result(10)).release()
    call.result(10).release()
    source.close()
    eventually(lambda: client.get_server_info()["source"]["session"] is None)  # type: ignore[index]


def test_status_reports_are_shown(source: Source, client: Client) -> None:
    """Until the source is detached; the latest report counts, and an invalid one is refused."""
    source.report({"cluster": "c", "nodes": 1})
    source.report({"cluster": "c", "nodes": 2, "activity": ["waits"]})
    info = client.get_server_info()["source"]
    assert info is not None
    assert (info["status"], info["cluster"], info["joiner"]) == ({"cluster": "c", "nodes": 2, "activity": ["waits"]}, "", None)
    assert (info["pid"], info["misses"]) == (os.getpid(), 0)
    with pytest.raises(ProtocolError):
        source.report({"nodes": "two"})  # type: ignore[typeddict-item]
    with pytest.raises(ProtocolError, match="has 70016 bytes: report at most 65536"):
        source.report({"activity": ["x" * 70_000]})
    assert client.get_server_info()["source"] == info
    source.close()

    def is_stopped() -> bool:
        gone = client.get_server_info()["source"]
        return gone is not None and (gone["session"], gone["status"]) == (None, {})

    eventually(is_stopped)  # a client's message may overtake that of another one


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_an_asynchronous_source_answers_several_misses(
    backend: str, model: Model, client: Client, base_path: str, threads: ThreadPoolExecutor
) -> None:
    """At once over one connection: a build, a record and an error."""

    async def answer() -> None:
        async with AsyncClient(base_path, device="cpu") as own, own.source() as source:
            calls.extend(threads.submit(client.call, "load", size) for size in (1, 2, 3))
            with other_server(base_path) as elsewhere, elsewhere.call("load", 2) as there, elsewhere.export(there) as record:

                async def one(miss: Miss) -> None:
                    if miss.cache_key == "load(size=1)":
                        async with await source.build(miss) as built:
                            assert built.value is None
                    elif miss.cache_key == "load(size=2)":
                        await (await source.adopt(miss, record)).release()
                    else:
                        await source.fail(miss, "no")

                async with anyio.create_task_group() as tasks:
                    for _ in range(3):
                        tasks.start_soon(one, await anext(source))
            await source.report({"nodes": 1})
            await source.close()

    calls: list[Future[Any]] = []
    anyio.run(answer, backend=backend)
    calls[0].result(10).release()
    calls[1].result(10).release()
    assert isinstance(calls[2].exception(10), ClusterError)
    assert (model.builds, client.get_statistics()["load"]["adopted"]) == (1, 1)


def test_a_provider_is_a_source_in_every_role(world: World, threads: ThreadPoolExecutor, role: str) -> None:
    """Calls of its own process are misses too."""
    load = world.share("load", managed=True)(lambda: torch.ones(1))
    with world.provider.source() as source:
        call = threads.submit(load)
        miss = next(source)
        with source.build(miss) as built, call.result(10) as handle:
            assert built.object_id == handle.object_id and handle.value.item() == 1
