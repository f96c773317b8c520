"""Clients that offer to make copies for a server that has no GPU driver: each gets an order at a time, when it asks for one."""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import Protocol

from shared_rpc.errors import CapabilityError, ProtocolError
from shared_rpc.memory.segments import Descriptor
from shared_rpc.protocol import worker as w
from shared_rpc.protocol.frames import Frame, close_all
from shared_rpc.protocol.messages import Message
from shared_rpc.protocol.peers import Peer
from shared_rpc.server.runs import Waiter

__all__ = ["CopyOffers", "OfferCaller", "OfferingClient"]

_log = logging.getLogger("shared_rpc.server")


class OfferCaller(Protocol):
    """The asker of one request of an offer, a :class:`shared_rpc.server.handlers.Caller`."""

    @property
    def session(self) -> str:
        """The id of the asker's session: each offer has its own."""

    def wait(self) -> Waiter:
        """Register the request as one that is answered later."""

    def reply(self, message: Message, payload: bytes = b"", fds: tuple[int, ...] = ()) -> bool:
        """Answer it; False if that could not be sent."""

    def detach_fds(self) -> list[int]:
        """Return the descriptors of the request, which belong to who asks from here on."""


#: Takes the answer to an order, by the order's number, and what has its descriptors.
Answered = Callable[[int, w.SegmentsCopied, OfferCaller | Frame], None]


class OfferingClient:
    """A client that makes copies, with what a worker has of that. On the loop, but for :meth:`defers`."""

    def __init__(self, pid: int, devices: Collection[str], answered: Answered) -> None:
        self.pid = pid
        self.devices = frozenset(devices)
        self._answered = answered
        #: Orders that it was not given yet, with duplicates of their descriptors.
        self._orders: deque[tuple[int, w.CopySegments, list[int]]] = deque()
        #: Its request for an order, None where it has not asked for one.
        self._asking: OfferCaller | None = None
        #: The number of the order that it was given, 0 for none, and whether the copies are still wanted.
        self.number = 0
        self.wanted = True

    @property
    def congested(self) -> bool:
        """Whether it has an order."""
        return bool(self.number or self._orders)

    def defers(self, number: int) -> bool:
        """Return whether an order waits until another one has ended."""
        return self.number not in (0, number)

    def send(self, message: Message, number: int = 0, payload: bytes = b"", fds: tuple[int, ...] = ()) -> None:
        """Order copies, or stop an order. Other messages are of no interest to a client, which keeps nothing mapped.

        :raises OSError: if this process cannot open more files.
        """
        if isinstance(message, w.CopySegments):
            owned: list[int] = []
            try:
                owned.extend(map(os.dup, fds))
            except OSError:
                close_all(owned)
                raise
            self._orders.append((number, message, owned))
            self._hand_out()
        elif isinstance(message, w.StopCopy) and number == self.number:
            self.wanted = False
        elif isinstance(message, w.StopCopy):
            for order in [each for each in self._orders if each[0] == number]:
                self._orders.remove(order)
                close_all(order[2])
                self._answered(number, w.SegmentsCopied([], [], stopped=True), Frame(0, 0, b""))

    def ask(self, caller: OfferCaller) -> None:
        """Answer a request for an order, when there is one.

        :raises ProtocolError: if another one of it waits.
        """
        if self._asking is not None:
            raise ProtocolError("this session waits for an order to copy already")
        caller.wait().on_leave = self._left
        self._asking = caller
        self._hand_out()

    def _left(self) -> None:
        self._asking = None

    def _hand_out(self) -> None:
        if self._asking is None or self.number or not self._orders:
            return
        asking, self._asking = self._asking, None
        self.number, message, fds = self._orders.popleft()
        self.wanted = True
        count = len(fds)
        sent = asking.reply(message, owners=tuple(map(Descriptor, fds)))
        fds.clear()
        if not sent:
            text = f"cannot send {count} descriptors to the client (pid {self.pid}) that offers to copy"
            self.answer(w.SegmentsCopied([], [], CapabilityError.code, text), Frame(0, 0, b""))

    def answer(self, message: w.SegmentsCopied, owner: OfferCaller | Frame) -> None:
        """Pass on the answer to the order that it was given."""
        number, self.number = self.number, 0
        self._answered(number, message, owner)

    def close(self) -> None:
        """Drop the orders that it was not given."""
        while self._orders:
            close_all(self._orders.pop()[2])


class CopyOffers:
    """The offers of a server's clients. On the loop.

    :param progressed: takes the progress of an order, by the order's number.
    :param answered: takes the answer to an order.
    :param lost: called with a client whose offer has ended.
    """

    def __init__(
        self,
        progressed: Callable[[int, w.CopyProgress], None],
        answered: Answered,
        lost: Callable[[OfferingClient], None],
    ) -> None:
        self._progressed = progressed
        self._answered = answered
        self._lost = lost
        #: By session, in the order of their beginning.
        self._offers: dict[str, OfferingClient] = {}

    def able(self, devices: Collection[str]) -> list[OfferingClient]:
        """Return the clients that see some GPUs, in the order of their offers."""
        return [client for client in self._offers.values() if client.devices.issuperset(devices)]

    def drop(self, client: OfferingClient) -> None:
        """End the offer of a client that has not kept to it; it may make another one."""
        for session, found in tuple(self._offers.items()):
            if found is client:
                self.end_session(session)

    def offer(self, session: str, peer: Peer | None, devices: Sequence[str]) -> None:
        """Take the offer of a session.

        :raises CapabilityError: if it is another user's.
        """
        if peer is None or peer.uid != os.geteuid():
            # Whoever copies can write to what others may only read, and to the copies.
            raise CapabilityError(
                f"the server (pid {os.getpid()}) has copies made by processes of its own user alone, uid {os.geteuid()}"
            )
        if session in self._offers:
            raise ProtocolError("this session has made its offer to copy already")
        self._offers[session] = OfferingClient(peer.pid, devices, self._answered)
        _log.info("pid %d offers to copy objects of %s", peer.pid, ", ".join(devices))

    def await_order(self, caller: OfferCaller) -> None:
        """Answer a request with the next order for its session. An offer ends whose last order has no answer.

        :raises CapabilityError: if the session has no offer (any more), as the other methods do.
        """
        client = self._of(caller.session)
        if client.number:
            self.drop(client)
            raise ProtocolError("an order for copies has no answer yet: the offer to copy has ended")
        client.ask(caller)

    def copied_so_far(self, session: str, done: int) -> bool:
        """Note the progress of a session's order; return whether the copies are still wanted."""
        client = self._of(session)
        self._progressed(client.number, w.CopyProgress(done))
        return client.wanted

    def copied(self, caller: OfferCaller, answer: w.SegmentsCopied) -> None:
        """Take the answer to a session's order."""
        client = self._of(caller.session)
        if not client.number:
            raise ProtocolError("no copies were ordered")
        client.answer(answer, caller)

    def end_session(self, session: str) -> None:
        """End the offer of a session, if it has one; the orders that it has fail."""
        client = self._offers.pop(session, None)
        if client is not None:
            _log.info("the offer of pid %d to copy has ended", client.pid)
            client.close()
            self._lost(client)

    def _of(self, session: str) -> OfferingClient:
        client = self._offers.get(session)
        if client is None:
            raise CapabilityError("this session has no offer to copy: it made none, or did not keep to it")
        return client
