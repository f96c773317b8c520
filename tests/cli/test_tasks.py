"""The commands for tasks, as a user's shell runs them: on pipes, on a terminal, and stopped with Ctrl-C."""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch

from shared_rpc import Client, Provider, Server, progress
from shared_rpc.cli.rendering import percent, steps, task_object
from shared_rpc.protocol.tasks import Progress, TaskInfo, TaskStatus
from tests.kit.commands import MODULE, Ran, cli
from tests.kit.forks import Popen, run
from tests.kit.processes import PYTHONPATH, Child, eventually
from tests.kit.terminals import HIDDEN, SHOWN, Tty


class Refused(Exception):
    """What an endpoint raises: to rebuild it is to import this module, and torch with it."""


def lines_of(ran: Ran) -> list[Any]:
    """The JSON documents that a command printed, one on each line."""
    return [json.loads(line) for line in ran.output.splitlines()]


def ended_badly(ran: Ran) -> str:
    """The one line on standard error of a command that failed, whatever it printed before."""
    assert ran.code == 1
    (line,) = ran.errors.splitlines()
    assert line.startswith("shared-rpc: ")
    return line.removeprefix("shared-rpc: ")


def cells(line: str) -> list[str]:
    """The columns of a row."""
    return re.split(r"\s{2,}", line.strip())


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """What the endpoint ``gated`` waits for."""
    gate = threading.Event()
    yield gate
    gate.set()


def share_all(provider: Provider, gate: threading.Event) -> None:
    """Endpoints that end at once, that wait to be told, that never end, and that fail."""

    @provider.share(managed=True)
    def load(size: int, name: str = "base") -> torch.nn.Module:
        return torch.nn.Linear(size, size, bias=False)

    @provider.share(cache=False)
    def ones(size: int) -> torch.Tensor:
        return torch.ones(size)

    @provider.share(cache=False, concurrency="serialized")
    def gated(known: bool = True, fail: bool = False) -> torch.Tensor:
        total = 4 if known else None
        progress(1, total, "the first\nof [red]all")
        gate.wait()
        progress(2, total, "the second")
        if fail:
            raise Refused("not\nnow")
        return torch.ones(4)

    @provider.share(cache=False)
    async def forever() -> torch.Tensor:
        await anyio.sleep_forever()
        raise AssertionError

    @provider.share(cache=False)
    def fails() -> torch.Tensor:
        raise Refused("not\nnow")


@pytest.fixture
def served(provider: Provider, serve: Callable[..., Server], gate: threading.Event) -> Server:
    """A server in this process with all endpoints, and no task yet."""
    share_all(provider, gate)
    return serve()


@pytest.fixture
def client(served: Server, connect: Callable[..., Client]) -> Client:
    """Its client."""
    return connect()


@pytest.fixture
def another(base_path: str, gate: threading.Event) -> Iterator[Client]:
    """A client of a second server in the same directory, which comes first there."""
    provider = Provider(f"{base_path}-another", device="cpu")
    share_all(provider, gate)
    with Server(provider) as server, Client(socket_path=server.socket_path, timeout=30.0) as client:
        yield client


def begun(client: Client, endpoint: str, /, **kwargs: Any) -> str:
    """The id of a task that runs, and has told its first progress if it ever does."""
    task = client.submit(endpoint, **kwargs)

    def ready() -> bool:
        info = client.get_task_status(task)
        return info.status is TaskStatus.RUNNING and (endpoint != "gated" or info.progress is not None)

    eventually(ready)
    return task


def ended(client: Client, endpoint: str, /, **kwargs: Any) -> str:
    """The id of a task that has ended, and whose result nobody has fetched."""
    task = client.submit(endpoint, **kwargs)
    eventually(lambda: client.get_task_status(task).status.finished)
    return task


# tasks


def test_tasks_without_a_server(base_path: str) -> None:
    """As for ``ls``, no server is no error."""
    assert (cli("tasks").output, cli("tasks", "--json").data) == ("there are no tasks\n", [])


def test_no_tasks(served: Server) -> None:
    """A sentence for people, which tells what was looked for, and an empty list for machines."""
    assert cli("tasks").output == "there are no tasks\n"
    assert cli("tasks", "--status", "failed").output == "no task is failed\n"
    assert cli("tasks", "--json").data == []


def test_tasks_tells_what_there_is_to_know(client: Client) -> None:
    """One row for each task in the order they were submitted, each on one line: scripts read it line by line."""
    done, cached, failed = ended(client, "load", size=16), ended(client, "load", size=16), ended(client, "fails")
    running, pending, asked = begun(client, "gated"), client.submit("gated"), begun(client, "forever")
    cancelled = client.submit("gated")
    client.cancel_task(cancelled)
    ran = cli("tasks")
    assert (ran.code, ran.errors) == (0, "")
    header, *rows = ran.output.splitlines()
    assert cells(header) == ["task", "endpoint", "status", "progress", "submitted", "took", "error or key"]
    shown = {row[0]: row[1:] for row in map(cells, rows)}
    assert list(shown) == [done, cached, failed, running, pending, asked, cancelled]
    assert shown[done][:2] == ["load", "completed"]
    assert re.fullmatch(r"\d+ s ago", shown[done][2])
    assert re.fullmatch(r"\d+\.\d s", shown[done][3])
    assert shown[done][4] == "load(size=16, name='base')"
    assert shown[cached][3:] == ["-", "load(size=16, name='base')"]
    assert shown[failed][:2] == ["fails", "failed"]
    assert shown[failed][4] == "tests.cli.test_tasks.Refused: not now"
    assert shown[running][1:3] == ["running", "1/4 the first of [red]all"]
    assert (shown[pending][1], shown[pending][3]) == ("pending", "-")
    assert (shown[asked][1], shown[cancelled][1]) == ("running", "cancelled")


def test_a_task_that_waits_for_capacity_tells_who_has_it(
    provider: Provider, serve: Callable[..., Server], connect: Callable[..., Client], gate: threading.Event
) -> None:
    """On its row, and as a field for machines."""
    share_all(provider, gate)
    serve(quotas={"cpu": 4096}, when_full="evict")
    client = connect()
    with client.call("load", size=16) as handle:
        task = client.submit("load", size=32)
        eventually(lambda: client.get_task_status(task).waits_for is not None)
        _, row = cli("tasks").output.splitlines()
        _, _, status, *_, why = cells(row)
        assert status == "running, waits for capacity"
        assert why.startswith("4096 bytes on cpu wait for capacity: 4096 is the quota")
        assert f"4096 bytes are object {handle.object_id} of load(), which pid {os.getpid()} uses" in why
        [info] = cli("tasks", "--json").data
        assert info["waits_for"] == why
    client.wait_for_task(task)


def test_a_task_that_was_asked_to_stop_is_marked(client: Client) -> None:
    """Asked is not stopped: the endpoint has to look."""
    client.cancel_task(begun(client, "gated"))
    assert cells(cli("tasks").output.splitlines()[1])[2:4] == ["running, asked to stop", "1/4 the first of [red]all"]


def test_tasks_for_machines(client: Client) -> None:
    """The fields of every task, progress by name too."""
    task = begun(client, "gated")
    (data,) = cli("tasks", "--json").data
    info = client.get_task_status(task)
    assert data == task_object(info)
    assert (data["task_id"], data["status"], data["created_at"]) == (task, "running", info.created_at)
    assert data["progress"] == {"done": 1.0, "total": 4.0, "message": "the first\nof [red]all"}


def test_tasks_of_one_status(client: Client) -> None:
    """``--status`` leaves out the others."""
    failed, running = ended(client, "fails"), begun(client, "forever")
    assert [task["task_id"] for task in cli("tasks", "--json", "--status", "failed").data] == [failed]
    assert [task["task_id"] for task in cli("tasks", "--json", "--status", "running").data] == [running]


def test_tasks_of_several_servers(client: Client, another: Client) -> None:
    """All of them in the order they were submitted; with ``--socket`` those of one."""
    tasks = [begun(one, "forever") for one in (client, another, client)]
    assert [task["task_id"] for task in cli("tasks", "--json").data] == tasks
    assert [task["task_id"] for task in cli("tasks", "--json", "--socket", another.socket_path).data] == [tasks[1]]


def test_a_long_error_is_cut(provider: Provider, serve: Callable[..., Server], connect: Callable[..., Client]) -> None:
    """The table shows its beginning, JSON more of it."""

    @provider.share
    def fails() -> torch.Tensor:
        raise ValueError("x" * 500)

    serve()
    ended(connect(), "fails")
    shown = cells(cli("tasks").output.splitlines()[1])[-1]
    assert (len(shown), shown[:14], shown[-2:]) == (200, "ValueError: xx", "x…")
    assert cli("tasks", "--json").data[0]["error_message"] == "x" * 500


# wait


def test_waiting_on_a_pipe(client: Client, gate: threading.Event, start: Callable[..., Child]) -> None:
    """A line for each step, when it is made, and one for the result."""
    child = start("tasks", "wait", begun(client, "gated"))
    assert child.expect("gated") == "gated: running, 1/4 the first of [red]all"
    gate.set()
    assert child.expect("gated") == "gated: running, 2/4 the second"
    assert re.fullmatch(r"gated: completed in \d+\.\d s, 16 B on cpu, object \w+", child.expect("gated"))
    assert child.close() == (0, "")


@pytest.mark.parametrize("options", [[], ["--json"]], ids=["lines", "json"])
def test_a_pipe_does_not_hold_back_what_is_told(client: Client, gate: threading.Event, options: list[str]) -> None:
    """What reads it sees the id and every step at once, and not when there is enough to fill a buffer."""
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    command = [sys.executable, *MODULE, "call", "gated", *options]
    with Popen(command, stdout=subprocess.PIPE, text=True, env={**environ, "PYTHONPATH": PYTHONPATH}) as process:
        assert process.stdout is not None
        try:
            (task,) = re.findall(r"\w{16}-\d+", process.stdout.readline())
            while "the first" not in process.stdout.readline():
                assert client.get_task_status(task).status is TaskStatus.RUNNING
        finally:
            gate.set()
            process.communicate(timeout=50)
    assert process.returncode == 0


def test_waiting_for_machines(client: Client, gate: threading.Event, start: Callable[..., Child]) -> None:
    """Every event in its order as JSON on a line of its own, and the result after them."""
    task = begun(client, "gated")
    child = start("tasks", "wait", "--json", task)
    events = [json.loads(child.expect("{"))]
    gate.set()
    events += [json.loads(child.expect("{")) for _ in range(2)]
    result = json.loads(child.expect("{"))
    assert child.close() == (0, "")
    assert [(event["task_id"], event["status"], event["progress"]["done"]) for event in events] == [
        (task, "running", 1.0),
        (task, "running", 2.0),
        (task, "completed", 2.0),
    ]
    assert events[-1] == task_object(client.get_task_status(task))
    assert result == {"object_id": events[-1]["object_id"], "nbytes": 16, "device": "cpu", "managed": False}


def test_a_result_is_told_as_the_server_tells_it(client: Client, served: Server) -> None:
    """Id, size and device are those of ``objects``; the lease of a managed result goes back."""
    ran = cli("tasks", "wait", "--json", ended(client, "load", size=16))
    (item,) = client.list_objects()
    assert lines_of(ran)[-1] == {key: item[key] for key in ("object_id", "nbytes", "device")} | {"managed": True}
    assert served.info()["leases"] == 1  # the task's, until somebody fetches it
    assert client.list_objects()[0]["cached"]


def test_a_result_s_descriptors_are_closed(client: Client) -> None:
    """Python has nothing to warn of at the end."""
    ran = Ran("-W", "always", *MODULE, "tasks", "wait", ended(client, "load", size=16))
    assert (ran.code, ran.errors) == (0, "")


def test_a_result_without_memory(provider: Provider, serve: Callable[..., Server]) -> None:
    """It is on the server's device all the same."""
    provider.share("nothing")(torch.nn.Identity)
    serve()
    result = lines_of(cli("call", "nothing", "--json"))[-1]
    assert (result["nbytes"], result["device"]) == (0, "cpu")


def test_a_result_with_private_tensors(provider: Provider, serve: Callable[..., Server]) -> None:
    """What each process copies is not told as shared, as in ``objects``."""
    provider.share("normed", managed=True, tensors="parameters")(lambda: torch.nn.BatchNorm1d(4))
    serve()
    result = lines_of(cli("call", "normed", "--json"))[-1]
    assert result["nbytes"] == 2 * 4 * 4
    with Client(provider.base_path, device="cpu") as client:
        assert client.list_objects()[0]["nbytes"] == result["nbytes"]


def test_waiting_for_what_has_ended(client: Client) -> None:
    """There is only the result to tell."""
    task = ended(client, "load", size=16)
    for timeout in ([], ["--timeout", "0"], ["--timeout", "inf"], ["--timeout", "1e300"]):
        ran = cli("tasks", "wait", task, *timeout)
        assert (ran.code, ran.errors) == (0, "")
        assert re.fullmatch(r"load: completed in \d+\.\d s, 1\.0 KiB on cpu, object \w+\n", ran.output)


def test_a_result_from_the_cache(client: Client) -> None:
    """Nothing ran, and nothing took any time."""
    ended(client, "load", size=16)
    ran = cli("tasks", "wait", client.submit("load", size=16))
    assert ran.output.startswith("load: completed from the cache, 1.0 KiB on cpu, object ")


def test_waiting_leaves_the_result(client: Client) -> None:
    """Whoever wants to use it can fetch it; after that a wait tells that it is gone."""
    task = ended(client, "ones", size=1)
    for _ in range(2):
        assert "object" in cli("tasks", "wait", task).output
    assert client.get_task_result(task).tolist() == [1]
    assert cli("tasks", "wait", task).output.endswith(", gone since\n")


def test_waiting_for_a_failure(client: Client, gate: threading.Event, start: Callable[..., Child]) -> None:
    """Exit code 1, and one line of what was raised, however many it has."""
    task = begun(client, "gated", fail=True)
    child = start("tasks", "wait", task)
    child.expect("1/4")
    gate.set()
    complaint = f"shared-rpc: task {task} of 'gated' failed: tests.cli.test_tasks.Refused: not now\n"
    assert child.close() == (1, complaint)
    assert cli("tasks", "wait", task).errors == complaint


def test_a_failure_for_machines(client: Client) -> None:
    """The last event tells of it, and there is no result."""
    task = ended(client, "fails")
    ran = cli("tasks", "wait", "--json", task)
    assert ended_badly(ran).startswith(f"task {task} of 'fails' failed: ")
    (event,) = lines_of(ran)
    assert (event["status"], event["error_message"]) == ("failed", "not\nnow")


def test_a_failure_that_could_not_be_told_in_time(
    provider: Provider, serve: Callable[..., Server], connect: Callable[..., Client], start: Callable[..., Child]
) -> None:
    """Who does not read may miss events, and not the last one."""
    gate = threading.Event()

    @provider.share
    def talks() -> torch.Tensor:
        gate.wait()
        for number in range(100):
            progress(number, None, "x" * 100_000)
        raise Refused("not now")

    serve()
    client = connect()
    task = begun(client, "talks")
    child = start("tasks", "wait", "--json", task)
    child.expect("running")
    gate.set()
    eventually(lambda: client.get_task_status(task).status.finished)
    output, errors = child.process.communicate(timeout=20)
    assert json.loads(output.splitlines()[-1])["status"] == "failed"
    assert (child.process.returncode, errors) == (
        1,
        f"shared-rpc: task {task} of 'talks' failed: tests.cli.test_tasks.Refused: not now\n",
    )


def test_waiting_for_a_task_that_is_cancelled(client: Client, start: Callable[..., Child]) -> None:
    """Exit code 1, and a line that says so."""
    task = begun(client, "forever")
    child = start("tasks", "wait", task)
    assert child.expect("forever") == "forever: running"
    client.cancel_task(task)
    assert child.close() == (1, f"shared-rpc: task {task} of 'forever' was cancelled\n")


def test_waiting_for_a_task_that_is_to_stop(client: Client, gate: threading.Event, start: Callable[..., Child]) -> None:
    """That somebody asked it to is a step of its own."""
    task = begun(client, "gated")
    child = start("tasks", "wait", task)
    child.expect("1/4")
    client.cancel_task(task)
    assert child.expect("gated") == "gated: running, asked to stop, 1/4 the first of [red]all"
    gate.set()
    child.expect("gated: completed")
    assert child.close() == (0, "")


def test_waiting_not_longer_than_asked(client: Client) -> None:
    """Exit code 1 in time, with the message of the error; the task goes on."""
    task = begun(client, "gated")
    ran = cli("tasks", "wait", task, "--timeout", "0.1")
    assert ran.output == "gated: running, 1/4 the first of [red]all\n"
    assert ended_badly(ran).startswith(f"the wait for task {task} took longer than its timeout. A run that has begun goes on")
    assert client.get_task_status(task).status is TaskStatus.RUNNING


def test_not_waiting_at_all(client: Client) -> None:
    """A timeout of 0 tells whether it has ended."""
    task = begun(client, "gated")
    assert cli("tasks", "wait", task, "--timeout", "0").complaint == f"task {task} of 'gated' is still running"


@pytest.mark.parametrize("where", [[], ["--socket"], ["--base-path"]], ids=["default", "socket", "base path"])
def test_leaving_a_wait(client: Client, base_path: str, start: Callable[..., Child], where: list[str]) -> None:
    """Ctrl-C ends the wait and not the task; the command that it names does end it."""
    task = begun(client, "forever")
    places = {"--socket": client.socket_path, "--base-path": base_path}
    options = [word for name in where for word in (name, places[name])]
    child = start("tasks", "wait", task, *options)
    child.expect("running")
    child.process.send_signal(signal.SIGINT)
    code, errors = child.close()
    told, _, command = errors.removesuffix("\n").partition("; to cancel it: ")
    assert (code, told) == (130, f"shared-rpc: task {task} goes on")
    assert client.get_task_status(task).status is TaskStatus.RUNNING
    words = shlex.split(command)
    assert words == ["shared-rpc", "tasks", "cancel", task, *options]
    assert cli(*words[1:]).code == 0
    eventually(lambda: client.get_task_status(task).status is TaskStatus.CANCELLED)


def test_a_server_that_stops_meanwhile(client: Client, served: Server, start: Callable[..., Child]) -> None:
    """The wait ends with it, and says so."""
    child = start("tasks", "wait", begun(client, "forever"))
    child.expect("running")
    served.stop()
    code, errors = child.close()
    assert (code, len(errors.splitlines())) == (1, 1)
    assert "stopped" in errors


@pytest.mark.parametrize("command", ["wait", "cancel"])
def test_an_id_that_was_never_issued(client: Client, command: str) -> None:
    """Exit code 1, and where ids come from."""
    for task in ("nonsense", f"{client.get_server_info()['server_id']}-7"):
        assert cli("tasks", command, task).complaint.startswith(
            f"this server has no task {task!r}: use an id returned by submit()"
        )


@pytest.mark.parametrize("command", ["wait", "cancel"])
def test_a_task_without_a_server(base_path: str, tmp_path: Path, command: str) -> None:
    """The error says where was looked, and how to start one."""
    assert cli("tasks", command, "a-1").complaint.startswith(f"no server answers in {tmp_path}: start one with ")


# Several servers.


def test_a_task_is_found_by_its_id(client: Client, another: Client) -> None:
    """With several servers none has to be named: the id tells whose it is."""
    for one in (client, another):
        assert lines_of(cli("tasks", "wait", "--json", ended(one, "load", size=16)))[-1]["nbytes"] == 1024
        task = begun(one, "forever")
        cli("tasks", "cancel", task)
        eventually(lambda one=one, task=task: one.get_task_status(task).status.finished)


def test_a_long_wait_holds_one_server_only(client: Client, another: Client, start: Callable[..., Child]) -> None:
    """The others are let go of: they have one client less than the one whose task it is."""
    start("tasks", "wait", begun(client, "forever")).expect("running")
    eventually(lambda: another.get_server_info()["sessions"] == 1)
    assert client.get_server_info()["sessions"] == 2


@pytest.mark.parametrize("command", ["wait", "cancel"])
def test_an_id_of_no_server(client: Client, another: Client, command: str) -> None:
    """The error names the servers that were asked; one that is named is asked whatever the id is."""
    complaint = f"none of the servers that answer issued task 'a-1': {another.socket_path}, {client.socket_path}"
    assert cli("tasks", command, "a-1").complaint == complaint
    assert cli("tasks", command, "a-1", "--socket", client.socket_path).complaint.startswith("this server has no task 'a-1'")


def test_a_call_to_one_of_several(client: Client, another: Client) -> None:
    """Which of them is to be called has to be said."""
    assert cli("call", "load", "size=16").complaint.startswith("several servers answer; choose one with --socket: ")
    task = lines_of(cli("call", "load", "size=16", "--json", "--socket", another.socket_path))[0]["task_id"]
    assert another.get_task_status(task).status is TaskStatus.COMPLETED


# cancel


def test_cancelling_what_has_not_begun(client: Client) -> None:
    """It is cancelled at once."""
    begun(client, "gated")
    task = client.submit("gated")
    assert cli("tasks", "cancel", task).output == f"task {task} was cancelled\n"
    assert client.get_task_status(task).status is TaskStatus.CANCELLED


def test_cancelling_what_runs(client: Client) -> None:
    """It is asked to stop, and may take its time; to ask again changes nothing."""
    task = begun(client, "gated")
    for _ in range(2):
        ran = cli("tasks", "cancel", task)
        assert (ran.code, ran.output) == (0, f"task {task} was asked to stop; it ends when its endpoint checks\n")
    assert client.get_task_status(task).cancel_requested


@pytest.mark.parametrize("endpoint, status", [("load", "completed"), ("fails", "failed")])
def test_cancelling_what_has_ended(client: Client, endpoint: str, status: str) -> None:
    """That is no error, and it says how it had ended."""
    task = ended(client, endpoint, **({"size": 1} if endpoint == "load" else {}))
    ran = cli("tasks", "cancel", task)
    assert (ran.code, ran.output) == (0, f"task {task} had ended: it is {status}\n")


def test_cancelling_for_machines(client: Client) -> None:
    """What became of it in a word, and the task."""
    running, pending, done = begun(client, "gated"), client.submit("gated"), ended(client, "load", size=1)
    for task, outcome in ((running, "asked"), (pending, "cancelled"), (done, "ended")):
        assert cli("tasks", "cancel", task, "--json").data == {
            "outcome": outcome,
            "task": task_object(client.get_task_status(task)),
        }


# call


def test_a_call_on_a_pipe(client: Client) -> None:
    """The task's id comes first, on a line of its own, then what ``wait`` tells."""
    ran = cli("call", "load", "size=16", "name=big")
    assert (ran.code, ran.errors) == (0, "")
    task, *_, last = ran.output.splitlines()
    info = client.get_task_status(task)
    assert (info.status, info.cache_key) == (TaskStatus.COMPLETED, "load(size=16, name='big')")
    assert re.fullmatch(rf"load: completed in \d+\.\d s, 1\.0 KiB on cpu, object {info.object_id}", last)


def test_a_call_for_machines(client: Client) -> None:
    """The id comes first here too, in a document of its own."""
    first, *events, result = lines_of(cli("call", "load", "size=16", "--json"))
    assert list(first) == ["task_id"]
    assert {event["task_id"] for event in events} == {first["task_id"]}
    assert events[-1]["status"] == "completed"
    assert set(result) == {"object_id", "nbytes", "device", "managed"}


def test_a_call_that_fails(served: Server) -> None:
    """Exit code 1, and what was raised."""
    ran = cli("call", "fails")
    task = ran.output.splitlines()[0]
    assert ended_badly(ran) == f"task {task} of 'fails' failed: tests.cli.test_tasks.Refused: not now"


def test_a_call_that_takes_longer(client: Client) -> None:
    """The task goes on; its id was printed, and a later wait finds it."""
    ran = cli("call", "gated", "--timeout", "0.1")
    task = ran.output.splitlines()[0]
    assert ended_badly(ran).startswith(f"wait_for_task({task!r}) took longer than its timeout")
    assert client.get_task_status(task).status is TaskStatus.RUNNING


def test_leaving_a_call(client: Client, start: Callable[..., Child]) -> None:
    """As for a wait, Ctrl-C does not end the task."""
    child = start("call", "forever")
    child.expect("running")
    (info,) = client.list_tasks()
    child.process.send_signal(signal.SIGINT)
    assert child.close() == (
        130,
        f"shared-rpc: task {info.task_id} goes on; to cancel it: shared-rpc tasks cancel {info.task_id}\n",
    )
    assert client.get_task_status(info.task_id).status is TaskStatus.RUNNING


@pytest.mark.parametrize(
    "arguments, complaint",
    [
        (["lod"], "the server has no endpoint 'lod': did you mean 'load'?"),
        (["load", "size=1", "siez=1"], "load(): got an unexpected keyword argument 'siez'"),
        (["load"], "load(): missing a required argument: 'size'"),
    ],
    ids=["endpoint", "argument", "missing"],
)
def test_a_call_that_does_not_fit(client: Client, arguments: list[str], complaint: str) -> None:
    """It is one line, and no task."""
    assert cli("call", *arguments).complaint.startswith(complaint)
    assert client.list_tasks() == []


# On a terminal.


@pytest.fixture
def terminal() -> Iterator[Callable[..., Tty]]:
    """``terminal(*arguments)`` runs ``shared-rpc`` on one that is wide enough for any line."""
    with ExitStack() as stack:

        def begin(*arguments: str) -> Tty:
            tty = Tty(*MODULE, *arguments, columns=300)
            stack.callback(tty.close)
            return tty

        yield begin


def last_line(tty: Tty) -> str:
    """What is left of what was shown."""
    return [line for line in tty.lines if line][-1]


def test_a_bar_on_a_terminal(client: Client, gate: threading.Event, terminal: Callable[..., Tty]) -> None:
    """How much is done of all, drawn and written, on one line that is gone when the result is told."""
    shown = terminal("tasks", "wait", begun(client, "gated"))
    shown.until("gated: running", "━", "1/4 the first of [red]all")
    gate.set()
    assert shown.end() == 0
    assert re.fullmatch(r"gated: completed in \d+\.\d s, 16 B on cpu, object \w+", shown.text.strip())


def test_a_total_that_is_not_known_on_a_terminal(client: Client, gate: threading.Event, terminal: Callable[..., Tty]) -> None:
    """The steps that were done are written all the same."""
    shown = terminal("tasks", "wait", begun(client, "gated", known=False))
    shown.until("gated: running", "1 the first of [red]all")
    gate.set()
    assert shown.end() == 0


def test_a_failure_on_a_terminal(client: Client, terminal: Callable[..., Tty]) -> None:
    """It is the same one line as on a pipe."""
    task = ended(client, "fails")
    shown = terminal("tasks", "wait", task)
    complaint = f"shared-rpc: task {task} of 'fails' failed: tests.cli.test_tasks.Refused: not now"
    assert (shown.end(), shown.text.strip()) == (1, complaint)


def test_leaving_a_wait_on_a_terminal(client: Client, terminal: Callable[..., Tty]) -> None:
    """The cursor, which was hidden meanwhile, is there again."""
    task = begun(client, "forever")
    shown = terminal("tasks", "wait", task)
    shown.until("forever: running")
    shown.kill(signal.SIGINT)
    told = f"shared-rpc: task {task} goes on; to cancel it: shared-rpc tasks cancel {task}"
    assert (shown.end(), last_line(shown)) == (130, told)
    assert shown.written.rindex(SHOWN) > shown.written.rindex(HIDDEN)


def test_machines_may_have_a_terminal_too(client: Client, terminal: Callable[..., Tty]) -> None:
    """``--json`` is JSON there as well."""
    shown = terminal("call", "load", "size=16", "--json")
    assert (shown.end(), json.loads(last_line(shown))["nbytes"]) == (0, 1024)


# What endpoints may say.


@pytest.mark.parametrize(
    "said, text, share",
    [
        (Progress(3.0, 10.0, "loading"), "3/10 loading", 30.0),
        (Progress(0.5, 1.0), "0.50/1", 50.0),
        (Progress(16060522496.0, 16060522496.0), "16060522496/16060522496", 100.0),
        (Progress(3.0), "3", None),
        (Progress(3.0, 0.0), "3/0", None),
        (Progress(4.0, 3.0), "4/3", 100.0),
        (Progress(-1.0, 3.0), "-1/3", 0.0),
        (Progress(math.nan, 3.0), "nan/3", None),
        (Progress(1.0, math.inf), "1/inf", 0.0),
        (Progress(math.inf, math.inf), "inf/inf", None),
        (Progress(1.0, None, " a\n\tb\x1b[2J "), "1 a b [2J", None),
        (None, "", None),
    ],
    ids=str,
)
def test_progress_as_it_is_shown(said: Progress | None, text: str, share: float | None) -> None:
    """Whatever the numbers are, and on one line whatever the text is."""
    assert (steps(said), percent(said)) == (text, share)


def test_progress_that_json_has_no_number_for() -> None:
    """It is null: a reader that knows JSON alone must not stumble over it."""
    info = TaskInfo("a-1", "load", TaskStatus.RUNNING, 0.0, progress=Progress(math.nan, math.inf))
    assert task_object(info)["progress"] == {"done": None, "total": None, "message": ""}


def test_small_steps_are_not_all_told(
    provider: Provider, serve: Callable[..., Server], connect: Callable[..., Client], start: Callable[..., Child]
) -> None:
    """A download that tells every block is not a line for each on a pipe; what the message says always is."""
    gate = threading.Event()

    @provider.share
    def downloads() -> torch.Tensor:
        gate.wait()
        for done in (0, 1, 99, 100, 101):
            progress(done, 10_000, "reading")
        progress(101, 10_000, "writing")
        return torch.ones(1)

    serve()
    task = begun(connect(), "downloads")
    child = start("tasks", "wait", task)
    child.expect("downloads: running")
    gate.set()
    output, _ = child.process.communicate(timeout=50)
    assert output.splitlines()[:-1] == [
        "downloads: running, 0/10000 reading",
        "downloads: running, 100/10000 reading",
        "downloads: running, 101/10000 writing",
    ]


# The rest of the command line.


def test_info_counts_the_tasks(client: Client) -> None:
    """By their status, without those that no task has."""
    assert ["tasks", "none"] in map(cells, cli("info").output.splitlines())
    ended(client, "load", size=16)
    ended(client, "fails")
    begun(client, "forever")
    assert ["tasks", "1 running, 1 completed, 1 failed"] in map(cells, cli("info").output.splitlines())


APP = """
    import anyio
    from shared_rpc import Provider
    from shared_rpc.errors import SharedRPCError

    provider = Provider(device="cpu")

    @provider.share(cache=False)
    async def forever():
        await anyio.sleep_forever()

    @provider.share
    def fails():
        raise SharedRPCError("not now")
"""


def test_a_limit_of_tasks(start: Callable[..., Child], connect: Callable[..., Client], tmp_path: Path) -> None:
    """``serve --max-tasks`` turns away what is too much."""
    (tmp_path / "app.py").write_text(textwrap.dedent(APP))
    start("serve", "app", "--max-tasks", "1").expect("serving")
    connect().submit("forever")
    assert cli("call", "forever").complaint.startswith("1 tasks are pending or running, the limit of this server")


def test_how_long_a_task_is_remembered(start: Callable[..., Child], connect: Callable[..., Client], tmp_path: Path) -> None:
    """``serve --result-ttl`` sets when a task that ended is forgotten."""
    (tmp_path / "app.py").write_text(textwrap.dedent(APP))
    start("serve", "app", "--result-ttl", "0").expect("serving")
    client = connect()
    task = client.submit("fails")
    eventually(lambda: not client.list_tasks())
    assert cli("tasks", "wait", task).complaint.startswith(f"task {task} has expired: a finished task is remembered for 0 s")


@pytest.mark.parametrize(
    "command",
    [
        ["tasks"],
        ["tasks", "wait", "load"],
        ["tasks", "wait", "load", "--json"],
        ["tasks", "wait", "fails"],
        ["tasks", "cancel", "load"],
        ["call", "load", "size=1"],
    ],
    ids=" ".join,
)
def test_talking_loads_no_torch(client: Client, command: list[str]) -> None:
    """Neither the result nor the exception is rebuilt, so that neither torch nor what else they need is imported."""
    tasks = {"load": ended(client, "load", size=1), "fails": ended(client, "fails")}
    if command[1:2] in (["wait"], ["cancel"]):
        command = [*command[:2], tasks[command[2]], *command[3:]]
    ran = Ran("-X", "importtime", *MODULE, *command)
    assert ran.code == (1 if tasks["fails"] in command else 0)
    imported = {line.rpartition("|")[2].strip() for line in ran.errors.splitlines()}
    assert "shared_rpc.client.base" in imported
    assert not imported & {"torch", "cloudpickle", "shared_rpc.codec", "shared_rpc.server.server", "tests.cli.test_tasks"}


@pytest.mark.parametrize(
    "command", [["tasks"], ["tasks", "wait"], ["tasks", "wait", "--json"], ["call", "gated"]], ids=" ".join
)
def test_a_reader_that_goes_away(client: Client, command: list[str]) -> None:
    """``shared-rpc call … | head -1`` leaves no traceback, and the task goes on."""
    task = begun(client, "gated")
    if "wait" in command:
        command = [*command, task]
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as output:
        process = run(
            [sys.executable, *MODULE, *command],
            stdout=output,
            stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": PYTHONPATH},
            timeout=50,
            check=False,
        )
    assert process.stderr == b""
    assert client.get_task_status(task).status is TaskStatus.RUNNING
