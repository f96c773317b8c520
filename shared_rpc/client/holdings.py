"""The handles that a client has given out, and their leases when a session ends before they do."""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from shared_rpc.client.steps import Reply, Request
from shared_rpc.errors import ProtocolError
from shared_rpc.handle import Lease
from shared_rpc.protocol import messages as m

__all__ = ["Holdings", "held_of", "to_hold"]


class Holdings:
    """Handles by the session that their leases are in. Thread-safe.

    A lease ends with its session. Where the same server, by its id, has a new session for this client, because all
    connections broke or because the server was restarted with what it kept, the client asks for leases on the same objects
    before it asks for anything else; a handle of one that is not there any more stays with the session that ended.
    """

    def __init__(self) -> None:
        self._handles: weakref.WeakSet[Lease[Any]] = weakref.WeakSet()
        self._lock = threading.Lock()

    def add(self, handle: Lease[Any]) -> None:
        """One more is out."""
        with self._lock:
            self._handles.add(handle)

    def of(self, session: object) -> list[Lease[Any]]:
        """Those whose leases are in a session."""
        with self._lock:
            return [handle for handle in self._handles if handle.in_session(session)]

    @staticmethod
    def move(handles: Iterable[Lease[Any]], held: Iterable[str], session: object) -> list[str]:
        """Put handles into another session, where it holds as many: the ids of leases that nobody wants any more."""
        left = Counter(held)
        for handle in handles:
            if left[handle.object_id] and handle.move_to(session):
                left[handle.object_id] -= 1
        return list(left.elements())


def to_hold(handles: Sequence[Lease[Any]]) -> Request:
    """What asks for their leases in a new session."""
    return Request(m.Hold([handle.object_id for handle in handles]), "the leases of this client")


def held_of(reply: Reply) -> list[str]:
    """The ids of what is held now, each as often as it was asked for.

    :raises ProtocolError: if the server answers something else.
    """
    reply.frame.close()
    if not isinstance(reply.message, m.Held):
        raise ProtocolError(f"the server answered the leases of this client with {type(reply.message).__name__}")
    return reply.message.object_ids
