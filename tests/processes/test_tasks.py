"""Tasks, in every role: submitted, watched, awaited, cancelled and fetched."""

from __future__ import annotations

import gc
import queue
import threading
import time
import weakref
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import anyio
import anyio.to_thread
import pytest
import torch

from shared_rpc import Client, Provider, Server, cancelled, progress, raise_if_cancelled
from shared_rpc.errors import (
    CapabilityError,
    DeadlineExceeded,
    EndpointNotFound,
    RemoteError,
    ServerBusy,
    TaskCancelled,
    TaskError,
)
from shared_rpc.protocol import messages as m
from shared_rpc.protocol.tasks import Progress, TaskInfo, TaskStatus
from shared_rpc.server.core import Core
from tests.kit.processes import eventually
from tests.kit.raw import Raw
from tests.kit.world import World, shares_memory


def watchers(core: Core) -> int:
    """Return the number of callers that wait for tasks."""
    return sum(len(task.watchers) for task in core.tasks.table)


def kept(client: Client | Provider) -> tuple[int, int]:
    """Return the numbers of objects and of leases, including those of tasks."""
    info = client.get_server_info()
    return info["objects"], info["leases"]


def status(world: World, task_id: str) -> tuple[str, bool]:
    """Return a task's status, and whether its cancellation was requested."""
    return changes([world.provider.get_task_status(task_id)])[0]


def changes(reports: list[TaskInfo]) -> list[tuple[str, bool]]:
    """Return the status and the requested cancellation of each report."""
    return [(info.status.value, info.cancel_requested) for info in reports]


def test_submitted_tasks_can_be_waited_for(world: World, role: str) -> None:
    """A task has the result of a call, and all its facts are reported."""
    world.share("ones")(lambda size, scale=2.0: torch.ones(size) * scale)
    before = time.time()
    task_id = world.provider.submit("ones", 3)
    assert torch.equal(world.provider.wait_for_task(task_id, 10), torch.full((3,), 2.0))
    assert torch.equal(world.provider.execute("ones", 3, scale=4.0), torch.full((3,), 4.0))
    info = world.provider.get_task_status(task_id)
    assert before <= info.created_at <= info.started_at <= info.finished_at <= time.time()
    assert (info.endpoint, info.status, info.cache_key) == ("ones", "completed", "ones(size=3, scale=2.0)")


def test_tasks_and_calls_join_each_other(world: World, go: threading.Event, begun: threading.Event, role: str) -> None:
    """The task is running from the start; the call gets the same result, which stays available."""
    ran = world.share_held(go, begun)
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(world.provider.call, "held", 5)
        assert begun.wait(10)
        task_id = world.provider.submit("held", 5)
        assert status(world, task_id) == ("running", False)
        eventually(lambda: world.waiting() == 2)
        go.set()
        assert shares_memory(call.result(10), world.provider.wait_for_task(task_id, 10))
    assert ran == [5]


def test_invalid_submits_are_refused(world: World, role: str) -> None:
    """For an unknown endpoint and arguments that do not fit there is an error at once, and no task."""
    world.share("ones")(lambda size: torch.ones((size,)))
    with pytest.raises(EndpointNotFound, match="no endpoint 'ons': did you mean 'ones'"):
        world.provider.submit("ons", 3)
    with pytest.raises(TypeError, match=r"ones\(\): missing a required argument: 'size'"):
        world.provider.execute("ones")
    with pytest.raises(CapabilityError):
        world.provider.submit("ones", object())
    assert world.provider.list_tasks() == []


def test_callbacks_report_every_change_in_order(world: World, go: threading.Event, begun: threading.Event, role: str) -> None:
    """Pending, running, progress and the end, in the thread that waits."""

    @world.share(concurrency="serialized", cache=False)
    def work(steps: int) -> torch.Tensor:
        begun.set()
        go.wait(10)
        progress(1, 3, "one step")
        return torch.ones(steps)

    reports: list[tuple[str, Progress | None, int]] = []

    def callback(info: TaskInfo) -> None:
        reports.append((info.status.value, info.progress, threading.get_ident()))
        go.set()

    world.provider.submit("work", 1)
    assert begun.wait(10)
    task_id = world.provider.submit("work", 4)
    assert world.provider.wait_for_task(task_id, 10, callback).tolist() == [1, 1, 1, 1]
    here = threading.get_ident()
    step = Progress(1.0, 3.0, "one step")
    assert reports == [
        ("pending", None, here),
        ("running", None, here),
        ("running", step, here),
        ("completed", step, here),
    ]


@pytest.mark.parametrize("error", [queue.Empty("mine"), KeyboardInterrupt()], ids=repr)
def test_a_failing_callback_ends_the_wait(
    world: World, go: threading.Event, begun: threading.Event, error: BaseException, role: str
) -> None:
    """With its exception, also one that the library uses itself; the task is unaffected."""
    world.share_held(go, begun, cache=False)
    task_id = world.provider.submit("held", 5)
    assert begun.wait(10)

    def callback(info: TaskInfo) -> None:
        raise error

    with pytest.raises(type(error)) as caught:
        world.provider.wait_for_task(task_id, 10, callback)
    assert caught.value is error
    assert status(world, task_id) == ("running", False)
    eventually(lambda: world.ask(watchers) == 0)
    go.set()
    assert world.provider.wait_for_task(task_id, 10).tolist() == [5, 5]


def test_a_wait_can_end_before_its_task(world: World, go: threading.Event, begun: threading.Event, role: str) -> None:
    """The error has the task's status, like that of a fetch; it continues, and a later wait gets the result."""
    world.share_held(go, begun, concurrency="serialized", cache=False)
    first, second = world.provider.submit("held", 1), world.provider.submit("held", 2)
    assert begun.wait(10)
    for task_id, where, timeout in ((first, "running", 0.02), (second, "pending", 0)):
        with pytest.raises(DeadlineExceeded, match=f"{task_id}.*(is still {where}|took longer than its timeout)"):
            world.provider.wait_for_task(task_id, timeout)
        with pytest.raises(TaskError, match=f"task {task_id} of 'held' is {where}, and has no result yet") as caught:
            world.provider.get_task_result(task_id)
        assert (type(caught.value), caught.value.reason) == (TaskError, "unfinished")
    assert world.ask(watchers) == 0
    go.set()
    eventually(lambda: status(world, second) == ("completed", False))
    assert world.provider.get_task_result(second).tolist() == [2, 2]
    assert world.provider.wait_for_task(first, 0).tolist() == [1, 1]


# Results.


def test_cached_results_can_be_fetched_repeatedly(world: World, role: str) -> None:
    """It is one memory, while the cache keeps it; the task never ran."""
    ones = world.share("ones")(lambda: torch.ones(2))
    cached = ones()
    task_id = world.provider.submit("ones")
    info = world.provider.get_task_status(task_id)
    assert (info.status, info.started_at) == ("completed", None)
    reports: list[TaskInfo] = []
    assert shares_memory(world.provider.wait_for_task(task_id, 10, reports.append), cached)
    assert shares_memory(world.provider.get_task_result(task_id), cached) and reports == [info]
    assert ones.invalidate() == 1
    ones()
    with pytest.raises(TaskError) as caught:  # another object of the same key is not the task's
        world.provider.get_task_result(task_id)
    assert caught.value.reason == "released"


def test_an_uncached_result_is_fetched_once(world: World, role: str) -> None:
    """It is kept until then, and not after; the task stays completed."""
    world.share("ones", cache=False)(lambda: torch.ones(2))
    task_id = world.provider.submit("ones")
    eventually(lambda: status(world, task_id) == ("completed", False))
    assert kept(world.provider) == (1, 1)
    assert world.provider.get_task_result(task_id).tolist() == [1, 1]
    assert kept(world.provider) == (0, 0)
    with pytest.raises(TaskError, match=f"the result of task {task_id} was already fetched.*call 'ones' again") as caught:
        world.provider.wait_for_task(task_id)
    assert caught.value.reason == "released"
    assert status(world, task_id) == ("completed", False)


def test_managed_results_are_held_by_their_task(world: World, role: str) -> None:
    """They do not count as idle; the fetch passes the lease on, and they end with it."""
    world.share("model", managed=True, idle_ttl=0)(lambda: torch.ones(2))
    task_id = world.provider.submit("model")
    eventually(lambda: status(world, task_id) == ("completed", False))
    assert kept(world.provider) == (1, 1)
    handle = world.provider.get_task_result(task_id)
    assert handle.object_id == world.provider.get_task_status(task_id).object_id
    assert handle.get_object_info()["leases"] == kept(world.provider)[1] == 1
    with world.provider.wait_for_task(task_id, 10) as again:  # for as long as a handle of it is held
        assert shares_memory(again.value, handle.value)
    handle.release()
    eventually(lambda: kept(world.provider) == (0, 0))
    with pytest.raises(TaskError) as caught:
        world.provider.get_task_result(task_id)
    assert caught.value.reason == "released"


def test_failing_endpoints_fail_their_task(world: World, role: str) -> None:
    """The exception is raised with its own type, repeatedly, and the status has type and message."""

    @world.share()
    def load() -> torch.Tensor:
        raise FileNotFoundError(2, "No such file", "llama")

    task_id = world.provider.submit("load")
    for fetch in (world.provider.wait_for_task, world.provider.get_task_result):
        with pytest.raises(FileNotFoundError) as caught:
            fetch(task_id)
        assert caught.value.filename == "llama"
        if world.role == "client":
            assert 'raise FileNotFoundError(2, "No such file"' in str(caught.value.__cause__)
    info = world.provider.get_task_status(task_id)
    assert (info.status, info.object_id) == ("failed", None)
    assert (info.error_type, info.error_message) == ("FileNotFoundError", "[Errno 2] No such file: 'llama'")


# Cancelling.


def test_cancelled_pending_tasks_never_run(world: World, go: threading.Event, begun: threading.Event, role: str) -> None:
    """Present and later waiters get an error; other tasks are unaffected."""
    ran = world.share_held(go, begun, concurrency="serialized")
    first, second, third = (world.provider.submit("held", number) for number in (1, 2, 3))
    assert begun.wait(10)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(world.provider.wait_for_task, second, 10)
        eventually(lambda: world.ask(watchers) == 1)
        assert world.provider.cancel_task(second) is True
        for attempt in (waiting.result, lambda: world.provider.get_task_result(second)):
            with pytest.raises(TaskCancelled, match=f"task {second} of 'held' was cancelled") as caught:
                attempt()
            assert caught.value.reason == "cancelled"
    assert (status(world, second), world.provider.get_task_status(second).started_at) == (("cancelled", True), None)
    go.set()
    for task_id in (first, third):
        world.provider.wait_for_task(task_id, 10)
    assert ran == [1, 3]


def test_cancelled_running_tasks_stop(world: World, begun: threading.Event, role: str) -> None:
    """An endpoint that polls ends at once; a request after the end has no effect."""

    @world.share(cache=False)
    def looking() -> torch.Tensor:
        begun.set()
        pause = threading.Event()
        for _ in range(20_000):
            raise_if_cancelled()
            pause.wait(0.001)
        return torch.ones(1)

    task_id = world.provider.submit("looking")
    assert begun.wait(10)
    reports: list[TaskInfo] = []
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(world.provider.wait_for_task, task_id, 10, reports.append)
        eventually(lambda: world.ask(watchers) == 1)
        assert world.provider.cancel_task(task_id) is True
        with pytest.raises(TaskCancelled, match="the task was cancelled") as caught:
            waiting.result(10)
    assert caught.value.reason == "cancelled"
    assert changes(reports) == [("running", False), ("running", True), ("cancelled", True)]
    assert world.provider.cancel_task(task_id) is False


def test_endpoints_that_do_not_poll_run_on(world: World, go: threading.Event, begun: threading.Event, role: str) -> None:
    """Their waiters get the result, which may be partial: it is not cached, and later calls have their own run."""
    ran = world.share_held(go, begun)
    task_id = world.provider.submit("held", 5)
    assert begun.wait(10)
    reports: list[TaskInfo] = []
    with ThreadPoolExecutor(2) as pool:
        waiting = pool.submit(world.provider.wait_for_task, task_id, 10, reports.append)
        eventually(lambda: world.ask(watchers) == 1)
        assert [world.provider.cancel_task(task_id) for _ in range(3)] == [True] * 3
        later = pool.submit(world.provider.call, "held", 5)
        eventually(lambda: ran == [5, 5])
        go.set()
    assert changes(reports) == [("running", False), ("running", True), ("completed", True)]
    assert not shares_memory(waiting.result(), later.result())
    assert shares_memory(later.result(), world.provider.call("held", 5))
    assert ran == [5, 5]


def test_cancelling_one_of_two_tasks_keeps_the_run(
    world: World, go: threading.Event, begun: threading.Event, role: str
) -> None:
    """It begins for the other task, and its result is cached."""
    ran = world.share_held(go, begun, concurrency="serialized")
    world.provider.submit("held", 1)
    assert begun.wait(10)
    one, other = world.provider.submit("held", 5), world.provider.submit("held", 5)
    assert world.provider.cancel_task(one) is True
    assert (status(world, one), status(world, other)) == (("cancelled", True), ("pending", False))
    go.set()
    result = world.provider.wait_for_task(other, 10)
    assert shares_memory(world.provider.call("held", 5), result)
    assert ran == [1, 5]


def test_async_endpoints_are_cancelled_at_their_await(world: World, begun: threading.Event, role: str) -> None:
    """They need not poll, and may clean up."""
    ended = []

    @world.share()
    async def load() -> torch.Tensor:
        begun.set()
        try:
            await anyio.sleep(30)
        finally:
            ended.append(cancelled())
        return torch.ones(1)

    task_id = world.provider.submit("load")
    assert begun.wait(10)
    assert world.provider.cancel_task(task_id) is True
    with pytest.raises(TaskCancelled):
        world.provider.wait_for_task(task_id, 10)
    assert (status(world, task_id), ended) == (("cancelled", True), [True])


@pytest.mark.parametrize("role", ["local", "client"])
@pytest.mark.parametrize("carried", [True, False], ids=["in the exception", "in a frame"])
def test_failures_keep_no_objects_of_their_endpoint(world: World, carried: bool, role: str) -> None:
    """A task is remembered for an hour, but not the model that failed to load."""
    seen: list[weakref.ref[torch.nn.Module]] = []

    @world.share(cache=False)
    def load() -> None:
        module = torch.nn.ReLU()
        seen.append(weakref.ref(module))
        try:
            raise ValueError(*[module, "x" * (1 << 15)] * carried)
        except ValueError as error:
            raise ExceptionGroup("several", [error]) from error

    task_id = world.provider.submit("load")
    with pytest.raises((RemoteError, ExceptionGroup)):
        world.provider.wait_for_task(task_id, 10)
    assert status(world, task_id) == ("failed", False)
    eventually(lambda: gc.collect() >= 0 and [one() for one in seen] == [None], seconds=1)


# Limits and deaths.


@pytest.fixture
def server(world: World, go: threading.Event, begun: threading.Event) -> Server:
    """A server with one thread and one task at a time, of an endpoint that is always a task, and of another one."""
    world.share_held(go, begun, cache=False, managed=True, execution="task")
    world.share("other")(lambda: torch.ones(1))
    return world.serve(max_tasks=2, max_workers=1)


def test_submits_beyond_max_tasks_are_refused(
    server: Server, client: Client, go: threading.Event, begun: threading.Event
) -> None:
    """Calls are not, and those of other endpoints do not wait for the worker's tasks."""
    tasks = [client.submit("held", number) for number in (1, 2)]
    assert begun.wait(10)
    with pytest.raises(ServerBusy, match="2 tasks are pending or running"):
        client.submit("held", 3)
    assert client.call("other") == 1
    go.set()
    for task_id in tasks:
        client.wait_for_task(task_id, 10).release()
    assert client.call("held", 3).value.tolist() == [3] * 2


def test_slow_readers_miss_progress_only(world: World, begun: threading.Event) -> None:
    """Others get every report; a slow one gets the end, and its unread messages are bounded."""
    count, waits, heard = 60, 200, threading.Semaphore(0)

    @world.share(cache=False)
    def talk() -> None:
        begun.wait(10)
        for number in range(count):
            progress(number, count, "x" * 400)
            heard.acquire(timeout=10)

    server, client = world.serve(), world.client()
    task_id = client.submit("talk")
    done: list[float] = []

    def callback(info: TaskInfo) -> None:
        begun.set()
        if info.progress is not None and info.status is TaskStatus.RUNNING:
            done.append(info.progress.done)
            heard.release()

    with Raw(server.socket_path) as silent:
        for number in range(waits):
            silent.say(m.WaitTask(task_id, events=True), number + 1)
        eventually(lambda: server.engine.ask(watchers) == waits)
        client.wait_for_task(task_id, 20, callback)
        assert done == list(range(count))
        received = Counter[type[m.Message]]()
        while received[m.Result] < waits:
            received[type(silent.hear())] += 1
    # About a megabyte in the server, and what the kernel takes: half a kilobyte for each.
    assert waits < received[m.TaskUpdate] < count * waits // 2


def test_killed_submitters_do_not_stop_their_task(
    server: Server, client: Client, world: World, go: threading.Event, begun: threading.Event
) -> None:
    """It continues and keeps its result, which any process with the id can fetch."""
    submitter = world.peer()
    task_id = submitter.ask("print('task', client.submit('held', 7), flush=True)", "task")
    assert begun.wait(10)
    submitter.kill()
    eventually(lambda: server.info()["sessions"] == 0, seconds=1)
    assert client.get_task_status(task_id).status is TaskStatus.RUNNING
    go.set()
    eventually(lambda: client.get_task_status(task_id).status.finished)
    assert kept(client) == (1, 1)
    with client.get_task_result(task_id) as handle:
        assert handle.value.tolist() == [7] * 2
        assert handle.get_object_info()["leases"] == 1
    eventually(lambda: kept(client) == (0, 0))
