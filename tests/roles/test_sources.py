"""A source of records answers the misses of its server: what its callers get, and what happens when it goes."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from shared_rpc import Client, Provider, Server
from shared_rpc.errors import ClusterError
from shared_rpc.operations.sources import Source
from tests.kit.apps import Connect, Serve
from tests.kit.processes import eventually

pytestmark = pytest.mark.usefixtures("no_leaks")

#: A grace that no test outlives.
LONG = 600.0


class Model:
    """The endpoint ``load``, which counts its builds, and fails with ``error`` if that is set."""

    def __init__(self, provider: Provider, **options: Any) -> None:
        self.builds = 0
        self.error: Exception | None = None
        provider.share("load", managed=True, **options)(self._load)

    def _load(self, size: int = 4) -> torch.Tensor:
        if self.error is not None:
            raise self.error
        self.builds += 1
        return torch.full((size,), float(self.builds))


@pytest.fixture
def model(provider: Provider) -> Model:
    """An endpoint of the server."""
    return Model(provider)


@pytest.fixture
def server(model: Model, serve: Serve) -> Server:
    """A server of it, which waits for sources."""
    return serve(source_grace=LONG)


@pytest.fixture
def source(server: Server, connect: Connect) -> Iterator[Source]:
    """A source that is attached to it."""
    with connect().source() as source:
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
    """How many runs wait for a source."""
    return sum(run["status"] == "asked" for run in client.list_runs())


def test_what_the_source_has_built_its_callers_get(
    source: Source, client: Client, model: Model, threads: ThreadPoolExecutor
) -> None:
    """The miss names the call; the source holds the object too, and the next call finds it in the cache."""
    call = threads.submit(client.call, "load", 8)
    miss = next(source)
    endpoint = client.list_endpoints()["load"]
    assert (miss.id, miss.endpoint, miss.cache_key, miss.device) == (1, "load", "load(size=8)", "cpu")
    assert miss.fingerprint == endpoint["fingerprint"]
    with source.build(miss) as built, call.result(10) as handle, client.call("load", 8) as again:
        assert built.object_id == handle.object_id == again.object_id
        assert (built.value, handle.value.tolist(), model.builds) == (None, [1.0] * 8, 1)
        assert len(client.list_objects()[0]["holders"]) == 2


def test_all_waiters_get_the_error_that_the_source_answers(
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


def test_without_a_source_nothing_is_asked(server: Server, client: Client, model: Model) -> None:
    """A server that never had one builds at once."""
    client.call("load").release()
    assert (model.builds, client.get_server_info()["source"]) == (1, None)


def test_a_lost_source_leaves_its_misses_to_the_server(
    model: Model, serve: Serve, connect: Connect, threads: ThreadPoolExecutor
) -> None:
    """They wait for the grace, which is over at once here."""
    serve(source_grace=0.0)
    client = connect()
    source = connect().source().__enter__()
    call = threads.submit(client.call, "load")
    next(source)
    source.close()
    call.result(10).release()
    assert model.builds == 1


def test_a_second_source_gets_the_misses_of_the_first(
    source: Source, client: Client, model: Model, connect: Connect, threads: ThreadPoolExecutor
) -> None:
    """The first one is told that it is replaced, whatever it does next."""
    call = threads.submit(client.call, "load")
    first = next(source)
    with connect().source() as second:
        miss = next(second)
        assert miss == first
        for attempt in (
            lambda: source.build(first),
            lambda: source.fail(first, ""),
            lambda: source.report({}),
            lambda: next(source),
        ):
            with pytest.raises(ClusterError, match="another one has taken its place") as caught:
                attempt()
            assert caught.value.reason == "replaced"
        second.build(miss).release()
        call.result(10).release()


def test_a_record_of_another_server_answers_a_miss(
    source: Source, client: Client, model: Model, base_path: str, threads: ThreadPoolExecutor
) -> None:
    """It is copied into a room, and the endpoint does not run here; the counts say so."""
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
