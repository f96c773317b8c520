"""The hook of a worker, whose providers are served by another process."""

from __future__ import annotations

from typing import Any, Protocol


class Host(Protocol):
    """The worker of this process."""

    def adopt(self, provider: Any) -> Any:
        """Have the broker serve a provider; return the runtime to which the provider's own calls go from then on."""


_hosts: list[Host] = []


def set_host(new: Host) -> None:
    """Make this process a worker."""
    _hosts[:] = [new]


def host() -> Host | None:
    """Return the host of this process, where it is a worker."""
    return _hosts[0] if _hosts else None
