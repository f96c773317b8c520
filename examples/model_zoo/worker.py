"""A worker that answers random requests for ten models. Its handles are active only while it computes with their model.

    python worker.py --requests 50 --seed 1

It prints a line of JSON for each request: the model, the input's seed, a digest of the output, the milliseconds taken, and the
tier the model was in: "device", "host" or "file", or "new" for this worker's first request to the model.
"""

import argparse
import hashlib
import json
import random
import time
from contextlib import ExitStack

import torch
from torch import nn
from zoo import DEVICE, MODELS, WIDTH

from shared_rpc import Client, Handle


def answer(model: nn.Module, seed: int) -> str:
    """Return a digest of the model's output for an input made from a seed."""
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(seed)).to(DEVICE)
    return hashlib.sha256(model(x).cpu().numpy().tobytes()).hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(1)  # several workers share the cores
    chance = random.Random(options.seed)
    handles: dict[int, Handle[nn.Module]] = {}
    with ExitStack() as stack:
        client = stack.enter_context(Client(connect_timeout=60, timeout=300))
        for _ in range(options.requests):
            number, seed = chance.randrange(MODELS), chance.randrange(50)
            began = time.perf_counter()
            if number in handles:
                tier = handles[number].get_object_info()["tier"]
            else:
                handles[number] = stack.enter_context(client.call("load_model", number))
                handles[number].suspend()  # from here on it is active only while it computes
                tier = "new"
            with handles[number].active() as model:
                digest = answer(model, seed)
            taken = round((time.perf_counter() - began) * 1e3, 1)
            print(json.dumps({"model": number, "seed": seed, "digest": digest, "ms": taken, "tier": tier}), flush=True)


if __name__ == "__main__":
    main()
