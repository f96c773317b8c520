"""The app of each rank's server, which serves that rank's part of a model. All commands, for two ranks::

    mkdir -m 700 /tmp/tp && python model.py /tmp/tp                  # random weights
    shared-rpc serve shards.py --base-path /tmp/tp/rank0 &           # with GPUs: --device cuda:0
    shared-rpc serve shards.py --base-path /tmp/tp/rank1 &           # and --device cuda:1
    python one_client.py /tmp/tp                                     # one process computes with all parts,
    python rank.py /tmp/tp 1 & python rank.py /tmp/tp 0              # or one process for each rank

Without a GPU everything runs on the host; if there are fewer GPUs than ranks, ranks share them.
"""

import torch
from model import CONFIG, Transformer

from shared_rpc import Provider
from shared_rpc.extras.sharding import Replicate, Rules, Shard, shard_state_dict

RULES: Rules = {
    # Column-parallel: a rank has a part of the outputs. Heads are not split; with more ranks than key and value heads, several
    # ranks have the same head.
    "*.q_proj.weight": Shard(0, blocks=CONFIG.heads),
    "*.[kv]_proj.weight": Shard(0, blocks=CONFIG.kv_heads, repeat=True),
    "*.gate_proj.weight": Shard(0),
    "*.up_proj.weight": Shard(0),
    "lm_head.weight": Shard(0),
    # Row-parallel: a rank has a part of the inputs, which it has computed, and the outputs are summed over the ranks.
    "*.o_proj.weight": Shard(1, blocks=CONFIG.heads),
    "*.down_proj.weight": Shard(1),
    "*norm.weight": Replicate(),
    "embed_tokens.weight": Replicate(),
}

provider = Provider()


# The caller passes the rank, so that a misconfigured server cannot return the part of another rank.
@provider.share(managed=True)
def load_shard(checkpoint: str, rank: int, world: int) -> Transformer:
    """Load one rank's part of the model; only that part of the file is read."""
    state = torch.load(checkpoint, mmap=True, weights_only=True)
    device = "cpu" if provider.device_id == "cpu" else "cuda"  # the current GPU is the provider's
    with torch.device("meta"):
        model = Transformer(CONFIG, world)
    model.load_state_dict(shard_state_dict(state, RULES, rank, world, device=device), assign=True)
    return model.requires_grad_(False).eval()
