"""Binding: methods of clients and providers, made of operations that are written once."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Coroutine, Generator
from typing import Any, Concatenate, Generic, ParamSpec, Self, TypeVar, cast, overload

from shared_rpc.client.handle import Lease, closing_scope
from shared_rpc.client.results import rebuild, result_of
from shared_rpc.client.steps import (
    BlockingMethods,
    CoroutineMethods,
    Driver,
    Lend,
    Operation,
    Reply,
    Work,
)
from shared_rpc.client.suspension import Context, map_again, outdated
from shared_rpc.client.transfer import ClientTransfer
from shared_rpc.memory.mapping import MAPPINGS
from shared_rpc.protocol import messages as m

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
D = TypeVar("D", bound=Driver)

#: The body of an operation: see :mod:`shared_rpc.client.steps`.
Steps = Generator[Any, Any, R]


class Leased(Generic[T]):
    """The handle returned by an operation, for type checkers: a :class:`Handle`, or for coroutines an :class:`AsyncHandle`."""


class Opened:
    """The channel returned by an operation, for type checkers: a :class:`TensorChannel` or an :class:`AsyncTensorChannel`."""


class Unbound(Generic[P, R]):
    """An operation that :func:`bound` turns into a method."""

    def __init__(self, body: Callable[Concatenate[Any, P], Steps[R]]) -> None:
        self.body = body


class operation(Unbound[P, R]):
    """A public operation: signature, docstring and body."""

    @overload
    def __get__(self, owner: None, kind: type) -> Self: ...
    @overload
    def __get__(self, owner: BlockingMethods, kind: type) -> Callable[P, R]: ...
    @overload
    def __get__(self, owner: CoroutineMethods, kind: type) -> Callable[P, Coroutine[Any, Any, R]]: ...
    def __get__(self, owner: Any, kind: type) -> Any:
        return self  # a bound class has a method in its place


class Part:
    """A public object with its own operations, and a context manager.

    :param driver: the driver of a client, which executes them.
    """

    def __init__(self, driver: Any) -> None:
        self._driver = driver

    def _enter(self) -> Operation[None]:
        """Begin a block."""
        yield from ()

    def _leave(self) -> Operation[None]:
        """End a block."""
        yield from ()

    def _next(self) -> Operation[Any]:
        """Return the next item of an iterator; None at its end."""
        yield from ()


class BlockingPart(Part, BlockingMethods):
    """A part of a blocking client."""

    def _run(self, operation: Operation[T]) -> T:
        return cast("T", self._driver._run(operation))

    def __enter__(self) -> Self:
        self._run(self._enter())
        return self

    def __exit__(self, *_: object) -> None:
        self._run(self._leave())


class CoroutinePart(Part, CoroutineMethods):
    """A part of a client for coroutines."""

    async def _run(self, operation: Operation[T]) -> T:
        return cast("T", await self._driver._run(operation))

    async def __aenter__(self) -> Self:
        await self._run(self._enter())
        return self

    async def __aexit__(self, *_: object) -> None:
        with closing_scope():
            await self._run(self._leave())


class BlockingIterator(BlockingPart, Generic[T]):
    """An iterator whose steps wait."""

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> T:
        item: T | None = self._run(self._next())
        if item is None:
            raise StopIteration
        return item


class CoroutineIterator(CoroutinePart, Generic[T]):
    """An asynchronous iterator."""

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> T:
        item: T | None = await self._run(self._next())
        if item is None:
            raise StopAsyncIteration
        return item


def bound(kind: type[D]) -> type[D]:
    """Turn the operations of a class into methods: plain functions, as fast as handwritten methods."""
    members = {name: found for base in reversed(kind.__mro__) for name, found in vars(base).items()}
    for name, found in members.items():
        body = found.body if isinstance(found, Unbound) else getattr(found, "_body", None)
        if body is not None:
            setattr(kind, name, _method(kind, name, body))
    return kind


def _method(kind: type[Driver], name: str, body: Callable[..., Steps[Any]]) -> Callable[..., Any]:
    """Return the method of one operation, with its public signature."""
    method: Any = kind._bound(name, body)
    annotations = {each: _shown(text, kind) for each, text in body.__annotations__.items() if each != "ctx"}
    signature = inspect.signature(body)
    of_self, *others = signature.parameters.values()
    parameters = [of_self.replace(name="self", annotation=inspect.Parameter.empty)]
    parameters += [each.replace(annotation=annotations[each.name]) for each in others]
    method.__name__, method.__qualname__ = name, f"{kind.__qualname__}.{name}"
    method.__doc__, method.__module__ = body.__doc__, kind.__module__
    method.__annotations__ = annotations
    # A subclass with another driver is bound again by that; and its module resolves the names in the annotations.
    method._body = method.__wrapped__ = body
    method.__signature__ = signature.replace(parameters=parameters, return_annotation=annotations["return"])
    return cast("Callable[..., Any]", method)


def _shown(annotation: str, kind: type[Driver]) -> str:
    """Convert an annotation to its public form for a class."""
    public = annotation[len("Steps[") : -1] if annotation.startswith("Steps[") else annotation
    if public == "Opened":
        return "TensorChannel" if issubclass(kind, BlockingMethods) else "AsyncTensorChannel"
    return re.sub(r"\bLeased?\b", kind._HANDLE.__name__, public) if "Lease" in public else public


def take_result(ctx: Context, what: str, reply: Reply, transfer: ClientTransfer | None = None) -> Operation[Any]:
    """Take the result from a reply: a handle if the value has a lease.

    :param transfer: see :func:`shared_rpc.client.results.result_of`.
    """
    if reply.live:
        assert isinstance(reply.message, m.Result), "only a Result has a value"
        return (yield from make_handle(ctx, reply.message, reply.value)) if reply.message.managed else reply.value
    result = result_of(what, reply, transfer)
    message = result.message
    with result:
        if message.owner and message.owner not in MAPPINGS.servers:
            MAPPINGS.servers[message.owner] = ctx.socket_path
        value = ctx._values.get(message.object_id) if message.object_id else None
        if value is not None and outdated(message.object_id, [segment.info for segment in result.segments]):
            ctx._values.pop(message.object_id, None)
            value = None
        if value is None:
            nbytes = len(result.skeleton) + len(message.table)
            value = yield Work(functools.partial(rebuild, result, ctx._values), nbytes)
        elif not message.managed and message.object_id in MAPPINGS.suspended:
            yield Work(functools.partial(MAPPINGS.resume, message.object_id, result.segments, message.owner))
    return (yield from make_handle(ctx, message, value)) if message.managed else value


def make_handle(ctx: Context, message: Any, value: Any) -> Operation[Any]:
    """Return the handle of a value with a lease, see :class:`Lend`; map the memory again if the object was suspended."""
    handle: Lease[Any] = yield Lend(message, value)
    if handle.object_id in ctx._leases.reported or handle.object_id in MAPPINGS.suspended:
        yield from map_again(ctx, handle)
    return handle


def id_of(handle: Lease[Any] | str) -> str:
    """Return the object id of a handle, or the id itself."""
    return handle if isinstance(handle, str) else handle.object_id
