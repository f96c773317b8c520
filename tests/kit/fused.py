"""A decoder in the layout of inference engines, and an engine that runs it in its own process.

Query, key and value are one matrix, and so are gate and up. The scales of the key-value cache are buffers that an engine writes
when it has loaded. A step takes one token, and works on tensors whose addresses do not change, so that it can be captured into
a CUDA graph.

``python -m tests.kit.fused own|shared eager|graph|compile BASE_PATH DEVICE`` prints the tokens and a digest of the logits, once
for each line that it reads; on ``write`` it writes to a parameter, on any other line it generates again.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

# vLLM's plugin: this part of it works without vLLM.
sys.path.append(str(Path(__file__).parent.parent.parent / "integrations" / "vllm"))
from shared_rpc_vllm.binding import WithoutWeights, bind, refuse_meta

VOCABULARY, WIDTH, HEADS, INNER, LENGTH, LAYERS = 97, 64, 4, 96, 24, 2


class Layer(nn.Module):
    """Attention with its own cache, and a gated projection."""

    keys: torch.Tensor
    values: torch.Tensor
    kv_scale: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.Parameter(torch.ones(WIDTH))
        self.qkv = nn.Parameter(torch.empty(3 * WIDTH, WIDTH))
        self.out = nn.Parameter(torch.empty(WIDTH, WIDTH))
        self.gate_up = nn.Parameter(torch.empty(2 * INNER, WIDTH))
        self.down = nn.Parameter(torch.empty(WIDTH, INNER))
        self.register_buffer("kv_scale", torch.ones(()))
        for name in ("keys", "values"):
            self.register_buffer(name, torch.zeros(HEADS, LENGTH, WIDTH // HEADS), persistent=False)

    def forward(self, x: torch.Tensor, position: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Return the next hidden state, and write this position into the cache."""
        normed = functional.rms_norm(x, (WIDTH,), self.norm)
        query, key, value = functional.linear(normed, self.qkv).view(3, HEADS, 1, WIDTH // HEADS)
        self.keys.index_copy_(1, position, key / self.kv_scale)
        self.values.index_copy_(1, position, value / self.kv_scale)
        scores = query @ (self.keys * self.kv_scale).transpose(1, 2) + mask
        x = x + functional.linear((scores.softmax(-1) @ (self.values * self.kv_scale)).reshape(1, WIDTH), self.out)
        gate, up = functional.linear(x, self.gate_up).chunk(2, dim=-1)
        return x + functional.linear(functional.silu(gate) * up, self.down)


class Decoder(nn.Module):
    """The layers, between an embedding and a head tied to it."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Parameter(torch.empty(VOCABULARY, WIDTH))
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.head = self.embedding

    def forward(self, token: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        """Return the logits of the next token."""
        hidden = functional.embedding(token, self.embedding)
        places = torch.arange(LENGTH, device=token.device)
        mask = torch.where(places <= position, 0.0, float("-inf"))
        for layer in self.layers:
            hidden = layer(hidden, position, mask)
        return functional.linear(hidden, self.head)


def build(device: str) -> Decoder:
    """Return the decoder with its weights: the same bits in every process."""
    generator = torch.Generator().manual_seed(0)
    model = Decoder()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / parameter.shape[-1] ** 0.5)
    return model.requires_grad_(False).to(device).eval()


def weights_of(model: Decoder) -> dict[str, torch.Tensor]:
    """Return the tensors of a state under all their names, parameters as parameters."""
    return {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}


def over(tensors: dict[str, torch.Tensor]) -> Decoder:
    """Return a decoder that is constructed without memory and then given these tensors, like an engine of vLLM."""
    with WithoutWeights():
        model = Decoder()
    bind(model, tensors)
    refuse_meta(model)
    return model.eval()


Step = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def stepper(model: Decoder, mode: str) -> Step:
    """Return one step of a model: eager, captured into a CUDA graph, or compiled into several."""
    if mode == "compile":
        compiled: Step = torch.compile(model, mode="reduce-overhead", fullgraph=True)
        return compiled
    if mode == "eager":
        return model
    device = model.embedding.device
    token, position = (torch.zeros(1, dtype=torch.long, device=device) for _ in range(2))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        model(token, position)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits = model(token, position)

    def replay(next_token: torch.Tensor, next_position: torch.Tensor) -> torch.Tensor:
        token.copy_(next_token)
        position.copy_(next_position)
        graph.replay()
        return logits

    return replay


def generate(step: Step, device: str) -> dict[str, Any]:
    """Return the greedy tokens after a first one, and a digest of all logits."""
    digest, tokens = hashlib.sha256(), [1]
    with torch.no_grad():
        for index in range(LENGTH):
            token, position = (torch.tensor([number], device=device) for number in (tokens[-1], index))
            logits = step(token, position).clone()
            digest.update(logits.cpu().numpy().tobytes())
            tokens.append(int(logits.argmax()))
    return {"tokens": tokens, "logits": digest.hexdigest()}


def main(source: str, mode: str, base_path: str, device: str) -> None:
    """Run the engine."""
    from shared_rpc import Client

    torch.set_num_threads(1)
    if source == "shared":
        handle = Client(base_path, device=device).call("weights")
        model = over(handle.value)
    else:
        model = build(device)
    for layer in model.layers:
        layer.kv_scale.fill_(0.5)  # type: ignore[operator, union-attr]
    step = stepper(model, mode)
    for line in sys.stdin:
        if line.strip() == "write":
            model.layers[0].qkv.data.fill_(0)  # type: ignore[operator, union-attr]
            if device != "cpu":
                torch.cuda.synchronize()
        print(json.dumps(generate(step, device)), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
