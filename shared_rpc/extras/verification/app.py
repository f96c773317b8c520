"""The endpoints of a verification's server, and the model: seeded random weights, the same bits in every process."""

from __future__ import annotations

import hashlib
import math
from typing import TYPE_CHECKING

from shared_rpc import Provider

if TYPE_CHECKING:
    import torch

#: Width of a layer, which has 4 MiB: a matrix of floats.
_WIDTH, _LAYER = 1024, 4 << 20
#: Rows of the input.
_BATCH = 4

provider = Provider()


def true_size(nbytes: int) -> int:
    """Return the size of a model for ``nbytes``, in whole layers, at least one."""
    return max(nbytes // _LAYER, 1) * _LAYER


def build(nbytes: int, seed: int, device: str) -> torch.nn.Module:
    """Build a stack of linear layers; the same bits for the same arguments, in any process of a machine."""
    import torch

    generator = torch.Generator(device).manual_seed(seed)
    stack = torch.nn.Sequential()
    for _ in range(nbytes // _LAYER):
        linear = torch.nn.Linear(_WIDTH, _WIDTH, bias=False, device="meta")  # without an initialisation
        weight = torch.empty(_WIDTH, _WIDTH, device=device).normal_(0, math.sqrt(2 / _WIDTH), generator=generator)
        linear.weight = torch.nn.Parameter(weight)
        stack.extend([linear, torch.nn.GELU()])
    return stack.eval().requires_grad_(False)


def digest(model: torch.nn.Module) -> str:
    """Hash the bits of a forward pass through all layers."""
    import torch

    inputs = torch.linspace(-1, 1, _BATCH * _WIDTH).reshape(_BATCH, _WIDTH).to(next(model.parameters()).device)
    with torch.inference_mode():
        outputs = model(inputs).cpu().contiguous()
    return hashlib.sha256(bytes(outputs.view(torch.uint8).flatten().tolist())).hexdigest()


def _device() -> str:
    # An endpoint runs with the provider's GPU as the current one.
    return "cpu" if provider.device_id == "cpu" else "cuda"


@provider.share(managed=True)
def model(nbytes: int, seed: int) -> torch.nn.Module:
    """Build a model that is writable for clients."""
    return build(nbytes, seed, _device())


@provider.share(managed=True, access="read")
def protected(nbytes: int, seed: int) -> torch.nn.Module:
    """Build a model that clients map read-only."""
    return build(nbytes, seed, _device())
