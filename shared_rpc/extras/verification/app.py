"""The endpoints of a verification's server."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shared_rpc import Provider
from shared_rpc.extras.verification.model import build

if TYPE_CHECKING:
    import torch

__all__ = ["provider"]

provider = Provider()


def _device() -> str:
    # An endpoint runs with the provider's GPU as the current one.
    return "cpu" if provider.device_id == "cpu" else "cuda"


@provider.share(managed=True)
def model(nbytes: int, seed: int) -> torch.nn.Module:
    """Build a model that all may write to."""
    return build(nbytes, seed, _device())


@provider.share(managed=True, access="read")
def protected(nbytes: int, seed: int) -> torch.nn.Module:
    """Build a model that clients map read-only."""
    return build(nbytes, seed, _device())
