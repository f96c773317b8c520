"""Whether this process is a worker: then what serves its providers is another process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from shared_rpc.provider import Provider
    from shared_rpc.runtime import Runtime

__all__ = ["Host", "host", "set_host"]


class Host(Protocol):
    """What a worker does with the providers of its app."""

    def adopt(self, provider: Provider) -> Runtime:
        """Have the broker serve a provider; its own calls go there from then on."""


_hosts: list[Host] = []


def set_host(new: Host) -> None:
    """This process is a worker, from now on."""
    _hosts[:] = [new]


def host() -> Host | None:
    """The host of this process, where it is a worker."""
    return _hosts[0] if _hosts else None
