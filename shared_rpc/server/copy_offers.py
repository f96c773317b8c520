"""Offers of clients to make copies for a server that has no GPU's driver, as its requests are passed on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from shared_rpc.protocol import worker as w
from shared_rpc.protocol.peers import Peer
from shared_rpc.server.runs import Waiter

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["CopyOffers", "OfferCaller"]


class OfferCaller(Protocol):
    """The asker of one request of an offer, as :class:`shared_rpc.server.handlers.Caller`."""

    @property
    def session(self) -> str:
        """The id of the asker's session: each offer has its own."""

    def wait(self) -> Waiter:
        """Register the request as one that is answered later."""

    def reply(self, message: w.CopySegments, payload: bytes = b"", fds: tuple[int, ...] = ()) -> bool:
        """Answer it; False if that could not be sent."""

    def detach_fds(self) -> list[int]:
        """Return the descriptors of the request, which belong to who asks from here on."""


class CopyOffers(Protocol):
    """The offers of a server's clients. On its loop."""

    def offer(self, session: str, peer: Peer | None, devices: Sequence[str]) -> None:
        """Take the offer of a session.

        :raises CapabilityError: if it is another user's.
        """

    def await_order(self, caller: OfferCaller) -> None:
        """Answer a request with the next order for its session.

        :raises CapabilityError: if the session has no offer (any more).
        """

    def copied_so_far(self, session: str, done: int) -> bool:
        """Note the progress of a session's order; return whether the copies are still wanted."""

    def copied(self, caller: OfferCaller, answer: w.SegmentsCopied) -> None:
        """Take the answer to a session's order."""

    def end_session(self, session: str) -> None:
        """Note that a session has ended, and its offer with it."""
