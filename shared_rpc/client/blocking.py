"""The blocking driver: plain blocking sockets, safe to use from many threads."""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

from shared_rpc.client.base import OWN_TIMEOUT, BaseClient
from shared_rpc.client.exchange import BRIEFLY, PROMPT
from shared_rpc.client.handle import Lease
from shared_rpc.client.pool import ConnectionPool, Turn
from shared_rpc.client.session import ClientSession
from shared_rpc.client.steps import (
    BlockingMethods,
    Lend,
    Notify,
    Operation,
    Reach,
    Reply,
    Request,
    Step,
    Tell,
    Within,
    Work,
    ask,
    drive,
    reached,
)
from shared_rpc.client.suspension import lease_ended, renewed
from shared_rpc.client.transfer import ClientTransfer
from shared_rpc.errors import SharedRPCError
from shared_rpc.errors.interrupts import is_interrupt, passed_over
from shared_rpc.lifecycle.finalizer import Job, weakly
from shared_rpc.memory.mapping import MAPPINGS
from shared_rpc.protocol import messages as m

T = TypeVar("T")


class BlockingDriver(BaseClient, BlockingMethods):
    """The driver of :class:`shared_rpc.Client`: every thread that waits has a connection of its own."""

    def _begin(self) -> None:
        self._pool = ConnectionPool(
            self._address.path, self._transfers(), self._leases, weakly(self._moved), weakly(self._renewed)
        )

    def _end_job(self) -> Job | None:
        # A client whose constructor failed has no pool.
        pool = getattr(self, "_pool", None)
        return pool.close if pool is not None and pool.has_sessions else None

    def _after_fork(self) -> None:
        super()._after_fork()
        self._pool.abandon(self._leases)

    def _moved(self) -> None:
        """Move the subscriptions: the session that they may belong to is about to end, and another one takes over."""
        if self._watch.active:
            session = self._run(reached(self._pool.session))
            if session.server_id == self._watched.server_id:
                self._watch_in(session).move()

    def _renewed(self, handles: Sequence[Lease[Any]], seconds: float) -> None:
        """Have the memory of handles renewed."""
        self._run(renewed(self, handles), patience=0, timeout=seconds)

    def close(self) -> None:
        """Close the connections and release the leases. Tensors stay valid; every later operation fails."""
        self._unwatch()
        self._pool.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()

    # Requests of handles.

    def _end_lease(self, object_id: str, session: object) -> None:
        if session is not self._pool.session:
            return
        with passed_over(SharedRPCError, OSError):  # the connection has ended, and the session's leases with it
            self._run(ask(Request(m.Release([object_id]), "release", sessions=[session]), m.Count), patience=0)
            self._run(lease_ended(self, [object_id]), patience=0)
            MAPPINGS.drain()

    def _release_dropped(self, session: ClientSession) -> None:
        super()._release_dropped(session)
        MAPPINGS.drain()

    def _exchange_apart(self, session: ClientSession, request: Request) -> Reply:
        return self._pool.exchange(request, time.monotonic() + BRIEFLY, 0)

    def _interrupted(self, session: object) -> None:
        if isinstance(session, ClientSession):
            self._pool.retire_session(session)

    def _has_lease(self, handle: Lease[Any]) -> bool:
        # A session that was retired keeps its leases until another one has them.
        return any(handle.in_session(session) for session in (self._pool.session, *self._pool.retired) if session is not None)

    # Driving of operations.

    def _known(self) -> ClientSession | None:
        return self._pool.session

    def _return_chunks(self, transfer: ClientTransfer, chunks: list[int]) -> None:
        request = Request(m.Free(chunks), "free", transfer=transfer)
        try:
            self._pool.exchange(request, time.monotonic() + BRIEFLY, 0).frame.close()
        except (SharedRPCError, OSError):
            if not request.sent:
                raise

    def _run(self, operation: Operation[T], *, patience: float | None = None, timeout: float | None = OWN_TIMEOUT) -> T:
        """Drive an operation, which may be interrupted anywhere: nothing is left over then, see :class:`ConnectionPool`."""
        turn = Turn(self._connect_timeout if patience is None else patience)
        turn.deadline = Within(self._timeout if timeout is OWN_TIMEOUT else timeout).deadline(time.monotonic())
        try:
            self._pool.turns.add(turn)
            return drive(operation, functools.partial(self._perform, turn))
        except BaseException as error:
            if is_interrupt(error):
                self._pool.retire(turn)
            raise
        finally:
            turn.ended = True
            self._pool.turns.discard(turn)
            if self._pool.retired:
                self._pool.end_soon()

    def _perform(self, turn: Turn, step: Step) -> Any:
        match step:
            case Request():
                deadline = max(turn.deadline, time.monotonic() + PROMPT) if step.at_once else turn.deadline
                return self._pool.exchange(step, deadline, turn.patience, turn)
            case Work():
                return step.function()
            case Lend():
                return self._lend(step, None if self._pool.closed else turn.session)
            case Notify():
                return step.callback(step.info)
            case Reach():
                return self._pool.need_session(turn)
            case Within():
                turn.deadline = step.deadline(time.monotonic())
            case Tell():
                sessions = [step.session or turn.session] if isinstance(step.message, m.Release) else []
                request = Request(step.message, "a message", sessions=sessions)
                with passed_over(SharedRPCError):
                    self._pool.exchange(request, time.monotonic() + PROMPT, 0, turn)
        return None
