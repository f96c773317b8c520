"""One provider in a worker, and the memory of its sessions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shared_rpc.server.in_process import InProcessExecutor
from shared_rpc.server.transfer import ServerTransfer, transfers_of

if TYPE_CHECKING:
    from shared_rpc.provider.provider import Provider

__all__ = ["Hosted", "given_back"]


class Hosted:
    """One provider: its executor, and the memory of the broker's sessions."""

    def __init__(self, key: str, provider: Provider, max_workers: int | None) -> None:
        self.key = key
        self.provider = provider
        self.transfers = transfers_of(provider.pool)
        self.executor = InProcessExecutor(provider.endpoints, provider.device_id, self.transfers, max_workers)

    def find(self, session: str) -> ServerTransfer | None:
        """The transfer of a session that has one."""
        return self.transfers.find(session)


def given_back(hosted: Hosted | None, session: str) -> list[int]:
    """Chunks of the client's that can go back to it."""
    transfer = hosted.find(session) if hosted is not None else None
    return transfer.returned() if transfer is not None else []
