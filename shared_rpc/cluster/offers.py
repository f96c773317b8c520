"""Offers: records that the agent of a node sends to others, those that are still arriving there among them."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec

from shared_rpc.client.exported import AsyncExportedRecord
from shared_rpc.cluster.agreement import Movers
from shared_rpc.cluster.movers import Mover, Part
from shared_rpc.cluster.receipts import Receipt
from shared_rpc.errors import ClusterError, StaleHandleError
from shared_rpc.operations.async_client import AsyncClient

__all__ = ["NOT_YET", "Offer", "Offers", "Put"]

#: Seconds after which who waits for a part that has not arrived yet is told so, and asks again.
NOT_YET = 5.0
#: Seconds after which an offer ends whose receiver asks for nothing more.
_IDLE = 120.0
#: Parts in the object store that are kept for other receivers, which as a rule are not far behind.
_KEPT = 3


class Offer(msgspec.Struct, frozen=True):
    """A record that a source is ready to send: under a number, with its header, by a mover, in parts of so many bytes."""

    number: int
    header: bytes
    mover: str
    part_nbytes: int


class Put(NamedTuple):
    """A part that lies in the object store of its source, and is to be read from there."""

    reference: Any


class _Offered:
    """A record that is offered: an export, or a receipt, until that is an object. ``used`` is when its receiver asked last.

    ``what`` is equal for offers of the same bytes.
    """

    def __init__(self, what: object, mover: Mover, record: AsyncExportedRecord | None, receipt: Receipt | None) -> None:
        self.what = what
        self.mover = mover
        self.record = record
        self.receipt = receipt
        self.used = time.monotonic()
        #: Held while the object is exported that the receipt has become.
        self.exporting = asyncio.Lock()
        self.ended = asyncio.Event()


class Offers:
    """The records that a node offers to others.

    :param node: the node's name, for errors.
    :param store_nbytes: the size of its object store.
    :param client: of the broker.
    :param movers: make what travels.
    :param put: puts what is given into the object store, and returns what it is to be read by.
    """

    def __init__(self, node: str, store_nbytes: int, client: AsyncClient, movers: Movers, put: Callable[[Any], Any]) -> None:
        self._node = node
        self._store_nbytes = store_nbytes
        self._client = client
        self._movers = movers
        self._put = put
        #: What was put, by what is offered and the part, the latest last.
        self._kept: OrderedDict[tuple[object, Part], asyncio.Task[Any]] = OrderedDict()
        self._offered: dict[int, _Offered] = {}
        self._numbers = itertools.count(1)
        #: Bytes that were sent.
        self.sent = 0

    async def of_object(self, object_id: str, movers: Sequence[str], store_nbytes: int) -> Offer:
        """Offer an object of the broker.

        :param movers: those that the receiver has, the best first.
        :param store_nbytes: the size of the receiver's object store.
        """
        record = await self._client.export(object_id)
        return self._open(object_id, record, record, None, movers, store_nbytes)

    def of_receipt(self, receipt: Receipt, movers: Sequence[str], store_nbytes: int) -> Offer:
        """Offer a record that is arriving, in the parts in which it arrives if those are small enough."""
        return self._open(receipt, receipt.room, None, receipt, movers, store_nbytes)

    def _open(
        self,
        what: object,
        here: AsyncExportedRecord,
        record: AsyncExportedRecord | None,
        receipt: Receipt | None,
        movers: Sequence[str],
        store_nbytes: int,
    ) -> Offer:
        number, name = next(self._numbers), self._movers.agree(movers)
        offered = self._offered[number] = _Offered(what, self._movers.make(name), record, receipt)
        nbytes = offered.mover.part_nbytes(min(store_nbytes, self._store_nbytes))
        if receipt is not None:
            nbytes = min(nbytes, receipt.part_nbytes)
        return Offer(number, here.header.to_bytes(), name, nbytes)

    async def ended(self, number: int) -> None:
        """Wait until an offer has ended."""
        offered = self._offered.get(number)
        if offered is not None:
            await offered.ended.wait()

    async def part(self, number: int, part: Part) -> Any:
        """Return what the mover makes of a part, or :class:`Put` in its place; None if it has not arrived yet.

        :raises ClusterError: if the offer has ended.
        """
        until = time.monotonic() + NOT_YET
        while (offered := self._offered.get(number)) is not None:
            offered.used = time.monotonic()
            record = await self._readable(number, offered, part)
            if record is None:
                assert offered.receipt is not None, "all parts of an export are there"
                if not await offered.receipt.change(until):
                    return None
                continue
            try:
                given = await self._given(offered, record, part)
            except StaleHandleError:
                if record is offered.record or not record.closed:
                    raise
                continue  # the room has become an object meanwhile
            self.sent += part.nbytes
            return given
        raise ClusterError(f"{self._node} has ended its offer {number}", reason="failed")

    async def _given(self, offered: _Offered, record: AsyncExportedRecord, part: Part) -> Any:
        """Have the mover give a part; what can be shared is put once for those who ask for it within a short time."""
        if not offered.mover.shared:
            return await asyncio.to_thread(offered.mover.give, record, part)
        which = (offered.what, part)
        kept = self._kept.get(which)
        if kept is None:
            work = asyncio.to_thread(lambda: self._put(offered.mover.give(record, part)))
            kept = self._kept[which] = asyncio.create_task(work)
            while len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
        try:
            return Put(await asyncio.shield(kept))
        except BaseException:
            if kept.done() and self._kept.get(which) is kept:
                del self._kept[which]
            raise

    async def _readable(self, number: int, offered: _Offered, part: Part) -> AsyncExportedRecord | None:
        """Return the record that a part is read from, None if it has not arrived."""
        async with offered.exporting:
            if offered.record is not None:
                return offered.record
            receipt = offered.receipt
            assert receipt is not None, "an offer is of an export or of a receipt"
            if receipt.object_id is not None:
                record = await self._client.export(receipt.object_id)
                if self._offered.get(number) is not offered:  # it has ended meanwhile
                    await record.close()
                    raise ClusterError(f"{self._node} has ended its offer {number}", reason="failed")
                offered.record = record
                return record
        if receipt.ended:
            await self.end(number)
            raise ClusterError(f"{self._node} has given up to receive it", reason="failed")
        return receipt.room if receipt.has(part) and not receipt.room.closed else None

    async def end(self, number: int) -> None:
        """End an offer; it may have ended."""
        offered = self._offered.pop(number, None)
        if offered is None:
            return
        offered.ended.set()
        # Not those of other receivers alone: one who found damage there is to get it anew.
        for which in [which for which in self._kept if which[0] == offered.what]:
            del self._kept[which]
        if offered.receipt is not None:
            offered.receipt.interrupt()
        await asyncio.to_thread(offered.mover.close)
        if offered.record is not None:
            await offered.record.close()

    async def give_up(self, receipt: Receipt) -> None:
        """End the offers of a record that does not go on arriving for now."""
        for number, offered in list(self._offered.items()):
            if offered.receipt is receipt:
                await self.end(number)

    async def end_idle(self) -> None:
        """End those whose receivers ask for nothing more."""
        for number, offered in list(self._offered.items()):
            if time.monotonic() - offered.used > _IDLE:
                await self.end(number)
