"""Signal handlers that raise within the blocking client, as for Ctrl-C, an alarm or a soft time limit.

Process, server and later operations are sound, and the server holds nothing of an interrupted operation once its client is
closed.
"""

from __future__ import annotations

import functools
import itertools
import os
import random
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress

import pytest
import torch

from shared_rpc import Client, Provider
from shared_rpc.errors import DeadlineExceeded
from tests.kit.brokers import BrokerApp
from tests.kit.deep import repetitions
from tests.kit.interrupting import Interrupted, interrupted_at, points_of, raising_handler
from tests.kit.processes import Child, eventually, rights

# Descriptors that are dropped with the frames of an operation are closed by finalisers, which warn.
pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")

#: How many points of an operation are tried, each with one of the exceptions: all of them with all of these in long runs.
POINTS = repetitions(40, 30_000)
#: How many of them one client endures.
ENDURED = 200


class Stopped(Exception):
    """An exception of an app, raised by its handler."""


KINDS = (Interrupted, KeyboardInterrupt, TimeoutError, Stopped, DeadlineExceeded)

ENDPOINTS = """
@provider.share(cache=False, managed=True)
def own(n=4):
    return {"a": torch.ones(n), "b": torch.zeros(2)}

@provider.share(cache=False, managed=True)
def slow_own():
    time.sleep(0.3)
    return torch.ones(4)

@provider.share(cache=False)
def fails():
    raise ValueError("as meant")
"""

ARGUMENT = torch.arange(1000.0)


@pytest.fixture
def no_leaks() -> None:
    """An interruption between two instructions may leave a mapping in this process; the tests look at the server."""


@pytest.fixture
def server(broker_app: BrokerApp) -> Child:
    """A server process with the endpoints above."""
    broker_app.write(ENDPOINTS)
    return broker_app.start_script()


@pytest.fixture
def watcher(server: Child, broker_app: BrokerApp) -> Client:
    """A client that observes the server."""
    client = broker_app.connect()
    client.ping()
    return client


@pytest.fixture
def client(server: Child, broker_app: BrokerApp) -> Client:
    """A client whose operations are interrupted."""
    return broker_app.connect()


def release(client: Client | Provider) -> None:
    """Attach, and release."""
    client.call("own").release()


def task(client: Client) -> None:
    """Wait for a task, with a callback. It fails: a result would be kept until it is fetched."""
    with suppress(ValueError):
        client.execute("fails", callback=lambda info: None)


def buffer(client: Client) -> None:
    """Create a buffer, open it again, and free it."""
    with client.create_buffer(4096) as made, client.get_buffer(made.object_id) as again:
        again.value.fill_(3)
        assert made.value[-1] == 3
        client.free_buffer(made)


def update(client: Client) -> None:
    """Write in place: the next update completes an interrupted one."""
    with client.call("held") as handle, client.update(handle) as value:
        value.fill_(3)


def suspension(client: Client) -> None:
    """Suspend and resume an object, also by a block."""
    with client.call("held") as handle:
        handle.suspend()
        with handle.active() as value:
            value.sum()
        handle.resume()
        assert handle.value.sum() == 28


def record(client: Client) -> None:
    """Export a record, and adopt it as the next generation."""
    with client.call("held") as handle, client.export(handle) as exported, client.allocate(exported.header) as room:
        exported.segments[0].copy_to(room.segments[0])
        client.adopt(room)


def candidate(client: Client) -> None:
    """Prepare a candidate, and promote it."""
    with client.prepare("held", 8) as prepared:
        client.promote(prepared)


OPERATIONS: dict[str, Callable[[Client], object]] = {
    "a tensor there and back": lambda client: client.call("echo", ARGUMENT),
    "attach and release": release,
    "a task": task,
    "a buffer": buffer,
    "an update": update,
    "a suspension": suspension,
    "a record": record,
    "a candidate": candidate,
}


def held(watcher: Client) -> dict[str, int]:
    """Return the resources that the server keeps for clients."""
    info = watcher.get_server_info()
    return {
        "sessions": info["sessions"],
        "leases": info["leases"],
        "objects": info["objects"],
        "chunks of the server's pools": info["pools"]["chunks"],
    }


def check_left(watcher: Client, before: dict[str, int], places: object) -> None:
    """Wait until no more resources are held than before."""
    try:
        eventually(lambda: all(count <= before[name] for name, count in held(watcher).items()), 5.0)
    except AssertionError:
        pytest.fail(f"{held(watcher)} instead of {before}, after interruptions at {places}")


def chosen(points: int) -> list[tuple[int, type[BaseException]]]:
    """Return all points with each exception, or a sample whose seed is printed."""
    pairs = list(itertools.product(range(1, points + 1), KINDS))
    if len(pairs) <= POINTS:
        return pairs
    seed = random.randrange(1 << 30)
    print(f"points chosen with the seed {seed}")
    return random.Random(seed).sample(pairs, POINTS)


def interrupt(operation: Callable[[], object], point: int, kind: type[BaseException]) -> str:
    """Interrupt an operation; return the place. Ctrl-C raises KeyboardInterrupt."""
    with raising_handler(kind):
        place, raised = interrupted_at(point, operation)
    if place and kind is KeyboardInterrupt:
        assert raised == "KeyboardInterrupt: from the handler", f"at {place}"
    return place


@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS)
def test_interrupted_operations_leave_nothing(
    watcher: Client, base_path: str, threads: ThreadPoolExecutor, operation: Callable[[Client], object]
) -> None:
    """At any point where a handler may run: the next operations of all threads succeed, and nothing is left after closing."""
    with Client(base_path, device="cpu", timeout=30.0) as client:
        for _ in range(3):
            operation(client)
        points = points_of(lambda: operation(client))
    before = held(watcher)
    pairs = chosen(points)
    for begin in range(0, len(pairs), ENDURED):
        places = []
        with Client(base_path, device="cpu", timeout=30.0) as client:
            operation(client)
            for point, kind in pairs[begin : begin + ENDURED]:
                places.append(interrupt(lambda: operation(client), point, kind))
                assert threads.submit(client.ping).result(10)
                operation(client)
        check_left(watcher, before, places)


def test_an_interrupted_resumption_beside_an_active_handle(client: Client, watcher: Client) -> None:
    """The object stays active for the other handle: the server may not evict it."""
    with client.call("held") as active, client.call("held") as other:
        other.suspend()
        points = points_of(other.resume)
        for point, kind in chosen(points):
            other.suspend()
            with raising_handler(kind):
                place, _ = interrupted_at(point, other.resume)
            client.ping()  # in the next session, if there is one
            assert watcher.get_object_info(active.object_id)["active"] >= 1, f"interrupted in {place}"
            other.resume()


def test_an_interrupted_suspension_exposes_no_unmapped_memory(client: Client) -> None:
    """The handle is suspended, or its memory is mapped."""
    with client.call("held") as handle:
        address, points = handle.value.data_ptr(), points_of(handle.suspend)
        for point, kind in chosen(points):
            handle.resume()
            with raising_handler(kind):
                place, _ = interrupted_at(point, handle.suspend)
            assert handle.suspended or rights(address).startswith("r"), f"interrupted in {place}"


def test_interrupted_first_operations_leave_nothing(server: Child, watcher: Client, base_path: str) -> None:
    """Also while the client connects, or is closed."""

    def whole() -> None:
        release(clients[-1])
        clients[-1].close()

    def new() -> Client:
        return Client(base_path, device="cpu", timeout=30.0)

    clients = [new()]
    points = points_of(whole)
    before = held(watcher)
    for point, kind in chosen(points):
        clients[-1] = new()
        place = interrupt(whole, point, kind)
        clients[-1].close()
        check_left(watcher, before, place)


def test_handlers_may_close_the_client(server: Child, base_path: str) -> None:
    """At any point: the operation ends, or fails with an error of the library."""
    operation = OPERATIONS["a tensor there and back"]
    with Client(base_path, device="cpu", timeout=30.0) as client:
        for _ in range(3):
            operation(client)
        points = points_of(lambda: operation(client))
    with raising_handler(Interrupted):
        for point in sorted({point for point, _ in chosen(points)}):
            with Client(base_path, device="cpu", timeout=30.0) as client:
                operation(client)
                signal.signal(signal.SIGUSR1, lambda *_, client=client: client.close())
                place, raised = interrupted_at(point, functools.partial(operation, client))
            assert raised.partition(":")[0] in ("", "ConnectionClosed", "ProtocolError"), f"at {place}"


@contextmanager
def alarm(kind: type[BaseException]) -> Iterator[None]:
    """Expect the exception of a handler that raises soon, without another error in its traceback."""
    with raising_handler(kind, signal.SIGALRM), pytest.raises(kind, match="from the handler") as raised:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    assert raised.value.__context__ is None


@pytest.mark.parametrize("kind", [DeadlineExceeded, KeyboardInterrupt, Stopped])
def test_interrupted_waits_keep_the_session(client: Client, watcher: Client, kind: type[BaseException]) -> None:
    """They end at once, and the request is withdrawn. Handles stay valid, also those of uncached objects."""
    with client.call("own") as handle, client.call("held") as other:
        for _ in range(3):
            with alarm(kind):
                next(client.refreshes())
        assert not handle.is_stale() and not other.is_stale()
    assert watcher.get_server_info()["sessions"] == 2


def test_a_result_after_an_interrupted_wait_is_released(client: Client, watcher: Client) -> None:
    """This process keeps no descriptor of it, and the server neither a lease nor the object."""
    client.call("own").release()
    before, descriptors = held(watcher), len(os.listdir("/proc/self/fd"))
    with alarm(KeyboardInterrupt):
        client.call("slow_own")
    client.call("slow_own").release()
    check_left(watcher, before, "a wait")
    eventually(lambda: len(os.listdir("/proc/self/fd")) <= descriptors)


def test_interrupted_waits_do_not_affect_other_threads(client: Client, watcher: Client) -> None:
    """Their waits go on, whichever thread was reading."""
    with ThreadPoolExecutor(3) as pool, client.call("held"):
        others = [client.refreshes() for _ in range(3)]
        for other in others:
            other.__enter__()
        news = [pool.submit(next, other) for other in others]
        for _ in range(5):
            with alarm(KeyboardInterrupt):
                next(client.refreshes())
        generation = client.refresh("held")
        assert [each.result(30) for each in news] == [generation] * 3
    assert watcher.get_server_info()["sessions"] == 2


@pytest.mark.parametrize(
    "operation",
    [
        release,
        lambda provider: provider.execute("held", callback=lambda info: None),
        lambda provider: provider.free_buffer(provider.create_buffer(4096)),
    ],
    ids=["a release", "a task", "a buffer"],
)
def test_interrupted_operations_in_the_servers_process_leave_nothing(operation: Callable[[Provider], object]) -> None:
    """The next one succeeds, and no buffer or run is left."""
    provider = Provider(execution_mode="local", device="cpu")
    provider.share("own", managed=True, cache=False)(lambda: torch.ones(4))
    provider.share("held", managed=True)(lambda: torch.ones(4))

    def left() -> tuple[int, int]:
        return provider.get_server_info()["buffers"], len(provider.list_runs())

    for _ in range(3):
        operation(provider)
    points = points_of(lambda: operation(provider))
    for point, kind in chosen(points):
        place = interrupt(lambda: operation(provider), point, kind)
        operation(provider)
        eventually(lambda: left() == (0, 0), 5.0, f"no buffer or run, after an interruption in {place}")
    provider.close()
