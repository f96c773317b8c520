"""Options of ``serve`` that override those of the app's providers."""

from __future__ import annotations

from shared_rpc.memory.devices import device_id, device_tag
from shared_rpc.memory.pool import PoolOptions
from shared_rpc.provider.provider import Provider
from shared_rpc.settings import ServeOptions, checked_path, resolve_base_path, socket_path


class Overrides:
    """The options of ``serve`` for one worker."""

    def __init__(self, options: ServeOptions, number: int) -> None:
        self.options = options
        self.socket = options.socket
        self.max_workers = options.threads
        self.quotas = options.quotas
        self._device = options.device_of(number)

    def apply(self, provider: Provider) -> None:
        """Override the options of a provider."""
        override(provider, self.options, self._device)

    def socket_of(self, provider: Provider) -> str | None:
        """Return the path where the broker listens for a provider; None for that of the provider's own device.

        With several workers, the socket is named for the device of the first.

        :raises ConfigurationError: for a path that is not UTF-8, or too long.
        """
        if self.socket is not None:
            return checked_path(self.socket)
        if not self.options.devices:
            return None
        return socket_path(resolve_base_path(provider.base_path), device_tag(device_id(self.options.devices[0])))


def override(provider: Provider, options: ServeOptions, device: str | None) -> None:
    """Override the base path, device, cluster and pools of a provider, as far as ``serve`` has options for them.

    :raises ConfigurationError: for sizes that make no pool.
    """
    if options.base_path is not None:
        provider.base_path = options.base_path
    if device is not None:
        provider.device = device
    if options.cluster is not None:
        provider.asked_cluster = options.cluster
    pool = provider.pool
    provider.pool = PoolOptions(
        initial=options.pool_initial if options.pool_initial is not None else pool.initial,
        limit=options.pool_limit if options.pool_limit is not None else pool.limit,
    )
