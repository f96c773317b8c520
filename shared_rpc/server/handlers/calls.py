"""Calls, the fate of their cached results, and the chunks of pools in which arguments and results lie."""

from __future__ import annotations

from shared_rpc.protocol import messages as m
from shared_rpc.protocol.values import decode_call
from shared_rpc.server.handlers.table import Caller, entered, handles


@handles(m.Call)
def call(caller: Caller, message: m.Call) -> None:
    waiter, lowered, arguments = entered(caller, message)
    if message.pooled:
        if caller.core.transfers.find(caller.session) is None:
            caller.core.transfers.of(caller.session)  # creates the transfer
        waiter.pooled = True
    waiter.on_out_of_memory = caller.out_of_memory
    caller.core.call(waiter, message.endpoint, lowered, arguments, frozenset(message.chain))


@handles(m.Cancel)
def cancel(caller: Caller, message: m.Cancel) -> None:
    caller.cancel()


@handles(m.Free)
def free(caller: Caller, message: m.Free) -> m.Count:
    caller.core.transfers.of(caller.session).release_results(message.chunks)
    return m.Count(len(message.chunks))


@handles(m.InvalidateCall)
def invalidate_call(caller: Caller, message: m.InvalidateCall) -> m.Count:
    return m.Count(caller.core.invalidate_call(message.endpoint, *decode_call(message.args, message.kwargs)))


@handles(m.InvalidateEndpoint)
def invalidate_endpoint(caller: Caller, message: m.InvalidateEndpoint) -> m.Count:
    return m.Count(caller.core.invalidate_endpoint(message.endpoint))
