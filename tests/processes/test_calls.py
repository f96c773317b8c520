"""The life of a call: its run, its waiting callers, their results, and the cached object."""

from __future__ import annotations

import asyncio
import gc
import importlib
import pickle
import sys
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from shared_rpc.errors import CodecError, RemoteError
from shared_rpc.memory.mapping import MAPPINGS
from shared_rpc.protocol import messages as m
from tests.kit.processes import eventually, python
from tests.kit.raw import Raw
from tests.kit.world import World

pytestmark = pytest.mark.usefixtures("no_leaks")


# Exceptions.


@pytest.mark.parametrize("is_async", [False, True], ids=["def", "async def"])
def test_a_server_survives_exits_of_endpoints(world: World, is_async: bool) -> None:
    """SystemExit reaches the caller as a RemoteError, and later calls are answered."""

    def build() -> None:
        raise SystemExit("the end")

    async def build_async() -> None:
        build()

    world.share("build")(build_async if is_async else build)
    server, client = world.serve(), world.client()
    for _ in range(2):
        with pytest.raises(RemoteError, match="SystemExit: the end"):
            client.call("build")
    assert server.info()["running"] == 0


class Custom(Exception):
    """An exception that cannot be rebuilt from its arguments."""

    def __init__(self, name: str, *, where: str) -> None:
        super().__init__(f"{name} in {where}")
        self.where = where


class Sticky(Exception):
    """An exception that ends a process that pickles it."""

    def __reduce__(self) -> str:
        raise SystemExit("pickled")


class Ending(Exception):
    """An exception that ends a process that unpickles it."""

    def __reduce__(self) -> tuple[Any, ...]:
        return sys.exit, ("unpickled",)


def raiser(world: World, error: Callable[[], BaseException]) -> None:
    """Share an endpoint that raises."""

    @world.share(cache=False)
    def fail() -> None:
        raise error()


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (lambda: Custom("weights", where="model.bin"), "weights in model.bin"),
        (lambda: Sticky("glue"), "glue"),
        (lambda: Ending("meant for the server"), "meant for the server"),
        (lambda: ValueError("x" * 10_000_000), "characters left out"),
    ],
    ids=["needs arguments", "ends its pickler", "ends its receiver", "is too long"],
)
def test_unpicklable_exceptions_become_remote_errors(world: World, error: Callable[[], Exception], message: str) -> None:
    """With their type's name, message and traceback."""
    raiser(world, error)
    with pytest.raises(RemoteError) as caught:
        world.client().call("fail")
    assert caught.value.type_name.endswith(type(error()).__name__)
    assert message in caught.value.message
    assert "raise error()" in caught.value.traceback
    assert len(str(caught.value)) < 100_000


class Broken(torch.nn.Linear):
    """A module that cannot be rebuilt."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        raise ImportError("it needs another release of something")


def test_retained_exceptions_keep_no_memory(world: World) -> None:
    """Such as a notebook's ``sys.last_value``: an object that cannot be rebuilt is unmapped."""
    before = len(MAPPINGS)
    world.share("broken", managed=True, cache=False)(lambda: Broken(4, 4))
    server = world.serve()
    with pytest.raises(CodecError, match="another release of something") as caught:
        world.client().call("broken")
    assert isinstance(caught.value.__cause__, ImportError)

    def is_unmapped() -> bool:
        gc.collect()
        MAPPINGS.drain()
        return len(MAPPINGS) <= before and server.info()["leases"] == 0

    eventually(is_unmapped)


def test_an_abandoned_inner_call_continues(world: World) -> None:
    """Its result is cached for later calls, and no lease is left."""
    ready = asyncio.Event()

    @world.share(managed=True)
    async def slow() -> torch.Tensor:
        await ready.wait()
        return torch.ones(4)

    @world.share(cache=False)
    async def impatient() -> torch.Tensor:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(slow(), 0.01)
        ready.set()
        return torch.zeros(1)

    server, client = world.serve(), world.client()
    assert client.call("impatient") == 0
    eventually(lambda: server.info()["objects"] == 1)
    eventually(lambda: server.info()["leases"] == 0)
    with client.call("slow") as handle:
        assert handle.value.sum() == 4
    assert server.info()["builds"] == 2


def test_queued_work_without_waiters_never_runs(world: World, go: threading.Event, begun: threading.Event) -> None:
    """It is dropped when its last waiter leaves, by cancellation or disconnection, and not before."""
    ran = world.share_held(go, begun)
    server = world.serve(max_workers=1)
    with Raw(server.socket_path) as stays, Raw(server.socket_path) as leaves:
        stays.say(m.Call("held", [1]), 1)
        begun.wait(10)
        for number in (2, 3, 4):
            leaves.say(m.Call("held", [number]), number)
        stays.say(m.Call("held", [3]), 3)
        eventually(lambda: server.info()["calls"] == 5)
        assert isinstance(leaves.ask(m.Cancel(), 4), m.Error)
        assert server.info()["running"] == 3
        leaves.close()
        eventually(lambda: server.info()["running"] == 2)
        go.set()
        assert isinstance(stays.hear(1), m.Result)
        assert isinstance(stays.hear(3), m.Result)
    assert ran == [1, 3]
    assert world.client().call("held", 2).tolist() == [2, 2]


def test_fingerprints_are_equal_in_all_processes() -> None:
    """Sets have a different order in each: two workers must agree."""
    code = """
        from shared_rpc.execution.endpoints import describe

        def f(x, y=2):
            return x in {"one", "two", "three", "four", "five"} or [z for z in (y, "text", {1, 2})]

        print("has", describe(f).fingerprint)
        """
    one, other = (python(code, environ={"PYTHONHASHSEED": seed}, fresh=True) for seed in ("1", "2"))
    assert one.expect("has") == other.expect("has")
    assert one.close() == other.close() == (0, "")


# Shared functions that travel to other processes, as those do which tasks and actors of Ray and pools of processes use.


MODULE = """
from shared_rpc import Provider
import torch

provider = Provider()

@provider.share
def load(size: int = 3):
    return torch.ones(size)
"""

#: A script that sends a function to another interpreter, which calls it.
SENDER = """
import subprocess
import sys
import cloudpickle

receiver = '''
import sys, cloudpickle
load = cloudpickle.load(sys.stdin.buffer)
print("sum:", float(load().sum()), load.__module__)
'''
ran = subprocess.run([sys.executable, "-c", receiver], input=cloudpickle.dumps(load), capture_output=True, check=True)
print(ran.stdout.decode(), flush=True)
"""


def test_shared_functions_of_a_script_work_in_another_interpreter(world: World) -> None:
    """They are pickled as code, with a provider that has the endpoint."""
    child = world.start("-c", MODULE + SENDER)
    assert child.expect("sum:") == "sum: 3.0 __main__"


def test_shared_functions_are_pickled_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the standard library's pickle too: the receiver gets its module's own function."""
    (tmp_path / "models_to_pickle.py").write_text(textwrap.dedent(MODULE))
    monkeypatch.syspath_prepend(str(tmp_path))
    module = importlib.import_module("models_to_pickle")
    assert pickle.loads(pickle.dumps(module.load)) is module.load
