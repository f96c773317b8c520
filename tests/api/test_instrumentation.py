"""Hooks and logs: the events that a server reports, and the isolation of hooks from the server and from each other."""

from __future__ import annotations

import io
import json
import logging
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch

from shared_rpc import Client, Provider, errors
from shared_rpc.context import request_id
from shared_rpc.observability import events as i
from tests.kit.brokers import BrokerApp, worker_pids
from tests.kit.logs import json_stream, lines
from tests.kit.processes import Child, eventually, python
from tests.kit.world import World

E = TypeVar("E", bound=i.Event)


class Listener:
    """A hook that records its events."""

    def __init__(self) -> None:
        self.events: list[i.Event] = []

    def __call__(self, event: i.Event) -> None:
        """Record an event."""
        self.events.append(event)

    def of(self, kind: type[E]) -> list[E]:
        """Return the events of one kind, in the order of their arrival."""
        return [event for event in tuple(self.events) if isinstance(event, kind)]

    def next(self, kind: type[E], count: int = 1) -> list[E]:
        """Wait for this many events of one kind, and return them."""
        eventually(lambda: len(self.of(kind)) >= count, what=f"{count} {kind.__name__}, but {self.events}")
        return self.of(kind)


@pytest.fixture(autouse=True)
def no_hook_is_left() -> Iterator[None]:
    """Remove the test's hooks at the end: hooks are global to the process."""
    yield
    for hook in i.get_hooks():
        i.remove_hook(hook)


@pytest.fixture
def listener() -> Listener:
    """A hook that is registered."""
    listener = Listener()
    i.add_hook(listener)
    return listener


@pytest.fixture
def world(world: World, go: threading.Event, tmp_path: Path) -> World:
    """A server with a few endpoints, which accepts two tasks."""

    world.share("model", managed=True)(lambda size: torch.zeros((size,)))

    @world.share(cache=False)
    def fails(value: int) -> torch.Tensor:
        raise ValueError(f"not {value}")

    world.share_held(go, concurrency="serialized", cache=False)
    world.serve(max_tasks=2, spill_dir=tmp_path)
    return world


def test_calls_emit_start_and_finish_events(client: Client, listener: Listener) -> None:
    """The first call builds and the second one is a cache hit; each has its own request id."""
    first, second = client.call("model", 3), client.call("model", 3)
    started, finished = listener.of(i.CallStarted), listener.of(i.CallFinished)
    assert [event.outcome for event in finished] == ["built", "hit"]
    assert [event.request_id for event in started] == [event.request_id for event in finished]
    assert len({event.request_id for event in started}) == 2
    assert all(event.endpoint == "model" and event.seconds > 0 and event.error == "" for event in finished)
    (built,) = listener.of(i.BuildFinished)
    assert (built.endpoint, built.request_id, built.cached) == ("model", finished[0].request_id, True)
    assert 0 < built.seconds <= finished[0].seconds
    assert [event.request_id for event in listener.of(i.BuildStarted)] == [built.request_id]
    assert first.server_id == second.server_id == finished[0].server_id


def test_abandoned_calls_finish_once(world: World, client: Client, listener: Listener, go: threading.Event) -> None:
    """With outcome ``left``, although the run continues."""
    with pytest.raises(errors.DeadlineExceeded):
        world.client(timeout=0.05).call("held")
    assert [event.outcome for event in listener.next(i.CallFinished)] == ["left"]
    go.set()
    listener.next(i.BuildFinished)
    assert len(listener.of(i.CallFinished)) == 1


def test_errors_carry_the_id_of_their_request(client: Client, listener: Listener) -> None:
    """It is also in the server's event: for an endpoint's own exception, and for one of the library."""
    with pytest.raises(ValueError, match="not 4") as raised:
        client.call("fails", 4)
    with pytest.raises(errors.EndpointNotFound) as missing:
        client.call("nowhere")
    own: Any = raised.value
    failed = listener.of(i.RequestFailed)
    assert [event.request_id for event in failed] == [own.request_id, missing.value.request_id]
    assert [event.code for event in failed] == ["remote", "endpoint-not-found"]
    assert failed[0].text == "not 4"
    assert own.__notes__ == [f"request {own.request_id} of the server's log"]
    (finished,) = listener.of(i.CallFinished)  # there is no endpoint that the other one would be a call of
    assert (finished.request_id, finished.outcome, finished.error) == (own.request_id, "failed", "remote")


def test_objects_and_leases_emit_events(client: Client, listener: Listener) -> None:
    """Published, leased, released and freed."""
    handle = client.call("model", 5)
    (published,), (given,) = listener.of(i.ObjectPublished), listener.of(i.LeaseGiven)
    assert (published.object_id, published.nbytes, published.device) == (handle.object_id, 20, "cpu")
    assert given.object_id == handle.object_id
    handle.release()
    client.invalidate_endpoint_cache("model")
    (ended,), (freed,) = listener.of(i.LeaseEnded), listener.of(i.ObjectFreed)
    assert (ended.object_id, ended.session, ended.reclaimed) == (handle.object_id, given.session, False)
    assert (freed.object_id, freed.endpoint) == (handle.object_id, "model")


def test_killed_clients_are_reported(world: World, listener: Listener) -> None:
    """Its leases as reclaimed, and its session as not closed by the client."""
    child = world.peer("handle = client.call('model', 7)")
    child.kill()
    (closed,) = listener.next(i.SessionClosed)
    assert (closed.pid, closed.clean, closed.leases) == (child.pid, False, 1)
    assert [event.reclaimed for event in listener.of(i.LeaseEnded)] == [True]
    assert [event.pid for event in listener.of(i.SessionOpened)] == [child.pid]


def test_tasks_emit_every_status(client: Client, listener: Listener) -> None:
    """With the id of the submitting request; the call ends with the task."""
    client.wait_for_task(client.submit("model", 8))
    changes = listener.of(i.TaskChanged)
    assert [event.status for event in changes] == ["pending", "running", "completed"]
    (finished,) = listener.of(i.CallFinished)
    assert {event.request_id for event in changes} >= {finished.request_id}
    assert finished.outcome == "built"


def test_cancelled_tasks_finish_their_calls(client: Client, listener: Listener) -> None:
    """Even before the task begins."""
    client.submit("held")
    assert client.cancel_task(client.submit("held"))
    (finished,) = listener.next(i.CallFinished)
    assert (finished.outcome, finished.error) == ("failed", "task-cancelled")


def test_calls_of_the_servers_own_process_emit_events(base_path: str, listener: Listener) -> None:
    """Also in the local role, without a socket."""
    provider = Provider(base_path, execution_mode="local", device="cpu")
    shared = provider.share("f")(lambda: torch.zeros(1))
    shared(), shared()
    provider.close()
    assert [event.outcome for event in listener.of(i.CallFinished)] == ["built", "hit"]


HOOK = """
import sys
from shared_rpc.observability import events as i

def tell(event):
    assert not {"prometheus_client", "wsgiref"} & {*sys.modules}
    if isinstance(event, (i.WorkerStarted, i.WorkerEnded, i.CallFinished)):
        print("event", event, flush=True)
"""


def test_brokers_take_hooks_from_their_command_line(broker_app: BrokerApp, tmp_path: Path) -> None:
    """The hook sees calls, and starts and ends of workers, without metrics."""
    (tmp_path / "my_hooks.py").write_text(HOOK)
    child = broker_app.begin(hooks=("my_hooks:tell",), cwd=tmp_path)
    started = child.expect("event")
    child.expect("serving")
    client = broker_app.connect()
    (worker,) = worker_pids(client)
    assert started.startswith("event WorkerStarted(") and f"pid={worker}" in started
    with pytest.raises(errors.WorkerCrashed):
        client.call("end", "kill")
    by_name = {name: line for line in (child.expect("event") for _ in range(3)) for name in [line.split()[1].partition("(")[0]]}
    ended, failed = by_name["WorkerEnded"], by_name["CallFinished"]
    assert f"pid={worker}" in ended and "crashed=True, signal='SIGKILL'" in ended
    assert "CallFinished(" in failed and "outcome='failed'" in failed and "error='worker-crashed'" in failed


def test_invalid_hooks_are_refused_at_the_start(broker_app: BrokerApp) -> None:
    """In one line that names the hook; nothing is served."""
    code, text = broker_app.begin(hooks=("os:environ",)).close()
    assert code == 1
    assert text.startswith("shared-rpc: --hook os:environ: ") and text.count("\n") == 1


#: A listener that writes a line for each event that a build makes.
NOTES = """
from shared_rpc.observability import events as i

def note(event):
    if isinstance(event, (i.BuildStarted, i.BuildFinished)):
        with open(PATH, "a") as file:
            print(type(event).__name__, event.endpoint, event.request_id, getattr(event, "error", "") or "-", file=file)
"""


def test_hooks_of_the_app_see_builds_in_a_worker(broker_app: BrokerApp, tmp_path: Path) -> None:
    """One start and one finish each, with the same request, endpoint and error as the broker's hooks see."""
    of_worker, of_broker = tmp_path / "worker.txt", tmp_path / "broker.txt"
    broker_app.write(NOTES.replace("PATH", repr(str(of_worker))), "\ni.add_hook(note)\n")
    (tmp_path / "my_hooks.py").write_text(NOTES.replace("PATH", repr(str(of_broker))))
    client = broker_app.serve(options={"hooks": ("my_hooks:note",)})
    client.call("model"), client.call("model")
    with pytest.raises(RuntimeError, match="negative dimension"):
        client.call("model", -1)
    eventually(lambda: of_worker.exists() and len(of_worker.read_text().splitlines()) == 4, what="4 events in the worker")
    lines = [line.split() for line in of_worker.read_text().splitlines()]
    started, finished = ["BuildStarted", "model", "-"], ["BuildFinished", "model", "-"]
    assert [[kind, endpoint, error] for kind, endpoint, _, error in lines] == [
        started,
        finished,
        started,
        [*finished[:2], "remote"],
    ]
    assert of_broker.read_text() == of_worker.read_text()


def test_tier_changes_emit_events(world: World, listener: Listener) -> None:
    """With both tiers, the freed and the copied bytes, and the reason; the second eviction reuses the copy."""
    world.share("sealed", managed=True, access="read")(lambda size: torch.zeros((size,)))
    client = world.client()
    handle = client.call("sealed", 1 << 18)
    handle.release()
    client.evict("sealed")
    client.restore("sealed")
    client.evict("sealed")
    client.call("sealed", 1 << 18)
    first, second = listener.of(i.ObjectEvicted)
    asked, used = listener.of(i.ObjectRestored)
    assert (first.object_id, first.endpoint, first.device) == (handle.object_id, "sealed", "cpu")
    assert (first.from_tier, first.to_tier, first.reason) == ("device", "file", "request")
    assert (first.nbytes, first.copied, second.copied) == (1 << 20, 1 << 20, 0)
    assert (asked.from_tier, asked.to_tier, asked.reason, asked.copied) == ("file", "device", "request", 1 << 20)
    assert (used.object_id, used.reason) == (handle.object_id, "use")
    assert all(event.seconds > 0 for event in (first, second, asked, used))


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    """The log as JSON."""
    with json_stream() as text:
        yield text


@pytest.fixture
def logging_client(world: World) -> Client:
    """A client of a server whose endpoints log."""

    @world.share
    def model(size: int) -> torch.Tensor:
        logging.getLogger("app").info("building %d", size, extra={"layers": 2})
        return torch.zeros(size)

    @world.share(cache=False)
    async def soon(size: int) -> torch.Tensor:
        logging.getLogger("app").info("soon, for %s", request_id())
        return torch.zeros(size)

    return world.client()


def test_an_event_is_one_line_with_its_fields(logging_client: Client, stream: io.StringIO) -> None:
    """From the call's start to its end, all with one id."""
    logging_client.call("model", 3)
    (started,), (built,) = lines(stream, event="CallStarted"), lines(stream, event="BuildFinished")
    (finished,) = lines(stream, event="CallFinished")
    assert started["request_id"] == built["request_id"] == finished["request_id"] != "-"
    assert (finished["message"], finished["endpoint"], finished["outcome"]) == ("call finished", "model", "built")
    assert (finished["logger"], finished["level"]) == ("shared_rpc.events", "DEBUG")
    assert isinstance(finished["seconds"], float)
    assert built["level"] == "INFO"  # the build time of cached objects is useful


@pytest.mark.parametrize("endpoint", ["model", "soon"])
def test_endpoint_logs_have_the_id_of_their_request(logging_client: Client, stream: io.StringIO, endpoint: str) -> None:
    """In a thread, and on the loop; with their own extra fields."""
    logging_client.call(endpoint, 4)
    (said,), (finished,) = lines(stream, logger="app"), lines(stream, event="CallFinished")
    assert said["request_id"] == finished["request_id"]
    if endpoint == "model":
        assert (said["message"], said["layers"]) == ("building 4", 2)
    else:
        assert said["message"] == f"soon, for {finished['request_id']}"
    logging.getLogger("app").info("outside")
    assert lines(stream, message="outside")[0]["request_id"] == "-"


def test_importing_configures_no_logging() -> None:
    """Neither the root logger nor the library's own has a handler or a level, in any role."""
    child = python("""
        import logging, shared_rpc.server, shared_rpc.client, shared_rpc.broker.broker, shared_rpc.observability.logs
        from shared_rpc import Provider
        from shared_rpc.observability.events import get_hooks
        Provider(execution_mode="local", device="cpu").share("f")(lambda: None)
        loggers = [logging.getLogger(), logging.getLogger("shared_rpc"), logging.getLogger("shared_rpc.events")]
        print("found", [(logger.handlers, logger.level) for logger in loggers], get_hooks())
    """)
    assert child.expect("found") == "found [([], 30), ([], 0), ([], 0)] ()"
    child.close()


LOGS = """
    import logging

    @provider.share(cache=False)
    def says(word):
        logging.getLogger("app").info("said %s", word)
        print("plain", word, file=sys.stderr, flush=True)
        raise ValueError(word)
"""


@pytest.fixture
def logged(broker_app: BrokerApp) -> Callable[..., list[str]]:
    """``logged(**options)`` returns the lines that a broker writes during a failing call, up to its end."""

    def run(**options: Any) -> list[str]:
        broker_app.write(LOGS)
        child: Child = broker_app.start(**options)
        with pytest.raises(ValueError, match="word") as raised:
            broker_app.connect().call("says", "word")
        own: Any = raised.value
        run.request_id = own.request_id
        _, text = child.close(signal.SIGTERM)
        return text.splitlines()

    return run


def test_brokers_log_json(logged: Callable[..., list[str]]) -> None:
    """Their own events, and log records of endpoints in workers; printed output is unchanged."""
    written = logged(log_format="json")
    assert written.count("plain word") == 1
    found = [json.loads(line) for line in written if line != "plain word"]
    mine = [line for line in found if line["request_id"] == logged.request_id]
    # Neither of two processes determines which of them writes first.
    assert sorted(line["message"] for line in mine) == ["build finished", "request failed", "said word"]
    assert len({line["process"] for line in mine}) == 2
    assert {line["event"] for line in found if "event" in line} >= {"WorkerStarted", "SessionOpened", "RequestFailed"}


def test_crashed_workers_are_logged_as_errors(broker_app: BrokerApp) -> None:
    """It is the only event at level ``error``."""
    child = broker_app.start(log_format="json", log_level="error")
    with pytest.raises(errors.WorkerCrashed):
        broker_app.connect().call("end", "kill")
    _, text = child.close(signal.SIGTERM)
    found = [json.loads(line) for line in text.splitlines() if line != "its last words"]
    assert {line["level"] for line in found} == {"ERROR"}, found
    assert [(line["event"], line["signal"]) for line in found if "event" in line] == [("WorkerEnded", "SIGKILL")]


def test_brokers_log_only_worker_output_by_default(logged: Callable[..., list[str]]) -> None:
    """Its standard error has only the output of workers."""
    assert logged() == ["plain word"]
