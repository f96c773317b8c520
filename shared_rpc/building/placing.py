"""Which tensor goes to which name of the models, what does not fit, and putting them there."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from shared_rpc.building.deferred import Deferred
from shared_rpc.building.slots import Slot, slots_of
from shared_rpc.building.successors import Successors, as_it_was
from shared_rpc.errors import CapabilityError, ConfigurationError, StateMismatchError

__all__ = ["Plan"]

#: Names that an error lists, of each kind.
_LISTED = 20


class Plan:
    """What is to be done for models. Nothing is changed until :meth:`carry_out`.

    :param roots: the modules of which none is a part of another one.
    :param tensors: the source's, by the models' names.
    :param own: whether a name is not to be asked for in the source.
    :param apart: whether a module has its tensors already.
    :raises ConfigurationError: if there is nothing to do.
    :raises CapabilityError: for a parameter that has no shape yet.
    """

    def __init__(
        self,
        roots: Sequence[nn.Module],
        tensors: dict[str, torch.Tensor],
        own: Callable[[str], bool],
        apart: Callable[[nn.Module], bool],
    ) -> None:
        self.roots = list(roots)
        if not self.roots:
            raise ConfigurationError(
                "materialize(): no torch module was built in the block by its own thread, or none of them was kept in a "
                "variable: build the model in the block, and not before"
            )
        self._source = tensors
        #: What goes to several slots where they are tied.
        self._shared: list[tuple[list[Slot], str]] = []
        self._computed: list[list[Slot]] = []
        self._missing: list[str] = []
        self._mismatched: list[str] = []
        self._known: set[str] = set()
        for root in self.roots:
            self._known |= {slot.name for slot in slots_of(root, lambda part: False) if apart(slot.module)}
            tied: dict[int, list[Slot]] = defaultdict(list)
            for slot in slots_of(root, apart):
                tied[id(slot.tensor)].append(slot)
            for slots in tied.values():
                self._place(slots, own)

    def _place(self, slots: list[Slot], own: Callable[[str], bool]) -> None:
        self._known |= {slot.name for slot in slots}
        found = [slot.name for slot in slots if slot.name in self._source and not own(slot.name) and slot.kind != "transient"]
        if not found:
            if all(slot.kind == "transient" or own(slot.name) for slot in slots):
                self._computed.append(slots)
            else:
                tied = f" (the same tensor as {', '.join(slot.name for slot in slots[1:])})" if len(slots) > 1 else ""
                self._missing.append(slots[0].name + tied)
            return
        first, source = found[0], self._source[found[0]]
        for name in found[1:]:
            if not _same_memory(self._source[name], source):
                self._mismatched.append(f"{first} and {name} are one tensor in the model, and two in the source")
        there = slots[0].tensor
        if is_lazy(there):
            raise CapabilityError(
                f"materialize(): {first} of {type(slots[0].module).__name__} has no shape before the first forward pass: build "
                f"the model with layers that know their sizes, as nn.Linear in place of nn.LazyLinear"
            )
        if (there.shape, there.dtype) != (source.shape, source.dtype):
            self._mismatched.append(f"{first} is {_described(there)} in the model, {_described(source)} in the source")
        self._shared.append((slots, first))

    def mismatch(self) -> StateMismatchError | None:
        """What does not fit, all of it."""
        unexpected = [name for name in self._source if name not in self._known]
        if not (self._missing or unexpected or self._mismatched):
            return None
        models = ", ".join(type(root).__name__ for root in self.roots)
        lines = [
            *_lines("missing, the model has them and the source has not", self._missing),
            *_lines("unexpected, the source has them and the model has not", unexpected),
            *_lines("of another shape or dtype", self._mismatched),
        ]
        advice = []
        if self._missing or unexpected:
            advice.append(
                "rename= maps the source's names to the model's, and to None what is not to be taken; own= names what the "
                "model is to make for itself"
            )
        if self._mismatched:
            advice.append(
                "build the model with the source's configuration and in its dtype (torch.set_default_dtype, or .to(dtype) in "
                "the block)"
            )
        return StateMismatchError(
            f"materialize(): the source does not fit {models}\n" + "\n".join(lines) + f"\n{'; '.join(advice)}",
            missing=self._missing,
            unexpected=unexpected,
            mismatched=self._mismatched,
        )

    def carry_out(self, deferred: Deferred) -> Successors:
        """Put everything in its place: what the block's tensors have become."""
        devices = {tensor.device for tensor in self._source.values()}
        device = devices.pop() if len(devices) == 1 else None
        successors = Successors()
        for slots, name in self._shared:
            source, old = self._source[name], slots[0].tensor
            new = _filled(slots, source.detach(), source.requires_grad)
            if deferred.made(old):
                successors.put(name, old, new, shared=True)
        computing = []
        for slots in self._computed:
            old = slots[0].tensor
            if deferred.made(old):
                seen = successors.of(old)
                if seen is None:
                    computing.append(slots)
                else:
                    _filled(slots, seen, old.requires_grad)
            elif device is not None and old.device != device and slots[0].kind != "parameter":
                _filled(slots, old.to(device), old.requires_grad)  # such as a table that numpy made
        for slots, tensor in zip(computing, deferred.compute([slots[0].tensor for slots in computing]), strict=True):
            placed = tensor.to(device) if device is not None else tensor
            old = slots[0].tensor
            successors.put(slots[0].name, old, _filled(slots, placed, old.requires_grad), shared=False)
        return successors


def _filled(slots: list[Slot], tensor: torch.Tensor, requires_grad: bool) -> torch.Tensor:
    """Have all slots one tensor: a parameter, where they have one. That is what they have then."""
    first = slots[0].tensor
    if isinstance(first, nn.Parameter):
        tensor = as_it_was(tensor, first).requires_grad_(requires_grad)
    for slot in slots:
        slot.fill(tensor)
    return tensor


def _same_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one is other or (
        (one.data_ptr(), one.shape, one.stride(), one.dtype) == (other.data_ptr(), other.shape, other.stride(), other.dtype)
    )


def _described(tensor: torch.Tensor) -> str:
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


def _lines(title: str, names: Iterable[str]) -> list[str]:
    listed = list(names)
    if not listed:
        return []
    more = [f"    ... and {len(listed) - _LISTED} more"] if len(listed) > _LISTED else []
    return [f"  {title} ({len(listed)}):", *(f"    {name}" for name in listed[:_LISTED]), *more]
