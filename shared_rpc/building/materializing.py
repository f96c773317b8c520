"""``materialize``: a user's own class around shared tensors, with no memory taken on the way."""

from __future__ import annotations

import gc
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn

from shared_rpc.building.construction import Construction
from shared_rpc.building.deferred import Deferred
from shared_rpc.building.placing import Plan
from shared_rpc.building.renaming import Rename, matches, renamer
from shared_rpc.building.slots import replace_attributes, state_of
from shared_rpc.building.successors import Successors, as_it_was
from shared_rpc.errors import CapabilityError, ConfigurationError
from shared_rpc.handle import Lease

__all__ = ["materialize"]

#: Leases of models: given back when the model has gone, or by who has the handle.
_kept: weakref.WeakKeyDictionary[nn.Module, Lease[Any]] = weakref.WeakKeyDictionary()
#: Modules that a block has filled: one around it leaves them as they are.
_filled: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def materialize(
    source: Lease[Any] | nn.Module | Mapping[str, torch.Tensor],
    *,
    rename: Rename | None = None,
    own: Sequence[str] = (),
) -> AbstractContextManager[None]:
    """Around the construction of a model: ``with materialize(handle): model = MyModel(config)``.

    In the block this thread makes tensors on torch's meta device, so the model takes no memory, however large it is. At the
    end parameters and persistent buffers are those of ``source``, by name: the same memory, no copy. A parameter requires
    gradients if the source's does. What the source is not asked for is computed as the constructor has it, and put on the
    source's device: buffers that are not persistent, tensors in plain attributes, and the names in ``own``.

    Every module that is built in the block and is a part of no other one takes its tensors from the same source; a tensor
    of the source is to be taken by one of them at least. Of blocks within each other the innermost counts. Nothing changes
    for other threads. Do not await anything in the block.

    A model keeps the handle it was built from, and so its lease, for as long as it lives or until the handle is released.
    Its tensors stay valid in any case.

    :param source: a handle of a module or of a dict of tensors, or these themselves.
    :param rename: what the model calls the source's tensors: a dict of names, in which ``*`` stands for one part of a dotted
        name and ``**`` for one or more, and so in the new name, in order: ``{"model.layers.*.mlp.**": "blocks.*.ffn.**"}``.
        Whole names come first, then the first pattern that fits. Or a function of the name. What is renamed to None is left
        out; what nothing fits keeps its name.
    :param own: names and patterns of the model that the source does not have, such as adapters: memory of this process alone.
    :raises StateMismatchError: at the end, with all names that are missing, unexpected, or of another shape or dtype.
    :raises CapabilityError: at the end, if the block has kept a tensor where it cannot be put right.
    :raises ConfigurationError: for a source or a ``rename`` that cannot be, and if no model was built.
    :raises StaleHandleError: for a handle that was released.
    """
    return _materializing(source, rename, own)


@contextmanager
def _materializing(
    source: Lease[Any] | nn.Module | Mapping[str, torch.Tensor], rename: Rename | None, own: Sequence[str]
) -> Iterator[None]:
    tensors, owned = _renamed(_tensors_of(source), rename), matches(own)
    deferred, construction = Deferred(), Construction()
    with construction, deferred:
        yield
    with torch.inference_mode(False):
        roots, successors = _fill(construction, tensors, owned, deferred)
        _settle(roots, successors, deferred)
    for root in roots:
        _filled.update(root.modules())
        if isinstance(source, Lease):
            _kept[root] = source


def _tensors_of(source: Any) -> dict[str, torch.Tensor]:
    value = source.value if isinstance(source, Lease) else source
    if isinstance(value, nn.Module):
        return state_of(value)
    if not isinstance(value, Mapping):
        raise ConfigurationError(
            f"materialize(): the source is a {type(value).__name__}: use a module, a dict of tensors, or a handle of either; "
            f"of an object that has a module in it, that module"
        )
    for name, tensor in value.items():
        if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
            raise ConfigurationError(
                f"materialize(): the source has a {type(tensor).__name__} at {name!r}: use a flat dict of tensors by name"
            )
    return dict(value)


def _renamed(tensors: dict[str, torch.Tensor], rename: Rename | None) -> dict[str, torch.Tensor]:
    """The tensors by the model's names.

    :raises ConfigurationError: if two of them have one name, or one has no memory.
    """
    chosen = renamer(rename)
    renamed: dict[str, torch.Tensor] = {}
    origins: dict[str, str] = {}
    for name, tensor in tensors.items():
        new = chosen(name)
        if new is None:
            continue
        if not isinstance(new, str):
            raise ConfigurationError(f"rename: the function gave {new!r} for {name!r}: a name is a str, None leaves it out")
        if tensor.is_meta:
            raise ConfigurationError(
                f"materialize(): the source's {name!r} is on the meta device, so there is nothing to share"
            )
        if new in renamed and renamed[new] is not tensor:
            raise ConfigurationError(f"rename: {origins[new]!r} and {name!r} of the source are both {new!r} in the model")
        renamed[new], origins[new] = tensor, name
    return renamed


def _fill(
    construction: Construction, tensors: dict[str, torch.Tensor], own: Callable[[str], bool], deferred: Deferred
) -> tuple[list[nn.Module], Successors]:
    """Give the models of the block their tensors: these models, and what has become of what they had."""

    def plan() -> Plan:
        return Plan(construction.roots(), tensors, own, _filled.__contains__)

    planned = plan()
    if planned.mismatch() is not None:
        # A module that was thrown away is there until it is collected, if it refers to itself.
        del planned
        gc.collect()
        planned = plan()
        mismatch = planned.mismatch()
        if mismatch is not None:
            raise mismatch
    return planned.roots, planned.carry_out(deferred)


def _settle(roots: list[nn.Module], successors: Successors, deferred: Deferred) -> None:
    """Put right what else the block has made and is in use, so that nothing is left on the meta device."""
    if not deferred.in_use():
        return
    _put_right(roots, successors, deferred)
    if not deferred.in_use():
        return
    gc.collect()
    if deferred.in_use():
        raise CapabilityError(_left(deferred, [type(root).__name__ for root in roots]))


def _put_right(roots: list[nn.Module], successors: Successors, deferred: Deferred) -> None:
    """The tensors in plain attributes: what they saw has become something else, or they are computed."""
    found: dict[int, torch.Tensor] = {}
    for root in roots:
        replace_attributes(root, lambda tensor: found.setdefault(id(tensor), tensor) if deferred.made(tensor) else tensor)
    there = {key: seen for key, tensor in found.items() if (seen := successors.of(tensor)) is not None}
    alone = [tensor for key, tensor in found.items() if key not in there]
    for old, new in zip(alone, deferred.compute(alone), strict=True):
        there[id(old)] = as_it_was(new, old)
    for root in roots:
        replace_attributes(root, lambda tensor: there.get(id(tensor), tensor))


def _left(deferred: Deferred, models: list[str]) -> str:
    shapes: dict[str, int] = defaultdict(int)
    for tensor in deferred.alive():
        shapes[f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"] += 1
    listed = ", ".join(f"{count} x {shape}" if count > 1 else shape for shape, count in list(shapes.items())[:10])
    return (
        f"materialize(): the block that built {', '.join(models)} has made tensors that are kept outside of the model's "
        f"modules and their attributes ({listed or 'by an autograd graph'}), and they have no memory: make optimizers, caches "
        f"and inputs after the block, and keep what the model needs in its attributes"
    )
