"""Generations and revisions for a provider, in every role."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from shared_rpc.client.subscriptions import Subscription
    from shared_rpc.handle import Handle
    from shared_rpc.protocol.generations import Generation
    from shared_rpc.protocol.ticket import Ticket
    from shared_rpc.runtime import Runtime

__all__ = ["Refreshing"]

T = TypeVar("T")


class Refreshing:
    """The part of :class:`shared_rpc.Provider` that is about generations."""

    if TYPE_CHECKING:

        def _runtime(self) -> Runtime: ...

    def refresh(self, endpoint: str, /, *args: Any, **kwargs: Any) -> Generation:
        """Build the next generation of a call's object, and make it the current one; see :meth:`Client.refresh`."""
        return self._runtime().generations.refresh(endpoint, *args, **kwargs)

    def retire(self, target: Handle[Any] | str) -> list[dict[str, Any]]:
        """Free what nobody holds of superseded generations; see :meth:`Client.retire`."""
        return self._runtime().generations.retire(target)

    def on_refresh(self, callback: Callable[[Generation], object]) -> Subscription:
        """Have a callback told of new generations, in a thread of its own; see :meth:`Client.on_refresh`."""
        return self._runtime().generations.on_refresh(callback)

    def update(self, handle: Handle[T], timeout: float | None = None) -> AbstractContextManager[T]:
        """Around what writes to a handle's memory in place; see :meth:`Client.update`."""
        return self._runtime().generations.update(handle, timeout)

    def open_ticket(self, ticket: Ticket | str | os.PathLike[str]) -> Handle[Any]:
        """The object of a ticket of this provider's server; see :meth:`Client.open_ticket`. Others' are for
        :meth:`Client.from_ticket`.
        """
        return self._runtime().generations.open_ticket(ticket)
