"""The app that is served for the pictures of the command line."""

import time

import torch

from shared_rpc import Provider, progress, raise_if_cancelled

provider = Provider(device="cpu")


@provider.share(managed=True, access="read")
def load_model(size: int = 1024) -> torch.nn.Module:
    """Build the model of all workers."""
    return torch.nn.Linear(size, size)


@provider.share(execution="task", managed=True, idle_ttl=3600)
def train(steps: int = 100) -> torch.nn.Module:
    """Report progress slowly."""
    for step in range(steps):
        raise_if_cancelled()
        time.sleep(0.01)
        progress(step + 1, steps, "training")
    return torch.nn.Linear(256, 256)


@provider.share(cache=False)
async def lookup(ids: torch.Tensor) -> torch.Tensor:
    """Return rows of a table."""
    return torch.ones(len(ids), 64)
