"""Modules and tensors of popular kinds, importable by every process of a test."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn


class Tied(nn.Module):
    """An embedding and an output layer with a common weight, as in language models."""

    def __init__(self, device: str = "cpu") -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4, device=device)
        self.head = nn.Linear(4, 7, bias=False, device=device)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the logits of tokens."""
        return self.head(self.embed(tokens))


class Slotted:
    """An object without a ``__dict__``."""

    __slots__ = ("label", "tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.label = "slotted"


@dataclass
class State:
    """The state of models apart from their parameters."""

    step: int
    moments: dict[str, Any] = field(default_factory=dict)


#: Bytes of an array that is not pickled.
LARGE_ARRAY = 1 << 18


def beside_a_tensor(device: str, *arrays: Any) -> State:
    """An object with arrays, and a tensor that makes it shareable."""
    return State(1, {"tensor": torch.ones(3, device=device), "arrays": list(arrays)})


def arrays_of(value: Any) -> Any:
    """Return the arrays of such an object."""
    return value.moments["arrays"]


class Everything(nn.Module):
    """A module that keeps tensors in every place that Python offers."""

    def __init__(self, device: str = "cpu") -> None:
        super().__init__()

        def tensor(start: int) -> torch.Tensor:
            return torch.arange(start, start + 3, dtype=torch.float32, device=device)

        self.weight = nn.Parameter(tensor(0))
        self.register_buffer("running", tensor(10))
        self.register_buffer("scratch", tensor(20), persistent=False)
        self.attribute = tensor(30)
        self.items = [tensor(40), {"deep": (tensor(50),)}]
        self.by_number = {7: tensor(60)}
        self.slotted = Slotted(tensor(70))
        self.state = State(3, {"first": tensor(80)})
        self.alias = self.running

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return all tensors by their places."""
        return {
            "parameter": self.weight,
            "buffer": self.running,
            "non-persistent buffer": self.scratch,
            "attribute": self.attribute,
            "list": self.items[0],
            "dict in a list": self.items[1]["deep"][0],
            "dict": self.by_number[7],
            "slot": self.slotted.tensor,
            "dataclass": self.state.moments["first"],
        }


class Marked(torch.Tensor):
    """A subclass with an attribute, as vision libraries use for boxes and masks."""

    label: str = "none"


class Labelled(nn.Parameter):
    """A parameter subclass that refers to its module, like those of 8-bit and 4-bit layers."""

    __slots__ = ("note",)
    label: str
    scale: torch.Tensor
    module: nn.Module

    def __getstate__(self) -> dict[str, Any]:
        """Return an incomplete state, as such classes do for ``copy.deepcopy``."""
        return {"label": self.label, "data": self.data, "requires_grad": self.requires_grad}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Set the incomplete state."""
        self.label, self.data, self.requires_grad = state["label"], state["data"], state["requires_grad"]


class Scaled(torch.Tensor):
    """A wrapper subclass: two inner tensors that read as their product, as in quantisation libraries."""

    @staticmethod
    def __new__(cls, values: torch.Tensor, scale: torch.Tensor) -> Scaled:
        """Wrap ``values * scale``."""
        return torch.Tensor._make_wrapper_subclass(cls, values.shape, dtype=scale.dtype, device=values.device)

    def __init__(self, values: torch.Tensor, scale: torch.Tensor) -> None:
        self.values_ = values
        self.scale = scale

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        """The names of the inner tensors."""
        return ["values_", "scale"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, torch.Tensor], meta: Any, size: Any, stride: Any) -> Scaled:
        """Rebuild the wrapper."""
        return cls(inner["values_"], inner["scale"])

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Detaching returns the same kind again; every other operation works on the product."""
        if function is torch.ops.aten.detach.default:
            return Scaled(args[0].values_, args[0].scale)
        plain = [argument.values_ * argument.scale if isinstance(argument, Scaled) else argument for argument in args]
        return function(*plain, **(kwargs or {}))


class Locked(nn.Module):
    """A module that cannot be pickled: it contains a lock, two levels down."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        self.layers[1].guard = {"of": [threading.Lock()]}


class Spanning(nn.Module):
    """Two layers on two devices, as placed by a device map. All numbers are small integers, so results are exact."""

    scale: torch.Tensor

    def __init__(self, first: str, second: str) -> None:
        super().__init__()
        self.devices = [torch.device(first), torch.device(second)]
        self.first = nn.Linear(8, 8, device=first)
        self.second = nn.Linear(8, 4, device=second)
        self.register_buffer("scale", torch.full((4,), 3.0, device=second))
        with torch.no_grad():
            for number, parameter in enumerate(self.parameters()):
                parameter.copy_(torch.arange(parameter.numel()).reshape(parameter.shape) % 5 + number)

    @torch.no_grad()
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute on the first device, then on the second."""
        hidden = self.first(x.to(self.devices[0]))
        return self.second(hidden.to(self.devices[1])) * self.scale


def net() -> dict[str, torch.Tensor]:
    """Tensors of several dtypes and shapes, a scalar and an empty one among them."""
    torch.manual_seed(3)
    return {
        "embedding": torch.randn(100, 64),
        "half": torch.randn(33, 7).half(),
        "brain": torch.randn(5).bfloat16(),
        "eight": torch.randn(9).to(torch.float8_e4m3fn),
        "mask": torch.tensor([True, False, True]),
        "batches": torch.tensor(12),
        "nothing": torch.empty(0, 4),
    }


def same_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors have the same address and layout."""
    return (one.data_ptr(), one.shape, one.stride(), one.dtype) == (other.data_ptr(), other.shape, other.stride(), other.dtype)
