"""Tiers of objects: on their devices, in host memory, or in files; and handles whose memory a process unmaps for a while."""

from __future__ import annotations

from typing import Any, Literal

from shared_rpc.client.handle import Lease
from shared_rpc.client.steps import query
from shared_rpc.client.suspension import Context, resume_handle, suspend_handle
from shared_rpc.operations.binding import Steps, id_of, operation
from shared_rpc.protocol import tiers as t
from shared_rpc.protocol.infos import MoveInfo


class TierOperations:
    """Moves of objects between tiers, and suspended handles."""

    @operation
    def evict(ctx: Context, target: Lease[Any] | str, to: Literal["host", "file"] | None = None) -> Steps[list[MoveInfo]]:
        """Free the memory of an object on its device, and keep its bytes in a lower tier; return the moved objects.

        The object keeps its identity: its next use restores it, once for all processes. The server makes a copy first, unless
        there is one with the same bytes, see ``host_copy`` of :meth:`Provider.share`. Objects that share memory are moved
        together.

        :param target: a handle or the id of an object, or the name of an endpoint for all of its objects.
        :param to: ``"host"``, the host's memory, for objects of a GPU; ``"file"``, an unnamed file in the server's spill
            directory; by default the next lower tier of the server.
        :raises ServerBusy: if a process uses an object (the message names the process, which must suspend or release its
            handles), or if an object is pinned. The other objects of an endpoint were moved.
        :raises CapabilityError: if it has no lower tier, or that is full, or if it shares a segment with other small results.
        """
        name = id_of(target)
        return (yield from query(t.Evict(name, to or ""), f"evict({name!r})"))

    @operation
    def restore(ctx: Context, target: Lease[Any] | str) -> Steps[list[MoveInfo]]:
        """Return an object to its device before it is used; return the moved objects.

        :param target: see :meth:`evict`.
        :raises ServerBusy: if the device has too little capacity now.
        :raises StaleHandleError: if its bytes are lost, because a file is damaged; the object was dropped then.
        """
        name = id_of(target)
        return (yield from query(t.Restore(name), f"restore({name!r})"))

    @operation
    def suspend(ctx: Context, handle: Lease[Any]) -> Steps[None]:
        """Unmap an object's memory for a while, and keep the lease: see :meth:`Handle.suspend`."""
        if handle._request_suspension():
            yield from suspend_handle(ctx, handle)

    @operation
    def resume(ctx: Context, handle: Lease[Any], timeout: float | None = None) -> Steps[None]:
        """Map the memory of a suspended handle again, at its address: see :meth:`Handle.resume`."""
        handle._request_resumption()
        yield from resume_handle(ctx, handle, timeout)
