"""A crash of a worker is an event: its runs fail, everything else stays, and the next one takes over."""

from __future__ import annotations

import concurrent.futures
import os
import re
import signal
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from shared_rpc import Client, errors
from shared_rpc.settings import ServeOptions
from tests.kit.brokers import BrokerApp, another_worker, begun, fds_of, is_running, worker_pids
from tests.kit.processes import Child, eventually, sigstop


@pytest.fixture
def app(broker_app: BrokerApp) -> BrokerApp:
    """An app that is not served yet."""
    return broker_app


@pytest.mark.parametrize(("how", "name", "code"), [("segfault", "SIGSEGV", None), ("kill", "SIGKILL", None), ("exit", None, 3)])
def test_a_crash_is_told_to_its_caller(app: BrokerApp, how: str, name: str | None, code: int | None) -> None:
    """With the signal or the exit code, and what the worker said last; the next call finds another worker."""
    app.start()
    client = app.connect()
    first = worker_pids(client)[0]
    with pytest.raises(errors.WorkerCrashed, match=rf"the worker \(pid {first}\)") as crash:
        client.call("end", how)
    assert (crash.value.signal, crash.value.exit_code) == (name, code)
    assert "its last words" in crash.value.stderr
    assert client.call("pid").item() == another_worker(client, first)


@pytest.mark.parametrize("short", [True, False])
def test_a_kill_for_want_of_memory(app: BrokerApp, children: list[Child], tmp_path: Path, short: bool) -> None:
    """The kernel says SIGKILL and counts: the error says what that means, and nothing of it where there was memory."""
    counts = tmp_path / "vmstat"
    counts.write_text("nr_free_pages 5\noom_kill 7\n")
    code = """
        import pathlib, runpy, sys
        from shared_rpc.broker import worker
        worker._COUNTS = pathlib.Path(sys.argv.pop(1))
        runpy.run_module("shared_rpc.broker", run_name="__main__")
    """
    broker = Child("-c", textwrap.dedent(code), str(counts), str(app.file), has_workers=True)
    children.append(broker)
    broker.expect("serving")
    client = app.connect()
    client.call("model")
    counts.write_text(f"nr_free_pages 5\noom_kill {9 if short else 7}\n")
    with pytest.raises(errors.WorkerCrashed) as crash:
        client.call("end", "kill")
    assert ("for lack of memory: 2 OOM kill(s)" in str(crash.value)) is short
    assert crash.value.signal == "SIGKILL"


def test_what_was_made_stays(app: BrokerApp) -> None:
    """Objects, leases, finished tasks and memory in use: attaching goes on, as if nothing had been."""
    app.start()
    client = app.connect()
    model, handle = client.call("model"), client.call("held")
    task = client.submit("model", 9)
    assert client.wait_for_task(task).weight[0, 0] == 9
    with pytest.raises(errors.WorkerCrashed):
        client.call("end", "kill")
    # Before there is another worker.
    other = app.connect()
    attached = other.call("model")
    with torch.no_grad():
        attached.weight[0, 0] = 5
    assert model.weight[0, 0] == 5
    assert (handle.value.tolist(), handle.is_stale()) == ([7.0] * 4, False)
    assert client.get_server_info()["leases"] == 1
    assert client.get_task_status(task).status == "completed"
    assert other.get_task_result(task).weight[0, 0] == 9


def test_attaching_goes_on_while_workers_die(app: BrokerApp) -> None:
    """Three kills, and attaches all the time from two connections: none fails."""
    app.start()
    client, other = app.connect(), app.connect()
    client.call("model")
    stop, failures, counts = threading.Event(), [], []

    def attach() -> None:
        with Client(app.base_path, device="cpu", timeout=10) as mine:
            count = 0
            while not stop.is_set():
                try:
                    assert mine.call("model").weight[0, 0] == 4
                    assert mine.get_server_info()["objects"] == 1
                except Exception as error:
                    failures.append(error)
                count += 1
            counts.append(count)

    attaching = [threading.Thread(target=attach) for _ in range(2)]
    for thread in attaching:
        thread.start()
    for _ in range(3):
        earlier = worker_pids(other)[0]
        os.kill(earlier, signal.SIGKILL)
        another_worker(other, earlier)
    stop.set()
    for thread in attaching:
        thread.join()
    assert failures == []
    assert min(counts) > 20


def test_all_who_wait_are_told(app: BrokerApp, threads: concurrent.futures.ThreadPoolExecutor, tmp_path: Path) -> None:
    """Three endpoints that ran, the followers of one of them, and tasks: each fails, with the same reason."""
    app.start("--threads", "8")
    client = app.connect()
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


def test_what_had_not_begun_is_tried_again(
    app: BrokerApp, threads: concurrent.futures.ThreadPoolExecutor, tmp_path: Path
) -> None:
    """The only thread of the worker was busy: the calls behind it, with memory in their arguments, do not notice the crash."""
    app.start("--threads", "1")
    client = app.connect()
    pid = worker_pids(client)[0]
    running = threads.submit(client.call, "slow", str(tmp_path / "go"))
    eventually(begun(tmp_path / "go"))
    waiting = [threads.submit(client.call, "echo", torch.full((5000,), float(number))) for number in range(4)]
    eventually(lambda: client.get_server_info()["running"] == 5)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(errors.WorkerCrashed):
        running.result(20)
    for number, call in enumerate(waiting):
        assert torch.equal(call.result(20), torch.full((5000,), float(number)))


def test_a_call_that_kills_every_worker_is_given_up(
    app: BrokerApp, threads: concurrent.futures.ThreadPoolExecutor, tmp_path: Path
) -> None:
    """A call whose second worker ends before it begins fails: no call goes round for ever."""
    app.start("--threads", "1")
    client = app.connect()
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


def test_a_build_that_is_stuck(app: BrokerApp, tmp_path: Path) -> None:
    """``--build-timeout`` kills the worker, and says so; short calls are not touched by it."""
    app.start("--build-timeout", "0.5")
    client = app.connect()
    client.call("echo", torch.ones(1))
    with pytest.raises(errors.WorkerCrashed, match=re.escape("slow() took longer than the build timeout of 0.5 s")):
        client.call("slow", str(tmp_path / "never"))
    assert client.call("echo", torch.ones(2)).tolist() == [1, 1]


def test_a_loop_of_crashes_fails_fast(app: BrokerApp, tmp_path: Path) -> None:
    """An app that cannot be loaded any more: builds are refused with its traceback, attaches go on, a reload mends it."""
    broken = tmp_path / "broken"
    app.write(f"""
        if os.path.exists({str(broken)!r}):
            raise LookupError("no such checkpoint")
    """)
    app.start()
    client = app.connect()
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


#: Puts a crash into the worker's own code, at a place where no endpoint is.
AT = """
    from shared_rpc.{module} import {name} as target

    plain = target.{method}

    def {method}(self, *args, **kwargs):
        if os.path.exists({trigger!r}):
            {crash}
        return plain(self, *args, **kwargs)

    target.{method} = {method}
"""


def test_killed_between_publish_and_reply(app: BrokerApp, tmp_path: Path) -> None:
    """The memory was made, and nobody was told of it: it goes with the worker, and the next build makes it anew."""
    trigger = tmp_path / "now"
    app.write(
        AT.format(
            module="worker.host",
            name="WorkerHost",
            method="ended",
            trigger=str(trigger),
            crash="os.kill(os.getpid(), 9)",
        )
    )
    broker = app.start("--no-preload")  # a zygote comes late, and has descriptors
    client = app.connect()
    client.call("model")
    client.ping()  # what the last answer left open for a moment is closed
    fds = fds_of(broker.pid)
    trigger.touch()
    with pytest.raises(errors.WorkerCrashed, match="SIGKILL"):
        client.call("model", 9)
    trigger.unlink()
    another_worker(client, 0)
    assert client.get_server_info()["objects"] == 1
    eventually(lambda: fds_of(broker.pid) == fds, what="the broker's descriptors are those it had")
    assert client.call("model", 9).weight[0, 0] == 9


def test_killed_with_half_of_the_segments_sent(app: BrokerApp, tmp_path: Path) -> None:
    """A result of 300 segments takes two messages: those that came with the first one are closed."""
    trigger = tmp_path / "now"
    app.write(
        """
        @provider.share
        def one(number):
            return torch.full((8,), float(number))

        @provider.share
        def many():
            return [one(number) for number in range(300)]
        """,
        AT.format(
            module="protocol.socket",
            name="FrameSocket",
            method="flush",
            trigger=str(trigger),
            crash="len(self._outbox) > 1 and self._outbox[0][1] and (send_one(self), os.kill(os.getpid(), 9))",
        ),
        """
        import array, socket

        def send_one(self):
            data, fds = self._outbox[0]
            self.sock.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))])
        """,
    )
    broker = app.start("--no-preload")  # a zygote comes late, and has descriptors
    client = app.connect()
    for number in range(300):
        client.call("one", number)
    client.ping()  # what the last answer left open for a moment is closed
    fds = fds_of(broker.pid)
    trigger.touch()
    with pytest.raises(errors.WorkerCrashed, match="SIGKILL"):
        client.call("many")
    trigger.unlink()
    another_worker(client, 0)
    assert client.get_server_info()["objects"] == 300
    eventually(lambda: fds_of(broker.pid) <= fds, what="the broker's descriptors are those it had")
    assert [tensor[0].item() for tensor in client.call("many")] == list(range(300))


def test_chunks_come_back_from_a_worker_that_ended(app: BrokerApp) -> None:
    """What a client lent for arguments is its own again, and what it has of a dead worker's pool stays readable."""
    app.start()
    client = app.connect()
    x = torch.arange(6000.0)
    kept = client.call("echo", x)
    for _ in range(2):
        with pytest.raises(errors.WorkerCrashed):
            client.call("end", "kill")
        assert torch.equal(client.call("echo", kept), x)
    assert torch.equal(kept, x)
    del kept
    client.call("echo", x)
    eventually(lambda: client.get_server_info()["pools"]["chunks"] <= 1)


def test_a_flood_on_standard_error(app: BrokerApp) -> None:
    """Sixty megabytes, which nobody reads: the endpoint ends, the broker does not grow, and others are answered."""
    app.write("""
        @provider.share(cache=False)
        def shout():
            for _ in range(1000):
                sys.stderr.write("x" * 60_000 + "\\n")
            return torch.ones(1)
    """)
    broker = app.start()
    client = app.connect()
    client.call("echo", torch.ones(1))
    before = resident(broker.pid)
    assert client.call("shout").item() == 1
    assert resident(broker.pid) - before < 8 << 20


def resident(pid: int) -> int:
    """Bytes of memory that a process has."""
    with open(f"/proc/{pid}/statm", encoding="ascii") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_a_child_of_the_worker_does_not_hide_its_end(app: BrokerApp) -> None:
    """A data loader's process has copies of the worker's descriptors; the crash is noticed all the same."""
    app.write("""
        @provider.share(cache=False)
        def fork(path):
            child = os.fork()
            if child == 0:
                while not os.path.exists(path):
                    time.sleep(0.01)
                os._exit(0)
            os.kill(os.getpid(), 9)
    """)
    app.start()
    client = app.connect()
    stop = app.file.parent / "stop"
    try:
        with pytest.raises(errors.WorkerCrashed, match="SIGKILL"):
            client.call("fork", str(stop))
        assert client.call("model").weight[0, 0] == 4
    finally:
        stop.touch()


def test_the_broker_is_killed(app: BrokerApp) -> None:
    """No worker outlives it, not even one that is stuck. Tensors stay; the next broker is found, and old handles are stale."""
    broker = app.start()
    client = app.connect()
    model, handle, worker = client.call("model"), client.call("held"), worker_pids(client)[0]
    sigstop(worker)
    broker.kill()
    eventually(lambda: not is_running(worker), what="the worker ends with its broker")
    assert model.weight[0, 0] == 4
    with pytest.raises((errors.ConnectionClosed, errors.ConnectError)):
        app.connect(connect_timeout=0).ping()
    app.start()
    assert client.call("model", 9).weight[0, 0] == 9
    with pytest.raises(errors.StaleHandleError) as stale:
        client.ensure_handle_live(handle)
    assert stale.value.reason == "server_changed"
    assert handle.value.tolist() == [7.0] * 4


def test_broker_and_worker_are_killed_together(app: BrokerApp) -> None:
    """Nothing is left that a new one would trip over."""
    broker = app.start()
    client = app.connect()
    model, worker = client.call("model"), worker_pids(client)[0]
    os.kill(worker, signal.SIGKILL)
    broker.kill()
    assert model.weight[0, 0] == 4
    app.start()
    assert app.connect().call("model").weight[0, 0] == 4


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_broker_that_is_asked_to_stop(
    app: BrokerApp, threads: concurrent.futures.ThreadPoolExecutor, tmp_path: Path, number: int
) -> None:
    """Those who wait are told, the workers end, one that is busy too, and the socket goes: in little more than a second."""
    broker = app.start()
    client = app.connect()
    worker = worker_pids(client)[0]
    running = threads.submit(client.call, "slow", str(tmp_path / "never"))
    eventually(begun(tmp_path / "never"))
    began = time.monotonic()
    broker.process.send_signal(number)
    code, stderr = broker.close()
    assert (code, stderr) == (0, "")
    assert time.monotonic() - began < 10
    with pytest.raises(errors.ConnectionClosed):
        running.result(20)
    assert not is_running(worker)
    assert not os.path.exists(f"{app.base_path}-cpu.sock")


@pytest.fixture
def counted(app: BrokerApp) -> Callable[[], tuple[int, int]]:
    """Descriptors of the broker and of its worker."""
    broker = app.start("--no-preload")  # a zygote comes late, and has descriptors
    client = app.connect()
    return lambda: (fds_of(broker.pid), fds_of(worker_pids(client)[0]))


def test_a_session_that_ends_leaves_nothing(app: BrokerApp, counted: Callable[[], tuple[int, int]]) -> None:
    """Arenas of its own and of its results, on both sides: as before its first call."""
    watcher = app.connect()
    with Client(app.base_path, device="cpu") as warm:
        warm.call("echo", torch.ones(1000))
    counted()  # which has a client too
    eventually(lambda: watcher.get_server_info()["sessions"] == 2)
    before = counted()
    for _ in range(5):
        with Client(app.base_path, device="cpu") as client:
            kept = [client.call("echo", torch.ones(1000)) for _ in range(3)]
            assert kept[0].sum() == 1000
    eventually(lambda: all(now <= then for now, then in zip(counted(), before, strict=True)), what="descriptors go back")


def test_no_process_can_be_started(app: BrokerApp, tmp_path: Path, children: list[Child]) -> None:
    """The broker goes on with what it has, says why there is no worker, and has one as soon as that can be."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o700)
    code = "import runpy, sys; sys.executable = sys.argv.pop(1); runpy.run_module('shared_rpc.broker', run_name='__main__')"
    words = ["-c", code, str(python), str(app.file), *ServeOptions(preload=False).words]  # a fork needs no interpreter's file
    broker = Child(*words, cwd=tmp_path, environ={"SHARED_TENSOR_ROLE": "server"})
    children.append(broker)
    broker.expect("serving")
    client = app.connect()
    client.call("model")
    python.rename(tmp_path / "elsewhere")
    with pytest.raises(errors.WorkerCrashed, match="SIGKILL"):
        client.call("end", "kill")
    broker.expect_error("cannot start a worker")
    assert client.call("model").weight[0, 0] == 4
    with pytest.raises(errors.WorkerCrashed, match="cannot start a worker"):
        client.reload()
    (tmp_path / "elsewhere").rename(python)
    assert client.call("model", 9).weight[0, 0] == 9


@pytest.mark.parametrize("how", ["killed", "fails"])
def test_a_worker_that_ends_while_it_loads_beside_one_that_serves(
    app: BrokerApp, tmp_path: Path, children: list[Child], how: str
) -> None:
    """It is one that crashed, and is started again: the broker keeps what it holds."""
    app.write(f"""
        try:
            os.close(os.open({str(tmp_path / "first")!r}, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            if not os.path.exists({str(tmp_path / "again")!r}):
                wait({str(tmp_path / "go")!r})
                open({str(tmp_path / "again")!r}, "w").close()
                raise RuntimeError("the second one does not load")
    """)
    broker = Child("-m", "shared_rpc.cli", "serve", str(app.file), "--workers", "2", cwd=tmp_path)
    children.append(broker)
    eventually(begun(tmp_path / "go"), 40.0)
    client = app.connect(connect_timeout=40.0)
    model = client.call("model")
    eventually(lambda: "ready" in [worker["state"] for worker in client.get_server_info()["workers"]])
    (second,) = (int(path.name.rpartition("-")[2]) for path in tmp_path.glob("go-begun-*"))
    if how == "killed":
        (tmp_path / "again").touch()
        os.kill(second, signal.SIGKILL)
    else:
        (tmp_path / "go").touch()
    broker.expect("serving")
    eventually(lambda: [worker["state"] for worker in client.get_server_info()["workers"]] == ["ready"] * 2, 40.0)
    with torch.no_grad():
        client.call("model").weight[0, 0] = 5
    assert model.weight[0, 0] == 5
    assert sum(worker["restarts"] for worker in client.get_server_info()["workers"]) == 1


def test_a_broker_that_is_asked_to_stop_while_it_loads(app: BrokerApp, tmp_path: Path, children: list[Child]) -> None:
    """It does not wait for the app, which may take minutes, or for ever."""
    app.write(f"wait({str(tmp_path / 'never')!r})")
    broker = Child("-m", "shared_rpc.cli", "serve", str(app.file), cwd=tmp_path)
    children.append(broker)
    eventually(begun(tmp_path / "never"), what="the app is being loaded")
    began = time.monotonic()
    broker.process.send_signal(signal.SIGINT)
    assert broker.close() == (0, "")
    assert time.monotonic() - began < 10


def test_a_worker_that_is_replaced_ends_as_a_process_does(app: BrokerApp, tmp_path: Path) -> None:
    """What the app has registered for the end is done."""
    app.write(f"import atexit; atexit.register(lambda: open({str(tmp_path / 'bye')!r}, 'w').close())")
    app.start()
    app.connect().reload()
    eventually((tmp_path / "bye").exists)


def test_nobody_reads_what_the_broker_logs(app: BrokerApp) -> None:
    """Its standard error is full, and workers end: it does not wait for a reader either."""
    app.write("""
        @provider.share(cache=False)
        def shout():
            for _ in range(20):
                sys.stderr.write("x" * 60_000 + "\\n")
            return torch.ones(1)
    """)
    app.start()
    client = app.connect(timeout=8)
    client.call("shout")
    for _ in range(4):
        with pytest.raises(errors.WorkerCrashed):
            client.call("end", "kill")
    assert client.get_server_info()["endpoints"]
