"""One provider in a worker, and the memory of its sessions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shared_rpc.server.in_process import InProcessExecutor
from shared_rpc.server.lanes import Lane, lanes_of

if TYPE_CHECKING:
    from shared_rpc.provider.provider import Provider

__all__ = ["Hosted", "given_back"]


class Hosted:
    """One provider: its executor, and the memory of the broker's sessions."""

    def __init__(self, key: str, provider: Provider, max_workers: int | None) -> None:
        self.key = key
        self.provider = provider
        self.lanes = lanes_of(provider.pool)
        self.executor = InProcessExecutor(provider.endpoints, provider.device_id, self.lanes, max_workers)

    def find(self, session: str) -> Lane | None:
        """The lane of a session that has one."""
        return self.lanes.find(session)


def given_back(hosted: Hosted | None, session: str) -> list[int]:
    """Chunks of the client's that can go back to it."""
    lane = hosted.find(session) if hosted is not None else None
    return lane.returned() if lane is not None else []
