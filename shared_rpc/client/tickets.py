"""The operation that opens a ticket; see :mod:`shared_rpc.client.steps` for how it is driven."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

from shared_rpc.client.operations import server_info
from shared_rpc.client.results import result_of, valued
from shared_rpc.client.steps import Operation, Request
from shared_rpc.protocol import generations as g
from shared_rpc.protocol import messages as m
from shared_rpc.protocol.ticket import Ticket

__all__ = ["open_ticket"]


def open_ticket(ticket: Ticket, values: MutableMapping[str, Any]) -> Operation[tuple[m.Result, Any]]:
    """The object of a ticket: ``(message, value)``.

    :param values: the values that live in this process, by object id.
    """
    # Asked each time: a server that this client knows may have another one in its place.
    info = yield from server_info()
    ticket.check_server(info["server_id"], info["socket_path"])
    what = f"open_ticket() of object {ticket.object_id}"
    if ticket.kind == "buffer":
        message: m.Message = m.GetBuffer(ticket.object_id)
    else:
        message = g.GetObject(ticket.object_id, ticket.cache_key or "")
    return (yield from valued(result_of(what, (yield Request(message, what))), values))
