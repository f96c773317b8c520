"""The interpreter is not shutting down while a process serves: endpoints may do everything that a main program may.

Each test runs as ``python app.py`` in the server role, and as ``shared-rpc serve app.py``.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from shared_rpc import Client
from tests.kit.brokers import ROLE, broker_words, is_running
from tests.kit.deep import deep
from tests.kit.processes import Child, eventually, skip_without_late_threads
from tests.kit.world import World

#: Several processes that import torch at once may share one core.
pytestmark = pytest.mark.timeout(180)

#: Needs no torch, and hardly anything else, before an endpoint runs.
APP = """
import os
import sys

from shared_rpc import Provider, progress

provider = Provider(device="cpu")


def square(x):
    return x * x


def tensor(*values):
    import torch

    return torch.tensor(values)


@provider.share(cache=False)
def ending():
    # Whatever in the standard library knows that the interpreter ends.
    import asyncio, concurrent.futures.process, concurrent.futures.thread, multiprocessing.util, threading, weakref

    return tensor(
        sys.is_finalizing(),
        threading._SHUTTING_DOWN,
        not threading.main_thread().is_alive(),
        concurrent.futures.thread._shutdown,
        concurrent.futures.process._global_shutdown,
        multiprocessing.util._exiting,
        weakref.finalize._shutdown,
    )


@provider.share(cache=False)
def pooled(kind, method):
    import multiprocessing
    from concurrent.futures import ProcessPoolExecutor

    context = multiprocessing.get_context(method)
    with ProcessPoolExecutor(2, context) if kind == "executor" else context.Pool(2) as pool:
        return tensor(*pool.map(square, [1, 2, 3]))


def fork_child(how, path):
    tensor(0)  # torch is imported before
    pid = os.fork()
    if pid == 0:
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
        progress(1, 2)
        if how == "os._exit":
            os._exit(7)
    return pid


@provider.share(cache=False)
def fork(how, path):
    return tensor(fork_child(how, path))


@provider.share(cache=False)
def code(pid):
    ended, status = os.waitpid(pid, os.WNOHANG)
    return tensor(os.waitstatus_to_exitcode(status) if ended else -1000)


@provider.share(cache=False)
def register(name):
    import atexit, threading, weakref

    lasting.append(Kept())
    weakref.finalize(lasting[-1], report, f"{name} finalizer")
    atexit.register(report, f"{name} at exit")
    threading._register_atexit(report, f"{name} before threads are joined")
    return tensor(0)


@provider.share(cache=False)
def keep(kind, method):
    # A pool that is there until the end, and the processes of which are its own affair.
    import multiprocessing
    from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor

    context = multiprocessing.get_context(method)
    if kind == "pool":
        lasting.append(context.Pool(1))
        return tensor(lasting[-1].apply(os.getpid))
    lasting.append(ProcessPoolExecutor(1, context) if kind == "executor" else ThreadPoolExecutor(1))
    return tensor(lasting[-1].submit(os.getpid).result())


@provider.share(cache=False)
def busy():
    # A process that works while an endpoint waits for it.
    print("busy:", int(keep("executor", "fork")), flush=True)
    lasting[-1].submit(square, 2)
    import threading

    threading.Event().wait()


class Kept:
    pass


lasting = []


@provider.share(cache=False)
def sources():
    import inspect

    return tensor(inspect.getsource(Kept) == "class Kept:\\n    pass\\n")


def report(text):
    print("report:", text, flush=True)
"""


class Served:
    """The app, a process that serves it, and a client."""

    def __init__(self, folder: Path, host: str, more: str = "", fresh: bool = False) -> None:
        if host == "script":
            skip_without_late_threads()
        self.host = host
        file = folder / "app.py"
        file.write_text(APP + more)
        path = str(folder / "s")
        environ = {"SHARED_TENSOR_BASE_PATH": path, "SHARED_TENSOR_ENABLED": "", **ROLE}
        command = [str(file)] if host == "script" else broker_words(file)
        self.child = Child(*command, environ=environ, cwd=folder, fresh=fresh)
        self.client = Client(path, device="cpu", timeout=150.0, connect_timeout=60.0)

    def ask(self, endpoint: str, *arguments: Any) -> list[Any]:
        """Return the text in an endpoint's tensor."""
        found: list[Any] = self.client.call(endpoint, *arguments).tolist()
        return found

    def end(self, number: signal.Signals = signal.SIGTERM) -> tuple[int, list[str], str]:
        """End the process; return the exit code, the app's reports, and the text on standard error."""
        self.child.process.send_signal(number)
        out, errors = self.child.process.communicate(timeout=20)
        reported = [line.removeprefix("report: ") for line in out.splitlines() if line.startswith("report: ")]
        said = [line for line in errors.splitlines() if not line.startswith("shared_rpc: serving at")]
        return self.child.process.returncode, reported, "\n".join(said)

    def close(self) -> None:
        """End it, whatever its state."""
        self.client.close()
        if self.child.process.poll() is None:
            # Not by SIGKILL, which would leave pools behind that have its pipes.
            self.end()


#: A worker runs the code of a script in the server role, in a process whose main code continues.
EACH_HOST = ["script", *deep("broker")]


@pytest.fixture(scope="module", params=EACH_HOST)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """The app, served in each way; its main code has ended."""
    folder = tmp_path_factory.mktemp(request.param)
    folder.chmod(0o700)
    # A process that ends with its main code must be a new interpreter, with the script's imports only.
    served = Served(folder, request.param, fresh=request.param == "script")
    served.client.ping()
    yield served
    served.close()


@contextmanager
def serving(folder: Path, host: str) -> Iterator[Callable[..., Served]]:
    """A function that serves the app, with more code, for a single test."""
    folder.chmod(0o700)
    with ExitStack() as stack:
        yield lambda more="": stack.enter_context(closing(Served(folder, host, more)))


@pytest.fixture(params=EACH_HOST)
def serve(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[..., Served]]:
    """``serve(more)`` serves it in each way."""
    with serving(tmp_path, request.param) as start:
        yield start


@pytest.fixture
def script(tmp_path: Path) -> Iterator[Callable[..., Served]]:
    """``script(more)`` runs it as ``python app.py`` in the server role."""
    with serving(tmp_path, "script") as start:
        yield start


def test_no_module_sees_an_interpreter_shutdown(served: Served) -> None:
    """Neither the interpreter nor a module of the standard library."""
    assert not any(served.ask("ending"))


def test_sources_of_the_app_can_be_read(served: Served) -> None:
    """As compilers do; those of a script are forgotten at the end of its main code."""
    assert served.ask("sources") == [True]


@pytest.mark.parametrize(("kind", "method"), [("executor", "spawn"), ("executor", "forkserver"), ("pool", "fork")])
def test_endpoints_can_use_process_pools(served: Served, kind: str, method: str) -> None:
    """Created and ended in an endpoint, with every start method."""
    assert served.ask("pooled", kind, method) == [1, 4, 9]


def code_of(served: Served, pid: int) -> int:
    """Wait for the end of a child that an endpoint has forked; return its exit code."""
    codes: list[int] = []

    def ended() -> bool:
        codes.extend(served.ask("code", pid))
        return codes[-1] != -1000

    eventually(ended, 10.0, f"the end of the fork {pid}")
    return codes[-1]


def test_a_fork_that_leaves_its_endpoint_exits_with_a_message(served: Served, tmp_path: Path) -> None:
    """Its parent continues, with earlier and later connections. One that calls ``os._exit`` has its own code."""
    written = tmp_path / "written"
    [pid], [other] = served.ask("fork", "return", str(written)), served.ask("fork", "os._exit", str(tmp_path / "other"))
    assert (code_of(served, pid), code_of(served, other)) == (1, 7)
    assert f"endpoint 'fork' forked this process (pid {pid})" in written.read_text()
    with Client(socket_path=served.client.socket_path, device="cpu") as later:
        later.ping()


def test_exit_callbacks_run_once_in_order(serve: Callable[..., Served]) -> None:
    """In the interpreter's order: first threads are joined, then ``atexit`` callbacks run, the last registered first."""
    served = serve()
    served.ask("register", "one")
    served.ask("register", "two")
    code, reported, errors = served.end()
    assert (code, errors) == (0, "")
    assert reported[:2] == ["two before threads are joined", "one before threads are joined"]
    # A finalizer's callback is one of atexit, registered with the first finalizer of the process.
    assert [line for line in reported[2:] if "at exit" in line] == ["two at exit", "one at exit"]
    assert sorted(line for line in reported[2:] if "finalizer" in line) == ["one finalizer", "two finalizer"]


@pytest.mark.parametrize("number", [signal.SIGTERM, *deep(signal.SIGINT)])
def test_idle_pools_end_with_the_process(serve: Callable[..., Served], number: signal.Signals) -> None:
    """They neither delay the exit nor outlive it."""
    served = serve()
    kept = [("executor", "fork"), ("executor", "forkserver"), ("pool", "fork"), ("pool", "spawn"), ("threads", "fork")]
    pids = [served.client.call("keep", kind, method).item() for kind, method in kept]
    code, _, errors = served.end(number)
    # A worker that cannot end its pools in time is killed; the resource tracker removes their remains, and reports them.
    assert (code, [line for line in errors.splitlines() if "resource_tracker" not in line]) == (0, [])
    eventually(lambda: not any(map(is_running, pids)), what=f"the end of {pids}")


def test_running_threads_are_joined_at_the_end(script: Callable[..., Served]) -> None:
    """They do not keep the process from serving."""
    served = script(
        """
import threading

go = threading.Event()


def work():
    go.wait()
    report("the thread has ended")


threading._register_atexit(go.set)
threading.Thread(target=work).start()
"""
    )
    served.child.expect_error("serving at")
    assert not any(served.ask("ending"))
    assert served.end() == (0, ["the thread has ended"], "")


def test_commands_serve_like_scripts(tmp_path: Path, base_path: str, world: World) -> None:
    """``python -c`` behaves like ``python app.py``."""
    skip_without_late_threads()
    child = world.start("-c", APP, environ={"SHARED_TENSOR_ROLE": "server"}, cwd=tmp_path)
    child.expect_error("serving at")
    with Client(base_path, device="cpu", timeout=150.0) as client:
        assert not client.call("ending").any()
    assert child.close(signal.SIGTERM) == (0, "")


def test_a_script_that_exits_with_a_code_serves(script: Callable[..., Served]) -> None:
    """Python does not report the code, so the process serves, and ends with that code."""
    served = script("sys.exit(3)\n")
    served.child.expect_error("serving at")
    assert served.end() == (3, [], "")


def test_exit_callbacks_of_the_main_code_run_after_serving(script: Callable[..., Served]) -> None:
    """Its resources, such as a temporary folder, still exist for endpoints."""
    served = script("import atexit\natexit.register(report, 'cleaned up')\nprint('report: main code', flush=True)\n")
    served.child.expect_error("serving at")
    served.ask("register", "endpoint")
    code, reported, errors = served.end()
    assert (code, errors) == (0, "")
    assert [line for line in reported if "finalizer" not in line] == [
        "main code",
        "endpoint before threads are joined",
        "endpoint at exit",
        "cleaned up",
    ]


def test_spawned_children_without_a_main_guard_are_clients(script: Callable[..., Served]) -> None:
    """The child runs the main code again, whose calls go to its parent's server."""
    served = script(
        """
@provider.share
def weights():
    return tensor(1, 2)


report(provider.execution_mode)
weights()
"""
    )
    served.child.expect_error("serving at")
    assert served.ask("pooled", "executor", "spawn") == [1, 4, 9]
    reported = served.end()[1]
    assert reported[0] == "server"
    assert set(reported[1:]) == {"client"}


def test_a_fork_server_does_not_serve(script: Callable[..., Served]) -> None:
    """It has imported the app, and ends after the serving process without replacing it."""
    served = script('import multiprocessing\n\nmultiprocessing.set_forkserver_preload(["app"])\n')
    served.child.expect_error("serving at")
    assert served.ask("pooled", "executor", "forkserver") == [1, 4, 9]
    assert served.end() == (0, [], "")
    assert not Path(served.client.socket_path).exists()


def test_processes_of_a_stuck_endpoint_end_with_the_server(serve: Callable[..., Served]) -> None:
    """They do not outlive a server that is stopped while the endpoint runs."""
    served = serve()
    served.client.submit("busy")
    pid = int(served.child.expect("busy:").split()[-1])
    code, _, _ = served.end()
    assert code == 0
    eventually(lambda: not is_running(pid), what=f"the end of {pid}")
