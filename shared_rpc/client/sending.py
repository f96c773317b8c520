"""Sending of calls: encoding of their arguments, and ownership of their memory."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import msgspec

from shared_rpc.client.steps import Operation, Reply, Request, Work
from shared_rpc.client.transfer import ClientTransfer, TransferClosed
from shared_rpc.errors import SegmentNotFound
from shared_rpc.memory.devices import device_kind
from shared_rpc.memory.mapping import MAPPINGS
from shared_rpc.memory.pool import Pool
from shared_rpc.memory.records import Arguments
from shared_rpc.protocol import messages as m
from shared_rpc.protocol.records import EMPTY_TABLE
from shared_rpc.protocol.values import encode_call, lower_call


def send(
    reached: Callable[[], Operation[Any]],
    kind: type[m.Call],
    endpoint: str,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    what: str,
    *,
    pooled: bool,
) -> Operation[tuple[Reply, ClientTransfer | None]]:
    """Send a call of a kind; return the reply and the pools that it used, which are the arguments of
    :func:`~shared_rpc.client.results.result_of`.

    :param reached: returns the session.
    :param pooled: True if its arguments and result may lie in pools.
    """
    while True:
        home = yield from reached()
        transfer: ClientTransfer | None = home.transfer if pooled else None
        try:
            arguments = _plain(args, kwargs)
            if arguments is None:
                arguments = yield _encoding(args, kwargs, home.device, home.server_id, transfer)
            freed = transfer.returned() if transfer is not None else []
            request: Request | None = None
            try:
                request = _request(kind, endpoint, arguments, what, transfer, freed)
                reply: Reply = yield request
                return reply, transfer
            finally:
                arguments.close()
                if transfer is not None and (request is None or not request.sent):
                    transfer.arguments.release(arguments.chunks)
                    transfer.references.requeue(freed)
        except TransferClosed:
            continue
        except SegmentNotFound as error:
            # The object has been dropped, or this is another server.
            if not MAPPINGS.disown(error.segments):
                raise


#: The table of a call without tensors.
_NO_TENSORS = msgspec.Raw(EMPTY_TABLE)


def _request(
    kind: type[m.Call],
    endpoint: str,
    arguments: Arguments,
    what: str,
    transfer: ClientTransfer | None,
    freed: list[int],
) -> Request:
    pooled = transfer is not None
    if not arguments.segments and not arguments.skeletons:
        table = _NO_TENSORS if arguments.table == EMPTY_TABLE else msgspec.Raw(arguments.table)
        message = kind(endpoint, arguments.args, arguments.kwargs, table, freed=freed, pooled=pooled)
        return Request(message, what, transfer=transfer)
    message = kind(endpoint, **arguments.body(), freed=freed, pooled=pooled)
    return Request(message, what, b"".join(arguments.skeletons), segments=arguments.segments, transfer=transfer)


class _HasMemory(Exception):
    """The error for an argument that needs the codec."""


def lower(args: Sequence[Any], kwargs: dict[str, Any], device: str) -> Operation[Arguments]:
    """Return the arguments that identify a cached call, without their memory.

    :param device: the id of the server's device.
    """
    arguments: Arguments | None = _plain(args, kwargs)
    if arguments is None:
        arguments = yield Work(functools.partial(_encode_all, args, kwargs, device, "", None, bare=True))
    assert arguments is not None, "the codec returns arguments"
    return arguments


#: The types of plain values.
_PLAIN = frozenset({type(None), bool, int, float, complex, str, bytes, list, tuple, dict})


def _plain(args: Sequence[Any], kwargs: dict[str, Any]) -> Arguments | None:
    """Return arguments that are plain data; None if the codec is needed."""
    if not args and not kwargs:
        return Arguments()
    if not _PLAIN.issuperset(map(type, args)) or not _PLAIN.issuperset(map(type, kwargs.values())):
        return None
    try:
        return Arguments(*encode_call(*lower_call(args, kwargs, _no_memory)))
    except _HasMemory:
        return None


def _no_memory(value: Any, path: str) -> NoReturn:
    raise _HasMemory(path)


def _encoding(args: Sequence[Any], kwargs: dict[str, Any], device: str, server: str, transfer: ClientTransfer | None) -> Work:
    pool = transfer.arguments if transfer is not None else None
    work = functools.partial(_encode_all, args, kwargs, device, server, pool)
    return Work(work, undo=functools.partial(_undo, pool))


def _encode_all(
    args: Sequence[Any],
    kwargs: dict[str, Any],
    device: str,
    server: str,
    pool: Pool | None,
    *,
    bare: bool = False,
) -> Arguments:
    from shared_rpc.codec.arguments import encode_arguments

    return encode_arguments(args, kwargs, device_kind(device), server, pool, bare=bare)


def _undo(pool: Pool | None, arguments: Arguments) -> None:
    arguments.close()
    if pool is not None:
        pool.release(arguments.chunks)
