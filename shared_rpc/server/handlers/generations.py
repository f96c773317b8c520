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


@handles(g.AwaitRefreshes)
def await_refreshes(caller: Caller, message: g.AwaitRefreshes) -> None:
    core = caller.core
    core.generations.wait(
        caller.wait(),
        message.after,
        lambda generations, after: caller.reply(g.Refreshes(generations, after, core.server_id)),
    )


@handles(g.GetLatest)
def get_latest(caller: Caller, message: g.GetLatest) -> None:
    caller.core.generations.deliver_latest(caller.wait(), message.object_id)


@handles(g.GetObject)
def get_object(caller: Caller, message: g.GetObject) -> None:
    core, stored = caller.core, caller.core.objects.get(message.object_id)
    if stored is not None and stored.kind == "buffer":
        core.buffers.get(caller.wait(), message.object_id)
    else:
        core.generations.deliver_object(caller.wait(), message.object_id, message.cache_key)


@handles(g.Retire)
def retire(caller: Caller, message: g.Retire) -> g.RetireReply:
    return g.RetireReply(caller.core.retire(message.target))


@handles(g.GetRevision)
def get_revision(caller: Caller, message: g.GetRevision) -> None:
    core = caller.core
    page, memory = page_of(core.objects, core.quotas, message.object_id, local=caller.local)
    with page:
        caller.reply(g.RevisionPage(page.info, memory), owners=(page.owner,))
