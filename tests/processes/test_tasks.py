"""Tasks, in every role: submitted, watched, awaited, cancelled and fetched."""

from __future__ import annotations

import gc
import os
import queue
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from typing import Any, TypeVar

import anyio
import anyio.to_thread
import pytest
import torch

from shared_rpc import Client, Provider, Server, cancelled, progress, raise_if_cancelled
from shared_rpc.errors import (
    CapabilityError,
    ConfigurationError,
    DeadlineExceeded,
    EndpointNotFound,
    RemoteError,
    ServerBusy,
    TaskCancelled,
    TaskError,
)
from shared_rpc.protocol import messages as m
from shared_rpc.protocol.catalogue import NUMBERS
from shared_rpc.protocol.tasks import Progress, TaskInfo, TaskStatus
from shared_rpc.provider.loopback import LoopbackRuntime
from shared_rpc.server.core import Core
from tests.kit.apps import App, Connect, Serve, at_once, shares_memory
from tests.kit.processes import Program, eventually
from tests.kit.raw import Raw

pytestmark = pytest.mark.usefixtures("no_leaks")

T = TypeVar("T")


class Stop(Exception):
    """Raised by a callback to end the wait."""


#: For questions about waiters in the process that runs the endpoints.
in_process = pytest.mark.parametrize("app", ["local", "server"], indirect=True)


def ask(app: App, question: Callable[[Core], T]) -> T:
    """Call ``question(core)`` with the core that runs the endpoints."""
    runtime = app.owner._runtime()
    assert isinstance(runtime, LoopbackRuntime)
    return runtime._engine.ask(question)


def watchers(app: App) -> int:
    """Return the number of callers that wait for tasks."""
    return ask(app, lambda core: sum(len(task.watchers) for task in core.tasks.table))


def leases(app: App) -> int:
    """Return the number of leases, including those of tasks."""
    return ask(app, lambda core: len(core.leases))


def objects(app: App) -> int:
    """Return the number of stored objects."""
    return ask(app, lambda core: len(core.objects))


def status(app: App, task_id: str) -> tuple[str, bool]:
    """Return a task's status, and whether its cancellation was requested."""
    return changes([app.provider.get_task_status(task_id)])[0]


def share_held(app: App, go: threading.Event, begun: threading.Event, **options: Any) -> list[int]:
    """Share ``held(number)``, which sets ``begun`` and waits for ``go``; return the numbers of its runs."""
    ran: list[int] = []

    @app.share(**options)
    def held(number: int = 1) -> torch.Tensor:
        ran.append(number)
        begun.set()
        go.wait(20)
        return torch.full((2,), float(number))

    return ran


def changes(reports: list[TaskInfo]) -> list[tuple[str, bool]]:
    """Return the status and the requested cancellation of each report."""
    return [(info.status.value, info.cancel_requested) for info in reports]


def share_looking(app: App, begun: threading.Event) -> None:
    """Share ``looking()``, which runs until its cancellation is requested."""

    @app.share(cache=False)
    def looking() -> torch.Tensor:
        begun.set()
        pause = threading.Event()
        for _ in range(20_000):
            raise_if_cancelled()
            pause.wait(0.001)
        return torch.ones(1)


# Submitting.


def test_submitted_tasks_can_be_waited_for(app: App) -> None:
    """A task has the result of a call, and all its facts are reported."""
    app.share("ones")(lambda size, scale=2.0: torch.ones(size) * scale)
    before = time.time()
    task_id = app.provider.submit("ones", 3)
    assert type(task_id) is str
    assert torch.equal(app.provider.wait_for_task(task_id, 10), torch.full((3,), 2.0))
    info = app.provider.get_task_status(task_id)
    assert before <= info.created_at <= info.started_at <= info.finished_at <= time.time()
    assert info.object_id
    assert info == TaskInfo(
        task_id,
        "ones",
        TaskStatus.COMPLETED,
        info.created_at,
        info.started_at,
        info.finished_at,
        cache_key="ones(size=3, scale=2.0)",
        object_id=info.object_id,
    )


def test_execute_submits_and_waits(app: App, go: threading.Event, begun: threading.Event) -> None:
    """With ``wait`` it returns the result and takes a callback and a timeout, without it the id at once."""
    share_held(app, go, begun)
    task_id = app.provider.execute("held", 5, wait=False)
    assert begun.wait(10) and status(app, task_id) == ("running", False)
    with pytest.raises(DeadlineExceeded):
        app.provider.execute("held", 5, timeout=0.05)
    reports: list[str] = []
    assert app.provider.execute("held", 5, callback=lambda info: (reports.append(info.status), go.set())).tolist() == [5, 5]
    assert (reports[0], reports[-1]) == ("running", "completed")


def test_tasks_of_cached_results_end_at_once(app: App) -> None:
    """They never run, the result is the cached object, and a callback is called once."""
    built: list[int] = []
    app.share("ones")(lambda: built.append(1) or torch.ones(2))
    cached = app.provider.call("ones")
    info = app.provider.get_task_status(app.provider.submit("ones"))
    assert (info.status, info.started_at) == ("completed", None)
    reports: list[TaskInfo] = []
    assert shares_memory(app.provider.wait_for_task(info.task_id, 10, reports.append), cached)
    assert (reports, built) == ([info], [1])


@pytest.mark.parametrize("first", ["call", "submit"])
def test_tasks_and_calls_join_each_other(app: App, go: threading.Event, begun: threading.Event, first: str) -> None:
    """The task is running from the start; the call gets the same result, which stays available."""
    ran = share_held(app, go, begun)
    with ThreadPoolExecutor(1) as pool:
        if first == "call":
            call = pool.submit(app.provider.call, "held", 5)
            assert begun.wait(10)
        task_id = app.provider.submit("held", 5)
        if first == "submit":
            assert begun.wait(10)
            call = pool.submit(app.provider.call, "held", 5)
        assert status(app, task_id) == ("running", False)
        eventually(lambda: app.waiting() == 2)
        go.set()
        assert shares_memory(call.result(10), app.provider.wait_for_task(task_id, 10))
    assert ran == [5]


def test_invalid_submits_are_refused(app: App) -> None:
    """For an unknown endpoint and arguments that do not fit there is an error at once, and no task."""
    app.share("ones")(lambda size: torch.ones((size,)))
    for submit in (app.provider.submit, app.provider.execute):
        with pytest.raises(EndpointNotFound, match="no endpoint 'ons': did you mean 'ones'"):
            submit("ons", 3)
        with pytest.raises(TypeError, match=r"ones\(\): missing a required argument: 'size'"):
            submit("ones")
        with pytest.raises(CapabilityError):
            submit("ones", object())
    assert app.provider.list_tasks() == []


# Watching.


def test_callbacks_report_every_change_in_order(app: App, go: threading.Event, begun: threading.Event) -> None:
    """Pending, running, progress and the end, in the thread that waits."""

    @app.share(concurrency="serialized", cache=False)
    def work(steps: int) -> torch.Tensor:
        begun.set()
        go.wait(10)
        progress(1, 3, "one step")
        return torch.ones(steps)

    reports: list[tuple[str, Progress | None, int]] = []

    def callback(info: TaskInfo) -> None:
        reports.append((info.status.value, info.progress, threading.get_ident()))
        go.set()

    app.provider.submit("work", 1)
    assert begun.wait(10)
    task_id = app.provider.submit("work", 4)
    assert app.provider.wait_for_task(task_id, 10, callback).tolist() == [1, 1, 1, 1]
    here = threading.get_ident()
    step = Progress(1.0, 3.0, "one step")
    assert reports == [
        ("pending", None, here),
        ("running", None, here),
        ("running", step, here),
        ("completed", step, here),
    ]


@pytest.mark.parametrize("error", [Stop("seen enough"), queue.Empty("mine"), KeyboardInterrupt()], ids=repr)
def test_a_failing_callback_ends_the_wait(app: App, go: threading.Event, begun: threading.Event, error: BaseException) -> None:
    """With its exception, also one that the library uses itself; the task, the session and its leases are unaffected."""
    share_held(app, go, begun, cache=False)
    app.share("kept", managed=True)(lambda: torch.ones(1))
    handle = app.provider.call("kept")
    task_id = app.provider.submit("held", 5)
    assert begun.wait(10)

    def callback(info: TaskInfo) -> None:
        raise error

    with pytest.raises(type(error)) as caught:
        app.provider.wait_for_task(task_id, 10, callback)
    assert caught.value is error
    assert status(app, task_id) == ("running", False)
    eventually(lambda: watchers(app) == 0)
    assert not handle.is_stale() and leases(app) == 1
    go.set()
    assert app.provider.wait_for_task(task_id, 10).tolist() == [5, 5]
    handle.release()


# Waiting.


def test_a_wait_can_end_before_its_task(app: App, go: threading.Event, begun: threading.Event) -> None:
    """The error has the task's status, like that of a fetch; it continues, and a later wait gets the result."""
    share_held(app, go, begun, concurrency="serialized", cache=False)
    first, second = app.provider.submit("held", 1), app.provider.submit("held", 2)
    assert begun.wait(10)
    for task_id, where, timeout in ((first, "running", 0.02), (second, "pending", 0)):
        with pytest.raises(DeadlineExceeded, match=f"{task_id}.*(is still {where}|took longer than its timeout)"):
            app.provider.wait_for_task(task_id, timeout)
        with pytest.raises(TaskError, match=f"task {task_id} of 'held' is {where}, and has no result yet") as caught:
            app.provider.get_task_result(task_id)
        assert (type(caught.value), caught.value.reason) == (TaskError, "unfinished")
    assert watchers(app) == 0
    go.set()
    eventually(lambda: status(app, second) == ("completed", False))
    assert app.provider.get_task_result(second).tolist() == [2, 2]
    assert app.provider.wait_for_task(first, 0).tolist() == [1, 1]


def test_endpoints_can_wait_for_tasks(app: App) -> None:
    """In any number: waiting does not use up the threads of the tasks."""

    @app.share(cache=False)
    def tower(height: int) -> torch.Tensor:
        if height == 0:
            return torch.zeros(1)
        below: torch.Tensor = app.owner.execute("tower", height - 1, timeout=20)
        return below + 1

    assert app.provider.execute("tower", 50, timeout=20).item() == 50


@in_process
def test_async_endpoints_can_use_tasks(app: App) -> None:
    """To submit, query and cancel; waiting there is an error with the remedy."""
    app.share("base")(lambda: torch.ones(2))

    @app.share(cache=False)
    async def look() -> torch.Tensor:
        task_id = app.owner.submit("base")
        with pytest.raises(ConfigurationError, match=r"on the server's event loop: use anyio\.to_thread"):
            app.owner.wait_for_task(task_id)
        result: torch.Tensor = await anyio.to_thread.run_sync(app.owner.wait_for_task, task_id, 10)
        assert app.owner.get_task_status(task_id).status is TaskStatus.COMPLETED
        assert not app.owner.cancel_task(task_id)
        return result * 2

    assert app.provider.call("look").tolist() == [2, 2]


# Results.


def test_cached_results_can_be_fetched_repeatedly(app: App) -> None:
    """It is one memory, while the cache keeps it."""
    ones = app.share("ones")(lambda: torch.ones(2))
    task_id = app.provider.submit("ones")
    first = app.provider.wait_for_task(task_id, 10)
    assert shares_memory(first, app.provider.get_task_result(task_id))
    assert shares_memory(first, app.provider.wait_for_task(task_id, 0))
    assert ones.invalidate() == 1
    with pytest.raises(TaskError) as caught:
        app.provider.get_task_result(task_id)
    assert caught.value.reason == "released"
    ones()
    with pytest.raises(TaskError):  # another object of the same key is not the task's
        app.provider.get_task_result(task_id)


def test_invalidated_builds_reach_their_waiters(app: App, go: threading.Event, begun: threading.Event) -> None:
    """Waiters of the run and of its tasks get one result, which is not kept after that."""
    share_held(app, go, begun)
    ids = [app.provider.submit("held", 5) for _ in range(2)]
    assert begun.wait(10)

    def release() -> None:
        eventually(lambda: (app.waiting(), watchers(app)) == (4, 2))
        app.provider.invalidate_endpoint_cache("held")
        go.set()

    waits = [lambda task_id=task_id: app.provider.wait_for_task(task_id, 10) for task_id in ids]
    *results, _ = at_once(*waits, *[lambda: app.provider.call("held", 5)] * 2, release)
    assert all(shares_memory(results[0], result) for result in results)
    assert (objects(app), leases(app)) == (0, 0)


@pytest.mark.parametrize("fetch", ["wait_for_task", "get_task_result"])
def test_an_uncached_result_is_fetched_once(app: App, fetch: str) -> None:
    """It is kept until then, and not after; the task stays completed."""
    app.share("ones", cache=False)(lambda: torch.ones(2))
    task_id = app.provider.submit("ones")
    eventually(lambda: status(app, task_id) == ("completed", False))
    assert (objects(app), leases(app)) == (1, 1)
    assert getattr(app.provider, fetch)(task_id).tolist() == [1, 1]
    assert (objects(app), leases(app)) == (0, 0)
    for again in (app.provider.get_task_result, app.provider.wait_for_task):
        with pytest.raises(TaskError, match=f"the result of task {task_id} was fetched.*call 'ones' again") as caught:
            again(task_id)
        assert caught.value.reason == "released"
    assert status(app, task_id) == ("completed", False)


def test_managed_results_are_held_by_their_task(app: App) -> None:
    """They do not count as idle; the fetch passes the lease on, and they end with it."""
    app.share("model", managed=True, idle_ttl=0)(lambda: torch.ones(2))
    task_id = app.provider.submit("model")
    eventually(lambda: status(app, task_id) == ("completed", False))
    assert (objects(app), leases(app)) == (1, 1)
    handle = app.provider.get_task_result(task_id)
    assert handle.object_id == app.provider.get_task_status(task_id).object_id
    assert handle.get_object_info()["leases"] == leases(app) == 1
    with app.provider.wait_for_task(task_id, 10) as again:  # for as long as a handle of it is held
        assert shares_memory(again.value, handle.value)
    handle.release()
    eventually(lambda: objects(app) == 0)
    with pytest.raises(TaskError) as caught:
        app.provider.get_task_result(task_id)
    assert caught.value.reason == "released"


def test_expired_tasks_are_reported(provider: Provider, serve: Serve, connect: Connect) -> None:
    """By every query about their id; and their results are released."""
    provider.share("managed", managed=True, idle_ttl=0)(lambda: torch.ones(2))
    server, client = serve(result_ttl=0.0), connect()
    task_id = client.submit("managed")
    eventually(lambda: client.list_tasks() == [])
    for question in (client.get_task_status, client.get_task_result, client.wait_for_task, client.cancel_task):
        with pytest.raises(TaskError, match=f"task {task_id} has expired"):
            question(task_id)
    eventually(lambda: kept(server) == (0, 0))


# Failures.


def test_failing_endpoints_fail_their_task(app: App) -> None:
    """The exception is raised with its own type, repeatedly, and the status has type and message."""

    @app.share()
    def load() -> torch.Tensor:
        raise FileNotFoundError(2, "No such file", "llama")

    task_id = app.provider.submit("load")
    for fetch in (app.provider.wait_for_task, app.provider.get_task_result, app.provider.wait_for_task):
        with pytest.raises(FileNotFoundError) as caught:
            fetch(task_id)
        assert caught.value.filename == "llama"
        if app.role == "client":
            assert 'raise FileNotFoundError(2, "No such file"' in str(caught.value.__cause__)
    info = app.provider.get_task_status(task_id)
    assert (info.status, info.object_id) == ("failed", None)
    assert (info.error_type, info.error_message) == ("FileNotFoundError", "[Errno 2] No such file: 'llama'")


@pytest.mark.parametrize("app", ["local", "client"], indirect=True)
def test_failures_keep_no_objects_of_their_endpoint(app: App) -> None:
    """A task is remembered for an hour, but not the model that failed to load."""
    seen: list[weakref.ref[torch.nn.Module]] = []

    @app.share(cache=False)
    def load() -> torch.Tensor:
        module = torch.nn.ReLU()
        seen.append(weakref.ref(module))
        try:
            raise ValueError(module, "x" * (1 << 15))
        except ValueError as error:
            raise ExceptionGroup("several", [error]) from error

    task_id = app.provider.submit("load")

    def use() -> None:
        with pytest.raises((RemoteError, ExceptionGroup)):
            app.provider.wait_for_task(task_id, 10)

    use()
    assert status(app, task_id) == ("failed", False)
    eventually(lambda: gc.collect() >= 0 and [one() for one in seen] == [None], seconds=1)


# Cancelling.


def test_cancelled_pending_tasks_never_run(app: App, go: threading.Event, begun: threading.Event) -> None:
    """Present and later waiters get an error; other tasks are unaffected."""
    ran = share_held(app, go, begun, concurrency="serialized")
    first, second, third = (app.provider.submit("held", number) for number in (1, 2, 3))
    assert begun.wait(10)
    reports: list[TaskInfo] = []
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(app.provider.wait_for_task, second, 10, reports.append)
        eventually(lambda: watchers(app) == 1)
        assert app.provider.cancel_task(second) is True
        for attempt in (waiting.result, lambda: app.provider.get_task_result(second)):
            with pytest.raises(TaskCancelled, match=f"task {second} of 'held' was cancelled") as caught:
                attempt()
            assert caught.value.reason == "cancelled"
    assert changes(reports) == [("pending", False), ("cancelled", True)]
    info = app.provider.get_task_status(second)
    assert (info.status, info.started_at, info.error_type, info.object_id) == ("cancelled", None, None, None)
    go.set()
    for task_id in (first, third):
        app.provider.wait_for_task(task_id, 10)
    assert ran == [1, 3]


def test_cancelled_running_tasks_stop(app: App, begun: threading.Event) -> None:
    """An endpoint that polls ends at once; a request after the end has no effect."""
    share_looking(app, begun)
    task_id = app.provider.submit("looking")
    assert begun.wait(10)
    reports: list[TaskInfo] = []
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(app.provider.wait_for_task, task_id, 10, reports.append)
        eventually(lambda: watchers(app) == 1)
        assert app.provider.cancel_task(task_id) is True
        with pytest.raises(TaskCancelled, match="the task was cancelled") as caught:
            waiting.result(10)
    assert caught.value.reason == "cancelled"
    assert changes(reports) == [("running", False), ("running", True), ("cancelled", True)]
    info = app.provider.get_task_status(task_id)
    assert (info.error_type, info.error_message, info.object_id) == (None, None, None)
    assert app.provider.cancel_task(task_id) is False


def test_endpoints_that_do_not_poll_run_on(app: App, go: threading.Event, begun: threading.Event) -> None:
    """Their waiters get the result, which may be partial: it is not cached, and later calls have their own run."""
    ran = share_held(app, go, begun)
    task_id = app.provider.submit("held", 5)
    assert begun.wait(10)
    reports: list[TaskInfo] = []
    with ThreadPoolExecutor(2) as pool:
        waiting = pool.submit(app.provider.wait_for_task, task_id, 10, reports.append)
        eventually(lambda: watchers(app) == 1)
        assert [app.provider.cancel_task(task_id) for _ in range(3)] == [True] * 3
        later = pool.submit(app.provider.call, "held", 5)
        eventually(lambda: ran == [5, 5])
        go.set()
    assert changes(reports) == [("running", False), ("running", True), ("completed", True)]
    assert not shares_memory(waiting.result(), later.result())
    assert shares_memory(later.result(), app.provider.call("held", 5))
    assert ran == [5, 5]


@pytest.mark.parametrize("started", [True, False], ids=["running", "pending"])
def test_cancelling_one_of_two_tasks_keeps_the_run(
    app: App, go: threading.Event, begun: threading.Event, started: bool
) -> None:
    """It continues for the other task, and its result is cached."""
    ran = share_held(app, go, begun, concurrency="serialized")
    if not started:
        app.provider.submit("held", 1)
        assert begun.wait(10)
    one, other = app.provider.submit("held", 5), app.provider.submit("held", 5)
    assert begun.wait(10)
    assert app.provider.cancel_task(one) is True
    assert status(app, one) == ("cancelled", True)
    assert status(app, other) == ("running" if started else "pending", False)
    go.set()
    result = app.provider.wait_for_task(other, 10)
    assert shares_memory(app.provider.call("held", 5), result)
    assert ran.count(5) == 1
    assert app.provider.cancel_task(one) is False


def test_async_endpoints_are_cancelled_at_their_await(app: App, begun: threading.Event) -> None:
    """They need not poll, and may clean up."""
    ended = []

    @app.share()
    async def load() -> torch.Tensor:
        begun.set()
        try:
            await anyio.sleep(30)
        finally:
            ended.append(cancelled())
        return torch.ones(1)

    task_id = app.provider.submit("load")
    assert begun.wait(10)
    assert app.provider.cancel_task(task_id) is True
    with pytest.raises(TaskCancelled):
        app.provider.wait_for_task(task_id, 10)
    assert (status(app, task_id), ended) == (("cancelled", True), [True])


# Endpoints that are always tasks.


def test_calls_of_task_endpoints_are_listed(app: App, go: threading.Event, begun: threading.Event) -> None:
    """During and after the run; a later call gets the cached result, without a task."""
    share_held(app, go, begun, execution="task")
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(app.provider.call, "held", 2)
        assert begun.wait(10)
        (info,) = app.provider.list_tasks()
        assert (info.endpoint, info.status, info.cache_key) == ("held", "running", "held(number=2)")
        go.set()
        result = call.result(10)
    assert shares_memory(app.provider.call("held", 2), result)
    (info,) = app.provider.list_tasks()
    assert info.status is TaskStatus.COMPLETED
    assert shares_memory(app.provider.get_task_result(info.task_id), result)


def test_tasks_behind_calls_are_not_kept(app: App) -> None:
    """The caller has the result, and nothing is left to fetch."""
    app.share("plain", execution="task", cache=False)(lambda: torch.ones(1))
    app.share("managed", execution="task", cache=False, managed=True)(lambda: torch.ones(1))
    assert app.provider.call("plain") == 1
    assert (objects(app), leases(app)) == (0, 0)
    with app.provider.call("managed"):
        assert (objects(app), leases(app)) == (1, 1)
    eventually(lambda: (objects(app), leases(app)) == (0, 0))
    for info in app.provider.list_tasks("completed"):
        with pytest.raises(TaskError) as caught:
            app.provider.get_task_result(info.task_id)
        assert caught.value.reason == "released"


def test_task_lists_are_paged(app: App) -> None:
    """All tasks are listed, without duplicates, in order of submission, or those of one status."""
    ones = app.share("ones")(lambda: torch.ones(1))
    ones()
    ids = [app.provider.submit("ones") for _ in range(1001)]
    assert [info.task_id for info in app.provider.list_tasks()] == ids
    assert [info.task_id for info in app.provider.list_tasks("completed")] == ids
    assert app.provider.list_tasks(TaskStatus.FAILED) == []
    with pytest.raises(ValueError, match="'RUNNING' is not a valid TaskStatus"):
        app.provider.list_tasks("RUNNING")


# Processes around a task.


#: Waiters for one task.
CROWD = 500

#: A client process without torch.
CLIENT = """
import signal, sys
from shared_rpc import Client
from shared_rpc.operations.tasks import fetch_task

client = Client(device="cpu", connect_timeout=10)
"""


@pytest.fixture
def shared(provider: Provider, go: threading.Event, begun: threading.Event) -> Provider:
    """The endpoints of the tests from here on."""

    def held(number: int) -> torch.Tensor:
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
    """A server of these endpoints."""
    return serve()


def watchers_of(server: Server) -> int:
    """Return the number of callers that wait for tasks."""
    return server.engine.ask(lambda core: sum(len(task.watchers) for task in core.tasks.table))


def kept(server: Server) -> tuple[int, int]:
    """Return the numbers of objects and leases."""
    info = server.info()
    return info["objects"], info["leases"]


def test_calls_beyond_max_tasks_are_refused(
    shared: Provider, serve: Serve, connect: Connect, go: threading.Event, begun: threading.Event
) -> None:
    """Like a submit; other calls are not."""
    serve(max_tasks=1)
    client = connect()
    task_id = client.submit("held", 1)
    assert begun.wait(10)
    for refused in (lambda: client.call("task", 2), lambda: client.submit("managed", 2)):
        with pytest.raises(ServerBusy, match="1 tasks are pending or running"):
            refused()
    with pytest.raises(ValueError, match="a negative number"):
        client.call("fails")
    go.set()
    client.wait_for_task(task_id, 10)
    assert client.call("task", 2).tolist() == [2] * 4


def test_tasks_do_not_block_calls(
    shared: Provider, serve: Serve, connect: Connect, go: threading.Event, begun: threading.Event
) -> None:
    """With a single worker and several long tasks, a call is answered at once, in this and another process."""
    serve(max_workers=1)
    client = connect()
    ids = [client.submit("held", number) for number in range(3)]
    assert begun.wait(10)
    for call in (client.call, shared.call):
        with pytest.raises(ValueError, match="a negative number"):
            call("fails")
    assert [info.status.value for info in client.list_tasks()] == ["running", "pending", "pending"]
    go.set()
    for task_id in ids:
        client.wait_for_task(task_id, 10)


def test_abandoned_calls_of_task_endpoints_are_dropped(
    server: Server, client: Client, go: threading.Event, begun: threading.Event
) -> None:
    """If they have not begun; running ones continue, and are not kept."""
    with Raw(server.socket_path) as raw:
        for number in (1, 2):
            raw.say(m.Call("task", [number]), number)
        assert begun.wait(10)
        eventually(lambda: watchers_of(server) == 2)
    eventually(lambda: changes(client.list_tasks()) == [("running", False), ("cancelled", True)])
    go.set()
    eventually(lambda: len(client.list_tasks("completed")) == 1)
    assert kept(server) == (0, 0)


def test_killed_submitters_do_not_stop_their_task(
    server: Server, client: Client, program: Program, go: threading.Event, begun: threading.Event
) -> None:
    """It continues and keeps its result, which any process with the id can fetch."""
    submitter = program(f"{CLIENT}\nprint('task', client.submit('managed', 7))\nsignal.pause()")
    task_id = submitter.expect("task").split()[1]
    assert begun.wait(10)
    submitter.kill()
    eventually(lambda: server.info()["sessions"] == 0, seconds=1)
    assert client.get_task_status(task_id).status is TaskStatus.RUNNING
    go.set()
    eventually(lambda: client.get_task_status(task_id).status.finished)
    assert kept(server) == (1, 1)
    fetcher = program(
        f"""
        from shared_rpc import Client

        with Client(device="cpu") as client, client.get_task_result("{task_id}") as handle:
            print("fetched", handle.value.tolist(), handle.get_object_info()["leases"])
        """
    )
    assert fetcher.expect("fetched") == "fetched [7.0, 7.0, 7.0, 7.0] 1"
    assert fetcher.close() == (0, "")
    eventually(lambda: kept(server) == (0, 0))


def test_killed_waiters_do_not_stop_their_task(
    server: Server, client: Client, program: Program, go: threading.Event, begun: threading.Event
) -> None:
    """It continues for others; one that has not begun is not dropped."""
    ids = [client.submit("task", 1), client.submit("task", 2)]
    assert begun.wait(10)
    waiter = program(f"{CLIENT}\nclient._run(fetch_task('{ids[1]}', print, False))")
    waiter.expect("pending")
    assert watchers_of(server) == 1
    waiter.kill()
    eventually(lambda: watchers_of(server) == 0, seconds=1)
    assert [info.status.value for info in client.list_tasks()] == ["running", "pending"]
    go.set()
    assert [client.wait_for_task(task_id, 10).tolist() for task_id in ids] == [[1] * 4, [2] * 4]


def test_many_processes_can_wait_for_one_task(
    server: Server, client: Client, go: threading.Event, begun: threading.Event
) -> None:
    """Without a thread in the server; all get the result, and everything is released."""
    task_id = client.submit("managed", 7)
    assert begun.wait(10)
    threads = len(os.listdir("/proc/self/task"))
    with ExitStack() as stack:
        raws = [stack.enter_context(Raw(server.socket_path)) for _ in range(CROWD)]
        for raw in raws:
            raw.say(m.WaitTask(task_id, events=True), 2)
        eventually(lambda: watchers_of(server) == CROWD)
        assert len(os.listdir("/proc/self/task")) <= threads
        client.ping()
        go.set()
        for raw in raws:
            running, completed, result = (raw.hear(2) for _ in range(3))
            assert (running.info.status.value, completed.info.status.value) == ("running", "completed")
            assert isinstance(result, m.Result) and result.managed
            assert result.object_id == completed.info.object_id
        assert kept(server) == (1, CROWD)
    eventually(lambda: (kept(server), server.info()["sessions"], watchers_of(server)) == ((0, 0), 1, 0))


def test_slow_readers_miss_progress_only(provider: Provider, serve: Serve, connect: Connect, begun: threading.Event) -> None:
    """Others get every report; a slow one gets the end, and its unread messages are bounded."""
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
        eventually(lambda: watchers_of(server) == waits)
        done: list[float] = []

        def callback(info: TaskInfo) -> None:
            begun.set()
            if info.progress is not None and info.status is TaskStatus.RUNNING:
                done.append(info.progress.done)
                heard.release()

        assert client.wait_for_task(task_id, 20, callback) == 1
        assert done == list(range(count))
        kinds = Counter[int]()
        while kinds[NUMBERS[m.Result]] < waits:
            with closing(silent.hear_frame()) as frame:
                kinds[frame.kind] += 1
        # About a megabyte in the server, and what the kernel takes: half a kilobyte for each.
        assert waits < kinds[NUMBERS[m.TaskUpdate]] < count * waits // 2


def test_watched_tasks_keep_their_result(server: Server, client: Client, go: threading.Event) -> None:
    """Every change is reported; this process has no lease, and others can fetch the result. A failure is not raised."""
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
    assert client.watch_task(client.submit("fails"), 10).error_type == "ValueError"
