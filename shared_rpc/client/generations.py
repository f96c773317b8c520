"""The operations on generations and revisions; see :mod:`shared_rpc.client.steps` for how they are driven."""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from typing import Any

from shared_rpc.client.results import result_of, valued
from shared_rpc.client.sending import no_lane, send
from shared_rpc.client.steps import Operation, Reply, Request, ask
from shared_rpc.errors import ProtocolError
from shared_rpc.memory.revisions import Page
from shared_rpc.memory.segments import Segment
from shared_rpc.protocol import generations as g
from shared_rpc.protocol import messages as m

__all__ = ["latest", "news", "refresh", "retire", "revision_page"]


def refresh(endpoint: str, args: Sequence[Any], kwargs: dict[str, Any], device: str, server: str) -> Operation[g.Generation]:
    """Build the next generation of a call's object, without taking it; for the parameters see ``operations.call``."""
    what = f"refresh({endpoint!r})"
    reply, _, _ = yield from send(g.Refresh, endpoint, args, kwargs, device, server, what, no_lane)
    reply.frame.close()
    if not isinstance(reply.message, g.Refreshed):
        raise ProtocolError(f"the server answered {what} with {type(reply.message).__name__}")
    return reply.message.generation


def news(after: int) -> Operation[g.Refreshes]:
    """Wait for what becomes current after a position; with -1 take the position."""
    refreshes: g.Refreshes = yield from ask(Request(g.AwaitRefreshes(after), "the wait for refreshes"), g.Refreshes)
    return refreshes


def latest(object_id: str, values: MutableMapping[str, Any]) -> Operation[tuple[m.Result, Any]]:
    """What is current of an object's key: ``(message, value)``."""
    what = f"latest() of object {object_id}"
    return (yield from valued(result_of(what, (yield Request(g.GetLatest(object_id), what))), values))


def retire(target: str) -> Operation[list[dict[str, Any]]]:
    """Free what nobody holds of superseded objects: facts about those left."""
    reply = yield from ask(Request(g.Retire(target), f"retire({target!r})"), m.FactsList)
    return list(reply.items)


def revision_page(object_id: str) -> Operation[Page]:
    """The page of an object's revision, mapped."""
    reply: Reply = yield Request(g.GetRevision(object_id), f"the revision of object {object_id}")
    message, frame = reply.message, reply.frame
    if not isinstance(message, g.RevisionPage) or len(frame.fds) != 1:
        frame.close()
        raise ProtocolError(f"the server answered a question for a revision with {type(message).__name__}")
    segment = Segment(message.page, -1)
    segment.adopt(frame.fds)
    return Page(segment, message.memory, object_id)
