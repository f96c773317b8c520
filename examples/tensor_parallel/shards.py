"""What every rank's server serves: the part of one rank, cut from a checkpoint.

    shared-rpc serve shards.py --device cuda:0      # and cuda:1, cuda:2, …: one server for each GPU

Which rank it is the caller says, so that a server cannot have the part of another one.
"""

from __future__ import annotations

import torch
from model import CONFIG, RULES, Transformer

from shared_rpc import Provider
from shared_rpc.extras.sharding import shard_state_dict

provider = Provider()


@provider.share(managed=True)
def load_shard(checkpoint: str, rank: int, world: int) -> Transformer:
    """One rank's part of the model. Of the file only that part is read."""
    state = torch.load(checkpoint, mmap=True, weights_only=True)
    device = "cpu" if provider.device_id == "cpu" else "cuda"  # the current GPU is the provider's
    part = shard_state_dict(state, RULES, rank, world, device=device)
    with torch.device("meta"):
        model = Transformer(CONFIG, world)
    model.load_state_dict(part, assign=True)
    return model.requires_grad_(False).eval()
