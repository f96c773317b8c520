"""Sending of calls: their arguments as they travel, and where their memory goes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import msgspec

from shared_rpc.client.steps import Operation, Reply, Request, Work, ask
from shared_rpc.client.transfer import ClientTransfer, TransferClosed
from shared_rpc.context import CALLED_BY
from shared_rpc.errors import DeadlineExceeded, SegmentNotFound, ServerBusy
from shared_rpc.memory.devices import device_kind
from shared_rpc.memory.mapping import MAPPINGS
from shared_rpc.memory.pool import Pool, PoolClosed, PoolFull
from shared_rpc.memory.records import Arguments
from shared_rpc.protocol import messages as m
from shared_rpc.protocol.records import EMPTY_TABLE
from shared_rpc.protocol.values import encode_call, lower_call

__all__ = ["Transfers", "lower", "no_transfer", "send"]

#: A function that returns the pools of a client's present session.
Transfers = Callable[[], ClientTransfer | None]


def no_transfer() -> None:
    """Return None, for a client without pools."""


def send(
    kind: type[m.Call],
    endpoint: str,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    device: str,
    server: str,
    what: str,
    transfers: Transfers,
) -> Operation[tuple[Reply, ClientTransfer | None, Sequence[int]]]:
    """Send a call of a kind; return the reply, the pools that it used, and the chunks of its own that its result may lie in:
    the arguments of :func:`~shared_rpc.client.results.result_of`.

    :param device: the id of the server's device; ``server`` its own, ``""`` to send it all memory.
    :raises ServerBusy: if the pool for arguments stays full.
    """
    while True:
        transfer = transfers()
        try:
            arguments = yield from lower(args, kwargs, device, server, transfer, what)
            reply, held = yield from _send_lowered(kind, endpoint, arguments, what, transfer)
            return reply, transfer, held
        except (TransferClosed, PoolClosed):
            continue
        except SegmentNotFound as error:
            # An object was dropped meanwhile, or this is another server.
            if not MAPPINGS.disown(error.segments):
                raise
        except PoolFull as full:
            assert transfer is not None, "there is a pool"
            if (yield Work(transfer.reclaim)):
                continue
            yield from _await_room(transfer, what, str(full))


def _send_lowered(
    kind: type[m.Call], endpoint: str, arguments: Arguments, what: str, transfer: ClientTransfer | None
) -> Operation[tuple[Reply, list[int]]]:
    held: list[int] = []
    freed = transfer.returned() if transfer is not None else []
    request: Request | None = None
    try:
        if transfer is not None and arguments.chunks and transfer.returnable:
            # For as long as the call, and its result if that stays there: the server may give the chunks back before.
            held = [chunk.number for chunk in transfer.arguments.retain(arguments.chunks)]
        request = _request(kind, endpoint, arguments, what, transfer, freed, returnable=bool(held))
        reply: Reply = yield request
        if isinstance(reply.message, m.Result) and reply.message.own:
            kept, held = held, []
            return reply, kept
        return reply, []
    finally:
        arguments.close()
        if transfer is not None:
            if held:
                transfer.arguments.release(held)
            if request is None or not request.sent:
                transfer.arguments.release(arguments.chunks)
                transfer.references.requeue(freed)
            elif request.out_of_memory:
                transfer.waiting -= 1


#: The table of a call without memory.
_NO_TENSORS = msgspec.Raw(EMPTY_TABLE)


def _request(
    kind: type[m.Call],
    endpoint: str,
    arguments: Arguments,
    what: str,
    transfer: ClientTransfer | None,
    freed: list[int],
    *,
    returnable: bool,
) -> Request:
    message = kind(
        endpoint,
        arguments.args,
        arguments.kwargs,
        table=_NO_TENSORS if arguments.table == EMPTY_TABLE else msgspec.Raw(arguments.table),
        segments=[segment.info for segment in arguments.segments],
        skeletons=[len(skeleton) for skeleton in arguments.skeletons],
        kept=[number for number, segment in enumerate(arguments.segments) if segment.closed],
        arenas=list(arguments.arenas),
        chunks=list(arguments.chunks),
        held=list(arguments.held),
        freed=freed,
        pooled=transfer is not None,
        chain=sorted(CALLED_BY.get()),
        returnable=returnable,
    )
    arenas = {number: arguments.segments[number] for number in arguments.arenas}
    fds = tuple(
        segment.fileno() for number, segment in enumerate(arguments.segments) if not segment.closed and number not in arenas
    )
    return Request(message, what, b"".join(arguments.skeletons), fds, arenas=arenas, transfer=transfer)


def _await_room(transfer: ClientTransfer, what: str, why: str) -> Operation[None]:
    """Wait until the server gives chunks of this client's pool back.

    :raises ServerBusy: if it has not when the call's time is over.
    """
    try:
        free = yield from ask(Request(m.AwaitFree(), what, transfer=transfer), m.Free)
    except DeadlineExceeded as error:
        raise ServerBusy(f"{what}: {why}") from error
    transfer.arguments.release(free.chunks)


class _HasMemory(Exception):
    """The error for an argument that needs the codec."""


def lower(
    args: Sequence[Any],
    kwargs: dict[str, Any],
    device: str,
    server: str,
    transfer: ClientTransfer | None = None,
    what: str = "",
) -> Operation[Arguments]:
    """Encode arguments as they travel: plain data without torch; tensors, modules and dtypes by the codec."""
    try:
        return Arguments(*encode_call(*lower_call(args, kwargs, _no_memory)))
    except _HasMemory:
        pass
    pool = transfer.arguments if transfer is not None else None

    def undo(arguments: Arguments) -> None:
        arguments.close()
        if pool is not None:
            pool.release(arguments.chunks)

    work = Work(lambda: _encode_all(args, kwargs, device, server, pool, f"arguments of {what}"), undo=undo)
    arguments: Arguments = yield work
    return arguments


def _no_memory(value: Any, path: str) -> NoReturn:
    raise _HasMemory(path)


def _encode_all(
    args: Sequence[Any], kwargs: dict[str, Any], device: str, server: str, pool: Pool | None, purpose: str
) -> Arguments:
    from shared_rpc.codec.arguments import encode_arguments

    return encode_arguments(args, kwargs, device_kind(device), server, pool, purpose)
