"""Waiting for a task without taking its result: who deploys weights maps none."""

from __future__ import annotations

import threading

import pytest
import torch

from shared_rpc import Provider, TaskInfo, TaskStatus, progress
from shared_rpc.errors import DeadlineExceeded, TaskError
from tests.kit.apps import Connect, Serve
from tests.kit.processes import python


@pytest.fixture
def go(provider: Provider, serve: Serve) -> threading.Event:
    """What the endpoint waits for."""
    event = threading.Event()

    @provider.share(execution="task", managed=True)
    def build(number: int) -> torch.Tensor:
        progress(1, 2, "half")
        event.wait(10)
        if number < 0:
            raise ValueError("a negative number")
        return torch.full((4,), float(number))

    serve()
    return event


def test_a_watched_task_is_left_to_others(go: threading.Event, connect: Connect) -> None:
    """Its end is told, with every change before it; this process has no lease, and the result is there for who wants it."""
    client, seen = connect(), []
    task_id = client.submit("build", 7)

    def changed(info: TaskInfo) -> None:
        seen.append(info)
        if info.progress is not None:
            go.set()

    ended = client.watch_task(task_id, 10, changed)
    assert ended.status is TaskStatus.COMPLETED
    assert seen[-1] == ended
    assert [facts["leases"] for facts in client.list_objects()] == [1]  # the task's own
    assert client.watch_task(task_id) == client.get_task_status(task_id)
    with client.get_task_result(task_id) as handle:
        assert handle.value.tolist() == [7] * 4


def test_a_watcher_needs_no_torch(go: threading.Event, base_path: str) -> None:
    """Nothing is rebuilt in its process."""
    go.set()
    child = python(
        """
        import sys
        from shared_rpc import Client
        with Client(device="cpu") as client:
            print("it is", client.watch_task(client.submit("build", 7)).status.value, "torch" in sys.modules)
        """,
        fresh=True,
    )
    assert child.expect("it is") == "it is completed False"
    assert child.close() == (0, "")


def test_a_failed_task_is_told_and_not_raised(go: threading.Event, connect: Connect) -> None:
    """Whoever wants its exception asks for the result."""
    go.set()
    client = connect()
    task_id = client.submit("build", -1)
    ended = client.watch_task(task_id, 10)
    assert (ended.status, ended.error_type) == (TaskStatus.FAILED, "ValueError")
    with pytest.raises(ValueError, match="a negative number"):
        client.get_task_result(task_id)


def test_the_watch_ends_in_time(go: threading.Event, connect: Connect) -> None:
    """The task goes on; and one that is not known is told at once."""
    client = connect()
    task_id = client.submit("build", 7)
    for timeout in (0, 0.05):
        with pytest.raises(DeadlineExceeded):
            client.watch_task(task_id, timeout)
    go.set()
    assert client.watch_task(task_id, 10).status is TaskStatus.COMPLETED
    with pytest.raises(TaskError):
        client.watch_task("nothing", 0)
