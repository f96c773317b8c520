"""The blocking driver: safe to use from many threads, which share one connection."""

from __future__ import annotations

import functools
import threading
import time
from typing import Any, Self, TypeVar, cast

from shared_rpc.client.base import OWN_TIMEOUT, BaseClient, OperationState, end
from shared_rpc.client.exchange import PROMPT
from shared_rpc.client.link import BlockingLink
from shared_rpc.client.session import RENEWAL, RETRY
from shared_rpc.client.steps import (
    Ask,
    BlockingMethods,
    Lend,
    Open,
    Operation,
    Pause,
    Reach,
    Reply,
    Request,
    Step,
    Tell,
    Within,
    Work,
    drive,
)
from shared_rpc.client.suspension import renew_handles
from shared_rpc.errors import ConnectError, SharedRPCError
from shared_rpc.memory.mapping import MAPPINGS

T = TypeVar("T")


class BlockingDriver(BaseClient, BlockingMethods):
    """The driver of :class:`shared_rpc.Client`.

    A signal handler may raise between receiving a reply, a lease or a chunk of a pool, and recording it. Unrecorded resources
    are released with the session.
    """

    _link: BlockingLink | None

    def _disconnected(self) -> None:
        super()._disconnected()
        self._connecting = threading.RLock()
        #: The patience of the latest operation that connects.
        self._patience = 0.0

    def close(self) -> None:
        """Close the connection and release the leases. Tensors stay valid; every later operation fails."""
        with self._lock:
            self._closed = True
            link = self._link
        if link is not None:  # also one whose end was interrupted
            end(link)
            self._link = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Requests of handles.

    def _end_lease_soon(self, object_id: str, session: object) -> None:
        super()._end_lease_soon(object_id, session)
        MAPPINGS.drain()

    # Driving of operations.

    def _run(self, operation: Operation[T], *, patience: float | None = None, timeout: float | None = OWN_TIMEOUT) -> T:
        state = OperationState(self._connect_timeout if patience is None else patience)
        state.deadline = Within(self._timeout if timeout is OWN_TIMEOUT else timeout).deadline(time.monotonic())
        try:
            return drive(operation, functools.partial(self._perform, state))
        except BaseException:
            self._undo(state)
            raise

    def _perform(self, state: OperationState, step: Step) -> Any:
        match step:
            case Request():
                return self._exchange(step, state)
            case Work():
                return step.function()
            case Lend():
                return self._lend(step, state)
            case Reach():
                return self._connected(state)
            case Open():
                return BlockingLink.open(step.path, step.seconds)
            case Ask():
                return step.link.exchange(step.request, time.monotonic() + PROMPT)
            case Pause():
                time.sleep(step.seconds)
                self._check_open()
            case Within():
                state.deadline = step.deadline(time.monotonic())
            case Tell():
                self._post(step.message, state.link or self._link)
        return None

    def _exchange(self, request: Request, state: OperationState) -> Reply:
        """Send a request; return the reply. If the server disconnects and the request is repeatable, it is sent to the next
        server.
        """
        self._begin(request, state)
        while True:
            link = self._ready_link() or self._connected(state)
            self._address(request, state, link)
            try:
                state.reply = link.exchange(request, state.deadline)
                return state.reply
            except SharedRPCError as error:
                if not self._repeats(request, link, error) or time.monotonic() > state.deadline:
                    raise

    def _connected(self, state: OperationState) -> BlockingLink:
        """Return the link; if there is none, one operation at a time connects. A signal handler may connect within that."""
        until = min(state.deadline, time.monotonic() + RETRY) if state.patience < self._patience else state.deadline
        # _is_owned() is private, as in shared_rpc.forks.
        nested = self._connecting._is_owned()  # type: ignore[attr-defined]
        try:
            self._check_open()
            while not self._connecting.acquire(timeout=max(min(RETRY, until - time.monotonic()), 0.0)):
                self._check_open()
                if time.monotonic() >= until:
                    raise ConnectError(
                        f"cannot connect to {self.socket_path}: another thread is already waiting for its server"
                    )
            self._patience = state.patience
            session = self._new_session(state.patience, state.deadline - time.monotonic())
            outdated = drive(session, functools.partial(self._perform, state))
        finally:
            if not nested:
                try:  # a signal handler may raise after a call, that of suppress() too
                    while True:
                        self._connecting.release()
                except RuntimeError:  # it is not this thread's any more
                    pass
        if outdated:
            seconds = min(RENEWAL, max(state.deadline - time.monotonic(), 0.0))
            self._run(renew_handles(self, outdated), patience=0, timeout=seconds)
        return cast("BlockingLink", self._connected_link())
