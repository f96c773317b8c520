"""Whether this process is a worker: then what serves its providers is another process."""

from __future__ import annotations

from typing import Any, Protocol

__all__ = ["Host", "host", "set_host"]


class Host(Protocol):
    """What a worker does with the providers of its app."""

    def adopt(self, provider: Any) -> Any:
        """Have the broker serve a provider: the runtime to which the provider's own calls go from then on."""


_hosts: list[Host] = []


def set_host(new: Host) -> None:
    """This process is a worker, from now on."""
    _hosts[:] = [new]


def host() -> Host | None:
    """The host of this process, where it is a worker."""
    return _hosts[0] if _hosts else None
