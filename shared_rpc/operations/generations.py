"""Generations of cached objects, iterators over new ones, and revisions of objects that are updated in place."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, TypeVar

from shared_rpc.client.handle import Lease
from shared_rpc.client.steps import Operation, Reply, Request, Within, message_of, query
from shared_rpc.client.suspension import Context
from shared_rpc.errors import ConnectError, ConnectionClosed, ProtocolError
from shared_rpc.memory.segments import Segment
from shared_rpc.operations.binding import BlockingIterator, CoroutineIterator, Leased, Part, Steps, operation, take_result
from shared_rpc.operations.handles import lending
from shared_rpc.protocol import generations as g
from shared_rpc.protocol.generations import Generation

if TYPE_CHECKING:
    from shared_rpc.memory.revisions import Page

T = TypeVar("T")

_ENDED = "refreshes are not reported any more"


class GenerationOperations:
    """Generations and revisions."""

    @operation
    def refresh(ctx: Context, endpoint: str, /, *args: Any, **kwargs: Any) -> Steps[Generation]:
        """Build the next generation of a cached call's object, and make it the current one; return its description.

        Calls get the earlier generation at once, until the new one is current. Handles keep theirs until they are released.
        This process gets no lease: call the endpoint, or :meth:`Handle.latest`.

        Simultaneous refreshes with the same arguments join one build, and so does a call with nothing in the cache. The build
        continues if this client gives up. An exception of the endpoint is raised here, and leaves the current generation
        unchanged.

        :raises ConfigurationError: if the call is not cached.
        :raises RefreshError: if the call was invalidated during the build, or a later refresh ended before this one.
        :raises DeadlineExceeded: after the client's timeout.
        """
        what = f"refresh({endpoint!r})"
        reply, _ = yield from ctx._sent(g.Refresh, endpoint, args, kwargs, what)
        return message_of(reply, what, g.Refreshed).generation

    @lending
    def latest(ctx: Context, handle: Lease[T]) -> Steps[Leased[T]]:
        """Return a handle of the current generation: see :meth:`Handle.latest`."""
        handle._check_held()
        what = f"latest() of object {handle.object_id}"
        found: Leased[T] = yield from take_result(ctx, what, (yield Request(g.GetLatest(handle.object_id), what)))
        return found

    @operation
    def revision_page(ctx: Context, object_id: str) -> Steps[Page]:
        """Return the page with an object's revision: see :attr:`Handle.revision`."""
        from shared_rpc.memory.revisions import Page

        reply: Reply = yield Request(g.GetRevision(object_id), f"the revision of object {object_id}")
        message, frame = reply.message, reply.frame
        if not isinstance(message, g.RevisionPage) or len(frame.fds) != 1:
            frame.close()
            raise ProtocolError(f"the server answered GetRevision with {type(message).__name__}")
        [segment] = Segment.received([message.page], frame)
        return Page(segment, message.memory, object_id)


class _News(Part):
    """News of a server not yet returned by the iterator, and the position after them."""

    def __init__(self, driver: Any) -> None:
        super().__init__(driver)
        self._after = -1
        self._server_id = ""
        self._news: deque[Generation] = deque()

    def _enter(self) -> Operation[None]:
        """Wait for generations that become current after the position; the first time only get the position."""
        if self._server_id:  # a server that does not answer the first time is subject to the client's timeouts
            yield Within(None)
        try:
            news, after, server_id = yield from query(g.AwaitRefreshes(self._after), "the wait for refreshes")
        except ConnectError as error:
            if not self._server_id:
                raise
            raise ConnectionClosed(f"{_ENDED}: {error}") from error
        if self._server_id not in ("", server_id):
            raise ConnectionClosed(f"{_ENDED}: the server {self._server_id} has ended, and {server_id} has taken its place")
        self._server_id, self._after = server_id, after
        self._news.extend(news)

    def _next(self) -> Operation[Generation]:
        while not self._news:
            yield from self._enter()
        return self._news.popleft()


class RefreshIterator(_News, BlockingIterator[Generation]):
    """The iterator of :meth:`Client.refreshes`."""


class AsyncRefreshIterator(_News, CoroutineIterator[Generation]):
    """The iterator of :meth:`AsyncClient.refreshes`."""
