"""Where a module keeps tensors: the names it gives them, and the plain attributes that have none."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal

import torch
from torch import nn

__all__ = ["Slot", "replace_attributes", "slots_of", "state_of"]


@dataclass(slots=True)
class Slot:
    """A name of a module's tree with its tensor. ``transient``: a buffer that is no part of the module's state."""

    name: str
    module: nn.Module
    attribute: str
    kind: Literal["parameter", "buffer", "transient"]

    @property
    def tensor(self) -> torch.Tensor:
        """What is there now."""
        own = self.module._parameters if self.kind == "parameter" else self.module._buffers
        tensor = own[self.attribute]
        assert tensor is not None, "a name without a tensor is no slot"
        return tensor

    def fill(self, tensor: torch.Tensor) -> None:
        """Put another one there, as ``load_state_dict(assign=True)`` does: some modules take note of it."""
        setattr(self.module, self.attribute, tensor)


def slots_of(root: nn.Module, apart: Callable[[nn.Module], bool]) -> Iterator[Slot]:
    """The slots of a tree, those of modules that are ``apart`` left out. A tensor or module with two names has both."""
    for prefix, module in root.named_modules(remove_duplicate=False):
        if apart(module):
            continue
        begin = f"{prefix}." if prefix else ""
        for name, parameter in module._parameters.items():
            if parameter is not None:
                yield Slot(begin + name, module, name, "parameter")
        for name, buffer in module._buffers.items():
            if buffer is not None:
                transient = name in module._non_persistent_buffers_set
                yield Slot(begin + name, module, name, "transient" if transient else "buffer")


def state_of(module: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers by name, as they are; ``state_dict`` would give copies of them without gradients."""
    return {slot.name: slot.tensor for slot in slots_of(module, lambda part: False) if slot.kind != "transient"}


def replace_attributes(root: nn.Module, replaced: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Have ``replaced`` decide of every tensor that the tree keeps in plain attributes: in lists, dicts, tuples, and the
    attributes of objects too. Where nothing is replaced nothing is written: much of it may belong to others.
    """
    seen: set[int] = set()

    def visit(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return replaced(value)
        if id(value) in seen or isinstance(value, (type, ModuleType, nn.Module)) or callable(value):
            return value
        # The third kind is what torch returns, as torch.linalg.qr does.
        if type(value) is tuple or (isinstance(value, tuple) and (hasattr(value, "_fields") or hasattr(value, "n_fields"))):
            parts = [visit(part) for part in value]
            if all(new is old for new, old in zip(parts, value, strict=True)):
                return value
            return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
        seen.add(id(value))
        if isinstance(value, list):
            visit_items(value, range(len(value)))
        elif isinstance(value, dict):
            visit_items(value, list(value))
        elif hasattr(value, "__dict__"):
            visit(vars(value))
        return value

    def visit_items(items: Any, keys: Iterable[Any]) -> None:
        for key in keys:
            old = items[key]
            new = visit(old)
            if new is not old:
                items[key] = new

    for module in root.modules():
        own = vars(module)
        visit_items(own, [name for name in own if name not in {"_parameters", "_buffers", "_modules"}])
