"""Objects of the server, leases on them, and tickets for them."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from shared_rpc.client.handle import Lease, drop_handles
from shared_rpc.client.steps import Request, Work, pages, query
from shared_rpc.client.suspension import Context, release_leases
from shared_rpc.errors import ConnectError, ConnectionClosed, StaleHandleError
from shared_rpc.operations.binding import Leased, Steps, id_of, operation, take_result
from shared_rpc.operations.handles import lending
from shared_rpc.protocol import generations as g
from shared_rpc.protocol import messages as m

if TYPE_CHECKING:
    from shared_rpc.protocol.infos import HolderInfo, ListedObjectInfo, ObjectInfo
    from shared_rpc.protocol.ticket import Ticket


class ObjectOperations:
    """Objects, leases and tickets."""

    @operation
    def list_objects(ctx: Context) -> Steps[list[ListedObjectInfo]]:
        """Return all objects, with the processes that hold them.

        They are fetched in pages: an object published or freed during the call may be listed or missing.
        """
        return (yield from pages(m.ListObjects, "list_objects"))

    @operation
    def get_object_info(ctx: Context, handle: Lease[Any] | str) -> Steps[ObjectInfo]:
        """Return the server's description of an object, by handle or id.

        :raises StaleHandleError: if the server does not own it.
        """
        return (yield from query(m.GetObjectInfo(id_of(handle)), "get_object_info"))

    @operation
    def holders(ctx: Context, handle: Lease[Any] | str) -> Steps[list[HolderInfo]]:
        """Return the processes that hold leases on an object, by handle or id; killed processes are not among them.

        :raises StaleHandleError: if the server does not own the object.
        """
        return (yield from query(m.ListHolders(id_of(handle)), "holders"))

    @operation
    def ensure_handle_live(ctx: Context, handle: Lease[Any]) -> Steps[None]:
        """Check that the server that issued the handle still owns its object.

        :raises StaleHandleError: if not; see :class:`StaleHandleError` for its ``reason``.
        """
        handle._check_held()
        try:
            yield from query(m.GetObjectInfo(handle.object_id), "get_object_info")
        except StaleHandleError:
            server = yield from ctx._reached()
            if server.server_id == handle.server_id:
                raise
            raise StaleHandleError(
                f"the handle was issued by server {handle.server_id}, and {server.server_id} has taken its place: call the "
                f"endpoint again",
                reason="server_changed",
            ) from None
        except (ConnectError, ConnectionClosed) as error:
            text = f"cannot reach the server {handle.server_id}, which issued the handle: {error}"
            raise StaleHandleError(text, reason="server_unreachable") from error

    @operation
    def release(ctx: Context, handle: Lease[Any] | str) -> Steps[bool]:
        """Release one lease, of a handle or an object id; return True if this process held it."""
        return (yield from release_leases(ctx, *drop_handles([handle]))) == 1

    @operation
    def release_many(ctx: Context, handles: Iterable[Lease[Any] | str]) -> Steps[int]:
        """Release several leases in one round trip; return the number of those that this process held."""
        return (yield from release_leases(ctx, *drop_handles(handles)))

    @lending
    def open_ticket(ctx: Context, ticket: Ticket | str | os.PathLike[str]) -> Steps[Leased[Any]]:
        """Return a handle, with its own lease, of the object of a ticket from :meth:`Handle.ticket`.

        The client must be connected to the ticket's server, see :meth:`Client.from_ticket`.

        :param ticket: a ticket, or the path of its file.
        :raises TicketError: if it cannot be used here; ``reason`` says why.
        :raises StaleHandleError: if the object was dropped, with ``reason`` ``"object_gone"``, ``"superseded"`` or
            ``"server_changed"``.
        :raises BufferNotFound: if it is a buffer that is no longer available.
        """
        from shared_rpc.protocol.ticket import read_ticket

        found: Ticket = yield Work(lambda: read_ticket(ticket))
        info = yield from query(m.GetServerInfo(), "get_server_info")
        found.check_server(info["server_id"], info["socket_path"] or f"pid {info['pid']}, in the local role")
        what = f"open_ticket() of object {found.object_id}"
        if found.kind == "buffer":
            message: m.Message = m.GetBuffer(found.object_id)
        else:
            message = g.GetObject(found.object_id, found.cache_key or "")
        handle: Leased[Any] = yield from take_result(ctx, what, (yield Request(message, what)))
        return handle
