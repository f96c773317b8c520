"""A managed object in the hands of its user."""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Any, Generic, NoReturn, Protocol, TypeVar

from shared_rpc.errors import CapabilityError, SharedRPCError, StaleHandleError
from shared_rpc.reaper import REAPER

__all__ = ["Handle", "Issuer"]

T = TypeVar("T")


class Issuer(Protocol):
    """Who gave a handle out, and takes its lease back."""

    def give_back(self, object_id: str, session: object) -> None:
        """Give back one lease. Never raises: where the session is gone, so is the lease."""

    def object_info(self, object_id: str) -> dict[str, Any]:
        """See :meth:`Handle.get_object_info`."""

    def ensure_handle_live(self, handle: Handle[Any]) -> None:
        """See :meth:`shared_rpc.Client.ensure_handle_live`."""


class Handle(Generic[T]):
    """A lease on an object of the server, and the object itself.

    The lease is given back by :meth:`release`, at the end of a ``with`` block, by garbage collection, by closing the
    client, and by the end of the process, however it comes. Tensors taken from :attr:`value` stay valid after that: a
    mapping of this process holds their memory.
    """

    def __init__(
        self,
        value: T,
        *,
        object_id: str,
        server_id: str,
        generation: int,
        issuer: Issuer,
        session: object,
    ) -> None:
        self.object_id = object_id
        self.server_id = server_id
        #: Counts the builds of the same cache key, from 1.
        self.generation = generation
        self._value: T | None = value
        self._issuer = issuer
        self._session = session
        self._released = False
        self._lock = threading.Lock()
        self._info: dict[str, Any] | None = None
        REAPER.start()

    @property
    def value(self) -> T:
        """The tensor, module or container.

        :raises StaleHandleError: after :meth:`release`.
        """
        if self._released:
            raise StaleHandleError(f"the handle of object {self.object_id} was released", reason="released")
        return self._value  # type: ignore[return-value]

    @property
    def released(self) -> bool:
        """Whether the lease was given back."""
        return self._released

    def release(self) -> None:
        """Give the lease back and let go of the value. Calling it again does nothing; it never raises."""
        if self._forgo():
            self._issuer.give_back(self.object_id, self._session)

    def _forgo(self) -> bool:
        """Let go of the value; whether there is a lease to give back."""
        with self._lock:
            if self._released:
                return False
            self._released = True
        self._value = None
        return True

    def get_object_info(self, refresh: bool = False) -> dict[str, Any]:
        """What the server knows of the object; asked once, and again with ``refresh``.

        Keys: ``object_id``, ``server_id``, ``endpoint``, ``cache_key``, ``nbytes``, ``device``, ``generation``, ``leases``
        (how many processes hold it), ``created_at``, ``last_accessed_at`` (Unix seconds).

        :raises StaleHandleError: if the server does not own the object any more.
        """
        if self._info is None or refresh:
            self._info = self._issuer.object_info(self.object_id)
        return dict(self._info)

    def is_stale(self) -> bool:
        """Whether the server that issued the handle is gone or owns the object no more. Asks the server."""
        try:
            self._issuer.ensure_handle_live(self)
        except SharedRPCError:
            return True
        return False

    def __reduce__(self) -> NoReturn:
        raise CapabilityError(
            f"the handle of object {self.object_id} cannot be pickled or copied, because its lease belongs to this process: "
            f"call the endpoint in the process that needs the object"
        )

    def __enter__(self) -> Handle[T]:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.release()

    def __del__(self) -> None:
        if not getattr(self, "_released", True):
            self._released = True
            issuer, object_id, session = self._issuer, self.object_id, self._session
            REAPER.submit(lambda: issuer.give_back(object_id, session))

    def __repr__(self) -> str:
        state = "released" if self._released else type(self._value).__name__
        return f"<Handle {self.object_id} generation {self.generation}: {state}>"
