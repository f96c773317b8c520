"""A broker's service manager: the sockets that it listens on, the objects that it stores. Without one nothing is done."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import msgspec

from shared_rpc.broker.persistence import Persistence, RecoveredService, code_of
from shared_rpc.broker.systemd import Inherited
from shared_rpc.errors import ConfigurationError
from shared_rpc.protocol import worker as w
from shared_rpc.server.core import Core
from shared_rpc.server.state.objects import StoredObject

__all__ = ["ServiceManager"]

_log = logging.getLogger("shared_rpc.broker")


class ServiceManager:
    """The service manager as a broker uses it. On the broker's loop only, but for :meth:`stopping`."""

    def __init__(self, inherited: Inherited) -> None:
        self._inherited = inherited
        self.notifier = inherited.notifier
        self._persistence = Persistence(inherited.notifier, _soon, inherited.capacity)
        #: Sockets that listen already, and that no provider serves yet.
        self._listeners = dict(inherited.listeners)

    def recover(self) -> list[RecoveredService]:
        """Return an earlier broker's services and objects; their descriptors are the caller's from here on."""
        stored, self._inherited.stored = self._inherited.stored, []
        return self._persistence.recover(stored)

    def listener(self, path: str) -> socket.socket | None:
        """Return the socket that listens at a path already, once."""
        return self._listeners.pop(path, None)

    def give_back(self, path: str, listener: socket.socket) -> None:
        """Take a socket back that no provider serves any more."""
        self._listeners[path] = listener

    def check(self, served: Mapping[str, Sequence[str]], *, loaded: bool, raises: bool = True) -> None:
        """Check that each socket that the manager listens on is served: its clients would wait for ever.

        :param served: by socket path.
        :param loaded: whether the app has reported its sockets; before that, nothing is checked.
        :param raises: else it is logged.
        :raises ConfigurationError: if not.
        """
        if not loaded or not self._listeners:
            return
        text = (
            f"the service manager listens at {', '.join(self._listeners)}, but the app serves at {', '.join(served)}: make "
            f"ListenStream= and the base path, the device or --socket agree"
        )
        if raises:
            raise ConfigurationError(text)
        _log.error("%s", text)

    def watch(self, serve: w.Serve, core: Core) -> None:
        """Store a provider, and from now on its objects."""
        self.keep_service(serve, core)
        if self.notifier.there:
            core.objects.watcher = _Storing(self._persistence, serve.key, core)

    def keep_service(self, serve: w.Serve, core: Core) -> None:
        """Store the changes of a provider."""
        self._persistence.keep_service(core.server_id, msgspec.structs.replace(serve, endpoints=core.registry.all()))

    def discard(self, key: str, core: Core) -> None:
        """Remove a provider that is served no more, and the rest of its objects."""
        core.objects.watcher = None
        for stored in core.objects:
            self._persistence.remove(stored.object_id)
        self._persistence.remove_service(key)

    @contextmanager
    def reloading(self, status: Callable[[], str]) -> Iterator[None]:
        """Tell that new code is loaded while the block runs, and that the broker is ready however that ends."""
        self.notifier.reloading()
        try:
            yield
        finally:
            self.notifier.ready(status())

    def stopping(self) -> None:
        """Announce the broker's end. What is stored stays."""
        self._persistence.close()
        self.notifier.stopping()


def _soon(write: Callable[[], None]) -> None:
    asyncio.get_running_loop().call_soon(write)


class _Storing:
    """The objects of one provider that its cache lists, stored."""

    def __init__(self, persistence: Persistence, key: str, core: Core) -> None:
        self._persistence = persistence
        self._key = key
        self._core = core

    def listed(self, stored: StoredObject) -> None:
        """Store an object."""
        terms = self._core.buffers.table.terms(stored.object_id) if stored.kind == "buffer" else None
        copies = self._core.objects.copies
        of_segments = {segment.info.id: copies.of(segment.info.id) for segment in stored.record.segments if stored.cold}
        self._persistence.keep(self._key, stored, code_of(self._core.registry.find(stored.endpoint)), terms, of_segments)

    def unlisted(self, stored: StoredObject) -> None:
        """Remove an object."""
        self._persistence.remove(stored.object_id)
