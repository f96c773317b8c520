"""Generations and revisions within the process that runs the endpoints: what a client asks of a server, asked of the core."""

from __future__ import annotations

import concurrent.futures
import os
import queue
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from typing import TYPE_CHECKING, Any, TypeVar

from shared_rpc.client.subscriptions import Subscription, Subscriptions
from shared_rpc.context import CURRENT_RUN
from shared_rpc.errors import CapabilityError, ConfigurationError, ConnectionClosed
from shared_rpc.handle import Handle, updating
from shared_rpc.memory.revisions import Page
from shared_rpc.protocol.generations import Generation
from shared_rpc.protocol.ticket import Ticket, read_ticket
from shared_rpc.server.engine import LOCAL_SESSION, Engine
from shared_rpc.server.generations import Generations
from shared_rpc.server.outcomes import Failure
from shared_rpc.server.runs import Delivery, Waiter

__all__ = ["InProcessGenerations"]

T = TypeVar("T")


class InProcessGenerations:
    """The part of :class:`shared_rpc.in_process.InProcessRuntime` that is about generations; see :class:`Client` for all."""

    _engine: Engine
    _watch: Subscriptions | None = None

    if TYPE_CHECKING:

        def _lowered(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]: ...
        def _hand(self, delivery: Delivery) -> Any: ...

        def get_buffer(self, buffer_id: str) -> Handle[Any]:
            """See :meth:`Client.get_buffer`."""

        def _waiting(self) -> AbstractContextManager[None]: ...

    def refresh(self, endpoint: str, /, *args: Any, **kwargs: Any) -> Generation:
        """See :meth:`Client.refresh`.

        :raises ConfigurationError: on the event loop that endpoints run on, which would wait for itself.
        """
        if self._engine.here():
            raise ConfigurationError(
                f"refresh({endpoint!r}) was called on the server's event loop: use anyio.to_thread.run_sync"
            )
        lowered, run = self._lowered(args, kwargs), CURRENT_RUN.get()
        chain = run.chain if run is not None else frozenset()
        future: concurrent.futures.Future[Generation] = concurrent.futures.Future()
        waiter = _waiter()

        def told(outcome: Generation | Failure) -> None:
            if isinstance(outcome, Failure):
                future.set_exception(outcome.to_raise())
            else:
                future.set_result(outcome)

        self._engine.post(lambda: self._engine.core.refresh(waiter, told, endpoint, lowered, (args, kwargs), chain))
        try:
            with self._waiting():
                return future.result()
        except BaseException:
            if not future.done():  # interrupted
                with suppress(ConnectionClosed):
                    self._engine.post(lambda: self._engine.core.leave(waiter))
            raise

    def retire(self, target: Handle[Any] | str) -> list[dict[str, Any]]:
        """See :meth:`Client.retire`."""
        name = target if isinstance(target, str) else target.object_id
        return self._engine.ask(lambda core: core.retire(name))

    def update(self, handle: Handle[T], timeout: float | None = None) -> AbstractContextManager[T]:
        """See :meth:`Client.update`."""
        return updating(handle, timeout)

    def on_refresh(self, callback: Callable[[Generation], object]) -> Subscription:
        """See :meth:`Client.on_refresh`."""
        if self._watch is None:
            self._watch = Subscriptions(lambda: EngineSource(self._engine))
        return self._watch.subscribe(callback)

    def _unwatch(self) -> None:
        if self._watch is not None:
            self._watch.close()

    def latest(self, handle: Handle[T]) -> Handle[T]:
        """See :class:`shared_rpc.handle.Issuer`."""
        handle._check_held()
        return self._handed(lambda generations, waiter: generations.hand_latest(waiter, handle.object_id))

    def open_ticket(self, ticket: Ticket | str | os.PathLike[str]) -> Handle[Any]:
        """See :meth:`Client.open_ticket`. The server's own process gets the live object."""
        found = read_ticket(ticket)
        found.check_server(self._engine.core.server_id, self._place())
        if found.kind == "buffer":
            return self.get_buffer(found.object_id)
        return self._handed(lambda generations, waiter: generations.hand(waiter, found.object_id, found.cache_key or ""))

    @property
    def socket_path(self) -> str:
        """See :class:`shared_rpc.handle.Giver`."""
        raise CapabilityError(
            "this process plays the local role, so nobody else can have what it holds: serve it, with "
            "SHARED_TENSOR_ROLE=server or shared-rpc serve, to make tickets"
        )

    def _place(self) -> str:
        """The socket, or what there is in its place."""
        try:
            return self.socket_path
        except CapabilityError:
            return f"pid {os.getpid()}, in the local role"

    def _handed(self, hand: Callable[[Generations, Waiter], None]) -> Handle[Any]:
        handed: list[Delivery | Failure] = []
        waiter = _waiter(handed.append)
        self._engine.ask(lambda core: hand(core.generations, waiter))
        (delivery,) = handed
        assert isinstance(delivery, Delivery), "what cannot be handed out was raised"
        return self._hand(delivery)  # type: ignore[no-any-return]

    def revision_page(self, object_id: str) -> Page:
        """See :class:`shared_rpc.handle.Issuer`."""
        page, memory = self._engine.ask(lambda core: core.revision_page(object_id, local=True))
        return Page(page, memory, object_id)


class EngineSource:
    """News of the core of this process."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        #: What the loop answers; None to wake whoever waits for it for good.
        self._answers: queue.SimpleQueue[tuple[list[Generation], int] | Failure | None] = queue.SimpleQueue()

    def news(self, after: int) -> tuple[list[Generation], int]:
        """See :class:`shared_rpc.client.subscriptions.Source`."""
        waiter = _waiter(lambda outcome: self._answers.put(outcome if isinstance(outcome, Failure) else None))
        self._engine.ask(
            lambda core: core.generations.wait(waiter, after, lambda generations, at: self._answers.put((generations, at)))
        )
        answer = self._answers.get()
        if isinstance(answer, tuple):
            return answer
        with suppress(ConnectionClosed):
            self._engine.ask(lambda core: core.generations.leave(waiter))
        raise ConnectionClosed(answer.text if answer is not None else "nobody wants to know any more")

    def hang_up(self) -> None:
        """See :class:`shared_rpc.client.subscriptions.Source`."""
        self._answers.put(None)

    def close(self) -> None:
        """See :class:`shared_rpc.client.subscriptions.Source`."""


def _waiter(deliver: Callable[[Delivery | Failure], None] = lambda outcome: None) -> Waiter:
    return Waiter(LOCAL_SESSION, deliver, local=True)
