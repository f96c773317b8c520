"""Records that are arriving at a node and are sent on from there, without Ray and without a broker."""

from __future__ import annotations

import asyncio
import time
from typing import Any, cast

import pytest

from shared_rpc.client.exported import AsyncExportedRecord, RecordBytes
from shared_rpc.cluster import offers
from shared_rpc.cluster.agreement import Movers
from shared_rpc.cluster.movers import OBJECTS, Mover, Part
from shared_rpc.cluster.offers import Offer, Offers, Put
from shared_rpc.cluster.receipts import Receipt
from shared_rpc.errors import ClusterError, StaleHandleError
from shared_rpc.protocol.records import SegmentInfo


class Header:
    """The parts of a header that matter here."""

    def __init__(self, nbytes: int, skeleton: bytes = b"s") -> None:
        self.skeleton = skeleton
        self.segments = [SegmentInfo("s", nbytes, "cpu", "read", "memfd")]

    def to_bytes(self) -> bytes:
        """Its name here."""
        return self.skeleton


class Segment:
    """A segment of so many bytes."""

    def __init__(self, info: SegmentInfo) -> None:
        self.info, self.nbytes = info, info.nbytes


class Record:
    """A record, or a room, of so many bytes."""

    def __init__(self, nbytes: int = 10) -> None:
        self.header = Header(nbytes)
        self.segments = [Segment(info) for info in self.header.segments]
        self.closed = False

    async def close(self) -> None:
        """Note that it is closed."""
        self.closed = True


class Broker:
    """A broker's client: it exports records, and keeps those that it has."""

    def __init__(self) -> None:
        self.exported: list[Record] = []

    async def export(self, object_id: str) -> Record:
        """Export an object that there is."""
        await asyncio.sleep(0)
        self.exported.append(Record())
        return self.exported[-1]


class Giver(Mover):
    """A mover that names the record and the part; ``stale`` is closed when it is first looked at."""

    stale: Record | None = None

    def give(self, record: RecordBytes, part: Part) -> Any:
        """Give the part."""
        if record is cast(Any, self.stale):
            assert self.stale is not None
            self.stale.closed, self.stale = True, None
            raise StaleHandleError("the record was closed", reason="released")
        return record, part

    def take(self, given: Any, room: RecordBytes, part: Part) -> None:
        """Take nothing."""

    @staticmethod
    def part_nbytes(store_nbytes: int) -> int:
        """Take parts as large as a store."""
        return store_nbytes


class Sharer(Giver):
    """One whose parts are put into a store."""

    shared = True


class Only(Movers):
    """One mover for all."""

    def __init__(self, mover: Mover) -> None:
        super().__init__({}, ())
        self.mover = mover

    def make(self, name: str) -> Mover:
        """Return it."""
        assert name == OBJECTS
        return self.mover


def receipt_of(nbytes: int = 10, part_nbytes: int = 4) -> Receipt:
    """A record that begins to arrive."""
    return Receipt(cast(AsyncExportedRecord, Record(nbytes)), part_nbytes)


@pytest.fixture
def broker() -> Broker:
    """The broker of the node."""
    return Broker()


@pytest.fixture
def giver() -> Giver:
    """Its mover."""
    return Giver()


@pytest.fixture
def sending(broker: Broker, giver: Giver) -> Offers:
    """What the node offers."""
    return Offers("n", 1000, cast(Any, broker), Only(giver), lambda given: given)


def test_a_part_is_here_when_all_its_bytes_are() -> None:
    """However it is cut."""
    receipt = receipt_of()
    first, second, third = receipt.missing
    receipt.arrived(second, OBJECTS)
    assert receipt.has(second) and receipt.has(Part(0, 5, 2))
    assert not receipt.has(Part(0, 3, 2)) and not receipt.has(Part(0, 7, 2))
    assert (receipt.nbytes, receipt.missing) == (4, (first, third))
    receipt.arrived(first, OBJECTS)
    assert receipt.has(Part(0, 0, 8)) and not receipt.has(Part(0, 0, 9))


def test_a_receipt_is_of_a_record_with_the_same_skeleton_and_sizes() -> None:
    """Its generation may differ."""
    receipt = receipt_of()
    assert receipt.is_of(cast(Any, Header(10)))
    assert not receipt.is_of(cast(Any, Header(11))) and not receipt.is_of(cast(Any, Header(10, b"t")))


def test_parts_that_another_source_sends_in_smaller_pieces_are_cut() -> None:
    """What has arrived stays."""
    receipt = receipt_of()
    receipt.arrived(receipt.missing[0], OBJECTS)
    receipt.cut(3)
    assert receipt.missing == ((0, 4, 3), (0, 7, 1), (0, 8, 2))
    assert (receipt.nbytes, receipt.part_nbytes, receipt.movers) == (4, 3, {OBJECTS: 4})


@pytest.mark.asyncio
async def test_a_receipt_that_nothing_comes_of_does_not_hold_who_waits() -> None:
    """The wait ends when it is to."""
    assert not await receipt_of().change(time.monotonic())


@pytest.mark.parametrize(("largest", "expected"), [(100, 4), (3, 3)])
def test_parts_are_sent_on_as_they_arrive(sending: Offers, largest: int, expected: int) -> None:
    """They are cut in the same way, unless the receiver has less room."""
    assert sending.of_receipt(receipt_of(), (), largest).part_nbytes == expected


@pytest.mark.asyncio
async def test_who_asks_for_a_part_that_is_missing_gets_it_when_it_arrives(sending: Offers) -> None:
    """From the room."""
    receipt = receipt_of()
    offer = sending.of_receipt(receipt, (), 100)
    part = receipt.missing[1]
    asked = asyncio.create_task(sending.part(offer.number, part))
    await asyncio.sleep(0)
    receipt.arrived(receipt.missing[0], OBJECTS)
    await asyncio.sleep(0)
    assert not asked.done()
    receipt.arrived(part, OBJECTS)
    assert await asked == (receipt.room, part)
    assert sending.sent == part.nbytes


@pytest.mark.asyncio
async def test_who_waits_for_long_is_told_so(sending: Offers, monkeypatch: pytest.MonkeyPatch) -> None:
    """It asks again, and knows that it is not forgotten."""
    monkeypatch.setattr(offers, "NOT_YET", 0.0)
    receipt = receipt_of()
    offer = sending.of_receipt(receipt, (), 100)
    assert await sending.part(offer.number, receipt.missing[0]) is None


async def waiting(sending: Offers, receipt: Receipt) -> tuple[Offer, asyncio.Task[Any]]:
    """Somebody who waits for a part."""
    offer = sending.of_receipt(receipt, (), 100)
    asked = asyncio.create_task(sending.part(offer.number, receipt.missing[-1]))
    await asyncio.sleep(0)
    return offer, asked


@pytest.mark.asyncio
@pytest.mark.parametrize("how", ["ended", "given up", "withdrawn"])
async def test_who_waits_learns_that_nothing_comes(sending: Offers, how: str) -> None:
    """The record is given up, or does not go on for now, or who waits is served by another node."""
    receipt = receipt_of()
    offer, asked = await waiting(sending, receipt)
    if how == "ended":
        await receipt.end()
    elif how == "given up":
        await sending.give_up(receipt)
    else:
        await sending.end(offer.number)
    with pytest.raises(ClusterError, match="given up to receive it" if how == "ended" else "has ended its offer"):
        await asked
    with pytest.raises(ClusterError, match="has ended its offer"):
        await sending.part(offer.number, receipt.missing[0])


@pytest.mark.asyncio
async def test_what_is_given_up_elsewhere_goes_on_here(sending: Offers) -> None:
    """Offers of other records stay."""
    mine, other = receipt_of(), receipt_of()
    offer = sending.of_receipt(mine, (), 100)
    await sending.give_up(other)
    mine.arrived(part := mine.missing[0], OBJECTS)
    assert await sending.part(offer.number, part) == (mine.room, part)


@pytest.mark.asyncio
async def test_what_has_become_an_object_is_sent_on_from_that(sending: Offers, broker: Broker) -> None:
    """It is exported once, whoever asks first, and closed with the offer."""
    receipt = receipt_of()
    offer, asked = await waiting(sending, receipt)
    for part in receipt.missing:
        receipt.arrived(part, OBJECTS)
    await receipt.room.close()
    receipt.become("o")
    both = await asyncio.gather(asked, sending.part(offer.number, Part(0, 0, 4)))
    [record] = broker.exported
    assert [cast(Any, found) for found, _ in both] == [record, record]
    await sending.end(offer.number)
    assert record.closed


@pytest.mark.asyncio
async def test_a_room_that_becomes_an_object_while_a_part_is_read_is_read_again(
    sending: Offers, broker: Broker, giver: Giver
) -> None:
    """From the object, once it is there."""
    receipt = receipt_of()
    offer = sending.of_receipt(receipt, (), 100)
    receipt.arrived(part := receipt.missing[0], OBJECTS)
    giver.stale = cast(Any, receipt.room)
    asked = asyncio.create_task(sending.part(offer.number, part))
    while giver.stale is not None:  # noqa: ASYNC110  # a thread reads it
        await asyncio.sleep(0)
    receipt.become("o")
    record, _ = await asked
    assert [record] == broker.exported


@pytest.mark.asyncio
async def test_an_export_that_is_closed_is_an_error(sending: Offers, broker: Broker, giver: Giver) -> None:
    """It does not become anything else."""
    offer = await sending.of_object("o", (), 100)
    giver.stale = broker.exported[0]
    with pytest.raises(StaleHandleError):
        await sending.part(offer.number, Part(0, 0, 4))


@pytest.mark.asyncio
async def test_an_offer_whose_receiver_asks_for_nothing_more_ends(
    sending: Offers, broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is used stays."""
    await sending.of_object("o", (), 100)
    await sending.end_idle()
    assert not broker.exported[0].closed
    monkeypatch.setattr(offers, "_IDLE", -1.0)
    await sending.end_idle()
    assert broker.exported[0].closed


class Store:
    """An object store, which says how much was put; ``full`` of them fail first."""

    def __init__(self) -> None:
        self.put: list[Any] = []
        self.full = 0

    def __call__(self, given: Any) -> str:
        """Put it."""
        if self.full:
            self.full -= 1
            raise MemoryError("it is full")
        self.put.append(given)
        return f"object {len(self.put)}"


@pytest.fixture
def store() -> Store:
    """The node's object store."""
    return Store()


@pytest.fixture
def sharing(broker: Broker, store: Store) -> Offers:
    """What the node offers, by way of its object store."""
    return Offers("n", 1000, cast(Any, broker), Only(Sharer()), store)


async def offered_twice(sharing: Offers) -> tuple[Offer, Offer]:
    """Two receivers of an object."""
    return await sharing.of_object("o", (), 100), await sharing.of_object("o", (), 100)


@pytest.mark.asyncio
async def test_a_part_is_put_once_for_all_receivers(sharing: Offers, store: Store) -> None:
    """Whether they ask at once or one shortly after the other."""
    one, two = await offered_twice(sharing)
    first, second = Part(0, 0, 4), Part(0, 4, 4)
    both = await asyncio.gather(sharing.part(one.number, first), sharing.part(two.number, first))
    assert both == [Put("object 1"), Put("object 1")]
    assert await sharing.part(one.number, second) == await sharing.part(two.number, second) == Put("object 2")
    assert [part for _, part in store.put] == [first, second]
    assert sharing.sent == 16


@pytest.mark.asyncio
async def test_few_parts_are_kept_for_receivers_that_are_behind(sharing: Offers, store: Store) -> None:
    """The store need not be large: the one that is too far behind has its own."""
    one, two = await offered_twice(sharing)
    for offset in range(0, 16, 4):
        await sharing.part(one.number, Part(0, offset, 4))
    await sharing.part(two.number, Part(0, 12, 4))
    assert len(store.put) == 4
    await sharing.part(two.number, Part(0, 0, 4))
    assert len(store.put) == 5


@pytest.mark.asyncio
async def test_who_asks_anew_gets_a_part_that_was_put_anew(sharing: Offers, store: Store) -> None:
    """It may have found that the one before was damaged; others that receive the object change nothing about that."""
    one, _ = await offered_twice(sharing)
    await sharing.part(one.number, Part(0, 0, 4))
    await sharing.end(one.number)
    again = await sharing.of_object("o", (), 100)
    assert await sharing.part(again.number, Part(0, 0, 4)) == Put("object 2")


@pytest.mark.asyncio
async def test_a_part_that_could_not_be_put_is_tried_again(sharing: Offers, store: Store) -> None:
    """The error is that of who has asked then."""
    store.full = 1
    one, two = await offered_twice(sharing)
    with pytest.raises(MemoryError):
        await sharing.part(one.number, Part(0, 0, 4))
    assert await sharing.part(two.number, Part(0, 0, 4)) == Put("object 1")
