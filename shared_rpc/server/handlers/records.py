"""Records that leave the server and enter it, and candidates."""

from __future__ import annotations

from shared_rpc.execution.outcomes import Failure
from shared_rpc.protocol import exported as x
from shared_rpc.protocol import generations as g
from shared_rpc.server.handlers.table import Caller, entered, handles


@handles(x.PrepareCandidate)
def prepare(caller: Caller, message: x.PrepareCandidate) -> None:
    waiter, lowered, arguments = entered(caller, message)
    if message.sealed:
        deliver = waiter.deliver
        waiter.deliver = lambda outcome: deliver(outcome.seal() if isinstance(outcome, Failure) else outcome)

    def made(generation: g.Generation) -> bool:
        return caller.reply(x.Candidate(generation))

    caller.core.prepare(waiter, made, message.endpoint, lowered, arguments, frozenset(message.chain))
