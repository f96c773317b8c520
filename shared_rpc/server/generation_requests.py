"""What a client may ask of generations and revisions, and how it is answered."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from shared_rpc.errors import SharedRPCError
from shared_rpc.protocol import generations as g
from shared_rpc.protocol import messages as m
from shared_rpc.protocol.frames import Frame
from shared_rpc.protocol.generations import Generation
from shared_rpc.server.core import Core
from shared_rpc.server.outcomes import Failure
from shared_rpc.server.runs import Waiter

if TYPE_CHECKING:
    from shared_rpc.server.arguments import ArgumentReader

__all__ = ["GENERATION_HANDLERS", "GenerationRequests"]


class GenerationRequests:
    """These requests of one connection; the rest of it is :class:`shared_rpc.server.requests.Requests`."""

    _core: Core
    _arguments: ArgumentReader
    _reply: Callable[..., bool]
    _waiters: dict[int, Waiter]

    if TYPE_CHECKING:

        def _waiter(self, request_id: int) -> Waiter: ...
        def _fail(self, request_id: int, failure: Failure) -> None: ...

    def _refresh(self, frame: Frame, message: g.Refresh) -> None:
        arguments = self._arguments.take(frame, message)
        try:
            waiter = self._waiter(frame.request_id)
        except SharedRPCError:
            arguments.close()
            raise

        def told(outcome: Generation | Failure) -> None:
            self._waiters.pop(frame.request_id, None)
            if isinstance(outcome, Failure):
                self._fail(frame.request_id, outcome)
            else:
                self._reply(frame.request_id, g.Refreshed(outcome))

        self._waiters[frame.request_id] = waiter
        lowered, chain = (arguments.args, arguments.kwargs), frozenset(message.chain)
        self._core.refresh(waiter, told, message.endpoint, lowered, arguments, chain)

    def _await_refreshes(self, frame: Frame, message: g.AwaitRefreshes) -> None:
        waiter = self._waiter(frame.request_id)

        def answer(generations: list[Generation], after: int) -> None:
            self._waiters.pop(frame.request_id, None)
            self._reply(frame.request_id, g.Refreshes(generations, after, self._core.server_id))

        self._waiters[frame.request_id] = waiter
        self._core.generations.wait(waiter, message.after, answer)

    def _get_latest(self, frame: Frame, message: g.GetLatest) -> None:
        self._core.generations.hand_latest(self._waiter(frame.request_id), message.object_id)

    def _get_object(self, frame: Frame, message: g.GetObject) -> None:
        waiter, stored = self._waiter(frame.request_id), self._core.objects.get(message.object_id)
        if stored is not None and stored.kind == "buffer":
            self._core.buffers.get(waiter, message.object_id)  # on its own terms
        else:
            self._core.generations.hand(waiter, message.object_id, message.cache_key)

    def _retire(self, frame: Frame, message: g.Retire) -> None:
        self._reply(frame.request_id, m.FactsList(self._core.retire(message.target)))

    def _get_revision(self, frame: Frame, message: g.GetRevision) -> None:
        page, memory = self._core.revision_page(message.object_id, local=False)
        with page:
            self._reply(frame.request_id, g.RevisionPage(page.info, memory), fds=(page.fileno(),))


#: Entered in the table of :mod:`shared_rpc.server.requests`.
GENERATION_HANDLERS: dict[type[m.Message], Callable[[Any, Frame, Any], None]] = {
    g.Refresh: GenerationRequests._refresh,
    g.AwaitRefreshes: GenerationRequests._await_refreshes,
    g.GetLatest: GenerationRequests._get_latest,
    g.GetObject: GenerationRequests._get_object,
    g.Retire: GenerationRequests._retire,
    g.GetRevision: GenerationRequests._get_revision,
}
