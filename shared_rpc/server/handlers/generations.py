"""Generations of cached results, and revisions of objects."""

from __future__ import annotations

from shared_rpc.protocol import generations as g
from shared_rpc.server.generations import page_of
from shared_rpc.server.handlers.table import Caller, entered, handles


@handles(g.Refresh)
def refresh(caller: Caller, message: g.Refresh) -> None:
    waiter, lowered, arguments = entered(caller, message)

    def made(generation: g.Generation) -> None:
        caller.reply(g.Refreshed(generation))

    caller.core.refresh(waiter, made, message.endpoint, lowered, arguments, frozenset(message.chain))


@handles(g.Retire)
def retire(caller: Caller, message: g.Retire) -> g.RetireReply:
    return g.RetireReply(caller.core.retire(message.target))


@handles(g.GetRevision)
def get_revision(caller: Caller, message: g.GetRevision) -> None:
    core = caller.core
    page, memory = page_of(core.objects, core.quotas, message.object_id, local=caller.local)
    with page:
        caller.reply(g.RevisionPage(page.info, memory), owners=(page.owner,))
