"""What both clients ask of a server that somebody watches: once blocking, once in coroutines."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from shared_rpc.client.steps import Operation, Request, ask
from shared_rpc.protocol import messages as m
from shared_rpc.protocol import monitoring as mo

__all__ = ["AsyncMonitoring", "Monitoring"]

T = TypeVar("T")


def _list_sessions() -> Operation[list[dict[str, Any]]]:
    reply = yield from ask(Request(mo.ListSessions(), "list_sessions", again=True), m.FactsList)
    return list(reply.items)


def _list_runs(limit: int) -> Operation[list[dict[str, Any]]]:
    reply = yield from ask(Request(mo.ListRuns(limit), "list_runs", again=True), m.FactsList)
    return list(reply.items)


def _get_statistics() -> Operation[dict[str, dict[str, Any]]]:
    reply = yield from ask(Request(mo.GetStatistics(), "get_statistics", again=True), m.Facts)
    return dict(reply.facts)


def _invalidate_object(object_id: str) -> Operation[int]:
    what = f"invalidate_object({object_id!r})"
    reply = yield from ask(Request(mo.InvalidateObject(object_id), what), m.Count)
    return int(reply.count)


class Monitoring:
    """For the blocking client."""

    if TYPE_CHECKING:

        def _run(self, operation: Operation[T], *, patience: float | None = None, timeout: float | None = None) -> T: ...

    def list_sessions(self) -> list[dict[str, Any]]:
        """The processes that are connected, this one among them.

        Keys: ``session`` (its id), ``pid``, ``connections``, ``leases`` (objects that it holds), ``nbytes`` (of the memory
        that they lie in, each byte counted once), and ``since`` (Unix seconds).
        """
        return self._run(_list_sessions())

    def list_runs(self, limit: int = 1000) -> list[dict[str, Any]]:
        """Runs of endpoints that have not ended, of calls and of tasks alike, the oldest first.

        Keys: ``endpoint``, ``cache_key`` (None where the result is not cached), ``status`` (``"pending"`` or ``"running"``),
        ``created_at`` and ``started_at`` (Unix seconds, None for one that has not begun), ``calls`` (how many wait for it),
        ``tasks`` (the ids of those that do), and ``progress``: what the endpoint said last, as ``done``, ``total`` (or None)
        and ``message``, or None.

        :param limit: how many to tell of; at most 1,000.
        """
        return self._run(_list_runs(limit))

    def get_statistics(self) -> dict[str, dict[str, Any]]:
        """What each endpoint has done since the server began, by its name; one that was never called is not there.

        Keys: ``calls``, of these ``hits`` (answered from the cache), ``misses`` (began a run which the cache would list) and
        ``joined`` (a run that went on already), ``builds`` (runs that began), ``build_seconds`` (of those that ended), and
        ``errors`` (callers and tasks that were told one).
        """
        return self._run(_get_statistics())

    def invalidate_object(self, object_id: str) -> int:
        """Drop one cached result, by its object's id; 0 if the cache had dropped it already. Handles that are out stay valid.

        A run of the same call that goes on is kept out of the cache, as by :meth:`invalidate_call_cache`.

        :raises StaleHandleError: if the server has no such object.
        :raises ConfigurationError: if it is a buffer, which :meth:`free_buffer` is for.
        """
        return self._run(_invalidate_object(object_id))


class AsyncMonitoring:
    """For coroutines; for all of it see :class:`Client`."""

    if TYPE_CHECKING:

        async def _run(self, operation: Operation[T], *, timeout: float | None = None) -> T: ...

    async def list_sessions(self) -> list[dict[str, Any]]:
        """See :meth:`Client.list_sessions`."""
        return await self._run(_list_sessions())

    async def list_runs(self, limit: int = 1000) -> list[dict[str, Any]]:
        """See :meth:`Client.list_runs`."""
        return await self._run(_list_runs(limit))

    async def get_statistics(self) -> dict[str, dict[str, Any]]:
        """See :meth:`Client.get_statistics`."""
        return await self._run(_get_statistics())

    async def invalidate_object(self, object_id: str) -> int:
        """See :meth:`Client.invalidate_object`."""
        return await self._run(_invalidate_object(object_id))
