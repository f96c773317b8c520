"""A broker and its service manager: what is passed on, what is stored, and when which is told.

Without a manager nothing of this does anything.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import msgspec

from shared_rpc.broker.persistence import Persistence, RestoredService, code_of
from shared_rpc.broker.systemd import Inherited
from shared_rpc.errors import ConfigurationError
from shared_rpc.protocol import worker as w
from shared_rpc.server.core import Core
from shared_rpc.server.state.objects import StoredObject

__all__ = ["Keeping"]

_log = logging.getLogger("shared_rpc.broker")


class Keeping:
    """On the broker's loop only, but for :meth:`stopping`."""

    def __init__(self, inherited: Inherited) -> None:
        self._inherited = inherited
        self._notifier = inherited.notifier
        self._persistence = Persistence(inherited.notifier, inherited.capacity) if inherited.notifier.there else None
        #: Sockets that listen already, and serve nothing yet.
        self._listeners = dict(inherited.listeners)

    def restore(self) -> list[RestoredService]:
        """What an earlier broker stored; its descriptors are the caller's from here on."""
        if self._persistence is None:
            return []
        stored, self._inherited.stored = self._inherited.stored, []
        return self._persistence.restore(stored)

    def listener(self, path: str) -> socket.socket | None:
        """The socket that listens at a path already, to be had once."""
        return self._listeners.pop(path, None)

    def check(self, served: Mapping[str, Sequence[str]], *, loaded: bool, raises: bool = True) -> None:
        """Whether somebody serves each socket that the manager listens on: its clients would wait for ever.

        :param served: by socket path.
        :param loaded: whether the app has said where it serves; before that nothing is wrong.
        :param raises: else it is logged.
        :raises ConfigurationError: if not.
        """
        if not loaded or not self._listeners:
            return
        text = (
            f"the service manager listens at {', '.join(self._listeners)}, and the app serves at {', '.join(served)}: make "
            f"ListenStream= and the base path, the device or --socket agree"
        )
        if raises:
            raise ConfigurationError(text)
        _log.error("%s", text)

    def watch(self, serve: w.Serve, core: Core) -> None:
        """Store a provider, and from now on its objects."""
        if self._persistence is not None:
            self.keep_service(serve, core)
            core.objects.watcher = _Storing(self._persistence, serve.key, core)

    def keep_service(self, serve: w.Serve, core: Core) -> None:
        """Store what has changed of a provider."""
        if self._persistence is not None:
            now = msgspec.structs.replace(serve, endpoints=core.registry.all())
            self._persistence.keep_service(core.server_id, now)

    def discard(self, key: str, core: Core) -> None:
        """A provider is served no more, and what is left of its objects goes."""
        if self._persistence is not None:
            core.objects.watcher = None
            for stored in core.objects:
                self._persistence.forget(stored.object_id)
            self._persistence.forget_service(key)

    def ready(self, status: str) -> None:
        """Objects can be attached, and the app is loaded or about to be."""
        self._notifier.ready(status)

    def status(self, text: str) -> None:
        """For people."""
        self._notifier.status(text)

    @contextmanager
    def reloading(self, status: Callable[[], str]) -> Iterator[None]:
        """While new code is loaded; ready again however that ends."""
        self._notifier.reloading()
        try:
            yield
        finally:
            self._notifier.ready(status())

    def stopping(self) -> None:
        """The broker ends: nothing that is stored goes with it."""
        if self._persistence is not None:
            self._persistence.close()
        self._notifier.stopping()


class _Storing:
    """Stores what one provider's cache lists."""

    def __init__(self, persistence: Persistence, key: str, core: Core) -> None:
        self._persistence = persistence
        self._key = key
        self._core = core

    def listed(self, stored: StoredObject) -> None:
        """See :class:`shared_rpc.server.state.objects.Watcher`."""
        specs = {spec.name: spec for spec in self._core.registry.all()}
        terms = self._core.buffers.table.terms(stored.object_id) if stored.kind == "buffer" else None
        self._persistence.keep(self._key, stored, code_of(specs.get(stored.endpoint)), terms)

    def unlisted(self, stored: StoredObject) -> None:
        """See :class:`shared_rpc.server.state.objects.Watcher`."""
        self._persistence.forget(stored.object_id)
