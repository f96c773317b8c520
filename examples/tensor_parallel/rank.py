"""One rank: a process that attaches to its own server, and computes with the other ranks: ``python rank.py DIRECTORY RANK``.

It writes the logits to DIRECTORY/logitsRANK.pt.
"""

import argparse
import os
from datetime import timedelta

import torch
import torch.distributed as dist
from model import prompts
from torch import Tensor

from shared_rpc import Client


def device_of(rank: int) -> str:
    """Return the device of a rank's part: its own GPU if there are enough, a shared one otherwise, the host without any."""
    return f"cuda:{rank % torch.cuda.device_count()}" if torch.cuda.is_available() else "cpu"


class Collectives:
    """The exchange between ranks: NCCL if each rank has its own GPU, else gloo on the host."""

    def __init__(self, store: str, rank: int, world: int) -> None:
        self.world = world
        self.backend = "nccl" if torch.cuda.is_available() and torch.cuda.device_count() >= world else "gloo"
        # All ranks are on this host, so no socket listens on its other interfaces.
        os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = "lo"
        # The ranks rendezvous through a file, so no port must be chosen.
        wait = timedelta(seconds=60)
        dist.init_process_group(self.backend, init_method=f"file://{store}", rank=rank, world_size=world, timeout=wait)

    def total(self, part: Tensor) -> Tensor:
        """Return the sum of the tensors of all ranks."""
        buffer = self._staged(part)
        dist.all_reduce(buffer)
        return buffer.to(part.device)

    def joined(self, part: Tensor) -> Tensor:
        """Return the concatenated tensors of all ranks."""
        buffer = self._staged(part)
        parts = [torch.empty_like(buffer) for _ in range(self.world)]
        dist.all_gather(parts, buffer)
        return torch.cat(parts, -1).to(part.device)

    def _staged(self, part: Tensor) -> Tensor:
        return part.contiguous() if self.backend == "nccl" else part.cpu().contiguous()


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=os.path.abspath)
    parser.add_argument("rank", type=int)
    parser.add_argument("--world", type=int, default=2)
    options = parser.parse_args()
    device = device_of(options.rank)
    if device != "cpu":
        torch.cuda.set_device(device)
    checkpoint = f"{options.directory}/model.pt"
    with (
        Client(f"{options.directory}/rank{options.rank}", device=device, connect_timeout=60) as client,
        client.call("load_shard", checkpoint, options.rank, options.world) as handle,
    ):
        print(f"rank {options.rank} is attached on {device}", flush=True)
        collectives = Collectives(f"{options.directory}/store", options.rank, options.world)
        logits = handle.value(prompts().to(device), collectives.total, collectives.joined).cpu()
    torch.save(logits, f"{options.directory}/logits{options.rank}.pt")
    print(f"the most likely next tokens, by {collectives.backend}:", logits[:, -1].argmax(-1).tolist(), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
