"""What a client process does with the library: the thing that is verified.

The tests of the verification put subjects in its place that copy, leak or compute something else, to see that it tells.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shared_rpc.verification import model

if TYPE_CHECKING:
    import torch

    from shared_rpc import Client, Handle

__all__ = ["Subject"]


class Subject:
    """Attaches to models of :mod:`shared_rpc.verification.app`, computes with them, and lets go of them."""

    def attach(self, client: Client, endpoint: str, nbytes: int, seed: int) -> Handle[torch.nn.Module]:
        """A lease on the model."""
        handle: Handle[torch.nn.Module] = client.call(endpoint, nbytes, seed)
        return handle

    def module(self, handle: Any) -> torch.nn.Module:
        """The model itself."""
        value: torch.nn.Module = handle.value
        return value

    def digest(self, handle: Any) -> str:
        """What the model computes."""
        return model.digest(self.module(handle))

    def release(self, handle: Any) -> None:
        """Give the lease back."""
        handle.release()
