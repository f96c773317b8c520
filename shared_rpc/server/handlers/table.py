"""The table of handlers: for each request the function that answers it, for every caller and transport."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from shared_rpc.errors import ProtocolError
from shared_rpc.execution.outcomes import Failure
from shared_rpc.memory.segments import Descriptor
from shared_rpc.protocol import messages as m
from shared_rpc.server.core import Core, Lowered
from shared_rpc.server.runs import CallArguments, Delivery, Waiter, close_arguments

__all__ = ["Caller", "answer", "entered", "handles"]


class Caller(Protocol):
    """The asker of one request, in another process or in this one. A request is answered once, by whatever ends it first.

    ``session`` is the id of the asker's session; ``local``: it is in this process, and can use a live value.
    ``name`` identifies the request in logs and errors.
    """

    @property
    def core(self) -> Core:
        """The core that handlers work on."""

    @property
    def session(self) -> str:
        """The id of the asker's session."""

    @property
    def local(self) -> bool:
        """Whether the asker is in this process."""

    @property
    def name(self) -> str:
        """The name that identifies the request."""

    @property
    def payload(self) -> bytes:
        """The payload of the request, until it waits."""

    def reply(self, message: m.Message, payload: bytes = b"", owners: tuple[Descriptor, ...] = ()) -> bool:
        """Answer. False if the answer could not be sent, or the asker no longer waits.

        :param owners: of the descriptors that go with it, which are referred to until it is written.
        """

    def fail(self, failure: Failure) -> None:
        """Answer with an error."""

    def deliver(self, outcome: Delivery | Failure) -> bool:
        """Answer with the outcome of a call. False if it could not be sent, and the lease that came with it was released."""

    def notify(self, message: m.Message) -> None:
        """Send a message that is not the answer. A client with too many unread bytes may miss it."""

    def out_of_memory(self, why: str) -> None:
        """Say that the result waits until the asker gives memory back; ``why`` is its error if it gives up meanwhile."""

    def wait(self) -> Waiter:
        """Register the request as one that is answered later. Its outcome goes to :meth:`deliver`.

        :raises ServerBusy: if too many of the asker's requests are under way.
        """

    def detach_fds(self) -> list[int]:
        """Return the descriptors of the request, until it waits; they belong to who asks from here on."""

    def cancel(self) -> None:
        """Cancel the earlier request that this one names, and answer it."""

    def arguments(self, message: m.Call) -> tuple[Lowered | None, CallArguments]:
        """Return a call's arguments: as plain data where they are at hand, and as the executor takes them.

        The descriptors belong to the caller then.
        """


MessageT = TypeVar("MessageT", bound=m.Message)
Handler = Callable[[Caller, MessageT], m.Message | None]

_HANDLERS: dict[type[m.Message], Callable[[Caller, Any], m.Message | None]] = {}


def handles(kind: type[MessageT]) -> Callable[[Handler[MessageT]], Handler[MessageT]]:
    """Enter the decorated function as the handler of a kind of message: its return value is the answer, or it answers later."""

    def enter(handler: Handler[MessageT]) -> Handler[MessageT]:
        assert kind not in _HANDLERS, f"{kind.__name__} has a handler already"
        _HANDLERS[kind] = handler
        return handler

    return enter


def answer(caller: Caller, message: m.Message) -> None:
    """Answer a request, now or later. Never raises."""
    try:
        handler = _HANDLERS.get(type(message))
        if handler is None:
            raise ProtocolError(f"{type(message).__name__} is no message of a client")
        reply = handler(caller, message)
        if reply is not None:
            caller.reply(reply)
    except Exception as error:
        what = f"the handler of request {caller.name} of session {caller.session} failed"
        caller.fail(Failure.unexpected(error, what))


def entered(caller: Caller, message: m.Call) -> tuple[Waiter, Lowered | None, CallArguments]:
    """Register a request that brings a call's arguments, which are taken whatever becomes of it."""
    lowered, arguments = caller.arguments(message)
    try:
        return caller.wait(), lowered, arguments
    except BaseException:
        close_arguments(arguments)
        raise
