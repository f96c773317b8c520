"""Processes that are killed while objects go to a lower tier or come back: nothing is lost, and nothing is left behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from shared_rpc import Client
from tests.kit.brokers import BrokerApp, memory_of
from tests.kit.processes import Child, eventually, python

#: An object whose copy takes a while.
LARGE = """
    @provider.share(managed=True)
    def large():
        return torch.arange(1 << 26, dtype=torch.int32)
    """
#: What its tensor has at the places that are looked at.
PLACES = [0, 1 << 20, (1 << 26) - 1]

#: A client that suspends or resumes an object until it is killed.
CLIENT = """
import sys
from shared_rpc import Client
from shared_rpc.client.steps import Request, ask
from shared_rpc.protocol import messages as m
from shared_rpc.protocol import tiers as t

client = Client(device="cpu")
object_id, again = {object_id!r}, {how!r} == "resume"
client._run(ask(Request(m.Hold([object_id]), "hold"), m.Held))
client._run(ask(Request(t.Suspend([object_id]), "suspend"), m.Count))
print("suspended", flush=True)
sys.stdin.readline()
if again:
    client._run(ask(Request(t.Resume(object_id), "resume"), t.Resumed))
sys.stdin.readline()
"""


@pytest.fixture
def client(broker_app: BrokerApp, tmp_path: Path) -> Client:
    """A client of a broker that has a directory for files."""
    broker_app.write(LARGE)
    (tmp_path / "spill").mkdir()
    broker_app.start("--spill-dir", str(tmp_path / "spill"))
    return broker_app.connect()


def check(client: Client, object_id: str) -> None:
    """The object is there, and has its bytes."""
    with client.call("large") as handle:
        assert handle.object_id == object_id
        assert handle.value[PLACES].tolist() == PLACES


def moving(client: Client, object_id: str) -> bool:
    """Whether bytes of an object are being copied."""
    return client.get_object_info(object_id).get("moving", {"done": 0})["done"] > 0


@pytest.mark.parametrize("how", ["suspend", "resume"])
def test_a_client_that_is_killed_while_its_object_moves(
    client: Client, children: list[Child], how: str, base_path: str
) -> None:
    """Whoever waits for the object gets it; the lease of the killed one is gone, and the broker has no descriptor more."""
    with client.call("large") as handle:
        object_id = str(handle.object_id)
    client.evict(object_id)
    broker = int(client.get_server_info()["pid"])
    before = memory_of(broker)
    with client.call("large"):
        child = python(CLIENT.format(object_id=object_id, how=how))
        children.append(child)
        child.expect("suspended")
    client.evict(object_id)
    child.tell("")
    if how == "resume":
        eventually(lambda: (info := client.get_object_info(object_id))["tier"] == "device" or "moving" in info)
    child.kill()
    check(client, object_id)
    eventually(lambda: client.get_object_info(object_id)["leases"] == 0)
    client.evict(object_id)
    eventually(lambda: memory_of(broker) == before)


@pytest.mark.parametrize("cold", [False, True], ids=["evicting", "restoring"])
def test_a_client_that_is_killed_while_it_asks_for_a_move(
    client: Client, children: list[Child], cold: bool, base_path: str
) -> None:
    """The move ends, one way or the other, and the object can be had."""
    with client.call("large") as handle:
        object_id = str(handle.object_id)
    if cold:
        client.evict(object_id)
    verb = "restore" if cold else "evict"
    child = python(f"from shared_rpc import Client; Client(device='cpu').{verb}({object_id!r})")
    children.append(child)
    eventually(lambda: moving(client, object_id) or child.process.poll() is not None)
    child.kill()
    eventually(lambda: "moving" not in client.get_object_info(object_id))
    check(client, object_id)
    assert client.get_server_info()["builds"] == 1
