"""Requests: their callers, their handlers, and the tasks of pending ones.

A handler is a method of the responsible part of the server, marked by :func:`handles`. It returns the answer, or None if it
answers through the caller itself. A handler that waits returns a coroutine, as ``async def`` does, which is cancelled when the
caller leaves.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from shared_rpc.errors import ProtocolError
from shared_rpc.execution.outcomes import Failure
from shared_rpc.execution.run import CallArguments
from shared_rpc.memory.segments import Descriptor
from shared_rpc.protocol import messages as m
from shared_rpc.server.waiting import Delivery, Waiter, Waits

#: The arguments of a call as plain data: by position, by name.
Lowered = tuple[Sequence[Any], dict[str, Any]]


class Caller(Protocol):
    """The caller of one request, in another process or in this one. A request is answered exactly once."""

    @property
    def session(self) -> str:
        """The id of the caller's session."""

    @property
    def local(self) -> bool:
        """True if the caller is in this process, and can use a live value."""

    @property
    def name(self) -> str:
        """The name that identifies the request in logs and errors."""

    @property
    def payload(self) -> bytes:
        """The payload of the request, until it waits."""

    @property
    def waiter(self) -> Waiter:
        """The waiter that represents a pending request in tables."""

    def reply(self, message: m.Message, payload: bytes = b"", owners: tuple[Descriptor, ...] = ()) -> bool:
        """Answer. Return False if the answer could not be sent, or the caller no longer waits.

        :param owners: owners of the descriptors sent along, referenced until the answer is written.
        """

    def fail(self, failure: Failure) -> None:
        """Answer with an error."""

    def deliver(self, outcome: Delivery | Failure) -> bool:
        """Answer with the outcome of a call. Return False if it could not be sent; its lease was released then."""

    def notify(self, message: m.Message) -> None:
        """Send a message that is not the answer. It is skipped for a client with too many unread bytes."""

    def wait(self) -> Waiter:
        """Register the request as pending. Its outcome goes to :meth:`deliver`.

        :raises ServerBusy: if the client has too many pending requests.
        """

    def cancel(self) -> None:
        """Cancel the earlier request named by this one, and answer it."""

    def arguments(self, message: m.Call) -> tuple[Lowered | None, CallArguments]:
        """Return a call's arguments: as plain data if available, and for the executor.

        Ownership of the descriptors passes to the caller of this method.
        """


HandlerT = TypeVar("HandlerT", bound=Callable[..., Any])

#: The answer to a request: now, later, or None if the handler answers itself.
Answer = m.Message | Coroutine[Any, Any, m.Message | None] | None
Handler = Callable[[Caller, Any], Answer]

#: The attribute of a method that names its message type.
_HANDLED = "_handled_message"


def handles(kind: type[m.Message]) -> Callable[[HandlerT], HandlerT]:
    """Mark a method as the handler of a message type."""

    def mark(method: HandlerT) -> HandlerT:
        setattr(method, _HANDLED, kind)
        return method

    return mark


class Requests:
    """The handlers of a server. On its loop only.

    :param waits: runs the coroutines of pending requests.
    :param parts: the objects whose methods answer.
    """

    def __init__(self, waits: Waits, *parts: object) -> None:
        self._waits = waits
        handlers: dict[type[m.Message], Handler] = {}
        for part in parts:
            for name, method in vars(type(part)).items():
                kind = getattr(method, _HANDLED, None)
                if kind is not None:
                    assert kind not in handlers, f"{kind.__name__} has a handler already"
                    handlers[kind] = getattr(part, name)
        self.handlers: Mapping[type[m.Message], Handler] = handlers

    def answer(self, caller: Caller, message: m.Message) -> None:
        """Answer a request, now or later. Never raises."""
        try:
            handler = self.handlers.get(type(message))
            if handler is None:
                raise ProtocolError(f"{type(message).__name__} is no message of a client")
            reply = handler(caller, message)
            if isinstance(reply, m.Message):
                caller.reply(reply)
            elif reply is not None:
                self._begin(caller, reply)
        except Exception as error:
            caller.fail(_unexpected(caller, error))

    def _begin(self, caller: Caller, work: Coroutine[Any, Any, m.Message | None]) -> None:
        try:
            waiter = caller.wait()
            self._waits.begin(waiter, self._answer(caller, waiter, work))
        except BaseException:
            work.close()
            raise

    async def _answer(self, caller: Caller, waiter: Waiter, work: Coroutine[Any, Any, m.Message | None]) -> None:
        if waiter not in self._waits:  # it left before this began
            work.close()
            return
        try:
            reply = await work
            if reply is not None:
                caller.reply(reply)
        except Exception as error:
            caller.fail(_unexpected(caller, error))


def _unexpected(caller: Caller, error: Exception) -> Failure:
    """Return the failure of a request whose handler raised."""
    return Failure.unexpected(error, f"the handler of request {caller.name} of session {caller.session} failed")
