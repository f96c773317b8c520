"""Generations of objects: current ones, announcements of refreshes, candidates; and the pages of revisions."""

from __future__ import annotations

import functools
from collections import OrderedDict
from itertools import takewhile

from shared_rpc.errors import ConfigurationError, RefreshError, StaleHandleError
from shared_rpc.protocol import generations as g
from shared_rpc.protocol import messages as m
from shared_rpc.protocol.generations import Generation
from shared_rpc.protocol.specs import EndpointSpec
from shared_rpc.server.requests import Answer, Caller, handles
from shared_rpc.server.shared import State
from shared_rpc.server.state.objects import StoredObject
from shared_rpc.server.tiers import Tiers
from shared_rpc.server.waiting import Delivery, Signal

#: Number of keys whose latest generation is kept for ``refreshes()`` iterators: slow ones miss the oldest generations.
_REMEMBERED = 4096


def check_refreshable(spec: EndpointSpec, key: str | None) -> None:
    """Check that a call has a key.

    :raises ConfigurationError: if it has none.
    """
    if key is None:
        why = (
            "its results are not cached: share it with cache=True"
            if not spec.cache
            else "a call with a tensor or a module among its arguments is not cached: give the endpoint a cache_format_key"
        )
        raise ConfigurationError(f"endpoint {spec.name!r} cannot be refreshed: {why}")


class Generations:
    """The generations of a server's cached objects. On its loop only.

    A ``refreshes()`` iterator polls from a position on, so that nothing is buffered for it: each poll returns the latest
    generation of every key.
    """

    def __init__(self, state: State, tiers: Tiers) -> None:
        self._state = state
        self._tiers = tiers
        self._objects = state.objects
        #: The latest generation of each key with its position, in order of positions.
        self._latest: OrderedDict[str, tuple[int, Generation]] = OrderedDict()
        self._position = 0
        #: Set with every announcement.
        self._news = Signal()

    def announce(self, stored: StoredObject) -> None:
        """Announce that an object is now current for its key. The first one is skipped: no client has an earlier one."""
        if stored.generation == 1:
            return
        generation = self.of(stored)
        self._position += 1
        self._latest.pop(generation.cache_key, None)
        self._latest[generation.cache_key] = self._position, generation
        if len(self._latest) > _REMEMBERED:
            self._latest.popitem(last=False)
        self._news.set()

    @handles(g.AwaitRefreshes)
    async def wait(self, caller: Caller, message: g.AwaitRefreshes) -> m.Answer:
        """Wait for generations that become current after a position; return at once if it is negative or of another server."""
        while message.after == self._position:
            await self._news.wait()
        news = self._since(message.after) if message.after >= 0 else []
        return m.Answer.of((news, self._position, self._state.server_id))

    def of(self, stored: StoredObject) -> Generation:
        """Describe an object with a key."""
        assert stored.cache_key is not None, "only objects with a key have generations"
        return Generation(
            endpoint=stored.endpoint,
            cache_key=stored.cache_key,
            object_id=stored.object_id,
            generation=stored.generation,
            previous_id=stored.previous_id,
            nbytes=stored.record.nbytes,
            device=stored.record.device,
            server_id=self._state.server_id,
            created_at=stored.created_at,
        )

    def made(self, endpoint: str, delivery: Delivery) -> Generation:
        """Describe the result of a refresh on delivery.

        :raises RefreshError: if its call was invalidated during the refresh, or a refresh that began later finished first.
        """
        stored = delivery.stored
        current = self._objects.current(stored.cache_key) if stored is not None else None
        if stored is not None and current is not None and current.run > stored.run:
            raise RefreshError(
                f"another refresh of {stored.cache_key} began while {endpoint}() built this generation, and ended first: this "
                f"generation is not current, generation {current.generation} is (object {current.object_id})"
            )
        if stored is None or not stored.listed:
            raise RefreshError(
                f"{endpoint}() was invalidated while its next generation was being built: the generation is not current. Call "
                f"the endpoint or refresh() to build another one"
            )
        return self.of(stored)

    def prepared(self, endpoint: str, delivery: Delivery) -> Generation:
        """Describe the candidate built by a run.

        :raises RefreshError: if its call was invalidated since.
        """
        stored = delivery.stored
        if stored is None or stored.invalidated:
            raise RefreshError(
                f"{endpoint}() was invalidated while its next generation was being built, which therefore is no candidate: "
                f"prepare another one"
            )
        return self.of(stored)

    @handles(g.GetLatest)
    def get_latest(self, caller: Caller, message: g.GetLatest) -> Answer:
        """Deliver the current object of an object's key with a lease, at once if it is on its device.

        :raises StaleHandleError: if the server does not own the object, or its key has no current object.
        """

        def latest() -> StoredObject:
            stored = self._state.stored(message.object_id)
            current = self._objects.lookup(stored.cache_key) if stored.cache_key is not None else stored
            if current is None:
                raise StaleHandleError(
                    f"{stored.cache_key} was invalidated and has no current generation: call the endpoint again",
                    reason="invalidated",
                )
            return current

        return self._tiers.serve(caller, latest, functools.partial(self._lend, caller))

    @handles(g.GetObject)
    def get_object(self, caller: Caller, message: g.GetObject) -> Answer:
        """Send an existing object, listed or not, with a lease; at once if it is on its device.

        :raises StaleHandleError: if the server does not own the object any more.
        """
        if not message.object_id:
            message = g.GetObject(self._of_segment(message.segment))
        return self._tiers.serve(caller, lambda: self._found(message), functools.partial(self._lend, caller))

    def _found(self, message: g.GetObject) -> StoredObject:
        stored = self._objects.get(message.object_id)
        if stored is not None:
            return stored
        current = self._objects.current(message.cache_key)
        if current is not None:
            raise StaleHandleError(
                f"object {message.object_id[:100]} was dropped, and generation {current.generation} of "
                f"{message.cache_key[:200]} is current: call the endpoint to get it",
                reason="superseded",
            )
        raise StaleHandleError(
            f"the server {self._state.server_id} has no object {message.object_id[:100]} any more: it had no lease and is not "
            f"cached: call the endpoint again",
            reason="object_gone",
        )

    def _of_segment(self, name: str) -> str:
        for stored in self._objects:
            if any(segment.info.name == name for segment in stored.record.segments):
                return stored.object_id
        return f"with segment {name}"  # the error for a dropped object names it

    def _lend(self, caller: Caller, stored: StoredObject) -> None:
        self._state.leases.grant(caller.session, stored.object_id)
        stored.last_accessed_at = self._state.clock.now()
        caller.deliver(Delivery(stored.record, stored.live, stored, True))

    def _since(self, after: int) -> list[Generation]:
        news = takewhile(lambda entry: entry[0] > after, reversed(self._latest.values()))
        return [generation for _, generation in news][::-1]
