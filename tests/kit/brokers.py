"""Apps served by a broker and its workers, as a user's shell starts them."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from shared_rpc import Client
from shared_rpc.protocol.options import ServeOptions
from shared_rpc.settings import program
from tests.kit.processes import Child, eventually, links_of, skip_without_late_threads
from tests.kit.world import World

#: The beginning of every app, with the endpoints that the tests of crashes need.
APP = """
import ctypes, os, sys, time
import torch
from shared_rpc import Provider

provider = Provider(device="cpu")

@provider.share
def model(size=4):
    module = torch.nn.Linear(size, size)
    torch.nn.init.constant_(module.weight, size)
    return module

@provider.share(managed=True)
def held(size=4):
    return torch.full((size,), 7.0)

@provider.share(cache=False)
def echo(x):
    return x

@provider.share
def slow(path, key=0):
    wait(path)
    return torch.zeros(1)

def wait(path):
    '''Say that it began, and go on when the file is there.'''
    open(f"{path}-begun-{os.getpid()}", "w").close()
    while not os.path.exists(path):
        time.sleep(0.005)

@provider.share(cache=False)
def end(how):
    print("its last words", file=sys.stderr, flush=True)
    if how == "segfault":
        ctypes.string_at(0)
    if how == "exit":
        os._exit(3)
    os.kill(os.getpid(), 9)

@provider.share(cache=False)
def plain():
    return torch.zeros(1)

@provider.share(cache=False)
def pid():
    return torch.tensor(os.getpid())
"""


#: The program of a broker that runs custom code first.
_RUN = """
import runpy
runpy.run_module("shared_rpc.broker", run_name="__main__", alter_sys=True)
"""
#: The role in which ``shared-rpc serve`` starts a broker.
ROLE = {"SHARED_TENSOR_ROLE": "server"}


def broker_words(target: object, **options: Any) -> list[str]:
    """Return the command line that ``shared-rpc serve`` becomes; the options are those of :class:`ServeOptions`."""
    return program("shared_rpc.broker", str(target), *ServeOptions(**options).words)[1:]


class BrokerProgram(NamedTuple):
    """A broker that runs custom code first: its complete code, and its arguments."""

    code: str
    words: list[str]


class BrokerApp:
    """An app file, the broker that serves it, and clients of it."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.base_path = world.base_path
        self.file = Path(world.base_path).with_name("app.py")
        self._clients: list[Client] = []

    def write(self, *pieces: str) -> None:
        """Write the app: :data:`APP`, followed by other code."""
        before = self.file.stat().st_mtime if self.file.exists() else None
        self.file.write_text(APP + "".join(textwrap.dedent(piece) for piece in pieces))
        if before is not None:
            # Python would reuse the bytecode of the previous app if both have the same size and were written within a second.
            os.utime(self.file, (before + 2, before + 2))

    def start(self, *, fresh: bool = False, **options: Any) -> Child:
        """Start a broker of the app, and wait until it serves; the options are those of :class:`ServeOptions`.

        :param fresh: for tests of a broker's imports, or of the start of its workers.
        """
        child = self.begin(fresh=fresh, **options)
        child.expect("serving")
        return child

    def begin(self, *, fresh: bool = False, cwd: Path | None = None, **options: Any) -> Child:
        """Start a broker of the app, without waiting for it."""
        words = broker_words(self.file, **options)
        return self.world.start(*words, environ=ROLE, cwd=cwd or self.file.parent, fresh=fresh)

    def start_script(self) -> Child:
        """Run the app in the server role, in which one process is the server and runs the endpoints; wait until it serves."""
        skip_without_late_threads()
        child = self.world.start(str(self.file), environ={"SHARED_TENSOR_ROLE": "server"}, cwd=self.file.parent)
        child.expect_error("serving")
        return child

    def serve(self, *pieces: str, options: Mapping[str, Any] | None = None, **connection: Any) -> Client:
        """Start a broker of the app, with other code appended if given; return a client of it."""
        if pieces:
            self.write(*pieces)
        self.start(**options or {})
        return self.connect(**connection)

    def program(self, code: str, **options: Any) -> BrokerProgram:
        """Return a broker of the app that runs custom code first; the options are those of :class:`ServeOptions`."""
        return BrokerProgram(code + _RUN, [str(self.file), *ServeOptions(**options).words])

    def start_program(self, program: BrokerProgram, **options: Any) -> Child:
        """Start such a broker, and wait until it serves the app; the options are those of :class:`Child`."""
        child = self.world.start("-c", program.code, *program.words, cwd=self.file.parent, **options)
        child.expect("serving")
        return child

    def connect(self, **options: Any) -> Client:
        """Return a client of the broker."""
        client = self.world.client(**{"connect_timeout": 5.0, **options})
        self._clients.append(client)
        return client

    def empty(self) -> None:
        """Close the clients and have the broker drop all objects, for the next test."""
        while self._clients:
            self._clients.pop().close()
        with Client(self.base_path, device="cpu", timeout=30.0) as client:
            for name in client.list_endpoints():
                client.invalidate_endpoint_cache(name)
            eventually(lambda: client.get_server_info()["objects"] == 0)


@contextmanager
def module_broker(directory: Path, app: str, **options: Any) -> Iterator[BrokerApp]:
    """Serve an app to all tests of a module, each of which calls :meth:`BrokerApp.empty` at its end."""
    directory.chmod(0o700)
    world = World(str(directory / "s"))
    served = BrokerApp(world)
    served.write(app)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SHARED_TENSOR_BASE_PATH", served.base_path)
        served.start(**options)
    yield served
    world.close()


def worker_pids(client: Client) -> list[int]:
    """Return the process ids of the running workers."""
    return [worker["pid"] for worker in client.get_server_info()["workers"]]


def another_worker(client: Client, earlier: int) -> int:
    """Wait until a worker other than an earlier one is ready; return its process id."""

    def ready() -> list[int]:
        workers = client.get_server_info()["workers"]
        return [worker["pid"] for worker in workers if worker["pid"] != earlier and worker["state"] == "ready"]

    eventually(lambda: bool(ready()), 40.0, "another worker")
    return ready()[0]


def begun(path: Path) -> Callable[[], bool]:
    """Return whether an endpoint that waits for ``path`` has begun."""
    return lambda: bool(list(path.parent.glob(f"{path.name}-begun-*")))


def is_running(pid: int) -> bool:
    """Return whether a process exists and has not ended."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def memory_of(pid: int) -> int:
    """Count a process's descriptors of memory and of spilled files, without a broker's state."""
    return sum((link.startswith("/memfd:") and "state" not in link) or "/spill/" in link for link in links_of(pid))


def fds_of(pid: int) -> int:
    """Count the open descriptors of a process."""
    return len(os.listdir(f"/proc/{pid}/fd"))


def private_memory(pid: int) -> int:
    """Return the bytes of a process's own memory, which no file has."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines()
    (found,) = (line.split()[1] for line in lines if line.startswith("Anonymous:"))
    return int(found) << 10
