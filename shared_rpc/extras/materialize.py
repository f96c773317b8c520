"""Models of a user's own class around shared tensors, built without memory for their parameters.

Parameters are moved to torch's meta device as modules register them, and at the end of the block the source's tensors replace
them, by name. Everything else that a constructor creates is real.
"""

from __future__ import annotations

import gc
import itertools
import re
import weakref
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from contextvars import ContextVar
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary

from shared_rpc.client.handle import Lease
from shared_rpc.errors import CapabilityError, ConfigurationError, StateMismatchError

__all__ = ["Rename", "materialize"]

#: A function from a source's name to the model's; None to leave the tensor out.
Rename = Callable[[str], str | None]

#: Leases of models, released when the model is collected, or by the owner of the handle.
_kept: weakref.WeakKeyDictionary[nn.Module, Lease[Any]] = weakref.WeakKeyDictionary()


@contextmanager
def materialize(
    source: Lease[Any] | nn.Module | Mapping[str, torch.Tensor],
    *,
    rename: Rename | None = None,
    own: Sequence[str] = (),
) -> Iterator[None]:
    """Build a model around existing tensors: ``with materialize(handle): model = MyModel(config)``.

    In the block, parameters of modules built by this thread are moved to torch's meta device as they are registered, so the
    model's weights use no memory beyond one at a time, and have no values. At the end parameters and persistent buffers are
    those of ``source``, by name: the same memory, no copy. A parameter requires gradients if the source's does. Everything
    else is created by the constructor: non-persistent buffers and the names in ``own``, which are moved to the source's
    device, and tensors in plain attributes.

    A parameter in ``own`` has its values at registration, and then its module's ``reset_parameters()`` runs, or the model's
    ``_init_weights(module)`` if it has this method, like models of transformers.

    Every top-level module built in the block takes its tensors from the same source; each tensor of the source must be used by
    at least one of them. Blocks do not nest. Other threads are unaffected. Do not await anything in the block.

    A model keeps the handle that it was built from, and so its lease, until its end or until the handle is released. Its
    tensors stay valid in any case.

    :param source: a handle of a module or of a dict of tensors, or these themselves.
    :param rename: a function from a name of the source to the model's; a tensor renamed to None is left out.
    :param own: names and globs (:mod:`fnmatch`) of the model that the source does not have, such as adapters: memory of this
        process alone.
    :raises StateMismatchError: at the end, with all names that are missing, unexpected, or of another shape or dtype.
    :raises CapabilityError: in the block, if the constructor needs the values of a parameter or moves one to a device; at the
        end, if a parameter or a tensor made from one is kept elsewhere than as a parameter or persistent buffer, or if the
        constructor writes to a parameter in ``own`` otherwise.
    :raises ConfigurationError: for an impossible source or ``rename``, in another block, and if no model was built.
    :raises StaleHandleError: for a handle that was released.
    """
    if _block.get() is not None:
        raise ConfigurationError("materialize(): blocks do not nest: attach an inner model after the outer block")
    if isinstance(own, str):
        raise ConfigurationError(f"own={own!r}: use a list of names and globs, as own=[{own!r}]")
    tensors = _tensors_of(source, rename or str)
    block = _Block(keeps=bool(own))
    token = _block.set(block)
    try:
        # Under inference_mode, the model's tensors would be useless for training.
        with torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext():
            yield
    except (NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        if not re.search(r"\bmeta\b|incompatible tensor type", str(error)):
            raise
        raise CapabilityError(
            f"materialize(): the block needs the values of a parameter, or moves one to a device, and parameters are on the "
            f"meta device without values until the block ends: do that after the block, or in forward(); the source's tensors "
            f"are on their device already ({error})"
        ) from error
    finally:
        _block.reset(token)
    roots: list[nn.Module] = []
    with torch.inference_mode(False):
        with suppress(StateMismatchError):
            roots = _fill(block, tensors, own)
        if not roots:
            gc.collect()  # a discarded model that is part of a cycle does not count
            roots = _fill(block, tensors, own)
    block.check_left()
    if isinstance(source, Lease):
        _kept.update(dict.fromkeys(roots, source))


def _tensors_of(source: Any, rename: Rename) -> dict[str, torch.Tensor]:
    """Return the source's tensors by the model's names."""
    value = source.value if isinstance(source, Lease) else source
    if isinstance(value, nn.Module):
        # state_dict() would give copies without gradients.
        value = {slot.name: slot.tensor for slot in _slots(value) if not slot.transient}
    if not isinstance(value, Mapping) or not all(isinstance(tensor, torch.Tensor) for tensor in value.values()):
        raise ConfigurationError(
            f"materialize(): the source is a {type(value).__name__}: use a module, a flat dict of tensors by name, or a handle "
            f"of either; of an object that has a module in it, that module"
        )
    renamed: dict[str, torch.Tensor] = {}
    for name, tensor in value.items():
        if (new := rename(name)) is None:
            continue
        if tensor.is_meta:
            raise ConfigurationError(f"materialize(): the source's {name!r} is on the meta device: there is nothing to share")
        if renamed.setdefault(new, tensor) is not tensor:
            raise ConfigurationError(f"rename: {name!r} and another name of the source are both {new!r} in the model")
    return renamed


# The block.

#: The block of this thread.
_block: ContextVar[_Block | None] = ContextVar("materialize", default=None)


class _StandIn(nn.Parameter):
    """A parameter on the meta device, where torch's own ``normal_`` loads its compiler."""

    def normal_(self, *args: Any, **options: Any) -> torch.Tensor:
        torch.autograd.graph.increment_version(self)
        return self

    def detach(self) -> torch.Tensor:
        return super().detach().as_subclass(_StandIn)  # nn.Parameter(parameter) insists on the type


class _Block:
    """A block: the modules that its thread builds in it, and their parameters on the meta device.

    :param keeps: True if a parameter's values may be needed at the end. Then the registered parameter is kept (unwritten
        memory costs nothing).
    """

    def __init__(self, keeps: bool) -> None:
        self._keeps = keeps
        self.modules: dict[weakref.ref[nn.Module], None] = {}
        #: The constructor's parameters, with their replacements on the meta device.
        self._stand_ins = WeakTensorKeyDictionary()
        #: The replacements, with their names.
        self._registered: list[tuple[weakref.ref[nn.Parameter], str]] = []
        #: By the id of a replacement: the values at registration, and the replacement's version at that time.
        self.values: dict[int, tuple[torch.Tensor, int]] = {}

    def roots(self) -> list[nn.Module]:
        """List the live top-level modules, in order of construction."""
        alive = {module: None for reference in self.modules if (module := reference()) is not None}
        parts = {part for module in alive for part in module.children()}
        return [module for module in alive if module not in parts]

    def stand_in(self, parameter: nn.Parameter, label: str) -> nn.Parameter | None:
        """Return the replacement for a parameter at registration: the same one on the meta device."""
        if parameter.is_meta or type(parameter.data) is not torch.Tensor or parameter.layout is not torch.strided:
            return None
        meta: nn.Parameter | None = self._stand_ins.get(parameter)
        if meta is None:
            values = parameter.detach()
            meta = self._stand_ins[parameter] = _StandIn(values.to("meta"), parameter.requires_grad)
            vars(meta).update(vars(parameter))  # marks for optimizers and libraries
            self._registered.append((weakref.ref(meta), label))
            if self._keeps:
                self.values[id(meta)] = values, meta._version
        return meta

    def check_left(self) -> None:
        """Check that no parameter is left on the meta device.

        :raises CapabilityError: with the names of the parameters.
        """
        self._stand_ins = WeakTensorKeyDictionary()
        if any(reference() is not None for reference, _ in self._registered):
            gc.collect()
        if left := list(dict.fromkeys(label for reference, label in self._registered if reference() is not None)):
            raise CapabilityError(
                f"materialize(): the block has kept {_listed(left)} outside of the model's "
                f"parameters, and these have no memory: make optimizers, caches and copies after the block"
            )


# Registrations, in all threads from the import of this module on. Hooks limited to blocks would break other threads'
# constructors, which iterate over torch's table of hooks.


def _registered(module: nn.Module, name: str, part: object) -> Any:
    if (block := _block.get()) is None:
        return None
    block.modules.setdefault(weakref.ref(module))
    return block.stand_in(part, f"{name} of {type(module).__name__}") if isinstance(part, nn.Parameter) else None


register_module_parameter_registration_hook(_registered)  # its result takes the place
register_module_buffer_registration_hook(_registered)
register_module_module_registration_hook(_registered)


# Replacement of the tensors.


class _Slot(NamedTuple):
    """A name in a model's tree with its tensor. ``transient``: a buffer outside of the module's state."""

    root: nn.Module
    name: str
    module: nn.Module
    attribute: str
    tensor: torch.Tensor
    transient: bool


def _slots(root: nn.Module) -> Iterator[_Slot]:
    """Yield the slots of a tree. A tensor with two names has both."""
    for prefix, module in root.named_modules(remove_duplicate=False):
        for attribute, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None:
                transient = attribute in module._non_persistent_buffers_set
                yield _Slot(root, f"{prefix}.{attribute}".lstrip("."), module, attribute, tensor, transient)


def _fill(block: _Block, tensors: dict[str, torch.Tensor], own: Sequence[str]) -> list[nn.Module]:
    """Put every tensor in its slots in the models that the block built. Nothing is changed if any does not fit.

    :raises StateMismatchError: with all mismatches.
    :raises CapabilityError: if a tensor without values remains.
    """
    roots = block.roots()
    if not roots:
        raise ConfigurationError(
            "materialize(): no torch module was built in the block by its own thread, or none of them was kept in a "
            "variable: build the model in the block, and not before"
        )
    devices = {tensor.device for tensor in tensors.values()}
    device = devices.pop() if len(devices) == 1 else None
    #: Slots of one tensor, with the names that the source has for it.
    shared: list[tuple[list[_Slot], list[str]]] = []
    made, missing, unexpected, mismatched = [], [], dict.fromkeys(tensors), []
    for root in roots:
        tied: dict[int, list[_Slot]] = defaultdict(list)
        for slot in _slots(root):
            unexpected.pop(slot.name, None)
            tied[id(slot.tensor)].append(slot)
        for slots in tied.values():
            names = [slot.name for slot in slots if not slot.transient and not any(fnmatchcase(slot.name, one) for one in own)]
            if not names:
                made.append(slots)
            elif found := [name for name in names if name in tensors]:
                shared.append((slots, found))
            else:
                missing.append(names[0])
    for (slot, *_), (name, *others) in shared:
        there, source = slot.tensor, tensors[name]
        if (there.shape, there.dtype) != (source.shape, source.dtype):
            mismatched.append(f"{name} is {_described(there)} in the model, {_described(source)} in the source")
        if any(tensors[other].data_ptr() != source.data_ptr() for other in others):
            mismatched.append(f"{name} and {', '.join(others)} are one tensor in the model, and two in the source")
    if missing or unexpected or mismatched:
        raise StateMismatchError(
            f"materialize(): the source does not fit {', '.join(type(root).__name__ for root in roots)}\n"
            f"  missing, the model has them and the source has not: {_listed(missing)}\n"
            f"  unexpected, the source has them and the model has not: {_listed(unexpected)}\n"
            f"  of another shape or dtype: {_listed(mismatched)}\n"
            "rename= maps the source's names to the model's, and to None the unused ones; own= names those of the model alone; "
            "for another dtype use torch.set_default_dtype, or .to(dtype) in the block",
            missing=missing,
            unexpected=tuple(unexpected),
            mismatched=mismatched,
        )
    # Before the source's parameters are in place, so that no initialiser can write to them.
    _initialise(block, [slots for slots in made if isinstance(old := slots[0].tensor, nn.Parameter) and old.is_meta], device)
    for slots, (name, *_) in shared:
        _put(slots, tensors[name].detach(), tensors[name].requires_grad)
    for slots in made:
        old = getattr(slots[0].module, slots[0].attribute)
        if device and not old.is_meta:
            _put(slots, old.to(device), old.requires_grad)
    for root in roots:
        for prefix, module in root.named_modules():
            for name, value in {**vars(module), "_buffers": None, **module._buffers}.items():
                for leaf in tree_leaves(value):
                    if isinstance(leaf, torch.Tensor) and leaf.is_meta:
                        raise CapabilityError(
                            f"materialize(): {f'{prefix}.{name}'.lstrip('.')}, of shape {tuple(leaf.shape)}, is on the meta "
                            f"device, where parameters are in the block: have the model take it from the parameter in "
                            f"forward() or after the block, or make it on a device of your choice"
                        )
    return roots


def _initialise(block: _Block, made: list[list[_Slot]], device: torch.device | None) -> None:
    """Allocate the models' own parameters, with their values at registration and those of an initialiser.

    :raises CapabilityError: if the constructor wrote others.
    """
    unknown = []
    owners: dict[nn.Module, list[tuple[_Slot, int]]] = defaultdict(list)
    for slots in made:
        slot, old = slots[0], slots[0].tensor
        values, version = block.values.get(id(old), (old, 0))
        if values.is_meta or values.shape != old.shape:  # computed from other parameters
            unknown.append(slot.name)
            continue
        _put(slots, values.to(device or values.device, old.dtype, copy=True), old.requires_grad)
        owners[slot.module].append((slot, old._version - version))
    for module, written in owners.items():
        before = [getattr(module, slot.attribute)._version for slot, _ in written]
        # transformers creates all values of its models by this method.
        if library := getattr(written[0][0].root, "_init_weights", None):
            torch.no_grad()(library)(module)
        elif reset := getattr(module, "reset_parameters", None):
            torch.no_grad()(reset)()
        for (slot, writes), version in zip(written, before, strict=True):
            if getattr(module, slot.attribute)._version - version < (min(writes, 1) if library else writes):
                unknown.append(slot.name)
    if unknown:
        raise CapabilityError(
            f"materialize(): {_listed(unknown)} of own=: the constructor computes it from other parameters, or "
            f"writes to it outside of its module's reset_parameters(): do that after the block, or register the parameter "
            f"with its values"
        )


def _put(slots: list[_Slot], tensor: torch.Tensor, requires_grad: bool) -> None:
    """Put one tensor in all slots, like ``load_state_dict(assign=True)``: some modules depend on that."""
    old = slots[0].tensor
    if isinstance(old, nn.Parameter):
        tensor = nn.Parameter(tensor, requires_grad)
        vars(tensor).update(vars(old))
    for slot in slots:
        setattr(slot.module, slot.attribute, tensor)


def _described(tensor: torch.Tensor) -> str:
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


def _listed(names: Collection[str]) -> str:
    """List up to 20 names."""
    return ", ".join(itertools.islice(names, 20)) + (f" and {len(names) - 20} more" if len(names) > 20 else "")
