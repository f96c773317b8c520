"""Mappings of suspended objects: the address range stays reserved, and restored memory is mapped there."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from typing import Any
from unittest.mock import Mock

import pytest

from shared_rpc.errors import CapabilityError, HandleSuspended
from shared_rpc.memory import mapping as mapping_module
from shared_rpc.memory.backends.host import HOST, MemfdBackend
from shared_rpc.memory.mapping import Mapping, MappingTable
from shared_rpc.memory.segments import Segment
from shared_rpc.protocol.records import Access
from tests.kit.bound_host import BoundHost
from tests.kit.processes import open_fds, rights
from tests.kit.world import at_once

Make = Callable[..., Segment]
Use = Callable[[list[Segment], str], tuple[Any, list[Mapping]]]


class User:
    """A user of mapped memory."""


class Device(MemfdBackend):
    """Host memory that requires synchronisation, like a GPU's, and whose mappings cannot be replaced atomically."""

    unmaps_in_background = False
    replaces = False

    def __init__(self) -> None:
        self.idle = True
        self.events: list[str] = []
        #: Addresses of mappings that cannot be vacated.
        self.refused: set[int] = set()

    def synchronize(self) -> bool:
        """Return whether waiting for the device succeeded."""
        self.events.append("synchronize")
        return self.idle

    def vacate(self, address: int, nbytes: int) -> None:
        """Vacate, and record it."""
        if address in self.refused:
            raise CapabilityError("out of map areas")
        self.events.append("vacate")
        super().vacate(address, nbytes)


@pytest.fixture(scope="module", autouse=True)
def descriptor_server() -> None:
    """Start the permanent server of descriptors before anything is counted."""
    BoundHost().create(1).close()


@pytest.fixture
def table(no_leaks: None) -> MappingTable:
    """An empty table."""
    return MappingTable()


@pytest.fixture
def make(no_leaks: None) -> Iterator[Make]:
    """``make(text, of)`` makes a segment that begins with a text; if ``of`` is given, as its next incarnation."""
    with ExitStack() as stack:

        def segment(text: bytes = b"", of: Segment | None = None, access: Access = "read_write") -> Segment:
            made = stack.enter_context(closing(HOST.create(1)))
            address = HOST.map(made.fileno(), made.info.nbytes, "read_write")
            HOST.view(address, len(text))[:] = text
            HOST.unmap(address, made.info.nbytes)
            if of is None and access == "read_write":
                return made
            info = made.info
            if of is not None:
                _, _, number = of.info.id.partition(".")
                info = of.info.incarnation(int(number or 0) + 1)
            described = Segment(info.__class__(info.id, info.nbytes, info.device, access, info.mechanism), made.descriptor)
            return stack.enter_context(closing(described))

        yield segment


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    """The device of all segments that the table maps in this test."""
    device = Device()
    monkeypatch.setattr(mapping_module, "backend_for", lambda name, mechanism=None: device)
    return device


@pytest.fixture
def use(table: MappingTable) -> Iterator[Use]:
    """``use(segments, object_id)`` attaches segments for an object that lives as long as the first of the answer.

    At the end of the test, nothing is left of the objects.
    """

    def attach(segments: list[Segment], object_id: str) -> tuple[list[User], list[Mapping]]:
        users = [User() for _ in segments]
        with table.attach(segments) as mappings:
            table.keep_for(zip(mappings, users, strict=True), object_id)
        return users, mappings

    yield attach
    table.drain()
    assert (len(table), table.suspended) == (0, frozenset())


def text(mapping: Mapping, length: int) -> bytes:
    """Return the text in a segment."""
    return bytes(HOST.view(mapping.address, length))


def test_a_suspended_object_returns_to_its_address(table: MappingTable, make: Make, use: Use) -> None:
    """Its memory is unmapped, with the address reserved, and mapped again with its present bytes."""
    segment = make(b"first")
    user, [mapping] = use([segment], "a")
    address = mapping.address
    assert table.suspend("a") and table.suspend("a")
    assert (rights(address), mapping.vacated, mapping.descriptor) == ("---p", True, None)
    with table_writer(segment) as writer:
        writer[:5] = b"later"
    for _ in range(2):
        table.resume("a", [segment])
    assert (mapping.address, mapping.vacated, text(mapping, 5)) == (address, False, b"later")
    del user
    table.drain()
    assert rights(address) == ""


class table_writer:
    """The bytes of a segment, as seen by another process."""

    def __init__(self, segment: Segment) -> None:
        self.segment = segment

    def __enter__(self) -> Any:
        self.address = HOST.map(self.segment.fileno(), self.segment.info.nbytes, "read_write")
        return HOST.view(self.address, self.segment.info.nbytes)

    def __exit__(self, *_: object) -> None:
        HOST.unmap(self.address, self.segment.info.nbytes)


def test_attaching_a_suspended_segment_maps_it_at_its_address(table: MappingTable, make: Make, use: Use) -> None:
    """Another result over the same memory, or a later incarnation, is built at the same address."""
    segment = make(b"first")
    first, [mapping] = use([segment], "a")
    users, address = [first], mapping.address  # none of them ends: unused ones are vacated then
    for current in (segment, make(b"other", of=segment)):
        table.suspend("a")
        other, [again] = use([current], "a")
        users.append(other)
        assert again is mapping
        assert (again.address, again.vacated, again.info.id) == (address, False, current.info.id)
    assert text(mapping, 5) == b"other"


# Segments that stay mapped.


@pytest.mark.parametrize("other", ["", "b"])
def test_memory_used_by_another_object_stays_mapped(table: MappingTable, make: Make, use: Use, other: str) -> None:
    """Also by an object unknown to the server; after its end the memory is unmapped at the next drain."""
    segment = make(b"both")
    _user, [mapping] = use([segment], "a")
    neighbour, _ = use([segment], other)
    assert table.suspend("a")
    assert (mapping.vacated, text(mapping, 4)) == (False, b"both")
    del neighbour
    table.drain()
    assert mapping.vacated
    table.resume("a", [segment])
    assert text(mapping, 4) == b"both"


def test_private_pages_stay(table: MappingTable, make: Make, use: Use) -> None:
    """Pages that the process has written to are nowhere else."""
    shared, private = make(b"shared"), make(b"before", access="copy")
    _user, [mapping, copy] = use([shared, private], "a")
    HOST.view(copy.address, 6)[:] = b"mine  "
    table.suspend("a")
    assert (mapping.vacated, copy.vacated) == (True, False)
    table.resume("a", [shared, make(b"before", of=private, access="copy")])
    assert text(copy, 6) == b"mine  "


def test_objects_in_use_are_not_suspended(table: MappingTable, make: Make, use: Use) -> None:
    """Uses that began during the suspension are checked last, when later uses see that the object is being suspended."""
    segment = make(b"used")
    _user, [mapping] = use([segment], "a")
    seen: list[bool] = []

    def in_use() -> bool:
        seen.append("a" in table.suspended)
        return True

    assert not table.suspend("a", in_use)
    assert (seen, table.suspended, text(mapping, 4)) == ([True], frozenset(), b"used")


# Refusing.


def test_a_device_that_cannot_be_waited_for_prevents_the_suspension(
    table: MappingTable, make: Make, use: Use, device: Device
) -> None:
    """As while a CUDA graph is captured: the object is unchanged."""
    segment = make(b"busy")
    _user, [mapping] = use([segment], "a")
    device.idle = False
    with pytest.raises(CapabilityError, match=r"cannot suspend now.*graph is being captured"):
        table.suspend("a")
    assert (device.events, table.suspended, text(mapping, 4)) == (["synchronize"], frozenset(), b"busy")
    device.idle = True
    assert table.suspend("a")
    assert device.events[1:] == ["synchronize", "vacate"]
    table.resume("a", [segment])


def test_memory_that_cannot_be_unmapped_prevents_the_suspension(
    table: MappingTable, make: Make, use: Use, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The object can be used as before."""
    _user, [mapping] = use([make(b"stays")], "a")
    monkeypatch.setattr(MemfdBackend, "vacate", Mock(side_effect=RuntimeError))
    with pytest.raises(RuntimeError):
        table.suspend("a")
    assert (table.suspended, table.find(mapping.address), text(mapping, 5)) == (frozenset(), (mapping, 0), b"stays")


@pytest.mark.parametrize("later", [False, True])
def test_an_object_is_suspended_although_some_of_its_memory_cannot_be_unmapped_yet(
    table: MappingTable, make: Make, use: Use, device: Device, later: bool
) -> None:
    """Other memory of it is unmapped already. The rest follows at the next drain, and all of it can be resumed before."""
    segments = [make(b"one"), make(b"two")]
    _user, mappings = use(segments, "a")
    device.refused.add(mappings[1].address)
    assert table.suspend("a")
    assert [mapping.vacated for mapping in mappings] == [True, False]
    if later:
        device.refused.clear()
        table.drain()
        assert [mapping.vacated for mapping in mappings] == [True, True]
    table.resume("a", segments)
    assert [text(mapping, 3) for mapping in mappings] == [b"one", b"two"]


def test_an_object_that_cannot_be_mapped_again_stays_suspended(table: MappingTable, make: Make, use: Use) -> None:
    """None of its memory is mapped then, and the next attempt succeeds."""
    segments = [make(b"one"), make(b"two")]
    lost = make(b"lost", of=segments[1])
    lost.close()
    _user, mappings = use(segments, "a")
    table.suspend("a")
    fds = open_fds()
    with pytest.raises(ValueError, match="is closed"):
        table.resume("a", [segments[0], lost])
    assert [mapping.vacated for mapping in mappings] == [True, True]
    assert ("a" in table.suspended, open_fds()) == (True, fds)
    table.resume("a", segments)
    assert [text(mapping, 3) for mapping in mappings] == [b"one", b"two"]


# Ends.


def test_vacated_addresses_are_not_found(table: MappingTable, make: Make, use: Use) -> None:
    """A search precedes a use of the memory, so it gives an error with the remedy."""
    segment = make()
    _user, [mapping] = use([segment], "a")
    mapping.label("object a of get()")
    table.suspend("a")
    with pytest.raises(HandleSuspended, match=r"object a of get\(\).*resume\(\)"):
        table.find(mapping.address + 7)
    assert not table.knows(segment.info)
    table.resume("a", [segment])
    assert table.find(mapping.address + 7) == (mapping, 7)


# Incarnations.


def test_a_new_incarnation_is_mapped_separately(table: MappingTable, make: Make, use: Use) -> None:
    """For users of the old memory that did not suspend it."""
    segment = make(b"first")
    second = make(b"other", of=segment)
    _user, [old] = use([segment], "a")
    assert table.outdated([second.info]) and not table.outdated([segment.info])
    _late, [new] = use([second], "a")
    assert (text(old, 5), text(new, 5)) == (b"first", b"other")
    assert not table.outdated([second.info])
    table.suspend("a")
    assert old.vacated and new.vacated
    third = make(b"third", of=second)
    table.resume("a", [third])
    assert (text(old, 5), text(new, 5), old.key != new.key) == (b"third", b"third", True)


# All at once.


def test_many_threads_can_suspend_resume_and_attach(table: MappingTable, make: Make, use: Use) -> None:
    """Attached objects have the right bytes, whatever other threads do; finally nothing is left."""
    segments = [make(bytes([number]) * 8) for number in range(3)]

    def work(seed: int) -> None:
        chance = random.Random(seed)
        for _ in range(150):
            number = chance.randrange(3)
            name = f"object {number}"
            what = chance.randrange(3)
            if what == 0:
                table.suspend(name)
            elif what == 1:
                table.resume(name, [segments[number]])
            else:
                user = User()
                with table.attach([segments[number]]) as [mapping]:
                    table.keep_for([(mapping, user)], name)
                    assert text(mapping, 8) == bytes([number]) * 8

    kept = [use([segment], f"object {number}") for number, segment in enumerate(segments)]
    assert at_once(*[functools.partial(work, seed) for seed in range(6)]) == [None] * 6
    for number, place in enumerate(mapping for _, [mapping] in kept):
        table.resume(f"object {number}", [segments[number]])
        assert text(place, 8) == bytes([number]) * 8
