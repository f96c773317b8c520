"""The server itself: whether it answers, what it has and does, and its end."""

from __future__ import annotations

import time
from typing import Any, Literal

import msgspec

from shared_rpc.client.process_exit import ProcessExit
from shared_rpc.client.steps import Request, Within, Work, ask
from shared_rpc.operations.binding import Context, Steps, operation, reached
from shared_rpc.protocol import messages as m
from shared_rpc.protocol import monitoring as mo

__all__ = ["ServerOperations"]


class ServerOperations:
    """The server itself."""

    @operation
    def ping(ctx: Context) -> Steps[float]:
        """Make one round trip; the seconds it took."""
        begin = time.perf_counter()
        yield from ask(Request(m.Ping(), "ping", again=True), m.Pong)
        return time.perf_counter() - begin

    @operation
    def get_server_info(ctx: Context) -> Steps[dict[str, Any]]:
        """The server's id, pid, device, socket path, uptime (seconds), endpoints and counters."""
        reply = yield from ask(Request(m.GetServerInfo(), "get_server_info", again=True), m.Facts)
        return dict(reply.facts)

    @operation
    def list_endpoints(ctx: Context) -> Steps[dict[str, dict[str, Any]]]:
        """The options of every endpoint, by name."""
        reply = yield from ask(Request(m.ListEndpoints(), "list_endpoints", again=True), m.Endpoints)
        return {spec.name: msgspec.to_builtins(spec) for spec in reply.endpoints}

    @operation
    def list_sessions(ctx: Context) -> Steps[list[dict[str, Any]]]:
        """The processes that are connected, this one among them.

        Keys: ``session`` (its id), ``pid``, ``connections``, ``leases`` (objects that it holds), ``nbytes`` (of the memory
        that they lie in, each byte counted once), and ``since`` (Unix seconds).
        """
        reply = yield from ask(Request(mo.ListSessions(), "list_sessions", again=True), m.FactsList)
        return list(reply.items)

    @operation
    def list_runs(ctx: Context, limit: int = 1000) -> Steps[list[dict[str, Any]]]:
        """Runs of endpoints that have not ended, of calls and of tasks alike, the oldest first.

        Keys: ``endpoint``, ``cache_key`` (None where the result is not cached), ``status`` (``"pending"`` or ``"running"``),
        ``created_at`` and ``started_at`` (Unix seconds, None for one that has not begun), ``calls`` (how many wait for it),
        ``tasks`` (the ids of those that do), and ``progress``: what the endpoint said last, as ``done``, ``total`` (or None)
        and ``message``, or None.

        :param limit: how many to tell of; at most 1,000.
        """
        reply = yield from ask(Request(mo.ListRuns(limit), "list_runs", again=True), m.FactsList)
        return list(reply.items)

    @operation
    def get_statistics(ctx: Context) -> Steps[dict[str, dict[str, Any]]]:
        """What each endpoint has done since the server began, by its name; one that was never called is not there.

        Keys: ``calls``, of these ``hits`` (answered from the cache), ``misses`` (began a run which the cache would list) and
        ``joined`` (a run that went on already), ``builds`` (runs that began), ``build_seconds`` (of those that ended), and
        ``errors`` (callers and tasks that were told one).
        """
        reply = yield from ask(Request(mo.GetStatistics(), "get_statistics", again=True), m.Facts)
        return dict(reply.facts)

    @operation
    def reload(
        ctx: Context, objects: Literal["changed", "all", "none"] = "changed", timeout: float | None = None
    ) -> Steps[dict[str, Any]]:
        """Have the server's workers read the app's code anew. The old ones serve until the new ones are ready.

        :param objects: which cached objects are dropped: those whose endpoint has ``"changed"``, ``"all"`` or ``"none"``. Who
            holds one keeps it; ``get_object_info`` says ``stale`` of those whose endpoint has changed.
        :param timeout: seconds to wait at most, None for as long as the app takes to load.
        :returns: ``workers``, the process ids of the new ones, and ``services``: by socket path what has ``changed``, how many
            objects were ``dropped``, and the ``endpoints`` there are.
        :raises WorkerCrashed: if the new code cannot be loaded; then nothing has changed.
        :raises ConfigurationError: if the server has no workers.
        """
        yield Within(timeout)
        reply = yield from ask(Request(m.Reload(objects), "reload"), m.Facts)
        return dict(reply.facts)

    @operation
    def stop_server(ctx: Context, if_idle: bool = False, timeout: float | None = 10.0) -> Steps[dict[str, Any]]:
        """Have the server end, as SIGTERM does, and wait until its process is gone. Clients keep the memory that they have.

        :param if_idle: refuse where others are connected, hold a lease, or have a task or a call that has not ended.
        :param timeout: seconds to wait until it is gone, None for as long as it takes.
        :returns: what it held: ``objects``, ``nbytes``, and of others ``clients``, ``leases``, ``tasks`` and ``running``
            endpoints; with its ``pid`` and ``socket_paths``.
        :raises ServerBusy: with ``if_idle``, if others use it.
        :raises ConfigurationError: if it is a part of a process that may do more, such as a script in the server role.
        :raises DeadlineExceeded: if it has not ended after ``timeout`` seconds.
        """
        yield from reached(ctx)
        with ProcessExit(ctx.socket_path) as process_exit:
            reply = yield from ask(Request(m.StopServer(if_idle), "stop_server"), m.Facts)
            yield Work(lambda: process_exit.wait(timeout))
        return dict(reply.facts)
