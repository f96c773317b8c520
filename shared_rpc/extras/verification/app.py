"""The endpoints of a verification's server, and the model: seeded random weights, the same bits in every process."""

from __future__ import annotations

import hashlib
import math
from typing import TYPE_CHECKING

from shared_rpc import Provider

if TYPE_CHECKING:
    import torch

#: Minimum number of layers of a model: enough for a table of tensors, few enough for a quick forward pass.
_LAYERS = 16
#: Rows of the input.
_BATCH = 4
_FLOAT = 4

provider = Provider()


def _shape(nbytes: int) -> tuple[int, int]:
    """Return the number of layers and their width, a power of two."""
    width = 1 << max(int(math.log2(max(nbytes / (_FLOAT * _LAYERS), 1))) // 2, 4)
    return max(nbytes // (_FLOAT * width * width), 1), width


def true_size(nbytes: int) -> int:
    """Return the size of a model for ``nbytes``, in whole layers, at least one."""
    layers, width = _shape(nbytes)
    return layers * width * width * _FLOAT


def build(nbytes: int, seed: int, device: str) -> torch.nn.Module:
    """Build a stack of linear layers; the same bits for the same arguments, in any process of a machine."""
    import torch

    layers, width = _shape(nbytes)
    generator = torch.Generator(device).manual_seed(seed)
    stack = torch.nn.Sequential()
    for _ in range(layers):
        # Without an initialisation that is overwritten.
        linear = torch.nn.Linear(width, width, bias=False, device="meta").to_empty(device=device)
        with torch.no_grad():
            linear.weight.normal_(0, math.sqrt(2 / width), generator=generator)
        stack.extend([linear, torch.nn.GELU()])
    return stack.eval().requires_grad_(False)


def digest(model: torch.nn.Module) -> str:
    """Hash the bits of a forward pass through all layers."""
    import torch

    weight = next(model.parameters())
    inputs = torch.linspace(-1, 1, _BATCH * weight.shape[1]).reshape(_BATCH, -1).to(weight.device)
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
