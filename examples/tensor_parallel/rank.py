"""One rank: a process that attaches to its own server, and computes together with the other ranks.

run.py starts one for each rank. For every line on standard input, which names a file with tokens and one for the logits, all
ranks compute one forward pass.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from model import Transformer, device_of
from torch import Tensor

from shared_rpc import Client


class Collectives:
    """What the ranks exchange: NCCL between GPUs where each rank has its own, else gloo on the host."""

    def __init__(self, store: str, rank: int, world: int) -> None:
        self.world = world
        self.backend = "nccl" if torch.cuda.is_available() and torch.cuda.device_count() >= world else "gloo"
        # All of them are on this host: nothing listens on its other interfaces.
        os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = "lo"
        # They find each other by a file, so no port is to be chosen.
        dist.init_process_group(
            self.backend, init_method=f"file://{store}", rank=rank, world_size=world, timeout=timedelta(seconds=60)
        )

    def total(self, part: Tensor) -> Tensor:
        """The sum of all ranks' tensors."""
        buffer = self._staged(part)
        dist.all_reduce(buffer)
        return buffer.to(part.device)

    def joined(self, part: Tensor) -> Tensor:
        """All ranks' tensors side by side."""
        buffer = self._staged(part)
        parts = [torch.empty_like(buffer) for _ in range(self.world)]
        dist.all_gather(parts, buffer)
        return torch.cat(parts, -1).to(part.device)

    def _staged(self, part: Tensor) -> Tensor:
        return part.contiguous() if self.backend == "nccl" else part.cpu().contiguous()


@torch.inference_mode()
def answer(line: str, model: Transformer, collectives: Collectives, device: str) -> None:
    """One forward pass."""
    source, target = line.split()
    tokens = torch.load(source, weights_only=True).to(device)
    torch.save(model(tokens, collectives.total, collectives.joined).cpu(), target)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("base-path", "checkpoint", "store"):
        parser.add_argument(f"--{name}", required=True)
    for name in ("rank", "world"):
        parser.add_argument(f"--{name}", type=int, required=True)
    options = parser.parse_args()

    device = device_of(options.rank)
    if device != "cpu":
        torch.cuda.set_device(device)
    collectives = Collectives(options.store, options.rank, options.world)
    with Client(options.base_path, device=device, connect_timeout=60) as client:
        client.ping()
        begin = time.perf_counter()
        with client.call("load_shard", options.checkpoint, options.rank, options.world) as handle:
            milliseconds = (time.perf_counter() - begin) * 1000
            print(f"attached to {device} in {milliseconds:.1f} ms, {collectives.backend}", flush=True)
            for line in sys.stdin:
                answer(line, handle.value, collectives, device)
                print("done", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
