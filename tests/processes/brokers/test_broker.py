"""A server whose endpoints run in worker processes behaves as one that runs them in its own process."""

from __future__ import annotations

import msgspec
import pytest
import torch

from shared_rpc import TaskInfo, errors
from shared_rpc.protocol import messages as m
from tests.kit.brokers import BrokerApp, fds_of, private_memory, worker_pids
from tests.kit.processes import eventually
from tests.kit.raw import Raw


def test_a_broker_loads_neither_torch_nor_cuda(app: BrokerApp) -> None:
    """With objects, a buffer, a task and a pooled result it has loaded no library of either; its memory is that of Python."""
    broker = app.start(fresh=True)
    client = app.connect()
    for size in range(1, 101):
        client.call("model", size)
    kept = client.call("model"), client.call("echo", torch.ones(1000)), client.create_buffer(4096)
    client.wait_for_task(client.submit("model", 9))
    with open(f"/proc/{broker.pid}/maps", encoding="utf-8") as maps:
        libraries = maps.read()
    for name in ("libtorch", "libcuda", "libnvidia", "numpy", "/memfd:"):
        assert name not in libraries
    assert private_memory(broker.pid) < 40 << 20
    assert len(kept) == 3


def test_endpoints_lend_their_thread_while_they_wait(app: BrokerApp) -> None:
    """For calls and for tasks."""
    client = app.serve(
        """
        @provider.share(cache=False)
        def deep(n):
            return torch.tensor(0) if n == 0 else deep(n - 1) + 1

        @provider.share(execution="task", cache=False)
        def inner():
            return torch.ones(1)

        @provider.share(execution="task", cache=False)
        def outer():
            return provider.wait_for_task(inner.submit()) + 1
    """,
        options={"threads": 1},
    )
    assert (client.call("deep", 5), client.call("outer")) == (5, 2)


def test_endpoints_that_would_wait_for_themselves_are_refused(app: BrokerApp) -> None:
    """Also on the worker's loop."""
    client = app.serve("""
        @provider.share
        def itself():
            return itself()

        @provider.share(cache=False)
        async def on_the_loop():
            return model(9).weight.detach().clone()

        @provider.share(cache=False)
        async def task_on_the_loop():
            return provider.execute("model", 9).weight.detach().clone()
    """)
    on_the_loop = "was called on the worker's event loop"
    for name, why in {"itself": "it would wait forever", "on_the_loop": on_the_loop, "task_on_the_loop": on_the_loop}.items():
        with pytest.raises(errors.ConfigurationError, match=why):
            client.call(name)
    assert client.list_tasks() == []  # the task was not submitted


def test_errors_of_endpoints_keep_their_type(app: BrokerApp) -> None:
    """They also have the traceback of the worker."""
    client = app.serve("""
        class Mine(Exception):
            pass

        @provider.share
        def fail(kind):
            raise Mine("mine") if kind == "mine" else SystemExit(4)
    """)
    with pytest.raises(Exception, match="mine") as error:
        client.call("fail", "mine")
    assert type(error.value).__name__ == "Mine" and "raise Mine" in str(error.value.__cause__)
    with pytest.raises(errors.RemoteError, match="SystemExit"):
        client.call("fail", "exit")
    assert client.call("model").weight[0, 0] == 4


def test_tasks_report_progress_and_can_be_stopped(app: BrokerApp) -> None:
    """Progress reaches the waiters; a request to stop reaches the worker."""
    client = app.serve("""
        import shared_rpc

        @provider.share(execution="task", cache=False)
        def forever():
            shared_rpc.progress(1, 2, "half done")
            while True:
                shared_rpc.raise_if_cancelled()
                time.sleep(0.005)
    """)
    task = client.submit("forever")
    seen: list[str] = []

    def stop(info: TaskInfo) -> None:
        if info.progress is not None:
            seen.append(info.progress.message)
            client.cancel_task(task)

    with pytest.raises(errors.TaskCancelled):
        client.wait_for_task(task, 20, callback=stop)
    assert set(seen) == {"half done"}


def test_results_can_be_arguments(app: BrokerApp) -> None:
    """Objects by reference: the worker finds its own memory. Short-lived results as copies."""
    client = app.serve("""
        @provider.share(cache=False)
        def where(x):
            from shared_rpc.memory.mapping import MAPPINGS
            found = MAPPINGS.find(x.data_ptr())
            return torch.tensor([found is not None, x.sum()])
    """)
    kept = client.call("echo", torch.ones(50))
    assert client.call("where", kept).tolist() == [1, 50]
    weight = client.call("model").weight.detach()
    assert client.call("where", weight).tolist() == [1, 64]
    assert client.call("echo", kept + 1).tolist() == [2] * 50


def test_malformed_arguments_do_not_end_the_worker(app: BrokerApp) -> None:
    """The worker, which decodes them first, answers with the error, and both processes continue."""
    client = app.serve()
    (worker,) = worker_pids(client)
    with Raw(client.socket_path) as raw:
        for args, kwargs in ((b"\x91\xc7\x01\x63x", b"\x80"), (b"\x91" * 100 + b"\xc0", b"\x80"), (b"\x90", b"\x91\x01")):
            answer = raw.ask(m.Call("echo", msgspec.Raw(args), msgspec.Raw(kwargs)))
            assert isinstance(answer, m.Error) and answer.code == errors.ProtocolError.code
    assert client.call("echo", torch.ones(3)).sum() == 3
    assert worker_pids(client) == [worker]


def test_pooled_calls_leave_no_descriptors(app: BrokerApp) -> None:
    """In broker and worker, once the worker has its zygote and the client its second connection."""
    broker = app.start()
    client = app.connect()
    worker = worker_pids(client)[0]
    x = torch.ones(3000)

    def counts() -> tuple[int, int]:
        for _ in range(50):
            client.call("echo", x)
        return fds_of(broker.pid), fds_of(worker)

    eventually(lambda: counts() == counts())
