"""Leases. A lease belongs to a holder and an object; it counts the handles granted to the holder. A holder is a session, or a
task whose result waits to be fetched.

A lease is active, unless the session has suspended the object: then the session must not access the object's memory until it
resumes it. A further handle resumes the lease, unless that handle is granted as a suspended one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import NamedTuple


class TaskHolder(NamedTuple):
    """A task that holds its result until a client fetches it. It has no mapped memory."""

    task_id: str


#: A session, by its id, or a task.
Holder = str | TaskHolder


class LeaseTable:
    """All leases of a server.

    :param on_give: called with the holder and the object of every new lease.
    :param on_end: called with the holder and the object of every ended lease, and with True if its holder has not released it:
        its process has ended without a goodbye.
    """

    def __init__(
        self, on_give: Callable[[Holder, str], None] | None = None, on_end: Callable[[Holder, str, bool], None] | None = None
    ) -> None:
        self._on_give = on_give
        self._on_end = on_end
        self._by_session: defaultdict[Holder, dict[str, int]] = defaultdict(dict)
        #: The holders of each object, with True for an active lease.
        self._by_object: defaultdict[str, dict[Holder, bool]] = defaultdict(dict)
        #: Called with an object whenever a session gets a handle on it that is not suspended, or resumes it.
        self.on_active: Callable[[str], None] | None = None

    def grant(self, session: Holder, object_id: str, *, active: bool = True) -> None:
        """Count one more handle of the session.

        :param active: False for a suspended handle: a new lease is inactive then, and an existing one is unchanged.
        """
        held = self._by_session[session]
        handles = held[object_id] = held.get(object_id, 0) + 1
        if active:
            self._activate(session, object_id)
        elif handles == 1:
            self._by_object[object_id][session] = False
        if self._on_give is not None and handles == 1:
            self._on_give(session, object_id)

    def release(self, session: Holder, object_id: str) -> bool:
        """Decrement the count of handles; return False if the session had none, as after a second release."""
        held = self._by_session.get(session)
        if not held or object_id not in held:
            return False
        held[object_id] -= 1
        if held[object_id] == 0:
            self._end(session, object_id, reclaimed=False)
        return True

    def suspend(self, session: Holder, object_id: str) -> bool:
        """Make a lease inactive. Return False if the session has no active lease on the object."""
        holders = self._by_object.get(object_id, {})
        if not holders.get(session):
            return False
        holders[session] = False
        return True

    def resume(self, session: Holder, object_id: str) -> None:
        """Make a lease active, if the session has one on the object."""
        if session in self._by_object.get(object_id, ()):
            self._activate(session, object_id)

    def active(self, object_id: str) -> frozenset[Holder]:
        """Return the holders of an object that have not suspended it."""
        return frozenset(holder for holder, active in self._by_object.get(object_id, {}).items() if active)

    def users(self, object_id: str) -> list[str]:
        """Return the sessions that have an object active, which must stay on its devices. A task has no mapped memory."""
        return [holder for holder in self.active(object_id) if isinstance(holder, str)]

    def _activate(self, session: Holder, object_id: str) -> None:
        self._by_object[object_id][session] = True
        if self.on_active is not None:
            self.on_active(object_id)

    def end_session(self, session: Holder, *, reclaimed: bool = False) -> list[str]:
        """Release all leases of a session; return the ids of their objects.

        :param reclaimed: True if the session ended without a goodbye.
        """
        held = list(self._by_session.get(session, ()))
        for object_id in held:
            self._end(session, object_id, reclaimed)
        return held

    def holders(self, object_id: str) -> frozenset[Holder]:
        """Return the sessions and tasks that hold an object."""
        return frozenset(self._by_object.get(object_id, ()))

    def handles(self, session: Holder, object_id: str) -> int:
        """Return the number of handles that a session has of an object."""
        return self._by_session.get(session, {}).get(object_id, 0)

    def held(self, object_id: str) -> bool:
        """Return True if an object has a holder."""
        return object_id in self._by_object

    def of_session(self, session: Holder) -> tuple[str, ...]:
        """Return the objects that a session holds."""
        return tuple(self._by_session.get(session, ()))

    def __len__(self) -> int:
        """Return the number of leases."""
        return sum(len(sessions) for sessions in self._by_object.values())

    def _end(self, session: Holder, object_id: str, reclaimed: bool) -> None:
        del self._by_session[session][object_id]
        if not self._by_session[session]:
            del self._by_session[session]
        del self._by_object[object_id][session]
        if not self._by_object[object_id]:
            del self._by_object[object_id]
        if self._on_end is not None:
            self._on_end(session, object_id, reclaimed)
