"""Tiers of objects: on their devices, in host memory, or in files; and handles whose memory a process gives up for a while."""

from __future__ import annotations

import functools
from typing import Any, Literal

from shared_rpc.client.copy_offer import CopyOffer
from shared_rpc.client.handle import Lease
from shared_rpc.client.steps import Request, Work, ask, reached
from shared_rpc.client.suspension import resumed, suspended
from shared_rpc.errors import CapabilityError
from shared_rpc.operations.binding import Context, Steps, id_of, operation
from shared_rpc.protocol import tiers as t
from shared_rpc.protocol.infos import MoveInfo

__all__ = ["TierOperations"]


class TierOperations:
    """Moves of objects between tiers, offers to copy their bytes, and suspended handles."""

    @operation
    def evict(ctx: Context, target: Lease[Any] | str, to: Literal["host", "file"] | None = None) -> Steps[list[MoveInfo]]:
        """Free the memory of an object on its device, and keep its bytes in a lower tier; return the objects that were moved.

        The object stays what it is: whoever asks for it next has it restored, once for all processes. A copy is made first,
        unless there is one with the same bytes, see ``host_copy`` of :meth:`Provider.share`. Objects that share memory go
        together.

        :param target: a handle or the id of an object, or the name of an endpoint for all of its objects.
        :param to: ``"host"``, the host's memory, for objects of a GPU; ``"file"``, a nameless file in the server's spill
            directory; by default the next one that the server has.
        :raises ServerBusy: if a process has an object in use, which the message names: it has to suspend or release its
            handles; or if an object is pinned. Of an endpoint's objects, the others were moved.
        :raises CapabilityError: if there is no lower tier for it, or no room there.
        """
        name = id_of(target)
        return (yield from ask(Request(t.Evict(name, to or ""), f"evict({name!r})"), t.Moved)).moves

    @operation
    def restore(ctx: Context, target: Lease[Any] | str) -> Steps[list[MoveInfo]]:
        """Take an object back to its device, before anyone asks for it; return the objects that were moved.

        :param target: see :meth:`evict`.
        :raises ServerBusy: if there is no room on the device now.
        :raises StaleHandleError: if its bytes are lost, because a file is damaged; then the object was dropped.
        """
        name = id_of(target)
        return (yield from ask(Request(t.Restore(name), f"restore({name!r})"), t.Moved)).moves

    @operation
    def offer_copies(ctx: Context) -> Steps[CopyOffer]:
        """Offer to make the copies by which objects of a GPU are evicted and restored, where no worker of the server can.

        A broker has no CUDA: its workers copy, and none can while the app is broken, a worker starts again, or does not read.
        From here on this process makes the copies then, in a daemon thread that has a connection of its own: ``with
        client.offer_copies():``, or ``async with await client.offer_copies():``. It needs the driver's Python bindings
        (``shared-rpc[cuda]``), a GPU that it sees, and the server's user. Until there is an order it costs one connection;
        the first order makes a CUDA context, if the process has none.

        The offer outlives the server: it waits for the next one at the same socket, for as long as it is not closed.

        :raises CapabilityError: if this process sees no GPU or is another user's, or the server is no broker: such a server
            makes its copies itself.
        :raises ConnectError: if no server listens within the client's ``connect_timeout``.
        """
        if ctx._offers is None:
            raise CapabilityError("this process makes the copies of its objects itself: offers to copy are for brokers")
        yield from reached(ctx._known())
        offer: CopyOffer = yield Work(functools.partial(CopyOffer, ctx.socket_path), undo=CopyOffer.close)
        ctx._offers.add(offer)
        return offer

    @operation
    def suspend(ctx: Context, handle: Lease[Any]) -> Steps[None]:
        """Give an object's memory up for a while, and keep the lease: see :meth:`Handle.suspend`."""
        if handle._rest():
            yield from suspended(ctx, handle)

    @operation
    def resume(ctx: Context, handle: Lease[Any], timeout: float | None = None) -> Steps[None]:
        """Have the memory of a suspended handle back, at its address: see :meth:`Handle.resume`."""
        handle._end_rest()
        yield from resumed(ctx, handle, timeout)

    @operation
    def _begin_block(ctx: Context, handle: Lease[Any], timeout: float | None) -> Steps[None]:
        """Resume a handle for the block that it was entered for."""
        yield from resumed(ctx, handle, timeout)

    @operation
    def _end_block(ctx: Context, handle: Lease[Any]) -> Steps[None]:
        """Suspend a handle again that is to be outside of blocks."""
        if handle._leave_block():
            yield from suspended(ctx, handle)
