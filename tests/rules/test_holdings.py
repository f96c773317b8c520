"""Objects as sessions hold them: leases on existing objects, descriptions, and the page of the revision."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import pytest

from shared_rpc.errors import ServerBusy, StaleHandleError
from shared_rpc.memory.records import Record
from shared_rpc.protocol import generations as g
from shared_rpc.protocol import messages as m
from shared_rpc.protocol.records import EMPTY_TABLE, Access, SegmentInfo
from shared_rpc.protocol.specs import EndpointSpec
from shared_rpc.server.holdings import Holdings
from shared_rpc.server.sessions import Sessions
from shared_rpc.server.shared import State
from shared_rpc.server.state.buffers import BufferTable
from shared_rpc.server.state.leases import LeaseTable, TaskHolder
from shared_rpc.server.state.objects import ObjectStore, StoredObject
from tests.kit.clock import Clock
from tests.rules.test_store import segment_of


class Shelf:
    """A server's objects, leases and buffers, with no server around them; ``tiers`` says what they do."""

    def __init__(self) -> None:
        self.clock, self.leases, self.moving = Clock(), LeaseTable(), None
        self.objects = ObjectStore(self.leases, self.clock, StoredObject.close)
        buffers = BufferTable(self.objects, self.leases, self.clock)
        self.capacity = Mock()
        parts = {"objects": self.objects, "leases": self.leases, "buffers": buffers, "clock": self.clock}
        self.state = State(
            server_id="server",
            device="cpu",
            sessions=Sessions("server", self.objects, self.leases, Mock()),
            capacity=self.capacity,
            **cast(Any, parts),
            **dict.fromkeys(("registry", "executor", "memory", "events", "misses", "wake_within"), Mock()),
        )
        self.holdings = Holdings(self.state, cast(Any, SimpleNamespace(info=lambda stored: ({"host": 4096}, self.moving))))

    def add(self, *accesses: Access, key: str | None = None, managed: bool = True, **options: Any) -> StoredObject:
        """An object of one segment for each access, that a task holds."""
        number = len(self.objects)
        segments = [segment_of(SegmentInfo(f"{number}-{index}", 4096, "cpu", one)) for index, one in enumerate(accesses)]
        spec = EndpointSpec("f", managed=managed)
        stored = self.objects.add(spec, key, Record(b"", EMPTY_TABLE, segments, 4096), **options)
        self.leases.grant(TaskHolder("task"), stored.object_id)
        return stored

    def description(self, stored: StoredObject) -> dict[str, Any]:
        """Return what clients get as the description of an object."""
        return cast(Any, m.GetObjectInfo.read(self.holdings.get_info(Mock(), m.GetObjectInfo(stored.object_id))))


@pytest.fixture
def shelf() -> Iterator[Shelf]:
    """One without objects, which drops all in the end."""
    shelf = Shelf()
    yield shelf
    shelf.objects.clear()


def caller(*, local: bool = False) -> Mock:
    """A request of the session ``mine``; what it is answered with is in ``reply``."""
    return Mock(session="mine", local=local)


def test_leases_are_granted_on_existing_managed_objects(shelf: Shelf) -> None:
    """One for each time that an id is given; inactive where the client says so, or has mapped memory that was replaced."""
    active, suspended, replaced, cached = (shelf.add("read_write", managed=number != 3).object_id for number in range(4))
    ids = [active, active, suspended, replaced, cached, "gone"]
    mapped = {active: ["0-0"], replaced: ["2-0", "earlier"], cached: ["earlier"]}
    answer = shelf.holdings.hold(caller(), m.Hold(ids, [suspended], mapped))
    assert (answer.object_ids, answer.outdated) == ([active, active, suspended, replaced], [replaced])
    assert [shelf.leases.handles("mine", each) for each in (active, suspended, replaced, cached)] == [2, 1, 1, 0]
    assert [shelf.leases.users(each) for each in (active, suspended, replaced)] == [["mine"], [], []]


def test_only_held_leases_are_released(shelf: Shelf) -> None:
    """The answer counts these alone; an object without holders goes."""
    stored = shelf.add("read_write")
    shelf.leases.grant("mine", stored.object_id)
    shelf.leases.end_session(TaskHolder("task"))
    assert shelf.holdings.release(caller(), m.Release([stored.object_id, stored.object_id, "gone"])) == m.Answer.of(1)
    with pytest.raises(StaleHandleError, match=f"server has no object {stored.object_id}"):
        shelf.description(stored)


def test_description_of_an_object(shelf: Shelf) -> None:
    """A task holds it, but does not use it; moves, candidates and terms of buffers are included if there are any."""
    stored = shelf.add("read_write", candidate=True)
    shelf.leases.grant("mine", stored.object_id)
    facts = shelf.description(stored)
    assert (facts["leases"], facts["active"], facts["copies"], facts["candidate"]) == (2, 1, {"host": 4096}, True)
    assert not {"moving", "lifetime", "state"} & facts.keys()
    stored.invalidated, shelf.moving = True, cast(Any, {"to": "host", "done": 1, "total": 2})
    facts = shelf.description(stored)
    assert "candidate" not in facts and facts["moving"] == {"to": "host", "done": 1, "total": 2}
    assert shelf.description(shelf.add("read_write", kind="buffer"))["state"] == "unknown"


def test_holders_of_an_existing_object_are_listed(shelf: Shelf) -> None:
    """For other objects the request fails."""
    stored = shelf.add("read_write")
    answer = shelf.holdings.list_holders(Mock(), m.ListHolders(stored.object_id))
    assert [(each["kind"], each["session"]) for each in m.ListHolders.read(answer)] == [("task", "task")]
    with pytest.raises(StaleHandleError):
        shelf.holdings.list_holders(Mock(), m.ListHolders("gone"))


def test_objects_are_listed_by_pages(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    """A page has at most a fixed number; the next begins after its last."""
    monkeypatch.setattr("shared_rpc.server.holdings._PAGE", 3)
    ids = [shelf.add("read_write", key=key).object_id for key in ("one", None, None, None)]

    def page_of(request: m.ListObjects) -> tuple[list[Any], int | None]:
        return request.read(shelf.holdings.list_objects(Mock(), request))

    infos, after = page_of(m.ListObjects())
    assert [info["object_id"] for info in infos] == ids[:3]
    first, second, _ = infos
    assert (first["cached"], second["cached"], [holder["session"] for holder in first["holders"]]) == (True, False, ["task"])
    last, after = page_of(m.ListObjects(after or 0))
    assert ([info["object_id"] for info in last], after) == (ids[3:], None)


def revision_of(shelf: Shelf, stored: StoredObject, asking: Mock) -> g.RevisionPage:
    """The answer to a request for the page of an object's revision."""
    shelf.holdings.get_revision(asking, g.GetRevision(stored.object_id))
    ((message,), options) = asking.reply.call_args
    assert len(options["owners"]) == 1
    return cast(g.RevisionPage, message)


@pytest.mark.parametrize(
    ("accesses", "local", "access"),
    [
        (["read_write", "read_write"], False, "read_write"),
        (["read_write", "read"], False, "read"),
        (["read"], True, "read_write"),
    ],
)
def test_a_revision_has_one_page(shelf: Shelf, no_leaks: None, accesses: list[Access], local: bool, access: Access) -> None:
    """It is made once, for a descriptor; that of read-only memory is read-only elsewhere. Each kind of memory counts once."""
    stored = shelf.add(*accesses)
    shelf.capacity.require_descriptors.side_effect = ServerBusy("none is left")
    with pytest.raises(ServerBusy):
        shelf.holdings.get_revision(caller(), g.GetRevision(stored.object_id))
    shelf.capacity.require_descriptors.side_effect = None
    first = revision_of(shelf, stored, caller(local=local))
    shelf.capacity.require_descriptors.assert_called_with(1)
    shelf.capacity.require_descriptors.reset_mock()
    assert revision_of(shelf, stored, caller(local=local)).page == first.page
    shelf.capacity.require_descriptors.assert_not_called()
    assert stored.page is not None and (first.page.id, first.page.access) == (stored.page.info.id, access)
    assert [info.id for info in first.memory] == [stored.record.segments[-1].info.id]
    stored.close()
