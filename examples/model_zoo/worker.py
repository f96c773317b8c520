"""A process that answers requests for any model. It has a handle of each, and only that active which it computes with.

It reads lines of JSON, ``{"request": 1, "model": 7, "seed": 3}``, and answers with a digest of the output, the time that
it took, and where the model was when it was asked for. ``worker.py alone`` has weights of its own and shares nothing.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from zoo import make, question

from shared_rpc import Client, Handle


def requests() -> Iterator[dict[str, Any]]:
    for line in sys.stdin:
        yield json.loads(line)


def say(**facts: Any) -> None:
    print(json.dumps(facts), flush=True)


def answer(model: nn.Module, seed: int, options: argparse.Namespace) -> str:
    """What the model makes of an input, to the last bit."""
    x = question(seed, options.megabytes, options.device)
    return hashlib.sha256(model(x).cpu().numpy().tobytes()).hexdigest()


def attached(options: argparse.Namespace) -> None:
    with ExitStack() as stack:
        client = stack.enter_context(Client(device=options.device, connect_timeout=60, timeout=300))
        handles: dict[int, Handle[nn.Module]] = {}
        say(ready=True)
        for asked in requests():
            number = asked["model"]
            began = time.perf_counter()
            if number not in handles:
                handles[number] = stack.enter_context(client.call("load_model", number, options.megabytes, options.device))
                handles[number].suspend()  # from here on it is active only while it computes
                found = "first"
            else:
                found = handles[number].get_object_info()["tier"]
            with handles[number].active() as model:
                digest = answer(model, asked["seed"], options)
            say(request=asked["request"], digest=digest, seconds=time.perf_counter() - began, found=found)


def alone(options: argparse.Namespace) -> None:
    say(ready=True)
    number, model = None, nn.Module()
    for asked in requests():  # those for one model come one after the other
        if asked["model"] != number:
            number = asked["model"]
            model = make(number, options.megabytes, options.device)
        say(request=asked["request"], digest=answer(model, asked["seed"], options))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=["attached", "alone"])
    parser.add_argument("--megabytes", type=int, required=True)
    parser.add_argument("--device", required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)  # several processes on few cores would only wait for each other
    (attached if options.kind == "attached" else alone)(options)


if __name__ == "__main__":
    main()
