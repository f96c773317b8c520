"""Every operation of a client, once.

An operation is a generator. It yields a :class:`Request` and is sent the :class:`Reply`, or yields a
:class:`Work`, a function that takes time, and is sent its result; it returns what the caller gets. It does no I/O
and knows no clock, so that blocking and asynchronous clients drive the same code. An error reply is raised by the
shell, not sent here.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, MutableMapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from shared_rpc.errors import ProtocolError
from shared_rpc.memory.devices import device_kind
from shared_rpc.memory.segments import Segment
from shared_rpc.records import Arguments
from shared_rpc.wire import messages as m
from shared_rpc.wire.frames import Frame
from shared_rpc.wire.values import encode, lower_call

__all__ = [
    "Operation",
    "Reply",
    "Request",
    "Result",
    "Work",
    "call",
    "fetch",
    "invalidate_call",
    "invalidate_endpoint",
    "list_endpoints",
    "list_objects",
    "object_info",
    "ping",
    "release",
    "server_info",
]

T = TypeVar("T")


@dataclass(frozen=True)
class Request:
    """A message to send. The descriptors are borrowed until the reply, or an error, comes.

    ``what`` names the operation in errors.
    """

    message: m.Message
    what: str
    payload: bytes = b""
    fds: tuple[int, ...] = ()


@dataclass(frozen=True)
class Reply:
    """What came back: a message, and the frame that still owns its descriptors."""

    message: m.Message
    frame: Frame


@dataclass(frozen=True)
class Work:
    """Something that takes time: a shell with an event loop runs it elsewhere."""

    function: Callable[[], Any]


Operation = Generator[Request | Work, Any, T]


def _ask(request: Request, kind: type[m.Message]) -> Operation[Any]:
    """Send a request whose reply is of one kind and carries no descriptors."""
    reply: Reply = yield request
    reply.frame.close()
    if not isinstance(reply.message, kind):
        raise ProtocolError(f"the server answered {request.what} with {type(reply.message).__name__}")
    return reply.message


def ping() -> Operation[None]:
    """One round trip."""
    yield from _ask(Request(m.Ping(), "ping"), m.Pong)


def server_info() -> Operation[dict[str, Any]]:
    """Facts about the server."""
    facts = yield from _ask(Request(m.GetServerInfo(), "get_server_info"), m.Facts)
    return dict(facts.facts)


def list_endpoints() -> Operation[dict[str, dict[str, Any]]]:
    """The options of every endpoint, by name."""
    reply = yield from _ask(Request(m.ListEndpoints(), "list_endpoints"), m.Endpoints)
    return {spec.name: msgspec.to_builtins(spec) for spec in reply.endpoints}


def list_objects() -> Operation[list[dict[str, Any]]]:
    """Facts about every object, with ``cached`` and its ``holders`` (session, pid, connections)."""
    reply = yield from _ask(Request(m.ListObjects(), "list_objects"), m.FactsList)
    return list(reply.items)


def object_info(object_id: str) -> Operation[dict[str, Any]]:
    """Facts about one object."""
    reply = yield from _ask(Request(m.GetObjectInfo(object_id), "get_object_info"), m.Facts)
    return dict(reply.facts)


def release(object_ids: Iterable[str]) -> Operation[int]:
    """Give leases back; how many the session held."""
    reply = yield from _ask(Request(m.Release(list(object_ids)), "release"), m.Count)
    return int(reply.count)


def invalidate_call(endpoint: str, args: Sequence[Any], kwargs: dict[str, Any], device: str) -> Operation[int]:
    """Drop the cached result of one call; 1 if there was one."""
    arguments: Arguments = yield Work(lambda: _lower(args, kwargs, device_kind(device)))
    arguments.close()  # only what tells the call from others is needed
    message = m.InvalidateCall(endpoint, *_encoded(arguments))
    reply = yield from _ask(Request(message, f"invalidate_call_cache({endpoint!r})"), m.Count)
    return int(reply.count)


def invalidate_endpoint(endpoint: str) -> Operation[int]:
    """Drop all cached results of an endpoint; how many there were."""
    reply = yield from _ask(Request(m.InvalidateEndpoint(endpoint), f"invalidate_endpoint_cache({endpoint!r})"), m.Count)
    return int(reply.count)


@dataclass
class Result:
    """A result that is not rebuilt yet. It owns its segments' descriptors, see :meth:`close`."""

    message: m.Result
    skeleton: bytes
    segments: list[Segment]

    def close(self) -> None:
        """Close the descriptors."""
        for segment in self.segments:
            segment.close()

    def __enter__(self) -> Result:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def fetch(endpoint: str, args: Sequence[Any], kwargs: dict[str, Any], device: str) -> Operation[Result]:
    """Call an endpoint and take its record, without rebuilding the value. Needs torch only for tensors in arguments."""
    arguments: Arguments = yield Work(lambda: _lower(args, kwargs, device_kind(device)))
    try:
        message = m.Call(
            endpoint,
            *_encoded(arguments),
            table=msgspec.Raw(arguments.table),
            segments=[segment.info for segment in arguments.segments],
            skeletons=[len(skeleton) for skeleton in arguments.skeletons],
        )
        fds = tuple(segment.fileno() for segment in arguments.segments)
        reply: Reply = yield Request(message, f"{endpoint}()", b"".join(arguments.skeletons), fds)
    finally:
        arguments.close()
    if not isinstance(reply.message, m.Result) or len(reply.message.segments) != len(reply.frame.fds):
        reply.frame.close()
        raise ProtocolError(f"the server answered {endpoint}() with {type(reply.message).__name__}, which does not fit")
    segments = [Segment(info, fd) for info, fd in zip(reply.message.segments, reply.frame.take_fds(), strict=True)]
    return Result(reply.message, reply.frame.payload, segments)


def call(
    endpoint: str,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    device: str,
    values: MutableMapping[str, Any],
) -> Operation[tuple[m.Result, Any]]:
    """Call an endpoint: ``(message, value)``. Where the value cannot be rebuilt, its lease is given back.

    :param values: the values that live in this process, by object id.
    """
    result: Result = yield from fetch(endpoint, args, kwargs, device)
    try:
        value = yield Work(lambda: _rebuild(result, values))
    except (Exception, KeyboardInterrupt):
        if result.message.managed:
            yield from release([result.message.object_id])
        raise
    return result.message, value


def _rebuild(result: Result, values: MutableMapping[str, Any]) -> Any:
    from shared_rpc.codec import decode_result

    with result:
        object_id = result.message.object_id
        value = values.get(object_id)
        if value is None:
            value = decode_result(result.skeleton, result.message.table, result.segments)
            if object_id:
                with suppress(TypeError):  # lists, tuples and dicts have no weak references, and are made anew
                    return values.setdefault(object_id, value)
        return value


class _HasMemory(Exception):
    """An argument needs the codec."""


def _lower(args: Sequence[Any], kwargs: dict[str, Any], kind: str) -> Arguments:
    """The arguments as they travel: plain data without torch; with tensors, modules and dtypes through the codec."""

    def leaf(value: Any, path: str) -> Any:
        raise _HasMemory(path)

    try:
        return Arguments(*lower_call(args, kwargs, leaf))
    except _HasMemory:
        from shared_rpc.codec import encode_arguments

        return encode_arguments(args, kwargs, kind)


def _encoded(arguments: Arguments) -> tuple[list[Any], dict[str, Any]]:
    return [encode(value) for value in arguments.args], {name: encode(value) for name, value in arguments.kwargs.items()}
