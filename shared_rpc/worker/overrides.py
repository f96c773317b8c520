"""What the broker's command line says of the app's providers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shared_rpc.memory.devices import device_id, device_tag
from shared_rpc.settings import checked_path, resolve_base_path, socket_path

if TYPE_CHECKING:
    from shared_rpc.provider import Provider

__all__ = ["Overrides"]


@dataclass(frozen=True)
class Overrides:
    """None stands for what it leaves to them."""

    base_path: str | None = None
    device: str | None = None
    socket: str | None = None
    max_workers: int | None = None
    quotas: Sequence[str] = ()
    #: The device whose name is in the socket's: with several workers that of the first.
    listen_device: str | None = None

    def socket_of(self, provider: Provider) -> str | None:
        """Where the broker listens for a provider; None for where its own device says.

        :raises ConfigurationError: for a path that is not UTF-8, or too long.
        """
        if self.socket is not None:
            return checked_path(self.socket)
        if self.listen_device is None:
            return None
        return socket_path(resolve_base_path(provider.base_path), device_tag(device_id(self.listen_device)))
