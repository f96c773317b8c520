"""A process that an endpoint forks ends where the endpoint ends in it, and its parent's clients do not notice.

Each test runs as ``python app.py`` in the server role, as ``shared-rpc serve app.py``, and with ``--in-process``.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from shared_rpc import Client
from tests.kit.brokers import HOSTS
from tests.kit.processes import Child, eventually

APP = """
import asyncio, os
import torch
from shared_rpc import Provider, progress

provider = Provider(device="cpu")

def begin(path):
    os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    progress(1, 2)

@provider.share(cache=False)
def fork(how, path):
    pid = os.fork()
    if pid == 0:
        begin(path)
        if how == "raise":
            raise SystemExit(5)
        if how == "os._exit":
            os._exit(7)
    return torch.tensor([pid])

@provider.share(cache=False)
async def fork_async(how, path):
    await asyncio.sleep(0)
    pid = os.fork()
    if pid == 0:
        begin(path)
        if how == "raise":
            raise SystemExit(5)
        if how == "os._exit":
            os._exit(7)
        if how == "await":
            await asyncio.sleep(0)
    return torch.tensor([pid])

@provider.share(cache=False)
def code(pid):
    ended, status = os.waitpid(pid, os.WNOHANG)
    return torch.tensor([os.waitstatus_to_exitcode(status) if ended else -1000])

@provider.share(cache=False)
async def double(x):
    await asyncio.sleep(0)
    return x * 2
"""


class Served:
    """The app, a process that serves it, and a client."""

    def __init__(self, folder: Path, host: str) -> None:
        (folder / "app.py").write_text(APP)
        self.path, self.written = str(folder / "s"), folder / "written"
        environ = {"SHARED_TENSOR_BASE_PATH": self.path, "SHARED_TENSOR_ROLE": "server" if host == "script" else ""}
        self.child = Child(*HOSTS[host], str(folder / "app.py"), environ=environ, cwd=folder)
        self.client = Client(self.path, device="cpu", timeout=8.0, connect_timeout=60.0)
        self._forks: list[int] = []

    def fork(self, endpoint: str, how: str) -> int:
        """Make an endpoint fork a child that ends in some way; return its process id."""
        self.written.unlink(missing_ok=True)
        self._forks.append(self.client.call(endpoint, how, str(self.written)).item())
        return self._forks[-1]

    def code(self, pid: int) -> int:
        """Wait for the end of a child; return its exit code."""
        codes: list[int] = []

        def ended() -> bool:
            codes.append(self.client.call("code", pid).item())
            return codes[-1] != -1000

        eventually(ended, 10.0, f"the end of the fork {pid}")
        self._forks.remove(pid)
        return codes[-1]

    def close(self) -> None:
        """End the server, and forks that have not ended."""
        self.client.close()
        for pid in self._forks:
            os.kill(pid, signal.SIGKILL)
        self.child.process.terminate()
        self.child.process.communicate(timeout=20)


@pytest.fixture(scope="module", params=HOSTS)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """The app, served in each way."""
    folder = tmp_path_factory.mktemp(request.param)
    folder.chmod(0o700)
    served = Served(folder, request.param)
    served.client.ping()
    yield served
    served.close()


@pytest.mark.parametrize(
    ("endpoint", "how"), [("fork", "return"), ("fork", "raise"), *(("fork_async", how) for how in ("return", "raise", "await"))]
)
def test_a_fork_that_leaves_its_endpoint_exits_with_a_message(served: Served, endpoint: str, how: str) -> None:
    """Its parent goes on, with connections from before and later."""
    pid = served.fork(endpoint, how)
    assert served.client.call("double", torch.ones(3)).tolist() == [2, 2, 2]
    assert served.code(pid) == 1
    assert f"endpoint {endpoint!r} forked this process (pid {pid})" in served.written.read_text()
    with Client(served.path, device="cpu") as later:
        assert later.call("double", torch.ones(3)).tolist() == [2, 2, 2]


@pytest.mark.parametrize("endpoint", ["fork", "fork_async"])
def test_a_fork_that_calls_os_exit_has_its_code(served: Served, endpoint: str) -> None:
    """It never returns to the endpoint's caller."""
    assert served.code(served.fork(endpoint, "os._exit")) == 7
