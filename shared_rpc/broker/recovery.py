"""An earlier broker's services: served again at once, and as the app has them now when that has been loaded."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import anyio
import msgspec

from shared_rpc.broker.dispatch import WorkerExecutor
from shared_rpc.broker.service_manager import ServiceManager
from shared_rpc.broker.worker import Worker
from shared_rpc.errors import SharedRPCError
from shared_rpc.protocol import worker as w
from shared_rpc.protocol.specs import EndpointSpec
from shared_rpc.server.acceptor import Acceptor
from shared_rpc.server.core import Core

__all__ = ["Recovery", "Service"]

_log = logging.getLogger("shared_rpc.broker")


@dataclass
class Service:
    """One provider of the app, as served. ``facts`` is the first worker's message about it."""

    facts: w.Serve
    core: Core
    acceptor: Acceptor
    executor: WorkerExecutor
    #: Ends this service alone, once the service has begun.
    scope: anyio.CancelScope | None = None
    #: Whether an earlier broker stored this service, and no worker has loaded the app yet.
    recovered: bool = False


class Recovery:
    """The recovery of an earlier broker's services and objects, until the app is loaded. On the broker's loop only.

    :param services: those of the broker, by the providers' keys.
    :param add: makes a service from a worker's message, with the id of an earlier server or None.
    """

    def __init__(
        self, services: dict[str, Service], manager: ServiceManager, add: Callable[[w.Serve, str | None], Service]
    ) -> None:
        self._services = services
        self._manager = manager
        self._add = add

    @property
    def pending(self) -> list[str]:
        """The keys of providers that are served as they were."""
        return [key for key, service in self._services.items() if service.recovered]

    def recover(self) -> None:
        """Serve the earlier broker's providers and objects.

        :raises ConfigurationError: if a socket cannot be had.
        """
        for found in self._manager.recover():
            service = self._add(found.serve, found.server_id)
            service.recovered = True
            for each in found.objects:
                service.core.recover(each.stored, each.terms, each.copies)
            service.core.objects.settle()  # the budget may have changed

    def reconcile(self, worker: Worker) -> None:
        """Go on as after a reload: the first worker has loaded the app as it is now."""
        for key in self.pending:
            service = self._services[key]
            service.recovered = False
            specs = list(worker.endpoints.get(key, {}).values())
            self._reconcile(key, service, worker.served.get(key), specs)
        self._manager.check({service.acceptor.path: [] for service in self._services.values()}, loaded=True, raises=False)
        self._manager.notifier.status(self.status())

    def _reconcile(self, key: str, service: Service, message: w.Serve | None, specs: list[EndpointSpec]) -> None:
        earlier = service.facts
        if message is None:
            service.core.replace_endpoints([], "changed")
            if not len(service.core.objects):
                self._discard(key)
        elif (message.socket_path, message.device) != (earlier.socket_path, earlier.device):
            self._replace(key, message)
            try:
                self._add(msgspec.structs.replace(message, endpoints=specs), None)
            except SharedRPCError as error:
                _log.error("cannot serve a provider of the app: %s", error)
        else:
            service.facts, service.core.mechanism = message, message.mechanism
            service.core.capacity.set_limits(message.quotas)
            facts = service.core.replace_endpoints(specs, "changed")
            _log.info("recovered %s: %d objects kept, %d dropped", key, len(service.core.objects), facts["dropped"])

    def make_way(self, message: w.Serve) -> None:
        """Discard what was recovered under another key at the socket where the app serves a provider now."""
        for key in self.pending:
            if key != message.key and self._services[key].acceptor.path == message.socket_path:
                self._replace(key, message)

    def _replace(self, key: str, message: w.Serve) -> None:
        earlier = self._services[key].facts
        _log.error(
            "the stored objects of %s at %s are dropped: the app now serves %s at %s",
            earlier.device,
            earlier.socket_path,
            message.device,
            message.socket_path,
        )
        self._discard(key)

    def _discard(self, key: str) -> None:
        service = self._services.pop(key)
        self._manager.discard(key, service.core)
        try:
            listener = service.acceptor.inherited()
        except OSError as error:
            _log.error("cannot keep the service manager's socket %s: %s", service.acceptor.path, error)
        else:
            if listener is not None:
                self._manager.give_back(service.acceptor.path, listener)
        service.acceptor.remove_socket()
        service.core.stop()
        service.core.close()
        if service.scope is not None:
            service.scope.cancel()

    def status(self) -> str:
        """Return one line for people."""
        count = sum(len(service.core.objects) for service in self._services.values())
        return f"{count} objects can be attached; the app is {'being loaded' if self.pending else 'loaded'}"
