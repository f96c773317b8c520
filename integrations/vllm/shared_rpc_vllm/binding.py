"""Binding: a model that was made without weights gets tensors that are there already."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from shared_rpc_vllm.errors import NotShareable


class WithoutWeights(TorchFunctionMode):
    """A mode in which ``torch.empty`` makes tensors on the meta device: what is about to be loaded takes no memory.

    What code computes when it makes a model, such as tables of rotations or of the experts of a rank, is computed as ever.
    Memory that is requested on a device by its name, such as a workspace, is there too.
    """

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call a function of torch."""
        kwargs = kwargs or {}
        if function is torch.empty and kwargs.get("device") is None:
            kwargs = {**kwargs, "device": "meta"}
        return function(*args, **kwargs)


def tensors_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return parameters and buffers by every name that they have: parameters as plain ones, with nothing else of the model.

    A tensor that has several names is one object under all of them.
    """
    plain: dict[int, nn.Parameter] = {}
    found: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        found[name] = plain.setdefault(id(parameter), nn.Parameter(parameter.data, requires_grad=False))
    found.update(model.named_buffers(remove_duplicate=False))
    return found


def bind(model: nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
    """Give a model these tensors as its parameters and buffers.

    A tensor that the model has becomes the given one, so that whatever else refers to it, such as an attention layer to another
    layer's parameter, has the new one too. What the model does not have is added; what is not given, and has no value, removed.

    :raises NotShareable: if a tensor belongs to a module that there is not, or a buffer has another shape here.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    for name, tensor in tensors.items():
        owner, _, leaf = name.rpartition(".")
        if owner not in modules:
            raise NotShareable(f"{name}: the server's model has it, and this engine's has no module {owner!r}")
        module = modules[owner]
        kind, other = _kinds(module, tensor)
        present = kind.get(leaf)
        if present is None:
            other.pop(leaf, None)
            module.__dict__.pop(leaf, None)
            kind[leaf] = tensor
        elif kind is module._buffers and present.shape != tensor.shape:
            raise NotShareable(f"{name} is {tuple(tensor.shape)} in the server, and {tuple(present.shape)} in this engine")
        else:
            _become(present, tensor)
    for name, module in modules.items():
        for held in (module._parameters, module._buffers):
            for leaf in [leaf for leaf, tensor in held.items() if tensor is not None and tensor.is_meta]:
                if f"{name}.{leaf}".removeprefix(".") not in tensors:
                    del held[leaf]


def _kinds(module: nn.Module, tensor: torch.Tensor) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return those of a module's tensors that are what this one is, parameters or buffers, and the others."""
    kinds: tuple[dict[str, Any], dict[str, Any]] = (module._parameters, module._buffers)
    return kinds if isinstance(tensor, nn.Parameter) else kinds[::-1]


def _become(present: torch.Tensor, tensor: torch.Tensor) -> None:
    """Make a tensor be another one. Its class and its attributes stay, such as vLLM's loaders of weights."""
    if present.device == tensor.device and present.data_ptr() == tensor.data_ptr() and present.shape == tensor.shape:
        return
    twin: Any = torch.Tensor._make_subclass(type(present), tensor.detach(), False)
    twin.__dict__.update(present.__dict__)
    torch.utils.swap_tensors(present, twin)


def refuse_meta(model: nn.Module) -> None:
    """Look for tensors that have no value still.

    :raises NotShareable: if there is one, with its name.
    """
    for name, module in model.named_modules():
        for attribute, tensor in _tensors_in(module):
            if tensor.is_meta and tensor.numel():
                raise NotShareable(
                    f"{name}.{attribute} of {type(module).__name__} is filled when weights are loaded, and is no parameter and "
                    f"no buffer: this engine has no value for it"
                )


def _tensors_in(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a module, and of the objects that are its attributes, such as a method or an implementation."""
    for attribute, value in [*module._parameters.items(), *module._buffers.items(), *vars(module).items()]:
        inner = {} if isinstance(value, nn.Module | type) else getattr(value, "__dict__", {})
        if isinstance(value, torch.Tensor):
            yield attribute, value
        else:
            yield from ((f"{attribute}.{name}", found) for name, found in inner.items() if isinstance(found, torch.Tensor))
