"""The commands for tasks: lists, waits, cancellations and calls, as tables, as JSON and on a terminal."""

from __future__ import annotations

import math
import re
import shlex
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from typing import Any

import anyio
import pytest
import torch

from shared_rpc import Client, Provider, Server, progress
from shared_rpc.cli.rendering import percent, status_of, steps, task_object
from shared_rpc.cli.tasks import Lines, _error_or_key
from shared_rpc.protocol.tasks import Progress, TaskInfo, TaskStatus
from tests.kit.commands import MODULE, cli
from tests.kit.processes import eventually
from tests.kit.terminals import Tty
from tests.kit.world import World

KEY = "load(size=16, name='base')"


class Refused(Exception):
    """Raised by an endpoint."""


def share_all(world: World, go: threading.Event) -> None:
    """Share endpoints that return at once, that wait for ``go``, that never return, and that fail."""

    @world.share(managed=True)
    def load(size: int, name: str = "base") -> torch.nn.Module:
        return torch.nn.Linear(size, size, bias=False)

    @world.share(cache=False, concurrency="serialized")
    def gated(fail: bool = False) -> torch.Tensor:
        progress(1, 4, "the first\nof [red]all")
        go.wait()
        progress(2, 4, "the second")
        if fail:
            raise Refused("not\nnow")
        return torch.ones(4)

    @world.share(cache=False)
    async def forever() -> torch.Tensor:
        await anyio.sleep_forever()
        raise AssertionError

    @world.share(cache=False)
    def fails() -> torch.Tensor:
        raise Refused("not\nnow")


@pytest.fixture
def world(world: World, go: threading.Event) -> World:
    """A server without tasks, with all endpoints."""
    share_all(world.provider, go)
    world.serve()
    return world


@pytest.fixture
def another(base_path: str, go: threading.Event) -> Iterator[Client]:
    """A client of a second server in the same directory, whose socket sorts before that of the first."""
    provider = Provider(f"{base_path}-another", device="cpu")
    share_all(provider, go)
    with Server(provider) as server, Client(socket_path=server.socket_path, timeout=30.0) as client:
        yield client


def begun(client: Client, endpoint: str, /, **kwargs: Any) -> str:
    """Return the id of a running task, after its first progress report if it makes any."""
    task = client.submit(endpoint, **kwargs)

    def ready() -> bool:
        info = client.get_task_status(task)
        return info.status is TaskStatus.RUNNING and (endpoint != "gated" or info.progress is not None)

    eventually(ready)
    return task


def ended(client: Client, endpoint: str, /, **kwargs: Any) -> str:
    """Return the id of a task that has ended, with its result still there."""
    task = client.submit(endpoint, **kwargs)
    eventually(lambda: client.get_task_status(task).status.finished)
    return task


def interrupt() -> None:
    """Raise KeyboardInterrupt."""
    raise KeyboardInterrupt


def test_no_tasks(world: World) -> None:
    """An empty table for people, an empty list for machines; no server is no error."""
    assert len(cli("tasks", "--status", "failed").rows) == 1
    assert cli("tasks", "--json").data == []
    world.server.stop()
    assert len(cli("tasks").rows) == 1


def test_tasks_are_listed_in_the_order_of_submission(client: Client) -> None:
    """Each on one line, with its status, progress, duration, and its error or key."""
    done, cached, failed = ended(client, "load", size=16), ended(client, "load", size=16), ended(client, "fails")
    running, pending = begun(client, "gated"), client.submit("gated")
    client.cancel_task(running)
    header, *rows = cli("tasks").rows
    assert header == ["task", "endpoint", "status", "progress", "submitted", "took", "error or key"]
    shown = {row[0]: row[1:] for row in rows}
    assert list(shown) == [done, cached, failed, running, pending]
    assert shown[done][:2] == ["load", "completed"]
    assert re.fullmatch(r"\d+ s ago", shown[done][2]) and re.fullmatch(r"\d+\.\d s", shown[done][3])
    assert (shown[done][4], shown[cached][3:]) == (KEY, ["-", KEY])
    assert (shown[failed][:2], shown[failed][4]) == (["fails", "failed"], f"{__name__}.Refused: not now")
    assert shown[running][1:3] == ["running, asked to stop", "1/4 the first of [red]all"]
    assert (shown[pending][1], shown[pending][3]) == ("pending", "-")
    assert ["tasks", "1 pending, 1 running, 2 completed, 1 failed"] in cli("info").rows
    assert cli("tasks", "--json").data == [task_object(info) for info in client.list_tasks()]


def test_a_task_that_waits_for_capacity() -> None:
    """The reason replaces the key, and is a field for machines."""
    info = TaskInfo("a-1", "load", TaskStatus.RUNNING, 0.0, cache_key=KEY, waits_for="buffer 1")
    assert (status_of(info), _error_or_key(info)) == ("running, waits for capacity", "buffer 1")
    assert task_object(info)["waits_for"] == "buffer 1"


def test_tasks_of_a_status_or_a_server(client: Client, another: Client) -> None:
    """By default those of all servers; ``--status`` and ``--socket`` leave out the others."""
    running = [begun(one, "forever") for one in (client, another, client)]
    failed = ended(another, "fails")

    def listed(*options: str) -> list[str]:
        return [task["task_id"] for task in cli("tasks", "--json", *options).data]

    assert listed() == [*running, failed]
    assert listed("--status", "running") == running
    assert listed("--socket", another.socket_path) == [running[1], failed]


def test_a_wait_prints_steps_and_the_result(client: Client, go: threading.Event) -> None:
    """Each step at once, on a line of its own."""
    waited = cli("tasks", "wait", begun(client, "gated"), when={"1/4": go.set})
    *lines, last = waited.succeeded.splitlines()
    assert lines == ["gated: running, 1/4 the first of [red]all", "gated: running, 2/4 the second"]
    assert re.fullmatch(r"gated: completed in \d+\.\d s, 16 B on cpu, object \w+", last)


@pytest.mark.parametrize("command", ["wait", "call"])
def test_events_and_the_result_as_json(client: Client, go: threading.Event, command: str) -> None:
    """One document on each line: that of a call begins with the task's id. The result of a wait is left to others."""
    words = ["tasks", "wait", begun(client, "gated")] if command == "wait" else ["call", "gated"]
    ran = cli(*words, "--json", when={"the first": go.set})
    *first, one, two, three, result = [document for document in ran.documents if document.get("status") != "pending"]
    task = one["task_id"]
    assert (ran.code, ran.errors) == (0, "")
    assert [document["task_id"] for document in first if list(document) == ["task_id"]] == [task] * (command == "call")
    assert [(event["status"], event["progress"]["done"]) for event in (one, two, three)] == [
        ("running", 1.0),
        ("running", 2.0),
        ("completed", 2.0),
    ]
    assert result == {"object_id": three["object_id"], "nbytes": 16, "device": "cpu"}
    if command == "wait":
        assert client.get_task_result(task).tolist() == [1] * 4
        assert cli("tasks", "wait", task).succeeded.endswith(", dropped since\n")


def test_waiting_for_a_task_that_has_ended(client: Client) -> None:
    """Only the result is printed, even with a timeout of 0; one from the cache took no time."""
    task = ended(client, "load", size=16)
    output = cli("tasks", "wait", task, "--timeout", "0").succeeded
    assert re.fullmatch(r"load: completed in \d+\.\d s, 1\.0 KiB on cpu, object \w+\n", output)
    output = cli("tasks", "wait", client.submit("load", size=16)).succeeded
    assert output.startswith("load: completed from the cache, 1.0 KiB on cpu, object ")


def test_a_failure_is_one_line(client: Client, go: threading.Event) -> None:
    """Exit code 1, whether the task fails before or during the wait; JSON has it in the last event."""
    task = begun(client, "gated", fail=True)
    during = cli("tasks", "wait", task, when={"1/4": go.set})
    before = cli("tasks", "wait", task)
    assert during.failure == before.failure == f"task {task} of 'gated' failed: {__name__}.Refused: not now"
    failed = cli("call", "fails", "--json")
    assert failed.failure.endswith("Refused: not now")
    event = failed.documents[-1]
    assert (event["status"], event["error_message"]) == ("failed", "not\nnow")


def test_a_task_that_is_cancelled_or_asked_to_stop(client: Client, go: threading.Event) -> None:
    """A cancelled one is an error; a request to stop is a step of its own."""
    task = begun(client, "forever")
    ran = cli("tasks", "wait", task, when={"running": lambda: client.cancel_task(task)})
    assert ran.output.startswith("forever: running\n")
    assert ran.failure == f"task {task} of 'forever' was cancelled"
    task = begun(client, "gated")
    ran = cli("tasks", "wait", task, when={"1/4": lambda: client.cancel_task(task), "asked to stop": go.set})
    assert "gated: running, asked to stop, 1/4 the first of [red]all" in ran.succeeded.splitlines()


def test_a_timeout_ends_the_wait_alone(client: Client) -> None:
    """Exit code 1; the task continues, and a later wait finds it. A timeout of 0 checks whether it has ended."""
    task = begun(client, "gated")
    ran = cli("tasks", "wait", task, "--timeout", "0.1")
    assert ran.output == "gated: running, 1/4 the first of [red]all\n"
    assert "took longer than its timeout" in ran.failure
    assert cli("tasks", "wait", task, "--timeout", "0").complaint == f"task {task} of 'gated' is still running"
    ran = cli("call", "forever", "--timeout", "0.1")
    task = ran.output.splitlines()[0]
    assert "took longer than its timeout" in ran.failure
    assert client.get_task_status(task).status is TaskStatus.RUNNING


@pytest.mark.parametrize(("command", "where"), [("call", []), ("wait", ["--socket"])], ids=str)
def test_ctrl_c_ends_the_wait_alone(client: Client, command: str, where: list[str]) -> None:
    """Exit code 130; the command that is printed cancels the task."""
    options = [word for name in where for word in (name, client.socket_path)]
    words = ["tasks", "wait", begun(client, "forever")] if command == "wait" else ["call", "forever"]
    ran = cli(*words, *options, when={"running": interrupt})
    (info,) = client.list_tasks()
    said, _, printed = ran.errors.removesuffix("\n").partition("; cancel it with: ")
    assert (ran.code, said, info.status) == (130, f"shared-rpc: task {info.task_id} continues", TaskStatus.RUNNING)
    assert shlex.split(printed) == ["shared-rpc", "tasks", "cancel", info.task_id, *options]
    assert cli(*shlex.split(printed)[1:]).code == 0
    eventually(lambda: client.get_task_status(info.task_id).status is TaskStatus.CANCELLED)


def test_small_steps_are_not_all_printed(capsys: pytest.CaptureFixture[str]) -> None:
    """A line for each hundredth of the whole, and for each new message."""
    lines = Lines()
    for done, message in [*((done, "reading") for done in (0.0, 1.0, 99.0, 100.0, 101.0)), (101.0, "writing")]:
        lines.update(TaskInfo("a-1", "load", TaskStatus.RUNNING, 0.0, progress=Progress(done, 10_000.0, message)))
    assert capsys.readouterr().out.splitlines() == [
        "load: running, 0/10000 reading",
        "load: running, 100/10000 reading",
        "load: running, 101/10000 writing",
    ]


def test_cancelling(client: Client) -> None:
    """A pending task is cancelled at once, a running one is asked to stop, and one that has ended is reported."""
    running, pending, failed = begun(client, "gated"), client.submit("gated"), ended(client, "fails")
    for task, output in [
        (running, f"task {running} was asked to stop; it ends when its endpoint checks\n"),
        (pending, f"task {pending} was cancelled\n"),
        (failed, f"task {failed} had ended: it is failed\n"),
    ]:
        assert cli("tasks", "cancel", task).succeeded == output
    data = cli("tasks", "cancel", running, "--json").data
    assert data == {"outcome": "asked", "task": task_object(client.get_task_status(running))}


def test_the_server_of_an_id(client: Client, another: Client) -> None:
    """It is found among several; the error for an unknown id names them, and ``--socket`` queries one whatever the id."""
    for one in (client, another):
        assert cli("tasks", "cancel", begun(one, "forever")).code == 0
    complaint = f"none of the servers that answer issued task 'a-1': {another.socket_path}, {client.socket_path}"
    assert cli("tasks", "wait", "a-1").complaint == complaint
    assert cli("tasks", "cancel", "a-1", "--socket", client.socket_path).complaint.startswith("this server has no task 'a-1'")


@pytest.fixture
def terminal() -> Iterator[Callable[..., Tty]]:
    """``terminal(*arguments)`` runs ``shared-rpc`` at a terminal that is wide enough for any line."""
    with ExitStack() as stack:
        yield lambda *arguments: stack.enter_context(closing(Tty(*MODULE, *arguments, columns=300)))


def test_a_bar(client: Client, go: threading.Event, terminal: Callable[..., Tty]) -> None:
    """Drawn and written on one line, which disappears before the result is printed."""
    tty = terminal("tasks", "wait", begun(client, "gated"))
    tty.until("gated: running", "━ 1/4 the first of [red]all")
    go.set()
    assert tty.end() == 0
    assert re.fullmatch(r"gated: completed in \d+\.\d s, 16 B on cpu, object \w+", tty.text.strip())


@pytest.mark.parametrize(
    ("reported", "text", "share"),
    [
        (Progress(3.0, 10.0, "loading"), "3/10 loading", 30.0),
        (Progress(3.0), "3", None),
        (Progress(4.0, 3.0), "4/3", 100.0),
        (Progress(math.nan, 3.0), "nan/3", None),
        (Progress(1.0, None, " a\n\tb\x1b[2J "), "1 a b [2J", None),
        (None, "", None),
    ],
    ids=str,
)
def test_any_progress_is_one_line(reported: Progress | None, text: str, share: float | None) -> None:
    """Whatever the numbers and the text."""
    assert (steps(reported), percent(reported)) == (text, share)


def test_numbers_that_json_lacks_are_null() -> None:
    """A strict parser can read the document."""
    info = TaskInfo("a-1", "load", TaskStatus.RUNNING, 0.0, progress=Progress(math.nan, math.inf))
    assert task_object(info)["progress"] == {"done": None, "total": None, "message": ""}
