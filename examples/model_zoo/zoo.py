"""Ten models on a device with memory for three. The commands, each in its own terminal::

    shared-rpc serve zoo.py --quota cpu=50MiB --when-full evict --spill-dir /tmp   # on a GPU: --quota cuda:0=50MiB
    python worker.py                                                               # any number of these

The server evicts models that no process uses, and restores them when a process needs them.
"""

import os

import torch
from torch import nn

from shared_rpc import Provider, progress

MODELS, LAYERS = 10, 8
#: MiB of a model.
MEGABYTES = int(os.environ.get("ZOO_MEGABYTES", "16"))
WIDTH = max(int((MEGABYTES * 2**20 / 4 / LAYERS) ** 0.5) // 64 * 64, 64)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

provider = Provider()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH, eps=1e-5)
        self.up = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + nn.functional.silu(self.up(self.norm(x)))


def make(number: int) -> nn.Module:
    """Return model ``number``, which has the same bits in every process."""
    generator = torch.Generator(DEVICE).manual_seed(number)
    with torch.device(DEVICE):
        model = nn.Sequential(*(Block() for _ in range(LAYERS))).requires_grad_(False).eval()
    for layer, block in enumerate(model):
        block.up.weight.normal_(0.0, WIDTH**-0.5, generator=generator)
        progress(layer + 1, LAYERS, "layers")
    return model


# Read-only weights do not change, so one copy in a lower tier serves all evictions.
@provider.share(managed=True, access="read")
def load_model(number: int) -> nn.Module:
    return make(number)
