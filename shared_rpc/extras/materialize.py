"""Models of a user's own class around shared tensors: their parameters take no memory on the way.

Parameters go to torch's meta device as modules register them, and at the end of the block the source's tensors take their
places, by name. Everything else that a constructor makes is real.
"""

from __future__ import annotations

import gc
import re
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
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
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.weak import WeakTensorKeyDictionary

from shared_rpc.client.handle import Lease
from shared_rpc.errors import CapabilityError, ConfigurationError, StateMismatchError

__all__ = ["Rename", "materialize"]

#: A map of names and patterns, or a function: the model's name of a source's tensor, None to leave the tensor out.
Rename = Mapping[str, str | None] | Callable[[str], str | None]

#: Leases of models, released when the model is collected, or by the owner of the handle.
_kept: weakref.WeakKeyDictionary[nn.Module, Lease[Any]] = weakref.WeakKeyDictionary()
#: Modules that a block has filled: a block around it leaves them as they are.
_filled: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def materialize(
    source: Lease[Any] | nn.Module | Mapping[str, torch.Tensor],
    *,
    rename: Rename | None = None,
    own: Sequence[str] = (),
) -> AbstractContextManager[None]:
    """Build a model around existing tensors: ``with materialize(handle): model = MyModel(config)``.

    In the block, parameters of modules that this thread builds go to torch's meta device as they are registered, so the
    model's weights take no memory beyond one at a time. At the end parameters and persistent buffers are those of ``source``,
    by name: the same memory, no copy. A parameter requires gradients if the source's does. Everything else is what the
    constructor makes: buffers that are not persistent and the names in ``own``, which are moved to the source's device, and
    tensors in plain attributes.

    Every module that is built in the block and is a part of no other one takes its tensors from the same source; each tensor
    of the source is to be taken by at least one of them. Of blocks within each other the innermost counts. Nothing changes
    for other threads. Do not await anything in the block.

    A model keeps the handle it was built from, and so its lease, for as long as it lives or until the handle is released.
    Its tensors stay valid in any case.

    :param source: a handle of a module or of a dict of tensors, or these themselves.
    :param rename: what the model calls the source's tensors: a dict of names, in which ``*`` stands for one part of a dotted
        name and ``**`` for one or more, and so in the new name, in order: ``{"model.layers.*.mlp.**": "blocks.*.ffn.**"}``.
        Whole names come first, then the first pattern that fits. Or a function of the name. A tensor renamed to None is left
        out; a name that nothing fits stays.
    :param own: names and patterns of the model that the source does not have, such as adapters: memory of this process alone.
    :raises StateMismatchError: at the end, with all names that are missing, unexpected, or of another shape or dtype.
    :raises CapabilityError: in the block, if the constructor needs the values of a parameter; at the end, if it has kept a
        parameter, or a tensor computed from one, elsewhere than as a parameter or persistent buffer.
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
        # Under inference_mode, the model's tensors would be of no use for training.
        with torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext(), block:
            yield
    finally:
        _block.reset(token)
    token = _block.set(None)  # what a block around this one must not see
    try:
        with torch.inference_mode(False):
            plan = _Plan(block, tensors, owned)
            if plan.mismatch() is not None:
                # An abandoned module that refers to itself exists until it is collected.
                del plan
                gc.collect()
                plan = _Plan(block, tensors, owned)
                if (mismatch := plan.mismatch()) is not None:
                    raise mismatch
            roots = plan.execute()
            del plan  # it keeps the tensors from before
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
        return {slot.name: slot.tensor for slot in _slots(value, lambda part: False) if slot.kind != "transient"}
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
            raise ConfigurationError(
                f"materialize(): the source's {name!r} is on the meta device, so there is nothing to share"
            )
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
        if not isinstance(name, str) or not isinstance(target, str | None):
            raise ConfigurationError(
                f"rename={{{name!r}: {target!r}}}: names and patterns are str, or None to leave a tensor out"
            )
        given, taken = len(_STARS.findall(name)), len(_STARS.findall(target or ""))
        if taken > given:
            raise ConfigurationError(
                f"rename={{{name!r}: {target!r}}}: the name has {taken} stars and its pattern {given}, and each star of a name "
                f"stands for what one of the pattern stands for"
            )
    patterns = [(_compiled(name), target) for name, target in rename.items() if "*" in name]

    def renamed(name: str) -> str | None:
        if "*" not in name and name in rename:
            return rename[name]
        for pattern, target in patterns:
            if (found := pattern.fullmatch(name)) is not None:
                if target is None:
                    return None
                pieces = _STARS.split(target)
                return "".join(
                    piece + part for piece, part in zip(pieces, [*found.groups()[: len(pieces) - 1], ""], strict=True)
                )
        return name

    return renamed


def _matches(patterns: Iterable[str]) -> Callable[[str], bool]:
    if isinstance(patterns, str) or not isinstance(patterns, Iterable):
        raise ConfigurationError(f"own={patterns!r}: use a list of names and patterns, as own=[{patterns!r}]")
    patterns = list(patterns)
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise ConfigurationError(f"own=[..., {pattern!r}, ...]: names and patterns are str")
    compiled = [_compiled(pattern) for pattern in patterns]
    return lambda name: any(pattern.fullmatch(name) for pattern in compiled)


def _compiled(pattern: str) -> re.Pattern[str]:
    """Compile a pattern: ``*`` is one part of a dotted name, ``**`` one or more of them; each is a group."""
    pieces = [re.escape(piece) for piece in _STARS.split(pattern)]
    stars = ["(.+)" if star == "**" else r"([^.]+)" for star in _STARS.findall(pattern)]
    return re.compile("".join(piece + star for piece, star in zip(pieces, [*stars, ""], strict=True)))


# The block.

_META = torch.device("meta")
_MOVES = frozenset({"cuda", "cpu", "xpu", "pin_memory", "share_memory_"})
#: In-place methods that change what a tensor is, and not its values.
_FORMS = frozenset({"requires_grad_", "detach_", "t_", "transpose_", "squeeze_", "unsqueeze_", "resize_", "set_"})
_CASTS = frozenset({"to", "type", "half", "bfloat16", "float", "double", "__set__"})
#: The block of this thread.
_block: ContextVar[_Block | None] = ContextVar("materialize", default=None)


class _Stored(NamedTuple):
    """A storage on the meta device. It is not kept alive, but its address is."""

    storage: StorageWeakRef
    #: Name of the parameter that it is of, or that it was computed from.
    label: str
    #: Address of the storage of the parameter of which it is another version; 0 if it was computed.
    origin: int


class _Block(TorchFunctionMode):
    """A block: the modules that its thread builds in it, and their parameters on the meta device.

    :param keeps: whether a parameter's values may be needed at the end. Then it is kept as the constructor registered it
        (memory without a write takes none), and later writes are done at the end.
    """

    def __init__(self, keeps: bool) -> None:
        super().__init__()
        self._keeps = keeps
        self._outer = _block.get()
        self._modules: dict[weakref.ref[nn.Module], None] = {}
        #: The parameters that the constructor made, with those on the meta device in their places.
        self._stand_ins = WeakTensorKeyDictionary()
        #: The storages of parameters that the constructor made.
        self.originals: dict[int, StorageWeakRef] = {}
        self._stored: dict[int, _Stored] = {}
        self._values: dict[int, torch.Tensor] = {}
        self._writes: defaultdict[int, list[Callable[[torch.Tensor], torch.Tensor | None]]] = defaultdict(list)
        default = torch.get_default_device()
        #: Device of tensors that code creates on "the parameter's device".
        self._device = torch.device("cpu") if default == _META else default

    def track(self, module: nn.Module) -> None:
        """Note a module that is being built, unless its constructor has begun in a block around this one."""
        if self._outer is None or not self._outer.knows(module):
            self._modules.setdefault(weakref.ref(module))

    def knows(self, module: nn.Module) -> bool:
        """Return whether a module is built in this block, or one around it."""
        return weakref.ref(module) in self._modules or (self._outer is not None and self._outer.knows(module))

    def roots(self) -> list[nn.Module]:
        """List the modules that are alive and a part of no other one, in the order of their construction."""
        alive = {module: None for reference in self._modules if (module := reference()) is not None}
        parts = {part for module in alive for part in module.children()}
        return [module for module in alive if module not in parts]

    def stand_in(self, parameter: nn.Parameter, label: str) -> nn.Parameter | None:
        """Return the parameter that a module registers in place of one: the same one on the meta device."""
        if is_lazy(parameter) or type(parameter.data) is not torch.Tensor or parameter.layout is not torch.strided:
            return None
        if parameter.is_meta:
            self._note(parameter, label, 0)
            return None
        if parameter not in self._stand_ins:
            with torch._C.DisableTorchFunction():  # of modes too: this one keeps tensors off the meta device
                values = parameter.detach()
                meta = torch.Tensor._make_subclass(type(parameter), values.to(_META), parameter.requires_grad)
            vars(meta).update(vars(parameter))  # marks that optimizers and libraries look for
            self._stand_ins[parameter] = meta
            self.originals[_key(parameter)] = StorageWeakRef(parameter.untyped_storage())
            self._note(meta, label, _key(meta))
            if self._keeps:
                self._values[_key(meta)] = values if values.stride() == meta.stride() else values.clone()
        stand_in: nn.Parameter = self._stand_ins[parameter]
        return stand_in

    def _note(self, tensor: torch.Tensor, label: str, origin: int) -> None:
        if _key(tensor) not in self._stored:
            self._stored[_key(tensor)] = _Stored(StorageWeakRef(tensor.untyped_storage()), label, origin)

    def label_of(self, tensor: torch.Tensor) -> str:
        """Return the name of the parameter that a tensor on the meta device is, or was computed from."""
        stored = self._stored.get(_key(tensor))
        return stored.label if stored else "a parameter"

    def values_of(self, name: str, parameter: torch.Tensor) -> torch.Tensor:
        """Compute the values that the constructor gave to a parameter.

        :raises CapabilityError: if it was computed from others.
        """
        stored = self._stored.get(_key(parameter))
        values = self._values.pop(stored.origin, None) if stored else None
        if stored is not None and values is not None:
            with torch.no_grad():
                for write in self._writes[stored.origin]:
                    if (values := write(values)) is None:
                        break
        if values is None or values.shape != parameter.shape:
            raise CapabilityError(
                f"materialize(): {name} is in own=, and the constructor computes it from other parameters "
                f"({self.label_of(parameter)}), which have no values in the block: do that after the block"
            )
        return values.to(parameter.dtype)

    def _later(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], origin: int) -> None:
        """Do a write to a parameter at the end."""
        written, rest = args[0], tree_map_only(torch.Tensor, torch.Tensor.clone, (args[1:], kwargs))
        view = written.shape, written.stride(), written.storage_offset()
        known = not any(isinstance(leaf, torch.Tensor) and leaf.is_meta for leaf in tree_leaves(rest))

        def write(values: torch.Tensor) -> torch.Tensor | None:
            func(values.as_strided(*view), *rest[0], **rest[1])
            return values

        self._writes[origin].append(write if known else lambda values: None)

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Keep parameters on the meta device and everything else off it; see :class:`TorchFunctionMode`."""
        kwargs, name = dict(kwargs or {}), getattr(func, "__name__", "")
        if not args and "tensor" in kwargs:  # as functions of torch.nn.init call their overrides
            args = (kwargs.pop("tensor"),)
        if name == "__get__":
            return func(*args, **kwargs)
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        first = args[0] if args else None
        if name in {"to", "type_as"} and isinstance(first, torch.Tensor):
            device, dtype, *_ = torch._C._nn._parse_to(*args[1:], **{key: kwargs[key] for key in kwargs if key != "copy"})
            if first.is_meta or device == _META:
                func, args, tensors = torch.Tensor.to, (first,), [first]
                kwargs = {"dtype": dtype or first.dtype, "copy": kwargs.get("copy", False)}
        metas = [tensor for tensor in tensors if tensor.is_meta]
        if not metas:
            result = func(*args, **kwargs)
            if not tensors and isinstance(result, torch.Tensor) and result.is_meta:
                return func(*args, **kwargs | {"device": self._device})
            return result
        if (name.startswith("new_") or name.endswith("_like")) and "empty" not in name:
            asked = kwargs.get("device")
            return func(*args, **kwargs | {"device": self._device if asked in (None, _META, "meta") else asked})
        if name in _MOVES:
            return first
        label, writes = self.label_of(metas[0]), (name.endswith("_") and not name.startswith("__")) or name in _INDEXED
        written = kwargs["out"] if isinstance(kwargs.get("out"), torch.Tensor) else first if writes else None
        if isinstance(written, torch.Tensor) and not written.is_meta:
            raise CapabilityError(_refusal(f"writes what it computed from {label} to another tensor"))
        stored = self._stored.get(_key(metas[0]))
        origin = stored.origin if stored else 0
        if written is first and writes and name not in _FORMS:
            if self._keeps:
                self._later(func, args, kwargs, origin)
            return first
        moved = tree_map_only(torch.Tensor, lambda tensor: tensor.to(_META), (args, kwargs))
        try:
            result = func(*moved[0], **moved[1])
        except (NotImplementedError, RuntimeError, TypeError) as error:
            if "meta" not in str(error).lower():
                raise
            raise CapabilityError(_refusal(f"asks for the values of {label} ({name})")) from error
        if name == "__set__" and not args[1].is_meta:
            origin = _key(args[0])
            if self._keeps:
                self._values[origin] = args[1]
        for leaf in tree_leaves(first if name == "__set__" else result):
            if isinstance(leaf, torch.Tensor) and leaf.is_meta:
                self._note(leaf, label, origin if name in _CASTS else 0)
        return result

    def check_left(self, roots: list[nn.Module]) -> None:
        """Check that nothing is left on the meta device.

        :raises CapabilityError: with the names of the parameters.
        """
        self._values.clear()
        self._writes.clear()
        self._stand_ins = WeakTensorKeyDictionary()
        for _ in range(2):
            left = list(dict.fromkeys(stored.label for stored in self._stored.values() if not stored.storage.expired()))
            if not left:
                return
            gc.collect()
        more = f" and {len(left) - _LISTED} more" if len(left) > _LISTED else ""
        raise CapabilityError(
            f"materialize(): the block that built {', '.join(type(root).__name__ for root in roots)} has kept "
            f"{', '.join(left[:_LISTED])}{more}, or a copy, outside of the model's parameters, and these have no memory: make "
            f"optimizers, caches and copies after the block"
        )


#: Functions that write to their first tensor, besides those whose names end with an underscore.
_INDEXED = frozenset({"__setitem__", *(f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "pow", "and", "or", "xor"))})


def _refusal(what: str) -> str:
    return (
        f"materialize(): the constructor {what}, and parameters have no values while the block runs: do that after the block, "
        f"or in forward()"
    )


def _key(tensor: torch.Tensor) -> int:
    """Return the address of a tensor's storage; 0 if it has none, as sparse tensors and subclasses."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):
        return 0


# Registrations, in all threads from the import of this module on. Hooks that came and went with blocks would break other
# threads' constructors, which iterate over torch's table of hooks.


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


# Putting the tensors in their places.

#: Names that an error lists, of each kind.
_LISTED = 20


class _Slot(NamedTuple):
    """A name of a module's tree with its tensor. ``transient``: a buffer that is no part of the module's state."""

    name: str
    module: nn.Module
    attribute: str
    kind: str
    tensor: torch.Tensor


def _slots(root: nn.Module, apart: Callable[[nn.Module], bool]) -> Iterator[_Slot]:
    """Yield the slots of a tree, those of modules that are ``apart`` left out. A tensor with two names has both."""
    for prefix, module in root.named_modules(remove_duplicate=False):
        if apart(module):
            continue
        begin = f"{prefix}." if prefix else ""
        for name, parameter in module._parameters.items():
            if parameter is not None:
                yield _Slot(begin + name, module, name, "parameter", parameter)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                kind = "transient" if name in module._non_persistent_buffers_set else "buffer"
                yield _Slot(begin + name, module, name, kind, buffer)


class _Plan:
    """A plan of the tensors' places in the models, with all that does not fit. Nothing is changed until :meth:`execute`."""

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
        self._known: set[str] = set()
        for root in self.roots:
            self._known |= {slot.name for slot in _slots(root, lambda part: False) if slot.module in _filled}
            tied: dict[int, list[_Slot]] = defaultdict(list)
            for slot in _slots(root, _filled.__contains__):
                tied[id(slot.tensor)].append(slot)
            for slots in tied.values():
                self._place(slots, own)

    def _place(self, slots: list[_Slot], own: Callable[[str], bool]) -> None:
        self._known |= {slot.name for slot in slots}
        found = [slot.name for slot in slots if slot.name in self._source and not own(slot.name) and slot.kind != "transient"]
        if not found:
            if all(slot.kind == "transient" or own(slot.name) for slot in slots):
                self._made.append(slots)
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
        """Return an error with all that does not fit; None if everything fits."""
        unexpected = [name for name in self._source if name not in self._known]
        if not (self._missing or unexpected or self._mismatched):
            return None
        lines = [
            *_lines("missing, the model has them and the source has not", self._missing),
            *_lines("unexpected, the source has them and the model has not", unexpected),
            *_lines("of another shape or dtype", self._mismatched),
        ]
        advice = []
        if self._missing or unexpected:
            advice.append(
                "rename= maps the source's names to the model's, and to None the unused ones; own= names the tensors that the "
                "model makes for itself"
            )
        if self._mismatched:
            advice.append(
                "build the model with the source's configuration and in its dtype (torch.set_default_dtype, or .to(dtype) in "
                "the block)"
            )
        models = ", ".join(type(root).__name__ for root in self.roots)
        return StateMismatchError(
            f"materialize(): the source does not fit {models}\n" + "\n".join(lines) + f"\n{'; '.join(advice)}",
            missing=self._missing,
            unexpected=unexpected,
            mismatched=self._mismatched,
        )

    def execute(self) -> list[nn.Module]:
        """Put every tensor in its place. Returns the models.

        :raises CapabilityError: if a tensor that stays sees memory that is replaced.
        """
        replaced = set(self._block.originals)
        for slots, name in self._shared:
            replaced.add(_key(slots[0].tensor))
            self._put(slots, self._source[name].detach(), self._source[name].requires_grad)
        for slots in self._made:
            old = slots[0].tensor
            if isinstance(old, nn.Parameter) and old.is_meta:
                new = self._block.values_of(slots[0].name, old)
            else:
                self._check(old, slots[0].name, replaced)
                new = old
            moved = new.to(self._device) if self._device and not is_lazy(new) else new
            if moved is not old:
                self._put(slots, moved, old.requires_grad)
        for root in self.roots:
            for prefix, module in root.named_modules():
                for name, value in vars(module).items():
                    if name not in {"_parameters", "_buffers", "_modules"}:
                        for leaf in tree_leaves(value):
                            self._check(leaf, f"{prefix}.{name}".lstrip("."), replaced)
        return self.roots

    def _put(self, slots: list[_Slot], tensor: torch.Tensor, requires_grad: bool) -> None:
        """Put one tensor in all slots, as ``load_state_dict(assign=True)`` does: some modules take note of it."""
        old = slots[0].tensor
        if isinstance(old, nn.Parameter):
            tensor = nn.Parameter(tensor, requires_grad)
            vars(tensor).update(vars(old))
        for slot in slots:
            setattr(slot.module, slot.attribute, tensor)

    def _check(self, value: object, path: str, replaced: set[int]) -> None:
        """Check that a buffer or a value in an attribute is a tensor of its own, with values."""
        if not isinstance(value, torch.Tensor) or not (value.is_meta or (_key(value) and _key(value) in replaced)):
            return
        found = f"computed from {self._block.label_of(value)}" if value.is_meta else "the memory of a tensor of the source"
        raise CapabilityError(
            f"materialize(): {path}, of shape {tuple(value.shape)}, is {found}, and the constructor's is gone at the end: have "
            f"the model take it from the parameter in forward() or after the block, or clone() what is no parameter"
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
