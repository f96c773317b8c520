"""What happens to a call: who runs it, who waits for it, what they get, and what is kept."""

from __future__ import annotations

import asyncio
import gc
import os
import pickle
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import anyio.to_thread
import pytest
import torch

from shared_rpc import Client, Provider, Server
from shared_rpc.errors import CapabilityError, ConfigurationError, EndpointNotFound, RemoteError, SharedRPCError
from shared_rpc.protocol import messages as m
from tests.kit.processes import Child, eventually, python
from tests.kit.raw import Raw

pytestmark = pytest.mark.usefixtures("no_leaks")


def together(count: int, call: Callable[[], object], server: Server, go: threading.Event) -> list[object]:
    """What ``count`` callers of one run get, result or exception; the run goes on once all of them wait for it."""
    calls = server.info()["calls"]

    def attempt() -> object:
        try:
            return call()
        except BaseException as error:
            return error

    with ThreadPoolExecutor(count) as pool:
        futures = [pool.submit(attempt) for _ in range(count)]
        eventually(lambda: server.info()["calls"] == calls + count)
        go.set()
        return [future.result(timeout=20) for future in futures]


# Singleflight.


def test_identical_calls_in_flight_are_one_run(
    provider: Provider, serve: Callable[..., Server], connect: Callable[..., Client], go: threading.Event
) -> None:
    """Ten callers, one build, one memory."""

    @provider.share
    def model(size: int) -> torch.Tensor:
        go.wait(30)
        return torch.zeros(size)

    server, client = serve(), connect()
    results = together(10, lambda: client.call("model", size=4), server, go)
    results[0].fill_(7)
    assert all(result.sum() == 28 for result in results)
    info = server.info()
    assert (info["builds"], info["joined"], info["cache_hits"]) == (1, 9, 0)
    client.call("model", 4)
    assert server.info()["cache_hits"] == 1


def test_without_singleflight_every_caller_has_a_run(
    provider: Provider, serve: Callable[..., Server], connect: Callable[..., Client], go: threading.Event
) -> None:
    """The option turns it off; the last result stays cached."""

    @provider.share(singleflight=False)
    def model() -> torch.Tensor:
        go.wait(30)
        return torch.zeros(4)

    server, client = serve(max_workers=3), connect()
    together(3, lambda: client.call("model"), server, go)
    assert server.info()["builds"] == 3
    assert server.info()["objects"] == 1


@pytest.mark.parametrize(
    "kind", [SystemExit, KeyboardInterrupt, GeneratorExit, asyncio.CancelledError], ids=lambda kind: kind.__name__
)
@pytest.mark.parametrize("is_async", [False, True], ids=["def", "async def"])
def test_a_leader_that_ends_badly_releases_its_followers(
    provider: Provider,
    serve: Callable[..., Server],
    connect: Callable[..., Client],
    go: threading.Event,
    kind: type[BaseException],
    is_async: bool,
) -> None:
    """What would end a process reaches the callers as a RemoteError, all of them, and the server lives."""

    def build() -> None:
        go.wait(30)
        raise kind("the end")

    async def build_async() -> None:
        await anyio.to_thread.run_sync(go.wait)
        raise kind("the end")

    provider.share("build")(build_async if is_async else build)
    server, client = serve(), connect()
    results = together(10, lambda: client.call("build"), server, go)
    assert [type(result) for result in results] == [RemoteError] * 10
    assert all(str(result).endswith(f"{kind.__name__}: the end") for result in results)
    client.ping()
    assert server.info()["running"] == 0


# Exceptions.


class Custom(Exception):
    """Cannot be rebuilt from its arguments."""

    def __init__(self, name: str, *, where: str) -> None:
        super().__init__(f"{name} in {where}")
        self.where = where


class Locked(Exception):
    """Cannot be pickled."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.lock = threading.Lock()


class Mute(Exception):
    """Cannot be printed."""

    def __str__(self) -> str:
        raise SystemExit("not even this")


class Sticky(Exception):
    """Ends whoever pickles it."""

    def __reduce__(self) -> str:
        raise SystemExit("pickled")


def raiser(provider: Provider, error: Callable[[], BaseException]) -> None:
    """Share an endpoint that raises."""

    @provider.share(cache=False)
    def fail() -> None:
        raise error()


@pytest.mark.parametrize(
    "error",
    [
        ValueError("wrong"),
        KeyError("missing"),
        OSError(2, "No such file", "weights.bin"),
        StopIteration(3),
        StopAsyncIteration(),
        RecursionError("deep"),
        ExceptionGroup("several", [ValueError(1), TypeError(2)]),
        pickle.PicklingError("other"),
        TimeoutError("of its own"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_exception_arrives_with_its_own_type(
    provider: Provider, serve: Callable[..., Server], connect: Callable[..., Client], error: Exception
) -> None:
    """``except ValueError`` works around a shared function, and the traceback of the server is the cause."""
    raiser(provider, lambda: error)
    serve()
    with pytest.raises(type(error)) as caught:
        connect().call("fail")
    assert type(caught.value) is type(error)
    assert str(caught.value) == str(error)
    assert "in the server:" in str(caught.value.__cause__)
    assert "raise error()" in str(caught.value.__cause__)
    assert "test_calls.py" in str(caught.value.__cause__)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (lambda: Custom("weights", where="model.bin"), "weights in model.bin"),
        (lambda: Locked("no way"), "no way"),
        (lambda: Sticky("glue"), "glue"),
        (lambda: ValueError("x" * 10_000_000), "characters left out"),
    ],
    ids=["needs arguments", "holds a lock", "ends its pickler", "is too long"],
)
def test_an_exception_that_cannot_travel(
    provider: Provider,
    serve: Callable[..., Server],
    connect: Callable[..., Client],
    error: Callable[[], Exception],
    message: str,
) -> None:
    """It arrives as a RemoteError with its type's name, message and traceback."""
    raiser(provider, error)
    serve()
    with pytest.raises(RemoteError) as caught:
        connect().call("fail")
    kind = type(error())
    assert caught.value.type_name in (kind.__name__, f"{kind.__module__}.{kind.__qualname__}")
    assert message in caught.value.message
    assert "raise error()" in caught.value.traceback
    assert len(str(caught.value)) < 100_000


def test_an_exception_that_cannot_be_printed(
    provider: Provider, serve: Callable[..., Server], connect: Callable[..., Client]
) -> None:
    """Whoever waits for it is told all the same."""
    raiser(provider, Mute)
    serve()
    client = connect()
    with pytest.raises(Mute):
        client.call("fail")
    client.ping()


@pytest.mark.parametrize("is_async", [False, True], ids=["def", "async def"])
def test_text_that_is_not_unicode(
    provider: Provider, serve: Callable[..., Server], connect: Callable[..., Client], is_async: bool
) -> None:
    """The name of a file may hold bytes that are no text; an error that shows it ends nothing."""
    name = b"weights-\xff.bin"

    def fail() -> None:
        raise FileNotFoundError(f"there is no {os.fsdecode(name)}")

    async def fail_async() -> None:
        fail()

    provider.share("fail")(fail_async if is_async else fail)
    serve()
    client = connect()
    with pytest.raises(FileNotFoundError, match="weights-"):
        client.call("fail")
    client.ping()


def test_followers_get_the_exception_too(
    provider: Provider, serve: Callable[..., Server], connect: Callable[..., Client], go: threading.Event
) -> None:
    """Each with its own type and traceback; a failure is not cached."""

    @provider.share
    def build() -> torch.Tensor:
        go.wait(30)
        raise ValueError("no weights")

    server, client = serve(), connect()
    results = together(10, lambda: client.call("build"), server, go)
    assert [type(result) for result in results] == [ValueError] * 10
    assert all("no weights" in str(result.__cause__) for result in results)
    with pytest.raises(ValueError):
        client.call("build")
    assert server.info()["builds"] == 2


def test_the_librarys_own_errors_arrive_as_such(
    provider: Provider, serve: Callable[..., Server], connect: Callable[..., Client]
) -> None:
    """In an endpoint, be it async, they mean what they mean elsewhere."""

    @provider.share(cache=False)
    def plain() -> None:
        raise CapabilityError("not on this device")

    @provider.share(cache=False)
    async def awaited() -> None:
        raise CapabilityError("not on this device")

    serve()
    for name in ("plain", "awaited"):
        with pytest.raises(CapabilityError, match="not on this device"):
            connect().call(name)


SCRIPT = """
import sys
from shared_rpc import Provider

print("running as", __name__, file=sys.stderr)
provider = Provider(device="cpu")

class Outer:
    class Missing(LookupError):
        pass

@provider.share(cache=False)
def find(name: str) -> None:
    raise Outer.Missing(name)

if __name__ == "__main__":
    print("role", provider.execution_mode)
    if provider.execution_mode == "client":
        try:
            find("weights")
        except Outer.Missing as error:
            print("caught", error, type(error) is Outer.Missing)
"""


@pytest.mark.parametrize("command", [["app.py"], ["-m", "shared_rpc.cli", "serve", "app.py"]], ids=["python", "serve"])
def test_an_exception_of_the_script_itself(base_path: str, children: list[Child], command: list[str]) -> None:
    """The same source in both roles: its own exception classes can be caught, and it is not run a second time."""
    directory = os.path.dirname(base_path)
    with open(f"{directory}/app.py", "w") as file:
        file.write(SCRIPT)
    server = Child(*command, cwd=directory, environ={"SHARED_TENSOR_ROLE": "server"})
    client = Child("app.py", cwd=directory, environ={"SHARED_TENSOR_ROLE": "client"})
    children += [server, client]
    assert client.expect("caught") == "caught weights True"
    assert client.close() == (0, "running as __main__\n")


# Concurrency.


def test_a_serialized_endpoint_never_overlaps_itself(
    provider: Provider, serve: Callable[..., Server], connect: Callable[..., Client]
) -> None:
    """However many call it, it runs one call at a time; others run meanwhile."""
    busy = threading.Lock()

    @provider.share(concurrency="serialized", cache=False)
    def alone(number: int) -> torch.Tensor:
        assert busy.acquire(blocking=False), "two at once"
        client.call("other", number)
        busy.release()
        return torch.tensor(number)

    @provider.share(concurrency="serialized", cache=False)
    async def alone_too(number: int) -> torch.Tensor:
        assert busy.acquire(blocking=False), "two at once"
        await asyncio.sleep(0.001)
        busy.release()
        return torch.tensor(number)

    @provider.share(cache=False)
    def other(number: int) -> torch.Tensor:
        return torch.tensor(number)

    serve(max_workers=8)
    client = connect()
    for name in ("alone", "alone_too"):
        with ThreadPoolExecutor(8) as pool:
            assert [int(result) for result in pool.map(lambda n, name=name: client.call(name, n), range(20))] == list(range(20))


def test_a_serialized_endpoint_that_is_given_up(
    provider: Provider,
    serve: Callable[..., Server],
    connect: Callable[..., Client],
    go: threading.Event,
    begun: threading.Event,
) -> None:
    """A call that leaves the queue does not keep its turn."""

    @provider.share(concurrency="serialized", cache=False)
    def alone(number: int) -> torch.Tensor:
        begun.set()
        go.wait(30)
        return torch.tensor(number)

    server, client = serve(), connect()
    with Raw(server.socket_path) as raw, ThreadPoolExecutor(2) as pool:
        raw.say(m.Call("alone", [1]), 1)
        begun.wait(10)
        raw.say(m.Call("alone", [2]), 2)
        last = pool.submit(client.call, "alone", 3)
        eventually(lambda: server.info()["running"] == 3)
        assert isinstance(raw.ask(m.Cancel(), 2), m.Error)
        assert server.info()["running"] == 2
        go.set()
        assert last.result(timeout=10) == 3
        assert server.info()["builds"] == 2


def test_async_endpoints_run_on_the_loop_and_await_each_other(
    provider: Provider, serve: Callable[..., Server], connect: Callable[..., Client]
) -> None:
    """Two that wait for each other's signal run at once, in one thread, though there is one worker."""
    first, second = asyncio.Event(), asyncio.Event()
    threads = set()

    @provider.share
    async def left() -> torch.Tensor:
        threads.add(threading.get_ident())
        first.set()
        await second.wait()
        return torch.ones(1)

    @provider.share
    async def right() -> torch.Tensor:
        threads.add(threading.get_ident())
        second.set()
        await first.wait()
        return torch.ones(1)

    @provider.share
    async def both() -> torch.Tensor:
        results = await asyncio.gather(left(), right())
        return torch.cat(results)

    serve(max_workers=1)
    assert connect().call("both").sum() == 2
    assert len(threads) == 1
    assert threading.get_ident() not in threads


def test_an_async_endpoint_that_stops_waiting_for_another(
    provider: Provider, serve: Callable[..., Server], connect: Callable[..., Client]
) -> None:
    """The other one goes on for those to come; nobody holds a lease that nobody asked for any more."""
    ready = asyncio.Event()

    @provider.share(managed=True)
    async def slow() -> torch.Tensor:
        await ready.wait()
        return torch.ones(4)

    @provider.share(cache=False)
    async def impatient() -> torch.Tensor:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(slow(), 0.01)
        ready.set()
        return torch.zeros(1)

    server, client = serve(), connect()
    assert client.call("impatient") == 0
    eventually(lambda: server.info()["objects"] == 1)
    eventually(lambda: server.info()["leases"] == 0)
    with client.call("slow") as handle:
        assert handle.value.sum() == 4
    assert server.info()["builds"] == 2


def test_an_async_endpoint_that_cancels_its_task(
    provider: Provider, serve: Callable[..., Server], connect: Callable[..., Client]
) -> None:
    """That is its own end, not the server's."""

    @provider.share(cache=False)
    async def suicidal() -> None:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        await asyncio.sleep(10)

    @provider.share(cache=False)
    def ones() -> torch.Tensor:
        return torch.ones(1)

    serve()
    client = connect()
    with pytest.raises(RemoteError, match="CancelledError"):
        client.call("suicidal")
    assert client.call("ones") == 1


def test_nested_calls_with_one_worker(provider: Provider, serve: Callable[..., Server], connect: Callable[..., Client]) -> None:
    """An endpoint that waits for another one lends its place, however deep they are nested."""

    @provider.share
    def tower(height: int) -> torch.Tensor:
        return torch.cat([tower(height - 1), torch.ones(1)]) if height else torch.ones(1)

    server = serve(max_workers=1)
    assert connect().call("tower", 10).sum() == 11
    assert server.info()["builds"] == 11
    assert connect().call("tower", 11).sum() == 12
    assert server.info()["builds"] == 12


def test_nested_calls_share_memory(provider: Provider, serve: Callable[..., Server], connect: Callable[..., Client]) -> None:
    """What an endpoint got from another one is the same memory that clients get."""

    @provider.share
    def base() -> torch.Tensor:
        return torch.zeros(4)

    @provider.share
    def view() -> torch.Tensor:
        return base()[:2]

    serve()
    client = connect()
    part, whole = client.call("view"), client.call("base")
    part.fill_(5)
    assert whole.tolist() == [5, 5, 0, 0]


def test_a_call_that_would_wait_for_itself(
    provider: Provider, serve: Callable[..., Server], connect: Callable[..., Client]
) -> None:
    """It is an error that names the call, at once, directly or by way of others; with another key it is a call."""

    @provider.share
    def ouroboros(size: int) -> torch.Tensor:
        return ouroboros(size=size)

    @provider.share
    def ping(size: int) -> torch.Tensor:
        return pong(size)

    @provider.share
    def pong(size: int) -> torch.Tensor:
        return ping(size) if size else torch.ones(1)

    @provider.share(concurrency="serialized", cache=False)
    def alone(depth: int) -> torch.Tensor:
        return alone(depth - 1)

    serve(max_workers=1)
    client = connect()
    with pytest.raises(ConfigurationError, match=r"ouroboros\(size=3\) was called while it is being built"):
        client.call("ouroboros", 3)
    with pytest.raises(ConfigurationError, match=r"ping\(size=3\) was called while it is being built"):
        client.call("ping", 3)
    with pytest.raises(ConfigurationError, match="endpoint 'alone' is serialized and was called by itself"):
        client.call("alone", 3)
    assert client.call("pong", 0) == 1


def test_an_interrupted_caller_in_the_server_leaves_no_lease(
    provider: Provider, serve: Callable[..., Server], go: threading.Event, begun: threading.Event
) -> None:
    """A call of the server's own process that is cancelled gives back what it never got."""

    @provider.share(managed=True)
    async def slow() -> torch.Tensor:
        begun.set()
        await anyio.to_thread.run_sync(go.wait)
        return torch.ones(1)

    server = serve()

    async def impatient() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(slow(), 0.05)

    asyncio.run(impatient())
    assert begun.is_set()
    go.set()
    eventually(lambda: server.info()["objects"] == 1)
    eventually(lambda: gc.collect() >= 0 and server.info()["leases"] == 0)


# Waiters that leave.


def test_queued_work_that_nobody_waits_for_never_runs(
    provider: Provider,
    serve: Callable[..., Server],
    connect: Callable[..., Client],
    go: threading.Event,
    begun: threading.Event,
) -> None:
    """It is dropped when its last waiter leaves, cancelled or gone, and not before."""
    ran = []

    @provider.share
    def job(number: int) -> torch.Tensor:
        ran.append(number)
        begun.set()
        go.wait(30)
        return torch.tensor(number)

    server = serve(max_workers=1)
    with Raw(server.socket_path) as stays, Raw(server.socket_path) as leaves:
        stays.say(m.Call("job", [1]), 1)
        begun.wait(10)
        for number in (2, 3, 4):
            leaves.say(m.Call("job", [number]), number)
        stays.say(m.Call("job", [3]), 3)
        eventually(lambda: server.info()["calls"] == 5)
        assert isinstance(leaves.ask(m.Cancel(), 4), m.Error)
        assert server.info()["running"] == 3
        leaves.close()
        eventually(lambda: server.info()["running"] == 2)
        go.set()
        assert isinstance(stays.hear(1), m.Result)
        assert isinstance(stays.hear(3), m.Result)
    assert ran == [1, 3]
    assert connect().call("job", 2) == 2


def test_work_that_has_begun_goes_on(
    provider: Provider,
    serve: Callable[..., Server],
    connect: Callable[..., Client],
    go: threading.Event,
    begun: threading.Event,
) -> None:
    """Its result is cached for those to come."""

    @provider.share
    def job() -> torch.Tensor:
        begun.set()
        go.wait(30)
        return torch.ones(1)

    server = serve()
    with Raw(server.socket_path) as raw:
        raw.say(m.Call("job"))
        begun.wait(10)
    eventually(lambda: server.info()["connections"] == 0)
    go.set()
    eventually(lambda: server.info()["objects"] == 1)
    connect().call("job")
    assert (server.info()["builds"], server.info()["cache_hits"]) == (1, 1)


# What is kept.


def test_invalidation_during_a_build(
    provider: Provider,
    serve: Callable[..., Server],
    connect: Callable[..., Client],
    go: threading.Event,
    begun: threading.Event,
) -> None:
    """Who waits gets the old result, the cache does not, and the next call builds anew, also before the old one ends."""
    versions = iter([1, 2])

    @provider.share
    def weights() -> torch.Tensor:
        version = next(versions)
        if version == 1:
            begun.set()
            go.wait(30)
        return torch.tensor(version)

    server, client = serve(), connect()
    with ThreadPoolExecutor(1) as pool:
        old = pool.submit(client.call, "weights")
        begun.wait(10)
        assert client.invalidate_call_cache("weights") == 0
        assert client.call("weights") == 2
        go.set()
        assert old.result(timeout=10) == 1
    assert client.call("weights") == 2
    assert server.info()["builds"] == 2


def test_invalidating_one_call(provider: Provider, serve: Callable[..., Server], connect: Callable[..., Client]) -> None:
    """It names a call the way a call does; the others stay."""

    @provider.share
    def zeros(size: int, *, fill: float = 0.0) -> torch.Tensor:
        return torch.full((size,), fill)

    server, client = serve(), connect()
    for size in (1, 2, 3):
        client.call("zeros", size)
    assert client.invalidate_call_cache("zeros", size=2, fill=0.0) == 1
    assert client.invalidate_call_cache("zeros", 2) == 0
    assert server.info()["objects"] == 2
    assert client.invalidate_endpoint_cache("zeros") == 2
    assert server.info()["objects"] == 0


def test_idle_ttl(provider: Provider, serve: Callable[..., Server], connect: Callable[..., Client]) -> None:
    """A result goes when nobody held or asked for it for that long, and not while somebody holds it."""

    @provider.share(managed=True, idle_ttl=0.05)
    def brief() -> torch.Tensor:
        return torch.ones(1)

    @provider.share
    def lasting() -> torch.Tensor:
        return torch.ones(1)

    server, client = serve(), connect()
    client.call("lasting")
    handle, marker = client.call("brief"), client.call("brief")
    eventually(lambda: client.call("lasting") is not None and server.info()["uptime"] > 0.2)
    assert [stored["cached"] for stored in client.list_objects()] == [True, True]
    marker.release()
    handle.release()
    assert eventually(lambda: server.info()["objects"] == 1, seconds=5) >= 0
    assert [stored["endpoint"] for stored in client.list_objects()] == ["lasting"]


def test_max_bytes(provider: Provider, serve: Callable[..., Server], connect: Callable[..., Client]) -> None:
    """Beyond the budget the least recently used results go, but none that somebody holds."""

    @provider.share
    def page(number: int) -> torch.Tensor:
        return torch.zeros(4096, dtype=torch.uint8)

    @provider.share(managed=True)
    def pinned(pages: int) -> torch.Tensor:
        return torch.zeros(4096 * pages, dtype=torch.uint8)

    def kept() -> list[str]:
        return sorted(stored["cache_key"] for stored in client.list_objects())

    server, client = serve(max_bytes=3 * 4096), connect()
    for number in (1, 2, 3):
        client.call("page", number)
    client.call("page", 1)
    client.call("page", 4)
    assert kept() == ["page(number=1)", "page(number=3)", "page(number=4)"]
    with client.call("pinned", 4):
        assert kept() == ["pinned(pages=4)"]
        assert server.info()["nbytes"] == 4 * 4096
    assert kept() == []


def test_a_result_larger_than_the_budget(
    provider: Provider, serve: Callable[..., Server], connect: Callable[..., Client]
) -> None:
    """Whoever asked for it gets it; it is not kept."""

    @provider.share
    def large() -> torch.Tensor:
        return torch.ones(4096)

    server, client = serve(max_bytes=4096), connect()
    assert client.call("large").sum() == 4096
    assert server.info()["objects"] == 0
    assert client.call("large").sum() == 4096
    assert server.info()["builds"] == 2


def test_without_a_cache_each_caller_has_its_own_memory(
    provider: Provider, serve: Callable[..., Server], connect: Callable[..., Client]
) -> None:
    """A write of one is not seen by another."""

    @provider.share(cache=False)
    def zeros() -> torch.Tensor:
        return torch.zeros(4)

    server, client = serve(), connect()
    first, second = client.call("zeros"), client.call("zeros")
    first.fill_(1)
    assert second.sum() == 0
    assert server.info()["objects"] == 0


def test_with_a_cache_all_callers_have_one_memory(
    provider: Provider, serve: Callable[..., Server], connect: Callable[..., Client]
) -> None:
    """A write of one is seen by all, the server's own callers among them."""

    @provider.share
    def zeros() -> torch.Tensor:
        return torch.zeros(4)

    serve()
    first, second, here = connect().call("zeros"), connect().call("zeros"), zeros()
    first.fill_(1)
    assert second.sum() == here.sum() == 4


# Results.


def test_the_same_tensor_twice(provider: Provider, serve: Callable[..., Server], connect: Callable[..., Client]) -> None:
    """One tensor in two places of a result is one tensor on the other side too; a view is over the same memory."""

    @provider.share(cache=False)
    def parts() -> dict[str, torch.Tensor]:
        whole = torch.arange(6.0).reshape(2, 3)
        return {"whole": whole, "again": whole, "turned": whole.T, "row": whole[1]}

    serve()
    parts_here = connect().call("parts")
    assert parts_here["whole"] is parts_here["again"]
    parts_here["row"].fill_(9)
    assert parts_here["whole"].tolist() == [[0, 1, 2], [9, 9, 9]]
    assert parts_here["turned"].tolist() == [[0, 9], [1, 9], [2, 9]]
    assert parts_here["turned"].stride() == (1, 3)


def test_none_is_a_result(provider: Provider, serve: Callable[..., Server], connect: Callable[..., Client]) -> None:
    """An endpoint may do something instead of making something; managed and cached too."""
    ran = []
    provider.share("act", cache=False)(lambda: ran.append(1))
    provider.share("once", managed=True)(lambda: ran.append(2))
    serve()
    client = connect()
    assert client.call("act") is None
    assert client.call("act") is None
    with client.call("once") as handle, client.call("once") as again:
        assert handle.value is None
        assert again.object_id == handle.object_id
    assert ran == [1, 1, 2]


def test_an_endpoint_that_returns_its_argument(
    provider: Provider, serve: Callable[..., Server], connect: Callable[..., Client]
) -> None:
    """The caller gets the memory it sent back, not a copy of it."""

    @provider.share(cache=False)
    def echo(x: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        return x

    server, client = serve(), connect()
    mine = torch.zeros(4)
    assert client.call("echo", mine).tolist() == [1, 1, 1, 1]
    assert mine.tolist() == [0, 0, 0, 0]
    assert server.info()["objects"] == 0


@pytest.mark.parametrize("value", [7, "text", [1, 2], {"a": None}, torch.nn.Linear], ids=repr)
def test_a_result_that_is_not_shared(
    provider: Provider, serve: Callable[..., Server], connect: Callable[..., Client], value: object
) -> None:
    """A plain Python value is refused, naming the endpoint."""
    provider.share("plain", cache=False)(lambda: value)
    serve()
    with pytest.raises(CapabilityError, match="endpoint 'plain'"):
        connect().call("plain")


# Endpoints and arguments.


def test_an_unknown_endpoint(provider: Provider, serve: Callable[..., Server], connect: Callable[..., Client]) -> None:
    """The error suggests the one that was meant, or tells what there is."""
    provider.share("load_model")(lambda: None)
    provider.share("load_tokens")(lambda: None)
    serve()
    client = connect()
    with pytest.raises(EndpointNotFound, match="no endpoint 'load_modl': did you mean 'load_model'"):
        client.call("load_modl")
    with pytest.raises(LookupError, match="no endpoint 'x': there is load_model, load_tokens"):
        client.call("x")
    with pytest.raises(EndpointNotFound):
        client.invalidate_endpoint_cache("x")


def test_arguments_that_do_not_fit(provider: Provider, serve: Callable[..., Server], connect: Callable[..., Client]) -> None:
    """A TypeError that names the endpoint, as of a plain function; nothing is run."""

    @provider.share
    def load(name: str, *, size: int = 1) -> torch.Tensor:
        return torch.ones(size)

    server, client = serve(), connect()
    for args, kwargs, text in [
        ((), {}, "missing a required argument: 'name'"),
        (("a", 2), {}, "too many positional arguments"),
        (("a",), {"colour": 1}, "unexpected keyword argument 'colour'"),
    ]:
        with pytest.raises(TypeError, match=rf"load\(\): .*{text}"):
            client.call("load", *args, **kwargs)
    assert server.info()["builds"] == 0


def test_arguments_of_every_plain_kind(
    provider: Provider, serve: Callable[..., Server], connect: Callable[..., Client]
) -> None:
    """They arrive as what they were."""
    seen = []
    provider.share("see", cache=False)(lambda *args, **kwargs: seen.append((args, kwargs)))
    serve()
    args = (None, True, 1, -(1 << 70), 0.5, 1j, "é", b"\0\xff", (1, (2, [3])), [], {"a": ()}, torch.bfloat16)
    connect().call("see", *args, flag={"b": [1.5]})
    assert seen == [(args, {"flag": {"b": [1.5]}})]
    assert [type(value) for value in seen[0][0]] == [type(value) for value in args]


def test_tensor_arguments(provider: Provider, serve: Callable[..., Server], connect: Callable[..., Client]) -> None:
    """The server sees their values, shapes and strides; what it writes to them the caller does not see."""

    @provider.share(cache=False)
    def look(x: torch.Tensor, *, more: dict[str, list[torch.Tensor]]) -> dict[str, torch.Tensor]:
        (y,) = more["y"]
        result = {"sum": x.sum() + y.sum(), "strides": torch.tensor(x.stride())}
        x.zero_()
        y.zero_()
        return result

    serve()
    x, y = torch.arange(6.0).reshape(2, 3).T, torch.nn.Parameter(torch.ones(3))
    seen = connect().call("look", x, more={"y": [y.detach()]})
    assert seen["sum"] == 18
    assert tuple(seen["strides"].tolist()) == x.stride() == (1, 3)
    assert x.sum() == 15
    assert y.sum() == 3


def test_a_module_as_an_argument(provider: Provider, serve: Callable[..., Server], connect: Callable[..., Client]) -> None:
    """It is rebuilt in the server over the memory that came with it."""

    @provider.share(cache=False)
    def weigh(module: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return module(x)

    serve()
    module, x = torch.nn.Linear(4, 2), torch.ones(1, 4)
    assert torch.equal(connect().call("weigh", module, x), module(x).detach())


def test_an_argument_that_is_too_large_for_a_message(
    provider: Provider, serve: Callable[..., Server], connect: Callable[..., Client]
) -> None:
    """The client says so before it sends anything, and says what to do."""
    provider.share("see", cache=False)(lambda data: None)
    server, client = serve(), connect()
    client.ping()
    with pytest.raises(SharedRPCError, match="large data travels as tensors"):
        client.call("see", bytes(65 << 20))
    client.ping()
    assert server.info()["calls"] == 0


def test_a_fingerprint_is_the_same_in_every_process() -> None:
    """Sets are hashed in an order of their own in each: two workers must agree."""
    code = "from tests.unit.test_endpoints import compiled, BODY; print('has', compiled(BODY).fingerprint)"
    one, other = (python(code, environ={"PYTHONHASHSEED": seed}, fresh=True) for seed in ("1", "2"))
    assert one.expect("has") == other.expect("has")
    assert one.close() == other.close() == (0, "")
