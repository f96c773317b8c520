"""Binding of existing tensors to a model that was built without weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from shared_rpc_vllm import NotShareable


class WithoutWeights(TorchFunctionMode):
    """A mode in which ``torch.empty`` creates tensors on the meta device, so that parameters take no memory.

    Other tensors that the constructor computes, such as rotary tables or the experts of a rank, are not affected, nor is memory
    requested on an explicit device, such as a workspace.
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
    """Return parameters and buffers by all of their names. Parameters are plain ones, without references to the model.

    A tensor with several names is one object under all of them.
    """
    plain: dict[int, nn.Parameter] = {}
    found: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        found[name] = plain.setdefault(id(parameter), nn.Parameter(parameter.data, requires_grad=False))
    found.update(model.named_buffers(remove_duplicate=False))
    return found


def bind(model: nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
    """Set the parameters and buffers of a model to these tensors.

    An existing tensor is replaced in place, so that other references to it, such as those of an attention layer to another
    layer's parameter, follow. Missing ones are added; tensors without a value that are not given are removed.

    :raises NotShareable: if the model lacks the module of a tensor, or a buffer has another shape.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    for name, tensor in tensors.items():
        owner, _, leaf = name.rpartition(".")
        if owner not in modules:
            raise NotShareable(f"{name}: the server's model has it, but this engine's model has no module {owner!r}")
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
    """Return the dicts of a module's parameters and buffers, with the kind of the given tensor first."""
    kinds: tuple[dict[str, Any], dict[str, Any]] = (module._parameters, module._buffers)
    return kinds if isinstance(tensor, nn.Parameter) else kinds[::-1]


def _become(present: torch.Tensor, tensor: torch.Tensor) -> None:
    """Replace a tensor in place by another one, keeping its class and its attributes, such as vLLM's weight loaders."""
    if present.device == tensor.device and present.data_ptr() == tensor.data_ptr() and present.shape == tensor.shape:
        return
    twin: Any = torch.Tensor._make_subclass(type(present), tensor.detach(), False)
    twin.__dict__.update(present.__dict__)
    torch.utils.swap_tensors(present, twin)


def refuse_meta(model: nn.Module) -> None:
    """Check that all tensors have values.

    :raises NotShareable: with the name of a tensor that has none.
    """
    for name, module in model.named_modules():
        for attribute, tensor in _tensors_in(module):
            if tensor.is_meta and tensor.numel():
                raise NotShareable(
                    f"{name}.{attribute} of {type(module).__name__} is filled when weights are loaded, and is no parameter and "
                    f"no buffer: this engine has no value for it"
                )


def _tensors_in(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a module and of its attributes, such as a quantisation method."""
    for attribute, value in [*module._parameters.items(), *module._buffers.items(), *vars(module).items()]:
        inner = {} if isinstance(value, nn.Module | type) else getattr(value, "__dict__", {})
        if isinstance(value, torch.Tensor):
            yield attribute, value
        else:
            yield from ((f"{attribute}.{name}", found) for name, found in inner.items() if isinstance(found, torch.Tensor))
