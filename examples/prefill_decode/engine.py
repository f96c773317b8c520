"""The engines. Each is a process of its own, and talks in lines of JSON on its standard input and output.

    python engine.py prefill --size small      # asks the server for weights and a KV cache, writes a ticket for each
    python engine.py decode --size small       # knows two files
    python engine.py alone --size small        # one process without a server, to compare with

``run.py`` plays all of it. Messages: the prefill engine gets ``{"request", "prompt", "new"}`` and ``{"free": blocks}`` and
answers with a handover ``{"request", "blocks", "length", "token", "new"}``, which is what the decode engine gets; that answers
with ``{"request", "tokens", "blocks"}``. Keys and values are in no message: they are where both can see them.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from model import Decoder, cache_shape
from weights import SIZES, Config, device, dtype, make

from shared_rpc import Client, Handle, materialize

#: From the names of the checkpoint to those of our own class.
LAYER_MAP = {
    "model.embed_tokens.weight": "embedding.weight",
    "model.layers.*.input_layernorm.weight": "blocks.*.attention_norm.weight",
    "model.layers.*.self_attn.q_proj.weight": "blocks.*.attention.query.weight",
    "model.layers.*.self_attn.k_proj.weight": "blocks.*.attention.key.weight",
    "model.layers.*.self_attn.v_proj.weight": "blocks.*.attention.value.weight",
    "model.layers.*.self_attn.o_proj.weight": "blocks.*.attention.out.weight",
    "model.layers.*.post_attention_layernorm.weight": "blocks.*.mlp_norm.weight",
    "model.layers.*.mlp.gate_proj.weight": "blocks.*.gate.weight",
    "model.layers.*.mlp.up_proj.weight": "blocks.*.up.weight",
    "model.layers.*.mlp.down_proj.weight": "blocks.*.down.weight",
    "model.norm.weight": "norm.weight",
    "lm_head.weight": "head.weight",
}


def build(config: Config, weights: Handle[dict[str, torch.Tensor]] | dict[str, torch.Tensor]) -> Decoder:
    """Our class around these weights, without a copy."""
    with materialize(weights, rename=LAYER_MAP):
        model = Decoder(config)
    return model.eval()


class Blocks:
    """Which blocks of the KV cache are free. The prefill engine has them."""

    def __init__(self, count: int, size: int) -> None:
        self._free = list(range(count))
        self._count = count
        self._size = size

    def take(self, positions: int) -> list[int] | None:
        needed = -(-positions // self._size)
        if needed > self._count:
            raise SystemExit(
                f"{positions} positions need {needed} blocks, and the KV cache has {self._count}: use more --blocks"
            )
        if needed > len(self._free):
            return None
        taken, self._free = self._free[:needed], self._free[needed:]
        return taken

    def give(self, blocks: list[int]) -> None:
        self._free += blocks


def messages() -> Iterator[dict[str, Any]]:
    for line in sys.stdin:
        yield json.loads(line)


def say(**facts: Any) -> None:
    print(json.dumps(facts), flush=True)


def own_memory() -> int:
    """Bytes that this process alone has: of torch's allocator on a GPU, of private pages on the host."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated()
    rollup = Path("/proc/self/smaps_rollup").read_text(encoding="ascii").splitlines()
    return sum(int(line.split()[1]) for line in rollup if line.startswith("Private_")) * 1024


def prefill(config: Config, size: str, count: int, directory: Path) -> None:
    with Client(connect_timeout=60) as client:  # the server may still be starting
        before = own_memory()
        began = time.perf_counter()
        with client.call("load_weights", size) as weights:
            model = build(config, weights)
            seconds = time.perf_counter() - began
            weights.ticket(directory / "weights.ticket")
            cache = client.create_buffer(cache_shape(config, count), dtype())
            cache.ticket(directory / "kv.ticket")
            say(ready="prefill", grown=own_memory() - before, seconds=seconds, weights=weights.get_object_info()["nbytes"])
            blocks, waiting = Blocks(count, config.block), deque[dict[str, Any]]()
            for message in messages():
                if "free" in message:
                    blocks.give(message["free"])
                else:
                    waiting.append(message)
                while waiting:
                    request = waiting[0]
                    prompt, new = request["prompt"], request["new"]
                    taken = blocks.take(len(prompt) + new)
                    if taken is None:
                        break  # until a request has ended
                    waiting.popleft()
                    token = model(prompt, 0, cache.value, taken)
                    if torch.cuda.is_available():
                        torch.cuda.synchronize()  # the other engine must find all of it
                    say(request=request["request"], blocks=taken, length=len(prompt), token=token, new=new)
            client.free_buffer(cache)


def decode(config: Config, directory: Path) -> None:
    first = next(messages())  # both tickets are there
    assert first["open"]
    with Client.from_ticket(directory / "weights.ticket") as client:
        before = own_memory()
        began = time.perf_counter()
        with (
            client.open_ticket(directory / "weights.ticket") as weights,
            client.open_ticket(directory / "kv.ticket") as cache,
        ):
            model = build(config, weights)
            say(ready="decode", grown=own_memory() - before, seconds=time.perf_counter() - began)
            for handover in messages():
                tokens = generate(model, cache.value, handover)
                say(request=handover["request"], tokens=tokens, blocks=handover["blocks"])


def generate(model: Decoder, cache: torch.Tensor, handover: dict[str, Any]) -> list[int]:
    """Greedily on from a prompt whose keys and values are in the cache."""
    tokens = [handover["token"]]
    while len(tokens) < handover["new"]:
        position = handover["length"] + len(tokens) - 1
        tokens.append(model(tokens[-1:], position, cache, handover["blocks"]))
    return tokens


def alone(config: Config, size: str, count: int) -> None:
    before = own_memory()
    began = time.perf_counter()
    model = build(config, make(size))
    say(ready="alone", grown=own_memory() - before, seconds=time.perf_counter() - began)
    cache = torch.zeros(cache_shape(config, count), dtype=dtype(), device=device())
    for request in messages():
        blocks = Blocks(count, config.block).take(len(request["prompt"]) + request["new"])
        assert blocks is not None, "one request fits"
        token = model(request["prompt"], 0, cache, blocks)
        handover = request | {"token": token, "length": len(request["prompt"]), "blocks": blocks}
        say(request=request["request"], tokens=generate(model, cache, handover))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("role", choices=["prefill", "decode", "alone"])
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--blocks", type=int, default=64, help="blocks of the KV cache")
    parser.add_argument("--directory", type=Path, default=Path(), help="where tickets are")
    options = parser.parse_args()
    config = SIZES[options.size]
    torch.set_default_dtype(dtype())  # what the weights are in
    build(SIZES["warm-up"], make("warm-up"))  # what libraries load when they are first used is no part of what is measured
    if options.role == "prefill":
        prefill(config, options.size, options.blocks, options.directory)
    elif options.role == "decode":
        decode(config, options.directory)
    else:
        alone(config, options.size, options.blocks)


if __name__ == "__main__":
    main()
