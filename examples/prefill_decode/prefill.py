"""The prefill engine: it writes the keys and values of prompts to a cache that both engines map.

On standard output it writes lines of JSON for the decode engine: tickets for the weights and the cache, then a line for each
prompt. On standard input it reads the decode engine's answers, which release blocks of the cache; weights.py has the commands.
"""

import argparse
import json
import random
import sys

import torch
from model import build, cache_shape
from weights import CONFIG, DTYPE

from shared_rpc import Client


def prompts(count: int) -> list[list[int]]:
    """Return random prompts, equal in every process."""
    chance = random.Random(7)
    return [[chance.randrange(CONFIG.vocabulary) for _ in range(chance.randrange(5, 60))] for _ in range(count)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=6)
    parser.add_argument("--new", type=int, default=16, help="tokens to generate for each request")
    parser.add_argument("--blocks", type=int, default=12, help="blocks of the KV cache")
    options = parser.parse_args()
    torch.set_num_threads(1)  # the engines share the cores
    with Client(connect_timeout=60) as client, client.call("load_weights") as weights:
        model = build(weights)
        cache = client.create_buffer(cache_shape(options.blocks), DTYPE)
        print(json.dumps({"weights": weights.ticket().to_json(), "cache": cache.ticket().to_json()}), flush=True)
        free, pending = list(range(options.blocks)), 0
        for number, prompt in enumerate(prompts(options.requests)):
            needed = -(-(len(prompt) + options.new) // CONFIG.block)
            if needed > options.blocks:
                raise SystemExit(
                    f"request {number} needs {needed} blocks, and the cache has {options.blocks}: use more --blocks"
                )
            while needed > len(free):  # until the decode engine has finished other requests
                free += json.loads(sys.stdin.readline())["blocks"]
                pending -= 1
            blocks, free = free[:needed], free[needed:]
            token = model(prompt, 0, cache.value, blocks)
            if torch.cuda.is_available():
                torch.cuda.synchronize()  # the other engine reads the cache
            handover = {"request": number, "token": token, "length": len(prompt), "new": options.new, "blocks": blocks}
            print(json.dumps(handover), flush=True)
            pending += 1
        for _ in range(pending):  # the decode engine still uses the cache
            sys.stdin.readline()
        client.free_buffer(cache)


if __name__ == "__main__":
    main()
