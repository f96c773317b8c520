"""Events of a process: hooks, of which a failing one affects no other, and lines of logs, which no content can imitate."""

from __future__ import annotations

import asyncio
import io
import json
import logging
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import torch

from shared_rpc.observability import events as i
from shared_rpc.observability.logs import JsonFormatter, RequestIdFilter, TextFormatter, log_event
from tests.kit.logs import json_stream, lines

EVENT = i.SessionOpened(session="s", pid=1)


@pytest.fixture
def hooks() -> i.Hooks:
    """Hooks that belong to no process."""
    return i.Hooks()


def test_a_hook_is_called_until_it_is_removed(hooks: i.Hooks) -> None:
    """Once for each event, however often it was added; without hooks no event is created."""
    heard: list[i.Event] = []
    hook = heard.append
    assert not hooks.registered
    hooks.add(hook)
    hooks.add(hook)
    assert (hooks.all(), hooks.registered) == ((hook,), True)
    hooks.emit(EVENT)
    hooks.remove(hook)
    hooks.remove(hook)
    hooks.emit(EVENT)
    assert (heard, hooks.registered) == ([EVENT], False)


@pytest.mark.parametrize("error", [RuntimeError("the collector is down"), SystemExit(1), asyncio.CancelledError()])
def test_failing_hooks_affect_no_other(hooks: i.Hooks, error: BaseException, caplog: pytest.LogCaptureFixture) -> None:
    """The emitter continues, other hooks are called, and the first failure is logged."""
    heard: list[i.Event] = []

    def broken(event: i.Event) -> None:
        raise error

    hooks.add(broken)
    hooks.add(heard.append)
    with caplog.at_level(logging.ERROR, "shared_rpc"):
        hooks.emit(EVENT)
        hooks.emit(EVENT)
    assert heard == [EVENT, EVENT]
    assert ["broken" in record.getMessage() for record in caplog.records] == [True]


def test_factories_make_their_hook_with_the_first_event(hooks: i.Hooks) -> None:
    """Not on registration, and once."""
    made: list[list[i.Event]] = []

    def make() -> i.Hook:
        made.append([])
        return made[-1].append

    hooks.add(i.HookFactory(make))
    assert not made
    hooks.emit(EVENT)
    hooks.emit(EVENT)
    assert made == [[EVENT, EVENT]]


# Lines of logs.


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    """The log as JSON."""
    with json_stream() as text:
        yield text


def record(message: str = "hello", **fields: Any) -> logging.LogRecord:
    """Return a record as a handler receives it."""
    made = logging.makeLogRecord(
        {"name": "app", "levelname": "INFO", "levelno": 20, "msg": message, "created": 0.5, "msecs": 500}
    )
    vars(made).update(fields)
    assert RequestIdFilter().filter(made)
    return made


def test_text_lines_have_fields() -> None:
    """After the message; values with blanks are quoted."""
    line = TextFormatter().format(record(request_id="ab-1-2", endpoint="model", seconds=0.25, text='a "b"\nc', empty=""))
    assert line == (
        '1970-01-01T00:00:00.500Z INFO app [ab-1-2] hello endpoint=model seconds=0.25 text="a \\"b\\"\\nc" empty=""'
    )


def test_texts_of_clients_stay_on_one_line() -> None:
    """In the message and in a field: they could look like another line, or control a terminal."""
    line = TextFormatter().format(record("from\n1970 CRITICAL \x1b[31m", field="\x1b[31m"))
    assert line == '1970-01-01T00:00:00.500Z INFO app [-] from\\n1970 CRITICAL \\x1b[31m field="\\u001b[31m"'


def test_json_lines_have_the_traceback() -> None:
    """On one line, whatever it contains."""
    try:
        raise ValueError("a\nb")
    except ValueError as error:
        made = record("it failed", exc_info=(type(error), error, error.__traceback__))
    text = JsonFormatter().format(made)
    assert "\n" not in text
    line = json.loads(text)
    assert line["time"] == "1970-01-01T00:00:00.500Z"
    assert line["exception"].endswith("ValueError: a\nb")


def test_values_missing_in_json_become_text() -> None:
    """Logging never fails."""
    line = json.loads(JsonFormatter().format(record(shape=torch.Size([2, 3]), device=torch.device("cpu"))))
    assert (line["shape"], line["device"]) == ([2, 3], "cpu")


def test_every_event_has_its_line(stream: io.StringIO) -> None:
    """Even rare ones; and none of their fields hides a field of the record."""
    values: dict[Any, Any] = {int: 1, float: 0.5, bool: True}
    for kind in (kind for kind in vars(i).values() if isinstance(kind, type) and issubclass(kind, i.Event)):
        fields = {field.name: values.get(field.type, "x") for field in msgspec.structs.fields(kind)}
        log_event(kind(**fields))
        (line,) = lines(stream, event=kind.__name__)
        assert fields.items() <= line.items()
