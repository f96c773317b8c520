"""The app of a server that loads for other processes: ``shared-rpc serve shared_rpc.integrations.app``."""

from __future__ import annotations

from typing import Any

from shared_rpc.integrations import loading
from shared_rpc.provider.provider import Provider

#: For processes that pass no provider of their own. A large checkpoint takes longer to load than any call should.
provider = Provider(timeout=None)


@loading.endpoint_of(provider)
def from_pretrained(key: str, versions: dict[str, str], request: bytes) -> dict[str, Any]:
    """Load the request of a process; see :func:`shared_rpc.integrations.loading.load`."""
    return loading.load(key, versions, request)
