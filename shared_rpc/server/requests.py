"""Requests: who asks, which method answers, and the tasks of those that wait.

A handler is a method of the part of the server that does the work, marked by :func:`handles`. Its return value is the answer;
None if it answers by the caller itself. One that waits is ``async def``, and has a task: the asker's leaving cancels that.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from shared_rpc.errors import ConnectionClosed, ProtocolError
from shared_rpc.execution.outcomes import Failure
from shared_rpc.memory.segments import Descriptor
from shared_rpc.protocol import messages as m
from shared_rpc.server.runs import CallArguments, Delivery, Waiter, tell

#: The arguments of a call as plain data: by position, by name.
Lowered = tuple[Sequence[Any], dict[str, Any]]


class Caller(Protocol):
    """The asker of one request, in another process or in this one. A request is answered once, by whatever ends it first.

    ``session`` is the id of the asker's session; ``local``: it is in this process, and can use a live value.
    ``name`` identifies the request in logs and errors.
    """

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

    @property
    def waiter(self) -> Waiter:
        """The waiter of a request that waits: what it is in registers of who waits for what."""

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


HandlerT = TypeVar("HandlerT", bound=Callable[..., Any])

#: Answers a request, now or later.
Handler = Callable[[Caller, Any], m.Message | None]

#: The attribute of a method that names the kind of message it answers.
_HANDLED = "_handled_message"


def handles(kind: type[m.Message]) -> Callable[[HandlerT], HandlerT]:
    """Mark a method of a part as the handler of a kind of message."""

    def mark(method: HandlerT) -> HandlerT:
        setattr(method, _HANDLED, kind)
        return method

    return mark


class Requests:
    """The handlers of a server, and the tasks of requests that wait. On its loop only.

    :param parts: the objects whose methods answer.
    """

    def __init__(self, *parts: object) -> None:
        self._tasks: dict[Waiter, asyncio.Task[None]] = {}
        self._stopped = False
        handlers: dict[type[m.Message], Handler] = {}
        for part in parts:
            for name, method in vars(type(part)).items():
                kind = getattr(method, _HANDLED, None)
                if kind is not None:
                    assert kind not in handlers, f"{kind.__name__} has a handler already"
                    bound = getattr(part, name)
                    waits = inspect.iscoroutinefunction(method)
                    handlers[kind] = functools.partial(self._begin, bound) if waits else bound
        self.handlers: Mapping[type[m.Message], Handler] = handlers

    def answer(self, caller: Caller, message: m.Message) -> None:
        """Answer a request, now or later. Never raises."""
        try:
            handler = self.handlers.get(type(message))
            if handler is None:
                raise ProtocolError(f"{type(message).__name__} is no message of a client")
            reply = handler(caller, message)
            if reply is not None:
                caller.reply(reply)
        except Exception as error:
            caller.fail(_unexpected(caller, error))

    def _begin(self, handler: Callable[[Caller, Any], Awaitable[m.Message | None]], caller: Caller, message: m.Message) -> None:
        if self._stopped:
            raise _gone()
        waiter = caller.wait()
        work = self._answer(handler, caller, waiter, message)
        self._tasks[waiter] = asyncio.get_running_loop().create_task(work)

    async def _answer(
        self,
        handler: Callable[[Caller, Any], Awaitable[m.Message | None]],
        caller: Caller,
        waiter: Waiter,
        message: m.Message,
    ) -> None:
        try:
            reply = await handler(caller, message)
            if reply is not None:
                caller.reply(reply)
        except Exception as error:
            caller.fail(_unexpected(caller, error))
        finally:
            self._tasks.pop(waiter, None)

    def leave(self, waiter: Waiter) -> None:
        """Cancel the task of a request whose asker no longer waits."""
        task = self._tasks.pop(waiter, None)
        if task is not None:
            task.cancel()

    def stop(self) -> None:
        """Cancel all tasks; the askers, and later ones, get an error."""
        self._stopped = True
        for waiter in tuple(self._tasks):
            self.leave(waiter)
            tell(waiter, Failure.of(_gone()))

    def __len__(self) -> int:
        """Count the requests that have a task."""
        return len(self._tasks)


def _unexpected(caller: Caller, error: Exception) -> Failure:
    """Return the failure of a request whose handler raised."""
    return Failure.unexpected(error, f"the handler of request {caller.name} of session {caller.session} failed")


def _gone() -> ConnectionClosed:
    return ConnectionClosed(f"the server (pid {os.getpid()}) was stopped")
