"""Raw buffers, and how long each stays available.

A buffer is an object that no endpoint made: its record, its leases and the effects of a session's end are those of every
object. From its creation it is *listed*: its id can be requested. That ends when it is freed, when its ``ttl`` has
passed, or with its last lease, or ``linger`` seconds after that, if it has neither a ``ttl`` nor is kept, whichever comes
first. Holders keep it even when unlisted; memory is freed with the end of the listing or with the last lease, whichever
comes last.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, replace

from shared_rpc.errors import BufferNotFound, ConfigurationError
from shared_rpc.memory.records import Record
from shared_rpc.protocol.specs import EndpointSpec
from shared_rpc.server.state import Clock
from shared_rpc.server.state.leases import LeaseTable
from shared_rpc.server.state.objects import ObjectStore, StoredObject

#: Number of removed buffers whose reason of removal is remembered.
_REMEMBERED = 10_000

#: Seconds after a restart of the server for earlier holders of a buffer to take their leases again.
_CLAIMED_WITHIN = 3600.0

#: Buffers have no endpoint, but these options of one.
_BUFFER = EndpointSpec("", managed=True)

#: Reasons for which a buffer is not available.
_REASONS = {
    "unknown": "this server has no such buffer",
    "freed": "it was freed",
    "expired": "its ttl has passed",
    "released": "its last holder has released it, and it was made without ttl= or keep=True",
}


@dataclass
class Terms:
    """The terms of a buffer's listing: until a time of the store's clock, and while held.

    ``kept``: it is listed even without holders. ``claimed_until``: without holders it is listed until then. ``linger``: seconds
    from its last lease to that time. ``name``: its name for lookups, ``""`` for none.
    """

    expires_at: float | None
    kept: bool = True
    claimed_until: float | None = None
    linger: float = 0.0
    name: str = ""


class BufferTable:
    """The buffers among the objects of a server."""

    def __init__(self, objects: ObjectStore, leases: LeaseTable, clock: Clock) -> None:
        self._objects = objects
        self._leases = leases
        self._clock = clock
        #: Terms of listed buffers.
        self._terms: dict[str, Terms] = {}
        #: Their ids by name.
        self._names: dict[str, str] = {}
        self._reasons: OrderedDict[str, str] = OrderedDict()

    def check_name(self, name: str) -> None:
        """Check that no listed buffer has the name.

        :raises ConfigurationError: if one does.
        """
        object_id = self._names.get(name)
        if object_id is not None and self._current(object_id) is not None:
            raise ConfigurationError(f"there is a buffer {name[:200]!r} already: free or release it, or use another name")

    def named(self, name: str) -> str:
        """Return the id of the buffer with this name.

        :raises BufferNotFound: if there is none.
        """
        object_id = self._names.get(name)
        if object_id is None:
            raise BufferNotFound(f"buffer {name[:200]!r} is not available: {_REASONS['unknown']}", reason="unknown")
        return object_id

    def add(
        self,
        session: str,
        record: Record,
        ttl: float | None,
        *,
        keep: bool = False,
        linger: float = 0.0,
        name: str = "",
    ) -> StoredObject:
        """List a new buffer, held by its creator.

        :param ttl: seconds from now during which it is listed even without holders.
        :param keep: True to list it without holders until it is freed.
        :param linger: seconds during which it is listed after the end of its last lease.
        :param name: a name that no other listed buffer has, ``""`` for none.
        """
        stored = self._objects.add(_BUFFER, None, record, kind="buffer")
        stored.listed = True  # the cache neither evicts nor expires it
        self._leases.grant(session, stored.object_id)
        expires_at = self._clock.now() + ttl if ttl is not None else None
        kept = keep or ttl is not None
        self._terms[stored.object_id] = Terms(expires_at, kept, linger=linger, name=name)
        if name:
            self._names[name] = stored.object_id
        self._objects.notify(stored)
        return stored

    def recover(self, stored: StoredObject, terms: Terms) -> None:
        """List a buffer of an earlier server, on the rest of its terms.

        Its earlier holders have a limited time to take their leases again.
        """
        self._objects.recover(stored)
        if not terms.kept:
            terms = replace(terms, claimed_until=self._clock.now() + _CLAIMED_WITHIN)
        self._terms[stored.object_id] = terms

    def settle(self, object_id: str) -> float | None:
        """Unlist a buffer listed only for its holders, after a lease has ended.

        :returns: the seconds during which it stays listed without holders; None if only a holder, a request or its ``ttl`` ends
            it.
        """
        terms = self._terms.get(object_id)
        if terms is None or terms.kept or self._leases.held(object_id):
            return None
        now = self._clock.now()
        if terms.claimed_until is None:
            terms.claimed_until = now + terms.linger
        if terms.claimed_until <= now:
            self._unlist(object_id, "released")
            return None
        return terms.claimed_until - now

    def terms(self, object_id: str) -> Terms:
        """Return the terms of a listed buffer."""
        return self._terms[object_id]

    def get(self, session: str, object_id: str) -> StoredObject:
        """Return a buffer and grant the session a lease on it.

        :raises BufferNotFound: if it is not, or no longer, listed.
        """
        stored, terms = self.listed(object_id), self._terms[object_id]
        self._leases.grant(session, object_id)
        stored.last_accessed_at = self._clock.now()
        if terms.linger:
            terms.claimed_until = None  # restarts after its next last lease
        return stored

    def listed(self, object_id: str) -> StoredObject:
        """Return a listed buffer.

        :raises BufferNotFound: if it is not, or no longer, listed.
        """
        stored = self._objects.get(object_id)
        if stored is None or self._current(object_id) is None:
            reason = self._reasons.get(object_id, "unknown")
            raise BufferNotFound(f"buffer {object_id[:100]} is not available: {_REASONS[reason]}", reason=reason)
        return stored

    def free(self, object_id: str) -> bool:
        """Unlist a buffer; return False if it was not listed."""
        if self._current(object_id) is None:
            return False
        self._unlist(object_id, "freed")
        return True

    def expire(self) -> float | None:
        """Unlist expired buffers; return the seconds until the next one expires, None for never."""
        now = self._clock.now()
        for object_id, terms in tuple(self._terms.items()):
            if terms.expires_at is not None and terms.expires_at <= now:
                self._unlist(object_id, "expired")
            elif terms.claimed_until is not None and terms.claimed_until <= now:
                self.settle(object_id)
        ends = [end for terms in self._terms.values() for end in (terms.expires_at, terms.claimed_until) if end is not None]
        return min((end - now for end in ends if end > now), default=None)

    def info(self, object_id: str) -> tuple[str, float | None]:
        """Return a buffer's state, and its end (time.time()), see :class:`~shared_rpc.protocol.infos.ObjectInfo`."""
        terms = self._current(object_id)
        if terms is None:
            return self._reasons.get(object_id, "unknown"), None
        return "listed", self._clock.unix(terms.expires_at) if terms.expires_at is not None else None

    def _current(self, object_id: str) -> Terms | None:
        """Return the terms of a listed buffer, None if they have expired since the last check."""
        terms = self._terms.get(object_id)
        if terms is None or terms.expires_at is None or terms.expires_at > self._clock.now():
            return terms
        self._unlist(object_id, "expired")
        return None

    def _unlist(self, object_id: str, reason: str) -> None:
        self._names.pop(self._terms.pop(object_id).name, None)
        self._reasons[object_id] = reason
        if len(self._reasons) > _REMEMBERED:
            self._reasons.popitem(last=False)
        stored = self._objects.get(object_id)
        if stored is not None:  # at the end of the server all objects are dropped at once
            self._objects.unlist(stored)

    def __len__(self) -> int:
        """Return the number of buffers, listed or held."""
        return self._objects.buffers
