"""The table of handlers: for each request the function that answers it, for every caller and transport."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from shared_rpc.errors import ProtocolError
from shared_rpc.protocol import messages as m
from shared_rpc.server import requests
from shared_rpc.server.core import Core
from shared_rpc.server.requests import Lowered, unexpected
from shared_rpc.server.runs import CallArguments, Waiter, close_arguments


class Caller(requests.Caller, Protocol):
    """The asker of one request to a core."""

    @property
    def core(self) -> Core:
        """The core that handlers work on."""


MessageT = TypeVar("MessageT", bound=m.Message)
Handler = Callable[[Caller, MessageT], m.Message | None]

_HANDLERS: dict[type[m.Message], Callable[[Caller, Any], m.Message | None]] = {}


def handles(kind: type[MessageT]) -> Callable[[Handler[MessageT]], Handler[MessageT]]:
    """Enter the decorated function as the handler of a kind of message that is about a whole server."""

    def enter(handler: Handler[MessageT]) -> Handler[MessageT]:
        assert kind not in _HANDLERS, f"{kind.__name__} has a handler already"
        _HANDLERS[kind] = handler
        return handler

    return enter


def answer(caller: Caller, message: m.Message) -> None:
    """Answer a request, now or later. Never raises."""
    try:
        kind = type(message)
        handler = _HANDLERS.get(kind) or caller.core.requests.handlers.get(kind)
        if handler is None:
            raise ProtocolError(f"{kind.__name__} is no message of a client")
        reply = handler(caller, message)
        if reply is not None:
            caller.reply(reply)
    except Exception as error:
        caller.fail(unexpected(caller, error))


def entered(caller: Caller, message: m.Call) -> tuple[Waiter, Lowered | None, CallArguments]:
    """Register a request that brings a call's arguments, which are taken whatever becomes of it."""
    lowered, arguments = caller.arguments(message)
    try:
        return caller.wait(), lowered, arguments
    except BaseException:
        close_arguments(arguments)
        raise
