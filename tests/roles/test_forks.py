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
import asyncio, atexit, os, signal, sys, threading, time
import torch
from shared_rpc import Provider, progress

provider = Provider(device="cpu")
parent = os.getpid()

def write(path, text):
    with open(path, "a") as file:
        file.write(text)

@atexit.register
def bye():
    if os.getpid() != parent:
        write(os.environ["INHERITED"], "ran")

def begin(path):
    '''In the child: standard output and error are a file.'''
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    progress(1, 2)

def leave(how):
    if how == "exit":
        sys.exit()
    if how == "exit 5":
        sys.exit(5)
    if how == "exit with a text":
        sys.exit("that is why")
    if how == "raise":
        raise RuntimeError("in the child")
    if how == "os._exit":
        os._exit(7)
    if how == "killed":
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)
    if how == "at exit":
        print("not flushed", end=" ")
        atexit.register(print, "at exit", end=" ")
        threading.Thread(target=lambda: (time.sleep(0.05), print("thread", end=" ")), daemon=False).start()
        sys.exit(4)
    if how == "another loop":
        async def main():
            return await asyncio.to_thread(lambda: 6)
        sys.exit(asyncio.run(main()))

@provider.share(cache=False)
def fork(how, path):
    pid = os.fork()
    if pid == 0:
        begin(path)
        leave(how)
    return torch.tensor([pid])

@provider.share(cache=False)
async def fork_async(how, path, awaits_before=False):
    if awaits_before:
        await asyncio.sleep(0.01)
    pid = os.fork()
    if pid == 0:
        begin(path)
        leave(how)
        if how == "await":
            await asyncio.sleep(0)
    return torch.tensor([pid])

@provider.share(cache=False)
def code(pid):
    '''The exit code of a child, or -1000 while it runs.'''
    ended, status = os.waitpid(pid, os.WNOHANG)
    return torch.tensor([os.waitstatus_to_exitcode(status) if ended else -1000])

@provider.share(cache=False)
def double(x):
    return x * 2

@provider.share(cache=False)
async def double_async(x):
    await asyncio.sleep(0)
    return x * 2
"""


class Served:
    """The app, a process that serves it, and a client."""

    def __init__(self, folder: Path, host: str) -> None:
        self.folder = folder
        (folder / "app.py").write_text(APP)
        self.path = str(folder / "s")
        environ = {
            "SHARED_TENSOR_BASE_PATH": self.path,
            "SHARED_TENSOR_ROLE": "server" if host == "script" else "",
            "INHERITED": str(folder / "inherited"),
        }
        self.child = Child(*HOSTS[host], str(folder / "app.py"), environ=environ, cwd=folder)
        self.client = self.connect()
        self._forks: list[int] = []

    def connect(self) -> Client:
        """One more client."""
        return Client(self.path, device="cpu", timeout=8.0, connect_timeout=60.0)

    def fork(self, endpoint: str, how: str) -> int:
        """Have an endpoint fork a child that leaves in some way: its process id."""
        self._forks.append(self.client.call(endpoint, how, str(self.said)).item())
        return self._forks[-1]

    @property
    def said(self) -> Path:
        """What the children have written."""
        return self.folder / "said"

    def code(self, pid: int) -> int:
        """The exit code of a child, once it has ended."""
        codes: list[int] = []

        def ended() -> bool:
            codes.append(self.client.call("code", pid).item())
            return codes[-1] != -1000

        eventually(ended, 10.0, f"the end of the fork {pid}")
        self._forks.remove(pid)
        return codes[-1]

    def close(self) -> None:
        """End it, and whatever has not ended."""
        self.client.close()
        for pid in self._forks:
            os.kill(pid, signal.SIGKILL)
        self.child.process.terminate()
        self.child.process.communicate(timeout=20)


@pytest.fixture(scope="module", params=HOSTS)
def host(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """The app, served in each way."""
    folder = tmp_path_factory.mktemp(request.param)
    folder.chmod(0o700)
    served = Served(folder, request.param)
    served.client.ping()
    yield served
    served.close()


@pytest.fixture
def served(host: Served) -> Served:
    """It, with nothing that children have written."""
    host.said.unlink(missing_ok=True)
    return host


@pytest.mark.parametrize("endpoint", ["fork", "fork_async"])
@pytest.mark.parametrize(
    ("how", "code", "text"),
    [
        ("return", 0, ""),
        ("exit", 0, ""),
        ("exit 5", 5, ""),
        ("exit with a text", 1, "that is why\n"),
        ("os._exit", 7, ""),
        ("killed", -signal.SIGTERM, ""),
        ("another loop", 6, ""),
        ("at exit", 4, "not flushed thread at exit "),
    ],
    ids=lambda value: value if isinstance(value, str) and value.isprintable() else "",
)
def test_the_end_of_the_endpoint_is_the_end_of_the_process(
    served: Served, endpoint: str, how: str, code: int, text: str
) -> None:
    """With the code and the words of any process that ends so; only its own exit callbacks run."""
    assert served.code(served.fork(endpoint, how)) == code
    assert served.said.read_text() == text
    assert not (served.folder / "inherited").exists()


@pytest.mark.parametrize("endpoint", ["fork", "fork_async"])
def test_an_error_is_shown_and_is_an_exit_code(served: Served, endpoint: str) -> None:
    """From the endpoint's own line on."""
    assert served.code(served.fork(endpoint, "raise")) == 1
    lines = served.said.read_text().splitlines()
    assert (lines[0], lines[-1]) == ("Traceback (most recent call last):", "RuntimeError: in the child")
    assert lines[1].endswith(f"in {endpoint}")


def test_a_child_that_awaits_ends_with_an_error(served: Served) -> None:
    """The loop is its parent's: it says so, and what it should do."""
    pid = served.fork("fork_async", "await")
    assert served.code(pid) == 1
    assert f"a process (pid {pid}) that the endpoint 'fork_async' forked" in served.said.read_text()


@pytest.mark.parametrize("how", ["return", "exit", "raise", "await"])
def test_others_do_not_notice(served: Served, how: str) -> None:
    """Calls of all kinds, from connections that were there before and come later, while children end."""
    with served.connect() as before:
        assert before.call("double", torch.ones(3)).tolist() == [2, 2, 2]
        for number in range(3):
            pids = [served.fork("fork_async", how), served.fork("fork", how)]
            with served.connect() as later:
                for client in (before, later):
                    for endpoint in ("double", "double_async"):
                        assert client.call(endpoint, torch.full((3,), number)).tolist() == [2 * number] * 3
            codes = [served.code(pid) for pid in pids]
            assert codes == [how in ("raise", "await"), how == "raise"]


def test_an_endpoint_that_had_awaited_before(served: Served) -> None:
    """It is not at its first step when it forks."""
    pid = served.client.call("fork_async", "exit 5", str(served.said), True).item()
    served._forks.append(pid)
    assert served.code(pid) == 5


def test_in_the_local_role(tmp_path: Path, children: list[Child]) -> None:
    """Without any server."""
    (tmp_path / "app.py").write_text(
        APP
        + """
if __name__ == "__main__":
    for endpoint in (fork, lambda *given: asyncio.run(fork_async(*given))):
        pid = endpoint("exit 5", sys.argv[1]).item()
        print("code", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""
    )
    child = Child(
        str(tmp_path / "app.py"),
        str(tmp_path / "said"),
        environ={"SHARED_TENSOR_ROLE": "local", "INHERITED": str(tmp_path / "inherited")},
    )
    children.append(child)
    assert child.expect("code") == "code 5"
    assert child.expect("code") == "code 5"
    assert child.close() == (0, "")
