"""Logs: one line for each event, as text or JSON, and the request's id in what endpoints log."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from shared_rpc import Client, Provider, errors
from shared_rpc.context import request_id
from tests.kit.apps import Connect, Serve
from tests.kit.brokers import BrokerApp
from tests.kit.logs import json_stream, lines
from tests.kit.processes import Child, python


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    """The log as JSON."""
    with json_stream() as text:
        yield text


@pytest.fixture
def client(provider: Provider, serve: Serve, connect: Connect) -> Client:
    """A client of a server whose endpoints log."""

    @provider.share
    def model(size: int) -> torch.Tensor:
        logging.getLogger("app").info("building %d", size, extra={"layers": 2})
        return torch.zeros(size)

    @provider.share(cache=False)
    async def soon(size: int) -> torch.Tensor:
        logging.getLogger("app").info("soon, for %s", request_id())
        return torch.zeros(size)

    serve()
    return connect()


def test_an_event_is_one_line_with_its_fields(client: Client, stream: io.StringIO) -> None:
    """From the call's beginning to its end, all with one id."""
    client.call("model", 3)
    (started,), (built,) = lines(stream, event="CallStarted"), lines(stream, event="BuildFinished")
    (finished,) = lines(stream, event="CallFinished")
    assert started["request_id"] == built["request_id"] == finished["request_id"] != "-"
    assert (finished["message"], finished["endpoint"], finished["outcome"]) == ("call finished", "model", "built")
    assert (finished["logger"], finished["level"]) == ("shared_rpc.events", "DEBUG")
    assert isinstance(finished["seconds"], float)
    assert built["level"] == "INFO"  # of what is cached it is worth to know when it was built


@pytest.mark.parametrize("endpoint", ["model", "soon"])
def test_what_an_endpoint_logs_has_the_id_of_its_request(client: Client, stream: io.StringIO, endpoint: str) -> None:
    """In a thread, and on the loop; with the fields that it gives itself."""
    client.call(endpoint, 4)
    (said,), (finished,) = lines(stream, logger="app"), lines(stream, event="CallFinished")
    assert said["request_id"] == finished["request_id"]
    if endpoint == "model":
        assert (said["message"], said["layers"]) == ("building 4", 2)
    else:
        assert said["message"] == f"soon, for {finished['request_id']}"
    logging.getLogger("app").info("outside")
    assert lines(stream, message="outside")[0]["request_id"] == "-"


def test_importing_configures_no_logging() -> None:
    """Neither the root logger nor the library's own has a handler or a level, in whatever role."""
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
    """``logged(*options)``: the lines that a broker writes while a call fails, up to its end."""

    def run(*options: str) -> list[str]:
        broker_app.write(LOGS)
        child: Child = broker_app.start(*options)
        with pytest.raises(ValueError, match="word") as raised:
            broker_app.connect().call("says", "word")
        own: Any = raised.value
        run.request_id = own.request_id
        child.process.terminate()
        _, text = child.close()
        return text.splitlines()

    return run


def test_a_broker_logs_json(logged: Callable[..., list[str]]) -> None:
    """Its own events, and what endpoints log in its workers; what they print stays as it is."""
    written = logged("--log-format", "json")
    assert written.count("plain word") == 1
    found = [json.loads(line) for line in written if line != "plain word"]
    mine = [line for line in found if line["request_id"] == logged.request_id]
    # Which of two processes is first to write is not told by what each of them does.
    assert sorted(line["message"] for line in mine) == ["build finished", "request failed", "said word"]
    assert len({line["process"] for line in mine}) == 2
    assert {line["event"] for line in found if "event" in line} >= {"WorkerStarted", "SessionOpened", "RequestFailed"}


def test_a_broker_logs_text(logged: Callable[..., list[str]]) -> None:
    """What is asked for, and nothing that is less important."""
    written = logged("--log-level", "debug")
    assert any(" DEBUG shared_rpc.events " in line and "call finished" in line for line in written)
    assert any(line.endswith(f" INFO app [{logged.request_id}] said word") for line in written)


def test_a_worker_that_crashes_is_an_error(broker_app: BrokerApp) -> None:
    """Of all events it is the one that is told where only errors are wanted."""
    child = broker_app.start("--log-format", "json", "--log-level", "error")
    with pytest.raises(errors.WorkerCrashed):
        broker_app.connect().call("end", "kill")
    child.process.terminate()
    _, text = child.close()
    found = [json.loads(line) for line in text.splitlines() if line != "its last words"]
    assert {line["level"] for line in found} == {"ERROR"}, found
    assert [(line["event"], line["signal"]) for line in found if "event" in line] == [("WorkerEnded", "SIGKILL")]


def test_a_broker_logs_nothing_new_unasked(logged: Callable[..., list[str]]) -> None:
    """Its standard error is what the workers write."""
    assert logged() == ["plain word"]
