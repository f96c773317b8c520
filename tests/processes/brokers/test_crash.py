"""Crashes of workers and of brokers: a worker's runs fail, everything else stays, and the next worker takes over."""

from __future__ import annotations

import concurrent.futures
import os
import signal
import time
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest
import torch

from shared_rpc import AsyncClient, Client, errors
from tests.kit.brokers import BrokerApp, another_worker, begun, fds_of, is_running, private_memory, worker_pids
from tests.kit.deep import deep
from tests.kit.processes import eventually, sigstop


def crash(client: Client) -> None:
    """Kill the worker in a call."""
    with pytest.raises(errors.WorkerCrashed):
        client.call("end", "kill")


# Errors that callers receive.


@pytest.mark.parametrize(
    ("how", "name", "code"), [("segfault", "SIGSEGV", None), ("exit", None, 3), *deep(("kill", "SIGKILL", None))]
)
def test_a_crash_is_described(app: BrokerApp, how: str, name: str | None, code: int | None) -> None:
    """With the signal or the exit code, and the last output; the next call finds another worker."""
    client = app.serve()
    first = worker_pids(client)[0]
    with pytest.raises(errors.WorkerCrashed, match=rf"the worker \(pid {first}\)") as crash:
        client.call("end", how)
    assert (crash.value.signal, crash.value.exit_code) == (name, code)
    assert "its last words" in crash.value.stderr
    assert client.call("pid").item() == another_worker(client, first)


def test_objects_survive_their_worker(app: BrokerApp) -> None:
    """As do leases, finished tasks and memory in use; clients attach before there is another worker."""
    client = app.serve()
    model, handle = client.call("model"), client.call("held")
    task = client.submit("model", 9)
    client.wait_for_task(task)
    crash(client)
    other = app.connect()
    with torch.no_grad():
        other.call("model").weight[0, 0] = 5
    assert model.weight[0, 0] == 5
    assert (handle.value.tolist(), handle.is_stale()) == ([7.0] * 4, False)
    assert other.get_task_result(task).weight[0, 0] == 9


def test_all_callers_get_the_crash(app: BrokerApp, threads: concurrent.futures.ThreadPoolExecutor, tmp_path: Path) -> None:
    """Of three runs, the followers of one of them, and tasks."""
    client = app.serve(options={"threads": 8})
    pid = worker_pids(client)[0]
    calls = [threads.submit(client.call, "slow", str(tmp_path / "go"), key) for key in (0, 0, 0, 1, 2)]
    task = client.submit("slow", str(tmp_path / "go"), key=3)
    eventually(lambda: client.get_server_info()["builds"] == 4)
    os.kill(pid, signal.SIGKILL)
    for call in calls:
        with pytest.raises(errors.WorkerCrashed, match="SIGKILL"):
            call.result(20)
    with pytest.raises(errors.WorkerCrashed, match="SIGKILL"):
        client.wait_for_task(task, 20)
    assert client.get_task_status(task).error_type == "WorkerCrashed"
    (tmp_path / "go").touch()
    assert client.call("slow", str(tmp_path / "go"), 0).shape == (1,)


def test_runs_that_have_not_begun_are_retried(
    app: BrokerApp, threads: concurrent.futures.ThreadPoolExecutor, tmp_path: Path
) -> None:
    """Calls behind the only thread of the worker, with memory in their arguments, do not notice the crash."""
    client = app.serve(options={"threads": 1})
    pid = worker_pids(client)[0]
    running = threads.submit(client.call, "slow", str(tmp_path / "go"))
    eventually(begun(tmp_path / "go"))
    waiting = [threads.submit(client.call, "echo", torch.full((5000,), float(number))) for number in range(4)]
    eventually(lambda: client.get_server_info()["running"] == 5)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(errors.WorkerCrashed):
        running.result(60)
    for number, call in enumerate(waiting):
        assert torch.equal(call.result(60), torch.full((5000,), float(number)))


def test_runs_are_retried_once(app: BrokerApp, threads: concurrent.futures.ThreadPoolExecutor, tmp_path: Path) -> None:
    """A run fails if its second worker ends before it begins: it may be the cause."""
    client = app.serve(options={"threads": 1})
    blockers, first = [], worker_pids(client)[0]
    blockers.append(threads.submit(client.call, "slow", str(tmp_path / "one")))
    eventually(begun(tmp_path / "one"))
    blockers.append(threads.submit(client.call, "slow", str(tmp_path / "two")))
    eventually(lambda: client.get_server_info()["running"] == 2)
    waiting = threads.submit(client.call, "echo", torch.ones(1))
    eventually(lambda: client.get_server_info()["running"] == 3)
    os.kill(first, signal.SIGKILL)
    eventually(begun(tmp_path / "two"))
    os.kill(another_worker(client, first), signal.SIGKILL)
    for call in (*blockers, waiting):
        with pytest.raises(errors.WorkerCrashed):
            call.result(20)


def test_build_timeouts_kill_the_worker(app: BrokerApp, tmp_path: Path) -> None:
    """``--build-timeout`` is named in the error; short calls are unaffected."""
    client = app.serve(options={"build_timeout": 0.5})
    client.call("echo", torch.ones(1))
    with pytest.raises(errors.WorkerCrashed, match="build timeout"):
        client.call("slow", str(tmp_path / "never"))
    assert client.call("echo", torch.ones(2)).tolist() == [1, 1]


def test_crash_loops_fail_fast(app: BrokerApp, tmp_path: Path) -> None:
    """If the app no longer loads, builds are refused with its traceback; clients attach, and a reload ends the loop."""
    broken = tmp_path / "broken"
    client = app.serve(f"""
        if os.path.exists({str(broken)!r}):
            raise LookupError("no such checkpoint")
    """)
    client.call("model")
    broken.touch()
    os.kill(worker_pids(client)[0], signal.SIGKILL)
    with pytest.raises(errors.WorkerCrashed, match="5 workers ended within 30 s") as crash:
        client.call("model", 9)
    assert "LookupError: no such checkpoint" in str(crash.value)
    began = time.monotonic()
    with pytest.raises(errors.WorkerCrashed):
        client.call("model", 9)
    assert app.connect().call("model").weight[0, 0] == 4
    assert time.monotonic() - began < 10
    broken.unlink()
    client.reload()
    assert client.call("model", 9).weight[0, 0] == 9


def test_memory_of_a_worker_killed_before_the_reply_is_freed(app: BrokerApp, tmp_path: Path) -> None:
    """And the next build allocates it again."""
    trigger = tmp_path / "now"
    app.write(f"""
        from shared_rpc.worker.host import WorkerHost
        ended = WorkerHost.ended
        WorkerHost.ended = lambda *args: os.kill(os.getpid(), 9) if os.path.exists({str(trigger)!r}) else ended(*args)
    """)
    broker = app.start(preload=False)  # a zygote is started late, and has descriptors
    client = app.connect()
    client.call("model")
    client.ping()  # descriptors that the last answer left open for a moment are closed
    fds = fds_of(broker.pid)
    trigger.touch()
    with pytest.raises(errors.WorkerCrashed, match="SIGKILL"):
        client.call("model", 9)
    trigger.unlink()
    another_worker(client, 0)
    assert client.get_server_info()["objects"] == 1
    eventually(lambda: fds_of(broker.pid) == fds, what="the broker's descriptors are those it had")
    assert client.call("model", 9).weight[0, 0] == 9


def test_chunks_survive_their_worker(app: BrokerApp) -> None:
    """Those of arguments are free again; results in the pool of a dead worker stay readable."""
    client = app.serve()
    x = torch.arange(6000.0)
    kept = client.call("echo", x)
    for _ in range(2):
        crash(client)
        assert torch.equal(client.call("echo", kept), x)
    assert torch.equal(kept, x)
    del kept
    client.call("echo", x)
    eventually(lambda: client.get_server_info()["pools"]["chunks"] <= 1)


def test_a_flood_on_standard_error_blocks_nothing(app: BrokerApp) -> None:
    """Neither the endpoint nor the broker, whose own output is not read; and it does not fill the broker's memory."""
    app.write("""
        @provider.share(cache=False)
        def shout():
            for _ in range(1000):
                sys.stderr.write("x" * 60_000 + "\\n")
            return torch.ones(1)
    """)
    broker = app.start()
    client = app.connect(timeout=8)
    client.call("plain")
    before = private_memory(broker.pid)
    assert client.call("shout").item() == 1
    assert private_memory(broker.pid) - before < 8 << 20
    crash(client)
    assert client.call("plain").item() == 0


def test_a_child_of_the_worker_does_not_hide_its_end(app: BrokerApp) -> None:
    """It has copies of the worker's descriptors, like the processes of a data loader."""
    client = app.serve("""
        @provider.share(cache=False)
        def fork(path):
            child = os.fork()
            if child == 0:
                while not os.path.exists(path):
                    time.sleep(0.01)
                os._exit(0)
            os.kill(os.getpid(), 9)
    """)
    stop = app.file.parent / "stop"
    try:
        with pytest.raises(errors.WorkerCrashed, match="SIGKILL"):
            client.call("fork", str(stop))
        assert client.call("model").weight[0, 0] == 4
    finally:
        stop.touch()


# Brokers.


def test_workers_end_with_a_killed_broker(app: BrokerApp) -> None:
    """Even a stopped one. Tensors stay, and old handles are stale at the next broker."""
    broker = app.start()
    client = app.connect()
    handle, worker = client.call("held"), worker_pids(client)[0]
    sigstop(worker)
    broker.kill()
    eventually(lambda: not is_running(worker), what="the worker ends with its broker")
    app.start()
    with pytest.raises(errors.StaleHandleError) as stale:
        client.ensure_handle_live(handle)
    assert stale.value.reason == "server_changed"
    assert handle.value.tolist() == [7.0] * 4


@pytest.mark.parametrize("number", [signal.SIGTERM, *deep(signal.SIGINT)])
def test_stopping_a_broker_ends_everything(
    app: BrokerApp, threads: concurrent.futures.ThreadPoolExecutor, tmp_path: Path, number: int
) -> None:
    """Callers get an error, busy workers end, and the socket is removed, in little time."""
    broker = app.start()
    client = app.connect()
    worker = worker_pids(client)[0]
    running = threads.submit(client.call, "slow", str(tmp_path / "never"))
    eventually(begun(tmp_path / "never"))
    began = time.monotonic()
    code, stderr = broker.close(number)
    assert (code, stderr) == (0, "")
    assert time.monotonic() - began < 10
    with pytest.raises(errors.ConnectionClosed):
        running.result(20)
    assert not is_running(worker)
    assert not os.path.exists(f"{app.base_path}-cpu.sock")


def test_waiting_clients_see_no_gap(app: BrokerApp, threads: concurrent.futures.ThreadPoolExecutor) -> None:
    """With a ``connect_timeout``, a call that begins without a broker is answered by the next one."""
    broker = app.start()
    client = app.connect(connect_timeout=20)
    client.ping()
    broker.kill()
    waiting = [threads.submit(client.call, "model", 9), threads.submit(anyio.run, _call_async, app.base_path, "model", 9)]
    app.start()
    for call in waiting:
        assert call.result(20).weight[0, 0] == 9


async def _call_async(base_path: str, *call: Any) -> Any:
    async with AsyncClient(base_path, device="cpu", connect_timeout=20) as client:
        return await client.call(*call)


def test_unsent_requests_go_to_the_next_broker(app: BrokerApp) -> None:
    """The broker ended before a byte was written: any request is repeated, including memory in arguments."""
    broker = app.start()
    client = app.connect()
    x = torch.arange(5000.0)
    client.call("echo", x)
    for ask in (lambda: client.call("echo", x), lambda: client.call("model"), lambda: client.submit("model", 8)):
        broker.kill()
        broker = app.start()
        ask()
    assert torch.equal(client.call("echo", x), x)


def test_sent_calls_are_not_repeated(app: BrokerApp, threads: concurrent.futures.ThreadPoolExecutor, tmp_path: Path) -> None:
    """It may have been executed, so its caller gets an error."""
    broker = app.start()
    client = app.connect(connect_timeout=20)
    calls = [
        threads.submit(client.call, "slow", str(tmp_path / "go")),
        threads.submit(anyio.run, _call_async, app.base_path, "slow", str(tmp_path / "go")),
    ]
    eventually(begun(tmp_path / "go"))
    eventually(lambda: client.get_server_info()["joined"] == 1)
    broker.kill()
    app.start()
    for call in calls:
        with pytest.raises(errors.ConnectionClosed):
            call.result(20)
    assert client.get_server_info()["calls"] == 0


def test_sent_queries_are_repeated(app: BrokerApp, threads: concurrent.futures.ThreadPoolExecutor) -> None:
    """They change nothing, so the next broker answers them."""
    broker = app.start()
    client = app.connect(connect_timeout=20)
    client.ping()
    assert client._link is not None
    socket = client._link._socket
    before = socket.written
    sigstop(broker.pid)
    asked = threads.submit(client.get_server_info)
    eventually(lambda: socket.written > before)
    broker.kill()
    app.start()
    assert asked.result(20)["objects"] == 0
