"""Generations of objects: the current ones, news of refreshes, the rest of earlier ones; and the pages of revisions."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from itertools import takewhile

from shared_rpc.errors import ConfigurationError, RefreshError, StaleHandleError
from shared_rpc.execution.outcomes import Failure
from shared_rpc.memory.backends.choice import chosen
from shared_rpc.memory.revisions import new_page, read_only
from shared_rpc.memory.segments import Segment
from shared_rpc.protocol.generations import Generation
from shared_rpc.protocol.records import SegmentInfo
from shared_rpc.protocol.specs import EndpointSpec
from shared_rpc.server.runs import Delivery, Restorer, Waiter, tell
from shared_rpc.server.state.leases import LeaseTable
from shared_rpc.server.state.objects import ObjectStore, StoredObject
from shared_rpc.server.state.quotas import Quotas
from shared_rpc.server.state.tasks import TASK_SESSION

__all__ = ["Generations", "page_of", "refreshable"]

#: Keys whose latest generation is remembered for subscribers: a subscriber that asks too rarely misses the oldest ones.
_REMEMBERED = 4096

#: Called with the generations since a position, and the position after them.
Answer = Callable[[list[Generation], int], object]


def refreshable(spec: EndpointSpec, key: str | None) -> str:
    """Return the key of a call that is to be refreshed.

    :raises ConfigurationError: if it has none.
    """
    if key is not None:
        return key
    why = (
        "its results are not cached: share it with cache=True"
        if not spec.cache
        else "a call with a tensor or a module among its arguments is not cached: give the endpoint a cache_format_key"
    )
    raise ConfigurationError(f"endpoint {spec.name!r} cannot be refreshed: {why}")


class Generations:
    """The generations of a server's cached objects. On its loop only.

    Subscribers ask again and again, from a position on. So there is nothing to buffer for one that
    is slow: it gets the latest generation of each key, when it asks.

    :param release: gives leases back: session, object ids.
    :param reclaim: gives memory back that only a value of the executor held.
    :param restorer: restores objects that are cold.
    """

    def __init__(
        self,
        server_id: str,
        objects: ObjectStore,
        leases: LeaseTable,
        release: Callable[[str, Iterable[str]], object],
        reclaim: Callable[[], None],
        restorer: Restorer,
    ) -> None:
        self._server_id = server_id
        self._objects = objects
        self._leases = leases
        self._release = release
        self._reclaim = reclaim
        self._restorer = restorer
        #: The latest generation of each key with its position, in order of positions.
        self._latest: OrderedDict[str, tuple[int, Generation]] = OrderedDict()
        self._position = 0
        #: The position and the answer of each waiter.
        self._waiting: dict[Waiter, tuple[int, Answer]] = {}
        #: The failure for waiters once the server has stopped.
        self._gone: Failure | None = None

    def announce(self, stored: StoredObject) -> None:
        """Announce that an object is the current one of its key. The first one is no news: no client has an earlier one."""
        if stored.generation == 1:
            return
        generation = self.of(stored)
        self._position += 1
        self._latest.pop(generation.cache_key, None)
        self._latest[generation.cache_key] = self._position, generation
        if len(self._latest) > _REMEMBERED:
            self._latest.popitem(last=False)
        waiting, self._waiting = self._waiting, {}
        for after, answer in waiting.values():
            answer(self._since(after), self._position)

    def wait(self, waiter: Waiter, after: int, answer: Answer) -> None:
        """Call ``answer`` once, with the generations that became current after a position; at once if ``after`` is negative."""
        if self._gone is not None:
            tell(waiter, self._gone)
            return
        news = self._since(after) if after >= 0 else []
        if news or after < 0 or after > self._position:  # also for a position of an earlier server
            answer(news, self._position)
        else:
            self._waiting[waiter] = after, answer

    def leave(self, waiter: Waiter) -> None:
        """Forget a waiter."""
        self._waiting.pop(waiter, None)

    def stop(self, failure: Failure) -> None:
        """Notify present and later waiters that the server has stopped."""
        self._gone = failure
        waiting, self._waiting = self._waiting, {}
        for waiter in waiting:
            tell(waiter, failure)

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
            server_id=self._server_id,
            created_at=stored.created_at,
        )

    def made(self, endpoint: str, delivery: Delivery) -> Generation:
        """Describe the result of a refresh, when it is delivered.

        :raises RefreshError: if its call was invalidated while it was being built, or a refresh that began later was sooner.
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
        """Describe the candidate that a run has built.

        :raises RefreshError: if its call was invalidated meanwhile.
        """
        stored = delivery.stored
        if stored is None or stored.invalidated:
            raise RefreshError(
                f"{endpoint}() was invalidated while its next generation was being built, which therefore is no candidate: "
                f"prepare another one"
            )
        return self.of(stored)

    def deliver_latest(self, waiter: Waiter, object_id: str) -> None:
        """Deliver the current object of an object's key with a lease, at once if it is on its device.

        :raises StaleHandleError: if the server does not own the object, or nothing of its key is current.
        """
        stored = self._objects.get(object_id)
        if stored is None:
            raise StaleHandleError(f"the server {self._server_id} has no object {object_id[:100]}", reason="object_gone")
        current = self._objects.lookup(stored.cache_key) if stored.cache_key is not None else stored
        if current is None:
            raise StaleHandleError(
                f"{stored.cache_key} was invalidated and has no current generation: call the endpoint again",
                reason="invalidated",
            )
        self._deliver(waiter, current, lambda: self.deliver_latest(waiter, object_id))

    def deliver_object(self, waiter: Waiter, object_id: str, cache_key: str) -> None:
        """Hand an object out that is there, current or not, with a lease; at once if it is on its device.

        :param cache_key: its key, for the reason of an error, ``""`` if it has none.
        :raises StaleHandleError: if the server does not own the object any more.
        """
        stored = self._objects.get(object_id)
        if stored is not None:
            if stored.listed and stored.cache_key is not None:
                self._objects.lookup(stored.cache_key)  # this counts as an access
            self._deliver(waiter, stored, lambda: self.deliver_object(waiter, object_id, cache_key))
            return
        current = self._objects.lookup(cache_key)
        if current is not None:
            raise StaleHandleError(
                f"object {object_id[:100]} was dropped, and generation {current.generation} of {cache_key[:200]} is current: "
                f"call the endpoint to get it",
                reason="superseded",
            )
        raise StaleHandleError(
            f"the server {self._server_id} has no object {object_id[:100]} any more: it had no lease and is not cached: "
            f"call the endpoint again",
            reason="object_gone",
        )

    def _deliver(self, waiter: Waiter, stored: StoredObject, again: Callable[[], None]) -> None:
        if stored.cold or self._restorer.must_wait(waiter, stored):
            self._restorer.when_warm(waiter, stored, again)
            return
        self._leases.grant(waiter.session, stored.object_id)
        tell(waiter, Delivery(stored.record, stored.live, stored, True))

    def retire(self, object_id: str, endpoint: str | None) -> list[StoredObject]:
        """Free superseded objects without holders, of an endpoint or the one with this id; return the held ones.

        Objects that only a task's unfetched result held are freed too.
        """
        superseded = [
            stored
            for stored in self._objects
            if not (stored.current or stored.candidate)
            and (stored.endpoint == endpoint if endpoint is not None else stored.object_id == object_id)
        ]
        for stored in superseded:
            for session in self._leases.holders(stored.object_id):
                if session.startswith(TASK_SESSION):
                    self._release(session, [stored.object_id])
        self._reclaim()
        return [stored for stored in superseded if self._objects.get(stored.object_id) is not None]

    def _since(self, after: int) -> list[Generation]:
        news = takewhile(lambda entry: entry[0] > after, reversed(self._latest.values()))
        return [generation for _, generation in news][::-1]


def page_of(objects: ObjectStore, quotas: Quotas, object_id: str, *, local: bool) -> tuple[Segment, list[SegmentInfo]]:
    """Return a descriptor of the page of an object's revision, and a segment for each kind of memory that the object is in.

    The page is made with the first request for it. The descriptor belongs to the caller.

    :param local: whether it is for this process, which may write to memory that it shares read-only.
    :raises StaleHandleError: if the server does not own the object.
    :raises ServerBusy: if there is no descriptor for its page.
    """
    stored = objects.get(object_id)
    if stored is not None and stored.page is None:
        quotas.require_descriptors(1)
        stored = objects.get(object_id)  # the eviction may have dropped it
    if stored is None:
        raise StaleHandleError(f"the server has no object {object_id[:100]}", reason="object_gone")
    sealed = any(segment.info.access == "read" for segment in stored.record.segments)
    page = stored.page
    if page is None:
        page = new_page("read" if sealed else "read_write")
        objects.add_page(stored, page)
    return read_only(page) if sealed and not local else page.duplicate(), _memory_of(stored)


def _memory_of(stored: StoredObject) -> list[SegmentInfo]:
    kinds = {(segment.info.device, segment.info.mechanism): segment.info for segment in stored.record.segments}
    if not kinds and stored.record.device != "cpu":  # in the local role objects have no segments
        return [SegmentInfo("", 0, stored.record.device, mechanism=chosen(stored.record.device).name)]
    return list(kinds.values())
