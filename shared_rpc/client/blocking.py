"""The blocking driver: plain blocking sockets, safe to use from many threads."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self, TypeVar, cast

from shared_rpc.client.base import OWN_TIMEOUT, BaseClient
from shared_rpc.client.connection import PROMPT
from shared_rpc.client.pool import ConnectionPool, Turn
from shared_rpc.client.session import ClientSession
from shared_rpc.client.steps import BlockingMethods, Lend, Operation, Reach, Request, Tell, Within, Work, ask
from shared_rpc.client.transfer import ClientTransfer, TransferClosed
from shared_rpc.errors import ConnectionClosed, SharedRPCError
from shared_rpc.errors.interrupts import is_interrupt, is_of_handler, passed_over
from shared_rpc.handle import Handle, Issuer
from shared_rpc.lifecycle.finalizer import Job, weakly
from shared_rpc.memory.mapping import MAPPINGS
from shared_rpc.protocol import messages as m

__all__ = ["BlockingDriver"]

T = TypeVar("T")

#: Seconds of a client without a timeout: ten years.
_FOREVER = 10 * 365 * 86400.0


class BlockingDriver(BaseClient, BlockingMethods):
    """Drives operations over connections of which every thread that waits has its own. See :class:`shared_rpc.Client`."""

    @classmethod
    def _bound(cls, name: str, body: Callable[..., Operation[Any]]) -> Callable[..., Any]:
        """See :class:`Driver`."""

        def method(self: BlockingDriver, /, *args: Any, **kwargs: Any) -> Any:
            return self._run(body(self, *args, **kwargs))

        return method

    def _begin(self) -> None:
        self._pool = ConnectionPool(self._address.path, self._transfers(), self._leases, weakly(self._moved))

    def _leaves(self) -> Job | None:
        # There is no pool where the client could not be made.
        pool = getattr(self, "_pool", None)
        return pool.close if pool is not None and pool.has_sessions else None

    def _after_fork(self) -> None:
        super()._after_fork()
        self._pool.abandon(self._leases)

    def _moved(self) -> None:
        """Have the subscriptions move: the session that they may belong to is about to end, and another one takes over."""
        if self._watch is not None and self._watch.active:
            self._watch_in(self._server())
            self._watch.move()

    def close(self) -> None:
        """Hang up. The leases go back; tensors stay valid. Every later operation fails."""
        self._unwatch()
        self._pool.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()

    # What a handle asks of whoever issued it.

    def give_back(self, object_id: str, session: object) -> None:
        """See :class:`shared_rpc.handle.Issuer`."""
        if session is not self._pool.session:
            return
        try:
            self._run(ask(Request(m.Release([object_id]), "release"), m.Count), patience=0)
        except (SharedRPCError, OSError) as error:
            if is_of_handler(error):
                raise
            return  # the connection is gone, and the session's leases with it
        MAPPINGS.drain()

    def _interrupted(self, session: object) -> None:
        """See :class:`shared_rpc.handle.Issuer`."""
        if isinstance(session, ClientSession):
            self._pool.retire_session(session)

    # Driving operations.

    def _known(self) -> ClientSession | None:
        return self._pool.session

    def _transfer(self) -> ClientTransfer | None:
        session = self._pool.session
        return session.transfer if session is not None else None

    def _give_chunks_back(self, chunks: list[int]) -> None:
        self._pool.exchange(Request(m.Free(chunks), "free"), time.monotonic() + PROMPT, 0)

    def _run(self, operation: Operation[T], *, patience: float | None = None, timeout: float | None = OWN_TIMEOUT) -> T:
        """Drive an operation, which may be interrupted anywhere: nothing is left over then, see :class:`ConnectionPool`."""
        turn = Turn()
        try:
            self._pool.enter(turn)
            return self._drive(operation, turn, patience, timeout)
        except BaseException as error:
            if is_interrupt(error):
                self._pool.retire(turn)
            raise
        finally:
            turn.ended = True
            self._pool.leave(turn)

    def _drive(self, operation: Operation[T], turn: Turn, patience: float | None, timeout: float | None) -> T:
        deadline = self._deadline(self._limit(timeout))
        patience = self._connect_timeout if patience is None else patience
        advance = functools.partial(operation.send, None)
        step: Any = None
        try:
            while True:
                # Around this alone: an endpoint may raise StopIteration too.
                try:
                    step = advance()
                except StopIteration as stop:
                    return cast("T", stop.value)
                if isinstance(step, Request | Reach):
                    try:
                        if isinstance(step, Reach):
                            advance = functools.partial(operation.send, self._pool.need_session(deadline, patience, turn))
                            continue
                        until = max(deadline, time.monotonic() + PROMPT) if step.at_once else deadline
                        advance = functools.partial(operation.send, self._pool.exchange(step, until, patience, turn))
                    except (SharedRPCError, TransferClosed) as error:
                        advance = functools.partial(operation.throw, error)
                    continue
                if isinstance(step, Within):
                    deadline = self._deadline(step.timeout)
                    advance = functools.partial(operation.send, None)
                    continue
                if isinstance(step, Tell):
                    with passed_over(SharedRPCError):
                        self._pool.exchange(Request(step.message, "a message"), time.monotonic() + PROMPT, 0, turn)
                    advance = functools.partial(operation.send, None)
                    continue
                try:
                    # No name for it here: code that runs below may keep this frame.
                    advance = functools.partial(
                        operation.send,
                        step.function()
                        if isinstance(step, Work)
                        else self._handle(step, turn)
                        if isinstance(step, Lend)
                        else step.callback(step.info),
                    )
                except BaseException as error:
                    advance = functools.partial(operation.throw, error)
        finally:
            operation.close()
            # They may hold an error whose frames hold this one, and the caller's tensors with it.
            del advance
            step = None

    def _handle(self, step: Lend, turn: Turn) -> Handle[Any]:
        session, message = turn.session, step.message
        if session is None or self._pool.closed:
            raise ConnectionClosed("this client was closed, and the lease went with it")
        handle = Handle(
            step.value,
            object_id=message.object_id,
            server_id=session.server_id,
            generation=message.generation,
            issuer=cast(Issuer, self),  # the operations that it has of one are not the driver's
            session=session,
        )
        self._leases.add(handle)
        return handle

    @staticmethod
    def _deadline(timeout: float | None) -> float:
        return time.monotonic() + (timeout if timeout is not None else _FOREVER)

    def _server(self) -> ClientSession:
        """Return the session: known since the first connection, and whatever server comes after has the same device."""
        return self._pool.session or self._run(_reached())


def _reached() -> Operation[ClientSession]:
    return cast(ClientSession, (yield Reach()))
