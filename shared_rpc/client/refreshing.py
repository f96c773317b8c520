"""What both clients do with generations and revisions: once blocking, once in coroutines."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

import anyio.to_thread

from shared_rpc.client import generations
from shared_rpc.client.base import BaseClient
from shared_rpc.client.connection import PROMPT, Connection
from shared_rpc.client.subscriptions import ConnectionSource, Subscription, Subscriptions
from shared_rpc.errors import ConnectError, ConnectionClosed
from shared_rpc.handle import AsyncHandle, Handle, updating, updating_async
from shared_rpc.lifecycle.finalizer import weakly
from shared_rpc.memory.revisions import Page
from shared_rpc.protocol import messages as m
from shared_rpc.protocol.generations import Generation, Refreshes

if TYPE_CHECKING:
    from shared_rpc.client.session import Session
    from shared_rpc.client.steps import Operation

__all__ = ["AsyncRefreshIterator", "AsyncRefreshing", "RefreshIterator", "Refreshing"]

T = TypeVar("T")

_ENDED = "nothing more is told of refreshes"


class _Watching(BaseClient):
    """A client's subscriptions."""

    def _watch_in(self, session: Session) -> Subscriptions:
        """What the session's subscriptions belong to; its connection does as well."""
        self._watched = session
        if self._watch is None:
            self._watch = Subscriptions(weakly(self._news_source))
        return self._watch

    def _news_source(self) -> ConnectionSource:
        return ConnectionSource(Connection(self.socket_path).open(self._watched.token, PROMPT))

    def _unwatch(self) -> None:
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.close()


class Refreshing(_Watching):
    """Generations and revisions for the blocking client."""

    if TYPE_CHECKING:

        def _run(self, operation: Operation[T], *, patience: float | None = None, timeout: float | None = None) -> T: ...
        def _take(self, operation: Operation[tuple[m.Result, Any]], *, timeout: float | None = None) -> Any: ...
        def _server(self) -> Session: ...

    def _moved(self) -> None:
        """The session that the subscriptions may belong to is about to end, and another one takes over."""
        if self._watch is not None and self._watch.active:
            self._watched = self._server()
            self._watch.move()

    def refresh(self, endpoint: str, /, *args: Any, **kwargs: Any) -> Generation:
        """Build the next generation of a cached call's object, and make it the current one: what there is to know of it.

        Until then calls get the present one at once, and from then on the new one; in between there is nothing. Handles that
        are out keep theirs until they are released. This process gets no lease: call the endpoint, or :meth:`Handle.latest`.

        Refreshes with the same arguments at the same time join one build, and so does a call with nothing in the cache. It goes
        on if this client gives up.

        What the endpoint raises is raised here, and leaves the present generation as it was.

        :raises ConfigurationError: if the call is not cached.
        :raises RefreshError: if the call was invalidated meanwhile, or a refresh that began later ended before this one.
        :raises DeadlineExceeded: after the client's timeout.
        """
        server = self._server()
        return self._run(generations.refresh(endpoint, args, kwargs, server.device, server.server_id))

    def latest(self, handle: Handle[T]) -> Handle[T]:
        """See :meth:`Handle.latest`."""
        handle._check_held()
        return self._take(generations.latest(handle.object_id, self._values))  # type: ignore[no-any-return]

    def retire(self, target: Handle[Any] | str) -> list[dict[str, Any]]:
        """Free what nobody holds of superseded generations; :meth:`get_object_info` of those that are left.

        A generation is superseded once another one is current, or it was invalidated. It goes with its last holder, without
        this. But the unfetched result of a task is kept for whoever may fetch it, up to the server's ``result_ttl``: this gives
        it up. What is left then is held by processes, which :meth:`list_objects` names; nobody takes it from them.

        :param target: an endpoint's name, for all its superseded objects; or a handle or an object's id, for that one.
        :raises EndpointNotFound: for what is neither.
        """
        return self._run(generations.retire(target if isinstance(target, str) else target.object_id))

    def on_refresh(self, callback: Callable[[Generation], object]) -> Subscription:
        """Have ``callback(generation)`` called whenever another generation of a cached call becomes current on the server.

        It is called for each one that a refresh built, and for those that were built anew after an invalidation or an
        eviction, from here on; the first of a call is no news. Where several of one call come at once, only the latest is told.

        Callbacks run one after the other in one daemon thread of this client, which has a connection of its own. Hand on what
        takes long. An exception is logged. So is the end of the connection, after which nothing is told: subscribe again.

        Close what is returned to be told no more.

        :raises ConnectError: if no server comes up in time.
        """
        return self._watch_in(self._server()).subscribe(callback)

    def refreshes(self) -> RefreshIterator:
        """Iterate over what :meth:`on_refresh` tells, in this thread; it waits, and ends with :class:`ConnectionClosed`.

        It begins with the first step, or with entering it: ``with client.refreshes() as news:`` misses nothing from there on.
        """
        return RefreshIterator(self)

    def update(self, handle: Handle[T], timeout: float | None = None) -> AbstractContextManager[T]:
        """Around what writes to a handle's memory in place: ``with client.update(handle) as value:``.

        :attr:`Handle.revision` is odd during the block, and the next even number after it. Whoever has read that number sees
        all that was written in the block: at its end this process's work on the GPU is waited for, on all streams. There is
        one writer at a time, in whichever process; another one is waited for. If the block raises, or the process is killed in
        it, the revision stays odd, and who waits gets :class:`UpdateInterrupted`, until another update ends.

        Nothing keeps readers from reading meanwhile: see :meth:`Handle.read_consistent`.

        :param timeout: seconds to wait for another writer; None for no limit.
        :raises DeadlineExceeded: then.
        :raises CapabilityError: if the object is shared with ``access="read"``; at the end, if the GPU cannot be waited for,
            because a CUDA graph is being captured.
        :raises StaleHandleError: if the handle was released.
        """
        return updating(handle, timeout)

    def revision_page(self, object_id: str) -> Page:
        """See :class:`shared_rpc.handle.Issuer`."""
        return self._run(generations.revision_page(object_id))


class _News:
    """What has come of a server's news, and where the next is to begin."""

    def __init__(self) -> None:
        self._after = -1
        self._server_id = ""
        self._news: deque[Generation] = deque()

    def _take(self, answer: Refreshes) -> None:
        if self._server_id not in ("", answer.server_id):
            raise ConnectionClosed(f"{_ENDED}: the server {self._server_id} has ended, and {answer.server_id} has come")
        self._server_id, self._after = answer.server_id, answer.after
        self._news.extend(answer.generations)

    def _gone(self, error: ConnectError) -> ConnectionClosed | ConnectError:
        """What to raise where the server cannot be reached: once it could be, that is the end of the connection."""
        return ConnectionClosed(f"{_ENDED}: {error}") if self._server_id else error


class RefreshIterator(_News):
    """See :meth:`Client.refreshes`."""

    def __init__(self, client: Refreshing) -> None:
        super().__init__()
        self._client = client

    def _ask(self) -> None:
        try:
            self._take(self._client._run(generations.news(self._after), timeout=None))
        except ConnectError as error:
            raise self._gone(error) from error

    def __enter__(self) -> RefreshIterator:
        self._ask()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        pass

    def __iter__(self) -> RefreshIterator:
        return self

    def __next__(self) -> Generation:
        while not self._news:
            self._ask()
        return self._news.popleft()


class AsyncRefreshing(_Watching):
    """Generations and revisions for coroutines; for all of them see :class:`Client`."""

    if TYPE_CHECKING:

        async def _run(self, operation: Operation[T], *, timeout: float | None = None) -> T: ...
        def _hand(self, outcome: tuple[m.Result, Any]) -> Any: ...
        async def _server(self) -> Session: ...

    async def refresh(self, endpoint: str, /, *args: Any, **kwargs: Any) -> Generation:
        """See :meth:`Client.refresh`."""
        server = await self._server()
        return await self._run(generations.refresh(endpoint, args, kwargs, server.device, server.server_id))

    async def latest(self, handle: AsyncHandle[T]) -> AsyncHandle[T]:
        """See :meth:`Handle.latest`."""
        handle._check_held()
        return self._hand(await self._run(generations.latest(handle.object_id, self._values)))  # type: ignore[no-any-return]

    async def retire(self, target: AsyncHandle[Any] | str) -> list[dict[str, Any]]:
        """See :meth:`Client.retire`."""
        return await self._run(generations.retire(target if isinstance(target, str) else target.object_id))

    async def on_refresh(self, callback: Callable[[Generation], object]) -> Subscription:
        """See :meth:`Client.on_refresh`. The callback is a plain function, and called in that thread, not on the loop; what
        belongs on the loop is for :meth:`refreshes`.
        """
        watch = self._watch_in(await self._server())
        return await anyio.to_thread.run_sync(watch.subscribe, callback)

    def refreshes(self) -> AsyncRefreshIterator:
        """See :meth:`Client.refreshes`: ``async for``, and ``async with`` around it."""
        return AsyncRefreshIterator(self)

    def update(self, handle: AsyncHandle[T], timeout: float | None = None) -> AbstractAsyncContextManager[T]:
        """See :meth:`Client.update`: ``async with client.update(handle) as value:``."""
        return updating_async(handle, timeout)

    async def revision_page(self, object_id: str) -> Page:
        """See :class:`shared_rpc.handle.AsyncIssuer`."""
        return await self._run(generations.revision_page(object_id))


class AsyncRefreshIterator(_News):
    """See :meth:`AsyncClient.refreshes`."""

    def __init__(self, client: AsyncRefreshing) -> None:
        super().__init__()
        self._client = client

    async def _ask(self) -> None:
        try:
            self._take(await self._client._run(generations.news(self._after), timeout=None))
        except ConnectError as error:
            raise self._gone(error) from error

    async def __aenter__(self) -> AsyncRefreshIterator:
        await self._ask()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        pass

    def __aiter__(self) -> AsyncRefreshIterator:
        return self

    async def __anext__(self) -> Generation:
        while not self._news:
            await self._ask()
        return self._news.popleft()
