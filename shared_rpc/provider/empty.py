"""The app of a server without endpoints: memory for the tensors of a host's processes."""

from __future__ import annotations

from shared_rpc.provider.provider import Provider

provider = Provider()
