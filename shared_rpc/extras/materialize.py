"""Models of a user's own class around shared tensors, built without memory for their parameters.

Parameters are moved to torch's meta device as modules register them, and at the end of the block the source's tensors replace
them, by name. Everything else that a constructor creates is real.
"""

from __future__ import annotations

import contextlib
import gc
import os
import re
import traceback
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary

from shared_rpc.client.handle import Lease
from shared_rpc.errors import CapabilityError, ConfigurationError, StateMismatchError

__all__ = ["Rename", "materialize"]

#: A map of names and patterns, or a function: from a source's name to the model's, None to leave the tensor out.
Rename = Mapping[str, str | None] | Callable[[str], str | None]

#: Leases of models, released when the model is collected, or by the owner of the handle.
_kept: weakref.WeakKeyDictionary[nn.Module, Lease[Any]] = weakref.WeakKeyDictionary()
#: Modules filled by a block, which blocks around it leave unchanged.
_filled: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def materialize(
    source: Lease[Any] | nn.Module | Mapping[str, torch.Tensor],
    *,
    rename: Rename | None = None,
    own: Sequence[str] = (),
) -> AbstractContextManager[None]:
    """Build a model around existing tensors: ``with materialize(handle): model = MyModel(config)``.

    In the block, parameters of modules built by this thread are moved to torch's meta device as they are registered, so the
    model's weights use no memory beyond one at a time, and have no values. At the end parameters and persistent buffers are
    those of ``source``, by name: the same memory, no copy. A parameter requires gradients if the source's does. Everything
    else is created by the constructor: non-persistent buffers and the names in ``own``, which are moved to the source's
    device, and tensors in plain attributes.

    A parameter in ``own`` has its values at registration. If the constructor wrote to it since then, its module's
    ``reset_parameters()`` runs again at the end, or the model's ``_init_weights(module)`` if it has this method, like models of
    transformers.

    Every top-level module built in the block takes its tensors from the same source; each tensor of the source must be used by
    at least one of them. Of nested blocks the innermost applies. Other threads are unaffected. Do not await anything in the
    block.

    A model keeps the handle that it was built from, and so its lease, until its end or until the handle is released. Its
    tensors stay valid in any case.

    :param source: a handle of a module or of a dict of tensors, or these themselves.
    :param rename: the model's names of the source's tensors: a dict of names, in which ``*`` stands for one part of a dotted
        name and ``**`` for one or more, in the same order in the new name: ``{"model.layers.*.mlp.**": "blocks.*.ffn.**"}``.
        Whole names take precedence, then the first matching pattern. Or a function of the name. A tensor renamed to None is
        left out; a name without a match is unchanged.
    :param own: names and patterns of the model that the source does not have, such as adapters: memory of this process alone.
    :raises StateMismatchError: at the end, with all names that are missing, unexpected, or of another shape or dtype.
    :raises CapabilityError: in the block, if the constructor needs the values of a parameter or moves one to a device; at the
        end, if it has kept a parameter, or the model a tensor made from one, elsewhere than as a parameter or persistent
        buffer, or if the values of a parameter in ``own`` come from elsewhere.
    :raises ConfigurationError: for an impossible source or ``rename``, and if no model was built.
    :raises StaleHandleError: for a handle that was released.
    """
    return _materializing(source, rename, own)


@contextmanager
def _materializing(
    source: Lease[Any] | nn.Module | Mapping[str, torch.Tensor], rename: Rename | None, own: Sequence[str]
) -> Iterator[None]:
    tensors, owned = _renamed(_tensors_of(source), rename), _matches(own)
    block = _Block(keeps=bool(own))
    token = _block.set(block)
    try:
        # Under inference_mode, the model's tensors would be useless for training.
        with torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext():
            yield
    except (NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        if (refusal := _refusal(error)) is not None:
            raise refusal from error
        raise
    finally:
        _block.reset(token)
    token = _block.set(None)  # what a block around this one must not see
    try:
        with torch.inference_mode(False):
            if _Plan(block, tensors, owned).mismatch() is not None:
                gc.collect()  # an abandoned module that refers to itself exists until it is collected
            roots = _Plan(block, tensors, owned).execute()
            block.check_left(roots)
    finally:
        _block.reset(token)
    for root in roots:
        _filled.update(root.modules())
        if isinstance(source, Lease):
            _kept[root] = source


# The source and its names.


def _tensors_of(source: Any) -> dict[str, torch.Tensor]:
    value = source.value if isinstance(source, Lease) else source
    if isinstance(value, nn.Module):
        # state_dict() would give copies without gradients.
        return {slot.name: slot.tensor for slot in _slots(value) if not slot.transient}
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
    chosen = _renamer(rename)
    renamed: dict[str, torch.Tensor] = {}
    origins: dict[str, str] = {}
    for name, tensor in tensors.items():
        new = chosen(name)
        if new is None:
            continue
        if not isinstance(new, str):
            raise ConfigurationError(f"rename: the function gave {new!r} for {name!r}: a name is a str, None leaves it out")
        if tensor.is_meta:
            raise ConfigurationError(f"materialize(): the source's {name!r} is on the meta device: there is nothing to share")
        if new in renamed and renamed[new] is not tensor:
            raise ConfigurationError(f"rename: {origins[new]!r} and {name!r} of the source are both {new!r} in the model")
        renamed[new], origins[new] = tensor, name
    return renamed


_STARS = re.compile(r"\*\*|\*")


def _renamer(rename: Rename | None) -> Callable[[str], str | None]:
    if rename is None:
        return lambda name: name
    if not isinstance(rename, Mapping):
        if not callable(rename):
            raise ConfigurationError(f"rename={rename!r}: use a dict of names and patterns, or a function of a name")
        return rename
    for name, target in rename.items():
        rule = f"rename={{{name!r}: {target!r}}}"
        if not isinstance(name, str) or not isinstance(target, str | None):
            raise ConfigurationError(f"{rule}: names and patterns are str, or None to leave a tensor out")
        given, taken = len(_STARS.findall(name)), len(_STARS.findall(target or ""))
        if taken > given:
            raise ConfigurationError(
                f"{rule}: the name has {taken} stars and its pattern {given}, and each star of a name stands for what one of "
                f"the pattern stands for"
            )
    patterns = [(_compiled(name), target) for name, target in rename.items() if "*" in name]

    def renamed(name: str) -> str | None:
        if "*" not in name and name in rename:
            return rename[name]
        for pattern, target in patterns:
            if (found := pattern.fullmatch(name)) is not None:
                return target and _with_groups(target, found)
        return name

    return renamed


def _with_groups(target: str, found: re.Match[str]) -> str:
    parts = iter(found.groups())
    return _STARS.sub(lambda _: next(parts), target)


def _matches(patterns: Iterable[str]) -> Callable[[str], bool]:
    if isinstance(patterns, str) or not isinstance(patterns, Iterable):
        raise ConfigurationError(f"own={patterns!r}: use a list of names and patterns, as own=[{patterns!r}]")
    compiled = []
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise ConfigurationError(f"own=[..., {pattern!r}, ...]: names and patterns are str")
        compiled.append(_compiled(pattern))
    return lambda name: any(pattern.fullmatch(name) for pattern in compiled)


def _compiled(pattern: str) -> re.Pattern[str]:
    """Compile a pattern: ``*`` is one part of a dotted name, ``**`` one or more of them; each is a group."""
    return re.compile(re.escape(pattern).replace(r"\*\*", "(.+)").replace(r"\*", r"([^.]+)"))


# The block.

_META = torch.device("meta")
#: The block of this thread.
_block: ContextVar[_Block | None] = ContextVar("materialize", default=None)


class _StandIn(nn.Parameter):
    """A parameter whose version also counts the uses of its ``data``: torch's own count misses such writes."""

    @property
    def data(self) -> torch.Tensor:
        torch.autograd.graph.increment_version(self)
        return torch.Tensor.detach(self)

    @data.setter
    def data(self, values: torch.Tensor) -> None:
        torch.Tensor.data.__set__(self, values)  # type: ignore[attr-defined]  # a descriptor

    def detach(self) -> torch.Tensor:
        return super().detach().as_subclass(_StandIn)  # nn.Parameter(parameter) insists on the type

    def normal_(self, *args: Any, **options: Any) -> torch.Tensor:
        if not self.is_meta:
            return super().normal_(*args, **options)
        torch.autograd.graph.increment_version(self)  # torch's own loads its compiler for the meta device
        return self


class _Block:
    """A block: the modules that its thread builds in it, and their parameters on the meta device.

    :param keeps: True if a parameter's values may be needed at the end. Then the registered parameter is kept (unwritten
        memory costs nothing).
    """

    def __init__(self, keeps: bool) -> None:
        self._keeps = keeps
        self._outer = _block.get()
        self._modules: dict[weakref.ref[nn.Module], None] = {}
        #: The constructor's parameters, with their replacements on the meta device.
        self._stand_ins = WeakTensorKeyDictionary()
        #: The storages of the constructor's parameters.
        self.originals: dict[int, StorageWeakRef] = {}
        #: The storages of parameters on the meta device, with the names at registration.
        self._stored: dict[int, tuple[StorageWeakRef, str]] = {}
        #: By the id of a replacement: the values at registration, and the replacement's version at that time.
        self._values: dict[int, tuple[torch.Tensor, int]] = {}

    def track(self, module: nn.Module) -> None:
        """Register a module being built, unless its constructor has begun in a block around this one."""
        if self._outer is None or not self._outer.knows(module):
            self._modules.setdefault(weakref.ref(module))

    def knows(self, module: nn.Module) -> bool:
        """Return True if a module is built in this block, or one around it."""
        return weakref.ref(module) in self._modules or (self._outer is not None and self._outer.knows(module))

    def roots(self) -> list[nn.Module]:
        """List the live top-level modules, in order of construction."""
        alive = {module: None for reference in self._modules if (module := reference()) is not None}
        parts = {part for module in alive for part in module.children()}
        return [module for module in alive if module not in parts]

    def stand_in(self, parameter: nn.Parameter, label: str) -> nn.Parameter | None:
        """Return the replacement for a parameter at registration: the same one on the meta device."""
        if is_lazy(parameter) or type(parameter.data) is not torch.Tensor or parameter.layout is not torch.strided:
            return None
        meta: nn.Parameter = parameter if parameter.is_meta else self._stand_ins.get(parameter)
        if meta is None:
            values = parameter.detach()
            meta = self._stand_ins[parameter] = _StandIn(values.to(_META), parameter.requires_grad)
            vars(meta).update(vars(parameter))  # marks for optimizers and libraries
            self.originals[_key(parameter)] = StorageWeakRef(parameter.untyped_storage())
            if self._keeps:
                self._values[id(meta)] = values, meta._version
        self._stored.setdefault(_key(meta), (StorageWeakRef(meta.untyped_storage()), label))
        return meta

    def original(self, parameter: torch.Tensor) -> tuple[torch.Tensor | None, int]:
        """Return a parameter's values at registration, if any, and the number of writes to it since then."""
        values, version = self._values.get(id(parameter), (None, 0))
        return values, parameter._version - version

    def check_left(self, roots: list[nn.Module]) -> None:
        """Check that no earlier parameter is left on the meta device.

        :raises CapabilityError: with the names of the parameters.
        """
        self._values.clear()
        self._stand_ins = WeakTensorKeyDictionary()
        for _ in range(2):
            left = list(dict.fromkeys(label for storage, label in self._stored.values() if not storage.expired()))
            if not left:
                return
            gc.collect()
        more = f" and {len(left) - _LISTED} more" if len(left) > _LISTED else ""
        raise CapabilityError(
            f"materialize(): the block that built {', '.join(type(root).__name__ for root in roots)} has kept "
            f"{', '.join(left[:_LISTED])}{more} outside of the model's parameters, and these have no memory: make "
            f"optimizers, caches and copies after the block"
        )


def _refusal(error: Exception) -> CapabilityError | None:
    """Convert an error of torch about a parameter on the meta device; None for any other."""
    if not re.search(r"\bmeta\b|incompatible tensor type", str(error)):
        return None
    torch_folder = os.path.dirname(torch.__file__)
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename not in {__file__, contextlib.__file__} and not frame.filename.startswith(torch_folder)
    ]
    where = f" at {frames[-1].filename}:{frames[-1].lineno} ({frames[-1].line})" if frames else ""
    return CapabilityError(
        f"materialize(): the block{where} needs the values of a parameter, or moves one to a device, and parameters are on the "
        f"meta device without values until the block ends: do that after the block, or in forward(); the source's tensors are "
        f"on their device already ({error})"
    )


def _key(tensor: torch.Tensor) -> int:
    """Return the address of a tensor's storage; 0 if it has none, for example for sparse tensors and subclasses."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):
        return 0


# Registrations, in all threads from the import of this module on. Hooks limited to blocks would break other threads'
# constructors, which iterate over torch's table of hooks.


def _registered_parameter(module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
    if (block := _block.get()) is None or parameter is None:
        return None
    block.track(module)
    return block.stand_in(parameter, f"{name} of {type(module).__name__}")


def _registered(module: nn.Module, name: str, part: object) -> None:
    if (block := _block.get()) is not None:
        block.track(module)


register_module_parameter_registration_hook(_registered_parameter)  # type: ignore[arg-type]  # its result takes the place
register_module_buffer_registration_hook(_registered)
register_module_module_registration_hook(_registered)


# Replacement of the tensors.

#: Maximum number of names of each kind in an error.
_LISTED = 20


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


class _Plan:
    """The assignment of tensors to slots in the models, with all mismatches. Nothing is changed until :meth:`execute`."""

    def __init__(self, block: _Block, tensors: dict[str, torch.Tensor], own: Callable[[str], bool]) -> None:
        self._block = block
        self.roots = block.roots()
        if not self.roots:
            raise ConfigurationError(
                "materialize(): no torch module was built in the block by its own thread, or none of them was kept in a "
                "variable: build the model in the block, and not before"
            )
        self._source = tensors
        devices = {tensor.device for tensor in tensors.values()}
        self._device = devices.pop() if len(devices) == 1 else None
        #: Slots with the name of their tensor in the source; tied slots together.
        self._shared: list[tuple[list[_Slot], str]] = []
        self._made: list[list[_Slot]] = []
        self._missing: list[str] = []
        self._mismatched: list[str] = []
        known = set()
        for root in self.roots:
            tied: dict[int, list[_Slot]] = defaultdict(list)
            for slot in _slots(root):
                known.add(slot.name)
                if slot.module not in _filled:
                    tied[id(slot.tensor)].append(slot)
            for slots in tied.values():
                self._place(slots, own)
        self._unexpected = [name for name in tensors if name not in known]

    def _place(self, slots: list[_Slot], own: Callable[[str], bool]) -> None:
        names = [slot.name for slot in slots if not slot.transient and not own(slot.name)]
        found = [name for name in names if name in self._source]
        if not names:
            self._made.append(slots)
        elif not found:
            tied = f" (the same tensor as {', '.join(slot.name for slot in slots[1:])})" if len(slots) > 1 else ""
            self._missing.append(slots[0].name + tied)
        if not found:
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
        """Return an error with all mismatches; None if there are none."""
        lines = [
            *_lines("missing, the model has them and the source has not", self._missing),
            *_lines("unexpected, the source has them and the model has not", self._unexpected),
            *_lines("of another shape or dtype", self._mismatched),
        ]
        if not lines:
            return None
        if self._missing or self._unexpected:
            lines.append(
                "rename= maps the source's names to the model's, and to None the unused ones; own= names the tensors that the "
                "model makes for itself"
            )
        if self._mismatched:
            lines.append(
                "build the model with the source's configuration and in its dtype (torch.set_default_dtype, or .to(dtype) in "
                "the block)"
            )
        models = ", ".join(type(root).__name__ for root in self.roots)
        return StateMismatchError(
            "\n".join([f"materialize(): the source does not fit {models}", *lines]),
            missing=self._missing,
            unexpected=self._unexpected,
            mismatched=self._mismatched,
        )

    def execute(self) -> list[nn.Module]:
        """Put every tensor in its slots. Returns the models.

        :raises StateMismatchError: with all mismatches, if there are any.
        :raises CapabilityError: if a remaining tensor uses memory that is replaced.
        """
        if (mismatch := self.mismatch()) is not None:
            raise mismatch
        replaced = {*self._block.originals, *(_key(slots[0].tensor) for slots, _ in self._shared)}
        # Before the source's parameters are in place, so that no initialiser can write to them.
        self._initialise(
            [slots for slots in self._made if slots[0].tensor.is_meta and isinstance(slots[0].tensor, nn.Parameter)]
        )
        for slots, name in self._shared:
            _put(slots, self._source[name].detach(), self._source[name].requires_grad)
        for slots in self._made:
            old = getattr(slots[0].module, slots[0].attribute)
            _check(old, slots[0].name, replaced)
            if self._device and not is_lazy(old) and old.device != self._device:
                _put(slots, old.to(self._device), old.requires_grad)
        for root in self.roots:
            for prefix, module in root.named_modules():
                for name, value in vars(module).items():
                    if name not in {"_parameters", "_buffers", "_modules"}:
                        for leaf in tree_leaves(value):
                            _check(leaf, f"{prefix}.{name}".lstrip("."), replaced)
        return self.roots

    def _initialise(self, made: list[list[_Slot]]) -> None:
        """Allocate the model's own parameters, with their values at registration or those of an initialiser.

        :raises CapabilityError: if the constructor wrote others.
        """
        owners: dict[nn.Module, dict[_Slot, int]] = defaultdict(dict)
        for slots in made:
            old = slots[0].tensor
            values, writes = self._block.original(old)
            if values is None or values.shape != old.shape:  # computed from other parameters: no number of writes does it
                values, writes = torch.empty_like(old, device=self._device or "cpu"), -1
            _put(slots, values.to(self._device or values.device, old.dtype, copy=True), old.requires_grad, _StandIn)
            owners[slots[0].module][slots[0]] = writes
        for module, written in owners.items():
            if any(written.values()):
                _run_initialiser(module, written)
        for slots in made:
            _put(slots, torch.Tensor.detach(getattr(slots[0].module, slots[0].attribute)), slots[0].tensor.requires_grad)


def _run_initialiser(module: nn.Module, written: dict[_Slot, int]) -> None:
    """Initialise a module's own parameters.

    :param written: the constructor's number of writes to each. An initialiser with fewer writes is incomplete.
    """
    library = getattr(
        next(iter(written)).root, "_init_weights", None
    )  # of transformers, which creates all values of its models
    reset = partial(library, module) if callable(library) else getattr(module, "reset_parameters", None)
    before = {slot: getattr(module, slot.attribute)._version for slot in written}
    if callable(reset):
        with torch.no_grad():
            reset()
    for slot, writes in written.items():
        done = getattr(module, slot.attribute)._version - before[slot]
        if done != writes and not (done and callable(library)):
            raise CapabilityError(
                f"materialize(): {slot.name} is in own=, and the constructor computes it from other parameters, or writes to "
                f"it outside of reset_parameters() of {type(module).__name__}: do that after the block, or register the "
                f"parameter with its values"
            )


def _put(slots: list[_Slot], tensor: torch.Tensor, requires_grad: bool, kind: type[nn.Parameter] = nn.Parameter) -> None:
    """Put one tensor in all slots, like ``load_state_dict(assign=True)``: some modules depend on that."""
    old = slots[0].tensor
    if isinstance(old, nn.Parameter):
        tensor = kind(tensor, requires_grad)
        vars(tensor).update(vars(old))
    for slot in slots:
        setattr(slot.module, slot.attribute, tensor)


def _check(value: object, path: str, replaced: set[int]) -> None:
    """Check that a buffer or a value in an attribute is an independent tensor, with values."""
    if not isinstance(value, torch.Tensor) or not (value.is_meta or (_key(value) and _key(value) in replaced)):
        return
    found = "on the meta device, where parameters are in the block" if value.is_meta else "the memory of a tensor of the source"
    raise CapabilityError(
        f"materialize(): {path}, of shape {tuple(value.shape)}, is {found}, and the constructor's is gone at the end: have the "
        f"model take it from the parameter in forward() or after the block, make it on a device of your choice, or clone() a "
        f"tensor that is no parameter"
    )


def _same_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one is other or (
        (one.data_ptr(), one.shape, one.stride(), one.dtype) == (other.data_ptr(), other.shape, other.stride(), other.dtype)
    )


def _described(tensor: torch.Tensor) -> str:
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


def _lines(title: str, names: Sequence[str]) -> list[str]:
    more = [f"    ... and {len(names) - _LISTED} more"] if len(names) > _LISTED else []
    return [f"  {title} ({len(names)}):", *(f"    {name}" for name in names[:_LISTED]), *more] if names else []
