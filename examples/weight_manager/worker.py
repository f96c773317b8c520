"""A worker: it attaches to the served version of a model, answers requests, and switches when another version is served.

Each line on standard input is the seed of an image. Each answer is a line of JSON: the generation of the weights, and a digest
of the logits. manager.py has the commands.
"""

import argparse
import hashlib
import json
import sys
from collections.abc import Iterator
from contextlib import suppress
from queue import Empty, SimpleQueue
from threading import Thread

import torch
from model import image

from shared_rpc import Client
from shared_rpc.errors import SharedRPCError

#: Seconds after which an idle worker checks whether its weights are still the served ones.
IDLE = 0.2


def lines() -> Iterator[str]:
    """Yield the lines of standard input, and an empty string when it has been idle for some time."""
    queue: SimpleQueue[str | None] = SimpleQueue()

    def read() -> None:
        for line in sys.stdin:
            queue.put(line.strip())
        queue.put(None)

    Thread(target=read, daemon=True).start()
    while True:
        try:
            line = queue.get(timeout=IDLE)
        except Empty:
            line = ""
        if line is None:
            return
        yield line


@torch.inference_mode()
def answer(model: torch.nn.Module, seed: int) -> str:
    """Return a digest of the logits."""
    device = next(model.parameters()).device
    return hashlib.sha256(model(image(seed).to(device)).cpu().numpy().tobytes()).hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    options = parser.parse_args()
    torch.set_num_threads(1)  # several workers share the cores
    with Client(connect_timeout=0) as client:  # fail at once if no manager runs
        handle = client.call("serving", options.model)
        print(f"serving {options.model}, generation {handle.generation}", file=sys.stderr, flush=True)
        for line in lines():
            # Without a manager the mapped weights stay valid.
            with suppress(SharedRPCError, LookupError):
                if not handle.is_current():
                    handle, old = client.call("serving", options.model), handle
                    old.release()
            if line:
                print(json.dumps({"generation": handle.generation, "digest": answer(handle.value, int(line))}), flush=True)


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        main()
