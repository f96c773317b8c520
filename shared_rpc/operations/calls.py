"""Calls, and the cache of their results."""

from __future__ import annotations

from typing import Any

from shared_rpc.client.sending import lower
from shared_rpc.client.steps import query
from shared_rpc.client.suspension import Context
from shared_rpc.operations.binding import Steps, operation, take_result
from shared_rpc.protocol import messages as m


class CallOperations:
    """Calls and their cached results."""

    @operation
    def call(ctx: Context, endpoint: str, /, *args: Any, **kwargs: Any) -> Steps[Any]:
        """Call an endpoint; return a handle if it is managed, else its result, over the server's own memory.

        While a tensor or module of the result lives in this process, the same one is returned again, as without a server.
        An exception of the endpoint is raised here with its own type, and the remote traceback as its cause.

        :raises EndpointNotFound: if the server has none of that name.
        :raises TypeError: if the arguments do not fit its signature.
        :raises CapabilityError: if an argument or the result cannot be shared.
        :raises DeadlineExceeded: after the client's timeout; a run that has begun continues in the server.
        :raises ConnectError: if no server listens within the client's ``connect_timeout``.
        :raises ConnectionClosed: if the server disconnects during the call.
        """
        what = f"{endpoint}()"
        reply, transfer = yield from ctx._sent(m.Call, endpoint, args, kwargs, what, pooled=True)
        return (yield from take_result(ctx, what, reply, transfer))

    @operation
    def invalidate_call_cache(ctx: Context, endpoint: str, /, *args: Any, **kwargs: Any) -> Steps[int]:
        """Drop the cached result of one call; return 1 if there was one. Handles stay valid."""
        server = yield from ctx._reached()
        arguments = yield from lower(args, kwargs, server.device)
        message = m.InvalidateCall(endpoint, arguments.args, arguments.kwargs)
        return (yield from query(message, f"invalidate_call_cache({endpoint!r})"))

    @operation
    def invalidate_endpoint_cache(ctx: Context, endpoint: str) -> Steps[int]:
        """Drop all cached results of an endpoint; return their number. Handles stay valid."""
        return (yield from query(m.InvalidateEndpoint(endpoint), f"invalidate_endpoint_cache({endpoint!r})"))

    @operation
    def invalidate_object(ctx: Context, object_id: str) -> Steps[int]:
        """Drop one cached result, by its object's id; return 0 if it was dropped before. Handles stay valid.

        The result of an active run of the same call is not cached, as with :meth:`invalidate_call_cache`.

        :raises StaleHandleError: if the server has no such object.
        :raises ConfigurationError: for a buffer: use :meth:`free_buffer`.
        """
        return (yield from query(m.InvalidateObject(object_id), f"invalidate_object({object_id!r})"))
