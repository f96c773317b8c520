"""Records in a broker, which needs no torch for them: they outlive crashes, and a killed client leaves no part of one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from shared_rpc.errors import RefreshError
from tests.kit.brokers import BrokerApp, fds_of
from tests.kit.processes import eventually
from tests.kit.service_manager import ServiceManager
from tests.kit.world import World

#: An endpoint that counts its builds in a file, and whose result has several segments: tensors, private ones and an array.
MODEL = """
import numpy

class Net(torch.nn.Module):
    def __init__(self, size):
        super().__init__()
        self.layer = torch.nn.Linear(size, size)
        self.norm = torch.nn.BatchNorm1d(size)
        self.array = numpy.arange(50_000)
        self.requires_grad_(False)

def net(size):
    with open("built", "a") as file:
        file.write("x")
    torch.manual_seed(size)
    return Net(size)

provider.share("net", managed=True, tensors="parameters")(net)
provider.share("sealed", managed=True, tensors="parameters", access="read")(net)
"""


class Place:
    """A folder with an app and the broker that serves it."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        folder.chmod(0o700)
        self.folder = folder
        self.app = BrokerApp(World(str(folder / "s")))
        self.app.write(MODEL)
        self.broker = self.app.start(base_path=self.app.base_path, preload=False)
        self.client = self.app.connect()

    @property
    def built(self) -> int:
        """The number of times that the endpoint ran here."""
        file = self.folder / "built"
        return len(file.read_text()) if file.exists() else 0

    def close(self) -> None:
        """End the broker and its client."""
        self.app.world.close()


@pytest.fixture
def places(world: World, tmp_path: Path) -> Iterator[list[Place]]:
    """Two places, like two hosts."""
    made = [Place(tmp_path / name) for name in ("a", "b")]
    yield made
    for place in made:
        place.close()


def same(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    """Return whether two modules have the same bits."""
    mine, theirs = one.state_dict(), other.state_dict()
    arrays = (one.array == other.array).all()  # type: ignore[operator]
    return bool(mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine) and arrays)


@pytest.mark.parametrize(
    "code",
    [
        'handle = other.call("held"); record = other.export(handle.object_id); allocated = client.allocate(record.header)',
        'kept = client.prepare("held")',
    ],
)
def test_a_killed_client_leaves_nothing(places: list[Place], world: World, code: str) -> None:
    """Neither objects nor memory nor descriptors, in either broker."""
    for place in places:
        place.client.call("held").release()
    before = [fds_of(place.broker.pid) for place in places]
    counts = [len(place.client.list_objects()) for place in places]
    clients = [f"Client({place.app.base_path!r}, device='cpu', timeout=30)" for place in places]
    code = f"from shared_rpc import Client\nclient, other = {', '.join(clients)}\n{code}\nprint('there', flush=True)\ninput()"
    holder = world.process(code)
    holder.expect("there")
    assert [len(place.client.list_objects()) for place in places] != counts
    holder.kill()
    eventually(lambda: [len(place.client.list_objects()) for place in places] == counts)
    # A process that was starting or ending before may have had descriptors that are closed now.
    eventually(
        lambda: all(fds_of(place.broker.pid) <= most for place, most in zip(places, before, strict=True)), what=f"{before}"
    )
    assert [place.client.get_server_info()["leases"] for place in places] == [0, 0]


def test_an_allocation_survives_its_broker(places: list[Place]) -> None:
    """This process's mapping stays valid: the next broker gets a copy of it."""
    here, there = places
    with here.client.export(here.client.call("net", 100)) as record, there.client.allocate(record.header) as allocated:
        for source, target in zip(record.segments, allocated.segments, strict=True):
            source.copy_to(target)
        there.broker.kill()
        there.app.start(base_path=there.app.base_path)
        there.client.ping()
        assert there.client.adopt(allocated).generation == 1
    assert there.client.call("net", 100).value.layer.weight.shape == (100, 100)
    assert there.built == 0


# Under a service manager.


def test_an_adopted_object_survives_its_broker(places: list[Place], broker_app: BrokerApp, manager: ServiceManager) -> None:
    """Like a built one: the next broker has it, with its generation and its seals."""
    here, _ = places
    broker_app.write(MODEL)
    broker = manager.start()
    client = broker_app.connect()
    handle = here.client.call("sealed", 100)
    with here.client.export(handle) as record:
        client.adopt(record)
        made = client.adopt(record)
        with client.adopt_candidate(record) as candidate:
            manager.expect(lambda: len(manager.objects()) == 1)
            broker.kill()
            manager.start()
            other = broker_app.connect()
            (listed,) = other.list_objects()
            with pytest.raises(RefreshError, match="is no candidate"):
                other.promote(candidate.object_id)
    assert (listed["object_id"], listed["generation"], listed["cached"]) == (made.object_id, 2, True)
    attached = other.call("sealed", 100)
    assert same(attached.value, handle.value)
    with other.export(attached) as again:
        assert [segment.info.access for segment in again.segments] == ["read", "private", "copy"]
        assert again.header.table == record.header.table
    assert not (broker_app.file.parent / "built").exists()
