"""Options of ``serve`` that override those of the app's providers."""

from __future__ import annotations

from shared_rpc.memory.devices import device_id, device_tag
from shared_rpc.memory.pool import PoolOptions
from shared_rpc.provider.provider import Provider
from shared_rpc.settings import ServeOptions, checked_path, resolve_base_path, socket_path


def override(provider: Provider, options: ServeOptions, number: int) -> None:
    """Override the base path, device, cluster and pools of a provider, as far as ``serve`` has options for them.

    :param number: which of the workers this process is, from 0.
    :raises ConfigurationError: for sizes that make no pool.
    """
    if options.base_path is not None:
        provider.base_path = options.base_path
    device = options.device_of(number)
    if device is not None:
        provider.device = device
    if options.cluster is not None:
        provider.asked_cluster = options.cluster
    pool = provider.pool
    provider.pool = PoolOptions(
        initial=options.pool_initial if options.pool_initial is not None else pool.initial,
        limit=options.pool_limit if options.pool_limit is not None else pool.limit,
    )


def socket_of(provider: Provider, options: ServeOptions) -> str | None:
    """Return the path where a broker listens for a provider; None for that of the provider's own device.

    With several workers, the socket is named for the device of the first.

    :raises ConfigurationError: for a path that is not UTF-8, or too long.
    """
    if options.socket is not None:
        return checked_path(options.socket)
    if not options.devices:
        return None
    return socket_path(resolve_base_path(provider.base_path), device_tag(device_id(options.devices[0])))
