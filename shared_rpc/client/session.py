"""Sessions of a client with a server: finding the server, and taking over leases from the previous session.

The rules are here, without I/O, shared by the blocking and the coroutine client.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from shared_rpc.client.handle import Lease
from shared_rpc.client.link import ForeignServer, Link, no_listener
from shared_rpc.client.steps import Ask, Open, Operation, Pause, Reply, Request, message_of
from shared_rpc.errors import ConnectError, ConnectionClosed, DeadlineExceeded
from shared_rpc.forks import fork_safe_lock
from shared_rpc.lifecycle.ending import is_child
from shared_rpc.memory.mapping import MAPPINGS
from shared_rpc.protocol import messages as m
from shared_rpc.protocol import tiers as t

#: Seconds between two attempts to reach a server that does not listen yet.
RETRY = 0.05
#: Seconds for which the first request of a session waits for the current memory of objects.
RENEWAL = 5.0
#: Maximum number of servers started for one connection, in case they end at once.
_SUMMONS = 3


class LeaseBook:
    """The handles of one client by the session that holds their leases, and their suspended objects. Thread-safe.

    A lease ends with its session. If the same server, by its id, has a new session for this client, because the connection
    broke or the server was restarted with its objects, the client first requests leases on the same objects. The handle of a
    dropped object stays with the ended session.
    """

    def __init__(self) -> None:
        self._handles: weakref.WeakSet[Lease[Any]] = weakref.WeakSet()
        self._lock = threading.RLock()
        #: The ids of objects last reported to the server as suspended by the session.
        self.reported: set[str] = set()
        #: The ids of objects in active suspensions and resumptions, by a key of each.
        self.suspending: dict[object, str] = {}
        self.resuming: dict[object, str] = {}
        with _lock:
            _books.add(self)

    @staticmethod
    def all() -> list[LeaseBook]:
        """Return those of this process, of its clients and of roles without a server."""
        with _lock:
            return list(_books)

    def add(self, handle: Lease[Any]) -> None:
        """Add a handle."""
        with self._lock:
            self._handles.add(handle)

    def of_server(self, server_id: str) -> list[Lease[Any]]:
        """Return the handles issued by a server, except released ones."""
        with self._lock:
            return [handle for handle in self._handles if handle.server_id == server_id and not handle.released]

    def of_object(self, object_id: str) -> list[Lease[Any]]:
        """Return the handles of an object, except released ones."""
        with self._lock:
            return [handle for handle in self._handles if handle.object_id == object_id and not handle.released]

    def mark_reported(self, object_id: str) -> bool:
        """Mark the object as reported; return False if the session needs it after all."""
        with self._lock:
            self.reported.add(object_id)
            handles, resuming = self.of_object(object_id), tuple(self.resuming.values())
            if handles and object_id not in resuming and all(handle.suspended for handle in handles):
                return True
            self.reported.discard(object_id)
            return False


_books: weakref.WeakSet[LeaseBook] = weakref.WeakSet()
_lock = fork_safe_lock()


class Renewal:
    """The leases of handles in a session that takes them over from an earlier one.

    While the earlier one was lost, nothing was active, and objects could be evicted. The server compares the memory mapped here
    with its current memory, and grants inactive leases on objects whose memory differs: see
    :func:`shared_rpc.client.suspension.renew_handles`.

    Handles may be suspended and resumed between :attr:`request` and :meth:`move`: :meth:`corrections` and :meth:`outdated`
    account for that.
    """

    def __init__(self, leases: LeaseBook, handles: Sequence[Lease[Any]]) -> None:
        ids = [handle.object_id for handle in handles]
        active = {handle.object_id for handle in handles if not handle.suspended}
        mapped = {each: [mapping.info.id for mapping in found] for each, found in MAPPINGS.of_objects(active).items()}
        self._handles = handles
        self._leases = leases
        #: Objects whose new leases are inactive, granted leases without a handle, and the handles that were moved.
        self._inactive = set(ids) - active
        self._unwanted: list[str] = []
        self._moved: list[Lease[Any]] = []
        self.request = Request(m.Hold(ids, sorted(self._inactive), mapped), "the leases of this client")

    def granted(self, reply: Reply) -> None:
        """Process the answer to the request."""
        held = message_of(reply, self.request.what, m.Held)
        self._unwanted = held.object_ids
        self._inactive.update(held.outdated)

    def move(self, session: object) -> None:
        """Move the handles into the session that has the leases."""
        left = Counter(self._unwanted)
        for handle in self._handles:
            if left[handle.object_id] and handle._move_to(session):
                left[handle.object_id] -= 1
        self._unwanted = list(left.elements())
        self._moved = [handle for handle in self._handles if handle._in_session(session)]

    def corrections(self) -> list[m.Message]:
        """Return the messages that correct the leases of the session, except those that need memory."""
        moved = {handle.object_id for handle in self._moved if handle.suspended} - self._inactive
        asleep = [each for each in moved if all(handle.suspended for handle in self._leases.of_object(each))]
        return [*([m.Release(self._unwanted)] if self._unwanted else []), *([t.Suspend(asleep)] if asleep else [])]

    def outdated(self) -> list[Lease[Any]]:
        """Return the active handles whose leases are inactive."""
        return [handle for handle in self._moved if handle.object_id in self._inactive and not handle.suspended]


def connect(
    path: str,
    patience: float,
    deadline: float,
    leases: LeaseBook,
    earlier: Link | None = None,
    summon: Callable[[str, float, float], None] | None = None,
) -> Operation[tuple[Any, Renewal | None]]:
    """Return a link to the server, and the leases that it has taken over from an ended one, if there are any.

    :param patience: seconds to wait for a server to listen, but not beyond ``deadline`` (time.monotonic()).
    :param summon: starts a server if none listens: called with the socket, ``patience`` and ``deadline``.
    :raises ConnectError: if there is no server until then, or it disconnects at once.
    """
    begin = time.monotonic()
    until = min(deadline, begin + patience)
    summons = _SUMMONS if summon is not None and patience > 0 else 0
    while True:
        link: Link | None = None
        renewal: Renewal | None = None
        try:
            link = yield Open(path, max(deadline - time.monotonic(), RETRY))
            if earlier is not None:
                earlier.ended = True  # before the search for handles: later ones are not included
                if handles := leases.of_server(link.server_id):
                    renewal = Renewal(leases, handles)
                    renewal.granted((yield Ask(link, renewal.request)))
            return link, renewal
        except ForeignServer:
            raise
        except (ConnectError, ConnectionClosed, DeadlineExceeded) as error:
            if link is not None:
                link.close()
            text = (
                str(error) if isinstance(error, ConnectError) else f"the server at {path} hung up during the handshake: {error}"
            )
            none_listens = isinstance(error, ConnectError) and no_listener(error)
            if summon is not None and summons and none_listens:
                summons -= 1
                summon(path, patience, deadline)
                until = min(deadline, time.monotonic() + patience)
                continue
            if time.monotonic() + RETRY > until:
                advice = (
                    ". Start a server with: shared-rpc serve app.py, or SHARED_TENSOR_ROLE=server python app.py, with the same "
                    "SHARED_TENSOR_BASE_PATH and device"
                )
                if is_child():
                    advice += ". If the parent of this process has the role server: call a shared function in the parent first"
                waited = f"{text} (waited {time.monotonic() - begin:.1f} s)"
                raise ConnectError(waited + advice if none_listens else waited) from error
        except BaseException:
            if link is not None:
                link.close()
            raise
        yield Pause(RETRY)
