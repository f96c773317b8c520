"""Handles: leases on objects of a server."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Generic, NoReturn, TypeVar

from shared_rpc.errors import CapabilityError, HandleSuspended, StaleHandleError
from shared_rpc.lifecycle.finalizer import FINALIZER

if TYPE_CHECKING:
    from anyio import CancelScope

    from shared_rpc.memory.revisions import Page

T = TypeVar("T")
R = TypeVar("R")

#: Seconds for the server's answer to a release at the end of a block.
_CLOSING = 1.0


class Lease(Generic[T]):
    """A lease on an object of the server, and the object itself: the base of all handles."""

    def __init__(self, value: T, *, object_id: str, server_id: str, generation: int, issuer: Any, session: object) -> None:
        #: The object's id in the server.
        self.object_id = object_id
        #: The id of the server that owns the object.
        self.server_id = server_id
        #: The number of the build for the same cache key, from 1.
        self.generation = generation
        self._value = value
        #: The client or role that takes back the lease, with its public methods.
        self._issuer = issuer
        self._session = session
        self._released = False
        self._lock = threading.Lock()
        #: The object's revision page, None before its first use.
        self._page: Page | None = None
        #: True while suspended; True if suspension was requested for the time outside of ``active()`` blocks; their number.
        self._suspended = False
        self._suspension_requested = False
        self._blocks = 0
        #: True if this process has older memory than the server, see :meth:`_become_outdated`.
        self._outdated = False
        FINALIZER.start()

    @property
    def value(self) -> T:
        """The object, as returned by the endpoint.

        :raises StaleHandleError: once the handle was released.
        :raises HandleSuspended: while the handle is suspended.
        """
        self._check_held()
        if self._suspended or self._outdated:
            why = "its memory may not be touched"
            if not self._suspended:
                why = "the object was evicted while the connection to the server was lost, so that its mapping here is outdated"
            raise HandleSuspended(
                f"the handle of object {self.object_id} is suspended, and {why}: resume() it first, or use its value in a "
                f"block 'with handle.active() as value:'"
            )
        return self._value

    @property
    def suspended(self) -> bool:
        """True while the handle is suspended: it must be resumed before :attr:`value` is used.

        An active handle becomes suspended if its object was evicted while the session with the server was lost, and the new
        session could not map its current memory at once.
        """
        return (self._suspended or self._outdated) and not self._released

    @property
    def _inactive(self) -> bool:
        """True if this process has promised not to access the memory, so that it can be unmapped."""
        return self._suspended and not self._released

    @property
    def released(self) -> bool:
        """True once the lease was released."""
        return self._released

    def _check_held(self) -> None:
        if self._released:
            raise StaleHandleError(f"the handle of object {self.object_id} was released", reason="released")

    def _in_session(self, session: object) -> bool:
        """Return True if the lease is in a session, and was not released."""
        return self._session is session and not self._released

    def _move_to(self, session: object) -> bool:
        """Move the lease to another session; return False if it was released."""
        with self._lock:
            if not self._released:
                self._session = session
            return not self._released

    # States of a suspension, see shared_rpc.client.suspension.

    def _request_suspension(self) -> bool:
        """Request the suspension of the handle, outside of blocks; return True if it must be done now.

        :raises StaleHandleError: if it was released.
        """
        self._check_held()
        with self._lock:
            self._suspension_requested = True
            return not self._suspended and not self._blocks

    def _become_suspended(self) -> bool:
        """Become suspended, if that is still requested."""
        with self._lock:
            if self._released or self._blocks or not self._suspension_requested:
                return False
            self._suspended = True
            return True

    def _request_resumption(self) -> None:
        """Request the resumption of the handle.

        :raises StaleHandleError: if it was released.
        """
        self._check_held()
        self._suspension_requested = False

    def _become_active(self) -> None:
        """Become active, now that the memory is mapped."""
        with self._lock:
            self._suspended = self._outdated = False

    def _cancel_suspension(self) -> None:
        """Record that the handle could not be suspended, and that the end of a block must not retry."""
        with self._lock:
            self._suspended = self._suspension_requested = False

    def _become_outdated(self) -> None:
        """Become suspended while the old memory stays mapped: the server has replaced it."""
        self._outdated = True

    def _drop_value(self) -> None:
        """Drop the value, while the handle is suspended."""
        nothing: Any = None
        with self._lock:
            if self._suspended:
                self._value = nothing

    def _take(self, value: T) -> None:
        """Set the object's current value, before the handle becomes active."""
        with self._lock:
            if not self._released:
                self._value = value

    def _enter_block(self) -> None:
        """Begin a block that needs the handle active.

        :raises StaleHandleError: if it was released.
        """
        self._check_held()
        with self._lock:
            self._blocks += 1

    def _leave_block(self) -> bool:
        """End such a block; return True if the handle must be suspended now."""
        with self._lock:
            self._blocks -= 1
            return self._suspension_requested and not (self._suspended or self._blocks or self._released)

    def _drop(self) -> bool:
        """Drop the value; return True if there is a lease to release."""
        with self._lock:
            if self._released:
                return False
            self._released = True
        # Not unmapped here: another thread may wait on the page.
        nothing: Any = None
        self._value = self._page = nothing
        return True

    def _return_soon(self) -> None:
        """Return the lease of a dropped handle in another thread."""
        issuer, object_id, session = self._issuer, self.object_id, self._session
        FINALIZER.submit(lambda: issuer._end_lease_soon(object_id, session))

    def __reduce__(self) -> NoReturn:
        raise CapabilityError(
            f"cannot pickle or copy the handle of object {self.object_id}, because its lease belongs to this process: "
            "send its value (to copy it: copy.deepcopy(handle.value)), or call the endpoint where the object is needed"
        )

    def __del__(self) -> None:
        if not getattr(self, "_released", True):
            self._released = True
            self._return_soon()

    def __repr__(self) -> str:
        state = "released" if self._released else "suspended" if self.suspended else type(self._value).__name__
        return f"<{type(self).__name__} {self.object_id} generation {self.generation}: {state}>"


def closing_scope() -> CancelScope:
    """Return a scope for the end of a block: a cancelled one releases its leases too, but does not wait for a stuck server."""
    from anyio import CancelScope, current_time

    return CancelScope(shield=True, deadline=current_time() + _CLOSING)


def drop_handles(handles: Iterable[Lease[Any] | str]) -> tuple[list[str], list[object]]:
    """Drop handles; return the object ids and sessions of those not released before. Ids are returned with None."""
    object_ids: list[str] = []
    sessions: list[object] = []
    for handle in handles:
        if isinstance(handle, str):
            object_ids.append(handle)
            sessions.append(None)
        elif handle._drop():
            object_ids.append(handle.object_id)
            sessions.append(handle._session)
    return object_ids, sessions
