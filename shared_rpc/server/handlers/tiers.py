"""Objects that are suspended and resumed, and moved between tiers."""

from __future__ import annotations

from shared_rpc.protocol import messages as m
from shared_rpc.protocol import tiers as t
from shared_rpc.server.core import Core
from shared_rpc.server.handlers.table import Caller, handles
from shared_rpc.server.state.objects import OBJECT_ID, StoredObject


@handles(t.Suspend)
def suspend(caller: Caller, message: t.Suspend) -> m.Count:
    return m.Count(caller.core.tiers.suspend(caller.session, message.object_ids))


@handles(t.Resume)
def resume(caller: Caller, message: t.Resume) -> None:
    core = caller.core

    def answer(stored: StoredObject) -> None:
        segments = stored.record.segments
        reply = t.Resumed(stored.generation, [segment.info for segment in segments], core.server_id)
        caller.reply(reply, owners=tuple(segment.owner for segment in segments))

    core.tiers.resume(caller.wait(), message.object_id, answer)


@handles(t.Evict)
def evict(caller: Caller, message: t.Evict) -> None:
    _check(caller.core, message.target)
    caller.core.tiers.evict(caller.wait(), message.target, message.to, lambda moves: caller.reply(t.Moved(moves)))


@handles(t.Restore)
def restore(caller: Caller, message: t.Restore) -> None:
    _check(caller.core, message.target)
    caller.core.tiers.restore(caller.wait(), message.target, lambda moves: caller.reply(t.Moved(moves)))


def _check(core: Core, target: str) -> None:
    """Check that a target is an object that is there, or an endpoint."""
    if OBJECT_ID.fullmatch(target):
        core.stored(target)
    else:
        core.registry.get(target)
