"""A broker whose device has capacity for one of several models, and processes that resume them in turns."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from shared_rpc import Client
from tests.kit.brokers import BrokerApp
from tests.kit.deep import repetitions
from tests.kit.processes import Child, eventually
from tests.kit.world import World

MIB = 1 << 20

MODELS = """
@provider.share(managed=True, access="read")
def weights(number):
    return torch.full((1 << 20,), number, dtype=torch.uint8)
"""

#: Resumes two models in turns, and checks that each is unchanged.
IN_TURNS = """
import sys
from shared_rpc import Client
from tests.kit.raw import HoldingSession

with Client(device="cpu", timeout=300.0) as client, HoldingSession(client.socket_path, 300.0) as session:
    models = []
    for number in (1, 2):
        with client.call("weights", number) as handle:
            session.hold(handle.object_id)
        session.suspend(handle.object_id)
        models.append((number, handle.object_id))
    print("ready", flush=True)
    sys.stdin.readline()
    for turn in range(TURNS):
        for number, object_id in models[::ORDER]:
            assert session.resume(object_id) == {number}, (turn, number)
            session.suspend(object_id)
    print("woken", flush=True)
"""

#: Uses a model; suspends and resumes it on command.
HOLDER = """
import sys
from shared_rpc import Client
from tests.kit.raw import HoldingSession

with Client(device="cpu", timeout=120.0) as client, HoldingSession(client.socket_path, 120.0) as session:
    with client.call("weights", NUMBER) as handle:
        session.hold(handle.object_id)
    print("holds", handle.object_id, flush=True)
    for line in sys.stdin:
        getattr(session, line.strip())(handle.object_id)
        print("done", line.strip(), flush=True)
"""


@pytest.fixture
def one_of_two(broker_app: BrokerApp, tmp_path: Path) -> Client:
    """A client of a broker with capacity for one model, and a directory for the others."""
    broker_app.write(MODELS)
    broker_app.start(quotas={"cpu": 1 << 20}, when_full="evict", spill_dir=str(tmp_path))
    return broker_app.connect()


@pytest.fixture
def holder(world: World) -> Callable[[int], Child]:
    """``holder(number)`` starts a process that has a model active."""
    return lambda number: world.process(HOLDER.replace("NUMBER", str(number)))


def tell(child: Child, what: str) -> None:
    """Run a command in a holder, and wait for its end."""
    child.tell(what)
    child.expect("done")


def test_many_processes_take_turns_on_two_models(one_of_two: Client, world: World) -> None:
    """With memory for one: all make progress, and find the right bytes each time."""
    code = IN_TURNS.replace("TURNS", "4")
    users = [world.process(code.replace("ORDER", "1" if number % 2 else "-1")) for number in range(repetitions(6, 50))]
    for user in users:
        user.expect("ready")
    for user in users:
        user.tell("go")
    for user in users:
        user.expect("woken")
        assert user.close() == (0, "")
    infos = one_of_two.list_objects()
    assert sorted(info["cache_key"] for info in infos) == ["weights(number=1)", "weights(number=2)"]
    assert sorted(info["tier"] for info in infos) == ["device", "file"] and not any(info["active"] for info in infos)
    assert one_of_two.list_devices()[0]["used"] == MIB


def test_memory_of_a_killed_user_is_reused(
    one_of_two: Client, holder: Callable[[int], Child], threads: ThreadPoolExecutor
) -> None:
    """Its leases end with it, and a waiter gets the memory."""
    first = holder(1)
    first.expect("holds")
    answer = threads.submit(one_of_two.call, "weights", 2)
    eventually(lambda: any(run["endpoint"] == "weights" for run in one_of_two.list_runs()))
    first.kill()
    with answer.result(60) as handle:
        assert handle.value[0].item() == 2


def test_a_killed_waiter_is_removed_from_the_queue(
    one_of_two: Client, holder: Callable[[int], Child], broker_app: BrokerApp
) -> None:
    """The next one is served."""
    first = holder(1)
    first.expect("holds")
    waiting = holder(2)
    eventually(lambda: any(run["cache_key"] == "weights(number=2)" for run in one_of_two.list_runs()), 60.0)
    waiting.kill()
    tell(first, "suspend")
    with broker_app.connect(timeout=60.0).call("weights", 3) as handle:
        assert handle.value[0].item() == 3
