"""Tasks and the processes around them: clients that are killed, a server that stops, and many who wait."""

from __future__ import annotations

import os
import threading
from collections import Counter
from contextlib import ExitStack

import pytest
import torch

from shared_rpc import Client, Provider, Server, progress
from shared_rpc.errors import DeadlineExceeded
from shared_rpc.protocol import messages as m
from shared_rpc.protocol.catalogue import NUMBERS
from shared_rpc.protocol.tasks import TaskInfo, TaskStatus
from tests.kit.apps import Connect, Serve
from tests.kit.processes import Child, eventually, open_fds, python
from tests.kit.raw import Raw

pytestmark = pytest.mark.usefixtures("no_leaks")


#: Those who wait for one task.
CROWD = 500

#: A client process without torch.
CLIENT = """
import signal, sys
from shared_rpc import Client
from shared_rpc.operations.calls import fetch
from shared_rpc.operations.tasks import fetch_task

client = Client(device="cpu", connect_timeout=10)
"""


@pytest.fixture
def ran() -> list[int]:
    """The numbers that endpoints ran with."""
    return []


@pytest.fixture
def shared(provider: Provider, go: threading.Event, begun: threading.Event, ran: list[int]) -> Provider:
    """The endpoints of this module."""

    def held(number: int) -> torch.Tensor:
        ran.append(number)
        begun.set()
        go.wait(30)
        return torch.full((4,), float(number))

    provider.share("held", cache=False)(held)
    provider.share("managed", cache=False, managed=True)(held)
    provider.share("task", cache=False, execution="task", concurrency="serialized")(held)

    @provider.share(cache=False)
    def fails() -> None:
        raise ValueError("a negative number")

    return provider


@pytest.fixture
def server(shared: Provider, serve: Serve) -> Server:
    """Serves them."""
    return serve()


def watchers(server: Server) -> int:
    """How many wait for tasks."""
    return server.engine.ask(lambda core: sum(len(task.watchers) for task in core.tasks.table))


def kept(server: Server) -> tuple[int, int]:
    """How many objects and leases there are."""
    info = server.info()
    return info["objects"], info["leases"]


def statuses(client: Client) -> list[str]:
    """Of all tasks, in the order they were submitted."""
    return [info.status.value for info in client.list_tasks()]


# Clients that are killed.


def test_the_submitter_is_killed(
    server: Server, client: Client, children: list[Child], go: threading.Event, begun: threading.Event
) -> None:
    """Its task goes on and keeps its result, which any process that knows the id can fetch."""
    submitter = python(f"{CLIENT}\nprint('task', client.submit('managed', 7))\nsignal.pause()")
    children.append(submitter)
    task_id = submitter.expect("task").split()[1]
    assert begun.wait(10)
    submitter.kill()
    eventually(lambda: server.info()["sessions"] == 0, seconds=1)
    assert client.get_task_status(task_id).status is TaskStatus.RUNNING
    go.set()
    eventually(lambda: client.get_task_status(task_id).status.finished)
    assert kept(server) == (1, 1)
    fetcher = python(
        f"""
        from shared_rpc import Client

        with Client(device="cpu") as client, client.get_task_result("{task_id}") as handle:
            print("fetched", handle.value.tolist(), handle.get_object_info()["leases"])
        """
    )
    children.append(fetcher)
    assert fetcher.expect("fetched") == "fetched [7.0, 7.0, 7.0, 7.0] 1"
    assert fetcher.close() == (0, "")
    eventually(lambda: kept(server) == (0, 0))


def test_a_process_is_killed_while_it_waits(
    server: Server, client: Client, children: list[Child], go: threading.Event, begun: threading.Event
) -> None:
    """Its wait is taken back, and the task goes on for others; one that has not begun is not dropped."""
    ids = {"running": client.submit("task", 1), "pending": client.submit("task", 2)}
    assert begun.wait(10)
    waiter = python(f"{CLIENT}\nclient._run(fetch_task('{ids['pending']}', print, False))")
    children.append(waiter)
    waiter.expect("pending")
    assert watchers(server) == 1
    waiter.kill()
    eventually(lambda: watchers(server) == 0, seconds=1)
    assert statuses(client) == ["running", "pending"]
    go.set()
    assert [client.wait_for_task(task_id, 10).tolist() for task_id in ids.values()] == [[1] * 4, [2] * 4]


# Many who wait.


def account(server: Server) -> dict[str, int]:
    """All that those who wait could cost, or leave behind."""
    info = server.info()
    held = {name: info[name] for name in ("connections", "sessions", "leases", "running", "objects", "nbytes")}
    return {**held, "watchers": watchers(server), "fds": open_fds(), "threads": len(os.listdir("/proc/self/task"))}


def test_a_crowd_waits_for_one_task(
    server: Server, client: Client, go: threading.Event, begun: threading.Event, ran: list[int]
) -> None:
    """It costs the server no thread, all get the result, and all that they held goes back."""
    go.set()
    client.execute("managed", 1, timeout=10).release()
    go.clear()
    begun.clear()
    eventually(lambda: kept(server) == (0, 0))
    before = account(server)
    task_id = client.submit("managed", 7)
    assert begun.wait(10)
    with ExitStack() as stack:
        raws = [stack.enter_context(Raw(server.socket_path)) for _ in range(CROWD)]
        for raw in raws:
            raw.say(m.WaitTask(task_id, events=True), 2)
        eventually(lambda: watchers(server) == CROWD)
        assert account(server)["threads"] <= before["threads"]
        client.ping()
        go.set()
        object_id = ""
        for raw in raws:
            *events, result = [raw.hear(2) for _ in range(3)]
            assert [type(event) for event in events] == [m.TaskUpdate] * 2
            assert [event.info.status.value for event in events] == ["running", "completed"]
            assert isinstance(result, m.Result) and result.managed
            object_id = object_id or result.object_id
            assert result.object_id == object_id == events[1].info.object_id
        assert kept(server) == (1, CROWD)
        for raw in raws[: CROWD // 2]:
            assert raw.ask(m.Release([object_id]), 3) == m.Count(1)
        assert kept(server) == (1, CROWD - CROWD // 2)
    assert ran == [1, 7]
    eventually(lambda: all(now <= before[name] for name, now in account(server).items()), what=f"{before} again")


def test_one_who_does_not_read(provider: Provider, serve: Serve, connect: Connect, begun: threading.Event) -> None:
    """Those who do are told everything meanwhile; it misses reports, not the end, and what waits for it is bounded."""
    count, waits, heard = 60, 200, threading.Semaphore(0)

    @provider.share(cache=False)
    def talk() -> torch.Tensor:
        begun.wait(10)
        for number in range(count):
            progress(number, count, "x" * 400)
            heard.acquire(timeout=10)
        return torch.ones(1)

    server, client = serve(), connect()
    task_id = client.submit("talk")
    with Raw(server.socket_path) as silent:
        silent.sock.settimeout(5)
        for number in range(waits):
            silent.say(m.WaitTask(task_id, events=True), number + 1)
        eventually(lambda: watchers(server) == waits)
        done: list[float] = []

        def callback(info: TaskInfo) -> None:
            begun.set()
            if info.progress is not None and info.status is TaskStatus.RUNNING:
                done.append(info.progress.done)
                heard.release()

        assert client.wait_for_task(task_id, 20, callback) == 1
        assert done == list(range(count))
        told, results = Counter[int](), set[int]()
        while len(results) < waits:
            frame = silent.hear_frame()
            frame.close()
            assert frame.request_id not in results
            if frame.kind == NUMBERS[m.TaskUpdate]:
                told[frame.request_id] += 1
            else:
                assert frame.kind == NUMBERS[m.Result]
                results.add(frame.request_id)
        # About a megabyte in the server, and what the kernel takes: half a kilobyte for each.
        assert waits < told.total() < count * waits // 2
        assert isinstance(silent.ask(m.GetTask(task_id), 1000), m.TaskIs)


# Waiting for a task without taking its result: who deploys weights maps none.


def test_a_watched_task_is_left_to_others(server: Server, client: Client, go: threading.Event) -> None:
    """Its end is told, with every change before it; this process has no lease, and the result is there for who wants it."""
    seen: list[TaskInfo] = []
    task_id = client.submit("managed", 7)
    for timeout in (0, 0.05):
        with pytest.raises(DeadlineExceeded):
            client.watch_task(task_id, timeout)
    ended = client.watch_task(task_id, 10, lambda info: (seen.append(info), go.set()))
    assert (ended.status, seen[-1]) == (TaskStatus.COMPLETED, ended)
    assert kept(server) == (1, 1)  # the task's own
    assert client.watch_task(task_id) == client.get_task_status(task_id)
    with client.get_task_result(task_id) as handle:
        assert handle.value.tolist() == [7] * 4


def test_a_watcher_needs_no_torch(server: Server, go: threading.Event) -> None:
    """Nothing is rebuilt in its process."""
    go.set()
    child = python(
        """
        import sys
        from shared_rpc import Client
        with Client(device="cpu") as client:
            print("it is", client.watch_task(client.submit("managed", 7)).status.value, "torch" in sys.modules)
        """,
        fresh=True,
    )
    assert child.expect("it is") == "it is completed False"
    assert child.close() == (0, "")


def test_a_failed_task_is_told_and_not_raised(server: Server, client: Client) -> None:
    """Whoever wants its exception asks for the result."""
    task_id = client.submit("fails")
    ended = client.watch_task(task_id, 10)
    assert (ended.status, ended.error_type) == (TaskStatus.FAILED, "ValueError")
    with pytest.raises(ValueError, match="a negative number"):
        client.get_task_result(task_id)
