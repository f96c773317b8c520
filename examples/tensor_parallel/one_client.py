"""One process that attaches to the servers of all ranks, and computes with all parts: ``python one_client.py DIRECTORY``."""

import argparse
from collections.abc import Sequence
from contextlib import ExitStack

import torch
from model import Transformer, prompts
from rank import device_of
from torch import Tensor

from shared_rpc import Client


@torch.inference_mode()
def forward(ranks: Sequence[Transformer], tokens: Tensor) -> Tensor:
    """Return the logits of the whole model, on the first rank's device. Each part is computed on its own device.

    Sums and concatenations replace the collectives of separate processes.
    """
    devices = [rank.lm_head.weight.device for rank in ranks]

    def total(parts: list[Tensor]) -> Tensor:
        return torch.stack([part.to(devices[0]) for part in parts]).sum(0)

    x = ranks[0].embed_tokens(tokens.to(devices[0]))
    for blocks in zip(*(rank.layers for rank in ranks), strict=True):
        x = x + total([block.attention(block.input_norm(x.to(there))) for block, there in zip(blocks, devices, strict=True)])
        x = x + total([block.mlp(block.post_norm(x.to(there))) for block, there in zip(blocks, devices, strict=True)])
    logits = [rank.lm_head(rank.norm(x.to(there))) for rank, there in zip(ranks, devices, strict=True)]
    return torch.cat([part.to(devices[0]) for part in logits], -1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory")
    parser.add_argument("--world", type=int, default=2)
    options = parser.parse_args()
    with ExitStack() as stack:
        parts = []
        for rank in range(options.world):
            client = stack.enter_context(Client(f"{options.directory}/rank{rank}", device=device_of(rank), connect_timeout=60))
            handle = client.call("load_shard", f"{options.directory}/model.pt", rank, options.world)
            parts.append(stack.enter_context(handle).value)
        print("the most likely next tokens:", forward(parts, prompts())[:, -1].argmax(-1).tolist())


if __name__ == "__main__":
    main()
