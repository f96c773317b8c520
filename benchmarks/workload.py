"""The measured models and endpoints: the same functions and tensors for all sides."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import nn

if TYPE_CHECKING:  # attaches of clients are measured with their imports
    from shared_rpc import Provider

#: Elements of a small tensor: 4 KiB of float32.
SMALL = 1024


class Sizes(NamedTuple):
    """Sizes that determine the tensors of a decoder: ``narrow`` is the width of keys and values. Weights are bfloat16."""

    layers: int
    hidden: int
    narrow: int
    intermediate: int
    vocabulary: int


SHAPES = {
    # 291 tensors, 16.06 GB: https://huggingface.co/meta-llama/Meta-Llama-3-8B/blob/main/config.json
    "llama-3-8b": Sizes(32, 4096, 1024, 14336, 128256),
    # 291 tensors, 109 MB.
    "small": Sizes(32, 512, 128, 512, 8192),
    # 21 tensors, for trials.
    "tiny": Sizes(2, 64, 32, 128, 256),
}


def _linear(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False)


class Layer(nn.Module):
    """The nine tensors of a decoder layer."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        hidden, narrow = sizes.hidden, sizes.narrow
        self.q_proj, self.k_proj = _linear(hidden, hidden), _linear(hidden, narrow)
        self.v_proj, self.o_proj = _linear(hidden, narrow), _linear(hidden, hidden)
        self.gate_proj, self.up_proj = _linear(hidden, sizes.intermediate), _linear(hidden, sizes.intermediate)
        self.down_proj = _linear(sizes.intermediate, hidden)
        self.input_layernorm, self.post_attention_layernorm = nn.RMSNorm(hidden), nn.RMSNorm(hidden)


class Decoder(nn.Module):
    """The weights of a decoder. A forward pass uses all feed-forward layers, without attention."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(sizes.vocabulary, sizes.hidden)
        self.layers = nn.ModuleList(Layer(sizes) for _ in range(sizes.layers))
        self.norm = nn.RMSNorm(sizes.hidden)
        self.lm_head = _linear(sizes.hidden, sizes.vocabulary)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return logits."""
        hidden = self.embed_tokens(tokens)
        for layer in self.layers:
            assert isinstance(layer, Layer), "a ModuleList has no type of its items"
            normed = layer.post_attention_layernorm(hidden)
            gated = nn.functional.silu(layer.gate_proj(normed)) * layer.up_proj(normed)
            hidden = hidden + layer.down_proj(gated) + layer.o_proj(layer.q_proj(normed))
        logits: torch.Tensor = self.lm_head(self.norm(hidden))
        return logits


class Weight(nn.Module):
    """A module with one tensor."""

    def __init__(self, elements: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(elements))


class Layers(nn.Sequential):
    """Layers of 4 MiB with torch's own initial values, like a model before its weights are loaded."""

    def __init__(self, mebibytes: int) -> None:
        begin = time.perf_counter()
        super().__init__(*(_linear(1024, 1024) for _ in range(mebibytes // 4)))
        self.requires_grad_(False)
        #: Seconds of the build.
        self.seconds = time.perf_counter() - begin


#: The width of a layer of a :class:`Stack`, and its dtype: 32 MiB on a GPU, 4 MiB on the host.
_LAYERS = {"cuda": (4096, torch.bfloat16), "cpu": (1024, torch.float32)}


class Stack(nn.Module):
    """Consecutive layers, so that a forward pass reads all weights once."""

    def __init__(self, nbytes: int, kind: str) -> None:
        super().__init__()
        width, dtype = _LAYERS[kind]
        layers = max(nbytes // (width * width * dtype.itemsize), 1)
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False, dtype=dtype) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply all layers."""
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x


class Workload:
    """The endpoints' functions, on one device."""

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)
        #: When the last model was in memory, before it was published.
        self.loaded = 0.0
        # The first module on the meta device makes torch import more modules.
        self.chain(1, 4)

    def share(self, provider: Provider) -> None:
        """Make the functions endpoints of a provider."""
        for managed in (self.model, self.chain, self.layers, self.writable_stack, self.kept):
            provider.share(managed=True)(managed)
        provider.share(managed=True, access="read")(self.stack)
        provider.share(self.small)
        for uncached in (self.fresh, self.fresh_on_loop, self.echo, self.plus_one, self.nothing):
            provider.share(cache=False)(uncached)

    def model(self, shape: str) -> nn.Module:
        """Build a decoder with a shape of :data:`SHAPES`. Managed, cached."""
        return self._make(lambda: Decoder(SHAPES[shape]).to(torch.bfloat16))

    def chain(self, tensors: int, nbytes: int) -> nn.Module:
        """Build tensors of one size, each in its own module, with ``nbytes`` bytes in total. Managed, cached."""
        elements = max(nbytes // tensors // torch.get_default_dtype().itemsize, 1)
        return self._make(lambda: nn.ModuleList(Weight(elements) for _ in range(tensors)))

    def layers(self, mebibytes: int, name: str = "") -> Layers:
        """Build :class:`Layers` for each name. Managed, cached."""
        with self.device:
            return Layers(mebibytes)

    def stack(self, mebibytes: int, number: int) -> Stack:
        """Build a :class:`Stack` of whole layers with random weights. Managed, cached, read-only."""
        with torch.device("meta"):
            module = Stack(mebibytes << 20, self.device.type)
        module = module.to_empty(device=self.device).requires_grad_(False).eval()
        chance = torch.Generator(self.device).manual_seed(number)
        for parameter in module.parameters():
            parameter.normal_(0.0, 0.02, generator=chance)
        return module

    def writable_stack(self, mebibytes: int) -> Stack:
        """Build a :meth:`stack`. Managed, cached."""
        return self.stack(mebibytes, 0)

    def small(self, number: int = 0) -> torch.Tensor:
        """Return a small tensor for each number. Direct, cached."""
        return torch.ones(SMALL, device=self.device)

    def fresh(self) -> torch.Tensor:
        """Return a new small tensor. Direct, not cached."""
        return torch.ones(SMALL, device=self.device)

    async def fresh_on_loop(self) -> torch.Tensor:
        """Return :meth:`fresh`, without a thread if the server supports that. Direct, not cached."""
        return self.fresh()

    def plus_one(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the argument plus one. Direct, not cached."""
        return tensor + 1

    def nothing(self) -> None:
        """Return None. Direct, not cached."""

    def kept(self) -> torch.Tensor:
        """Return a small tensor. Managed, cached."""
        return torch.ones(SMALL, device=self.device)

    def echo(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the argument. Direct, not cached."""
        return tensor

    def _make(self, make: Callable[[], nn.Module]) -> nn.Module:
        """Create a module without torch's initialisation; every parameter has one of a hundred values."""
        with torch.device("meta"):
            module = make()
        module = module.to_empty(device=self.device)
        with torch.no_grad():
            for number, parameter in enumerate(module.parameters()):
                parameter.fill_(1 + number % 100)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.loaded = time.perf_counter()
        return module.eval()


def digest(module: Stack) -> list[float]:
    """Run the module on a constant input, wait for it, and return a part of its output, for bitwise comparisons."""
    weight = next(module.parameters())
    x = torch.linspace(-1, 1, weight.shape[1], device=weight.device).to(weight.dtype)[None]
    answer: list[float] = module(x)[0, :8].float().tolist()
    return answer
