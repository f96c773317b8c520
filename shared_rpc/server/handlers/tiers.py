"""Objects that are suspended and resumed, and moved between tiers; offers to copy their bytes."""

from __future__ import annotations

import os

from shared_rpc.errors import CapabilityError
from shared_rpc.protocol import messages as m
from shared_rpc.protocol import tiers as t
from shared_rpc.protocol import worker as w
from shared_rpc.server.copy_offers import CopyOffers
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


@handles(t.OfferCopies)
def offer_copies(caller: Caller, message: t.OfferCopies) -> m.Count:
    _offers(caller.core).offer(caller.session, caller.core.sessions.peer_of(caller.session), message.devices)
    return m.Count(1)


@handles(t.AwaitCopyOrder)
def await_copy_order(caller: Caller, message: t.AwaitCopyOrder) -> None:
    _offers(caller.core).await_order(caller)


@handles(w.CopyProgress)
def copied_so_far(caller: Caller, message: w.CopyProgress) -> m.Count:
    return m.Count(int(_offers(caller.core).copied_so_far(caller.session, message.done)))


@handles(w.SegmentsCopied)
def copied(caller: Caller, message: w.SegmentsCopied) -> m.Count:
    _offers(caller.core).copied(caller, message)
    return m.Count(1)


def _offers(core: Core) -> CopyOffers:
    if core.copy_offers is None:
        raise CapabilityError(f"the server (pid {os.getpid()}) makes its copies itself: offers to copy are for brokers")
    return core.copy_offers


def _check(core: Core, target: str) -> None:
    """Check that a target is an object that is there, or an endpoint."""
    if OBJECT_ID.fullmatch(target):
        core.stored(target)
    else:
        core.registry.get(target)
