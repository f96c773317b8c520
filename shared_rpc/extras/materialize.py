"""Models of a user's own class around shared tensors: their parameters take no memory on the way.

Parameters go to torch's meta device as modules register them, ``torch.nn.init`` does nothing to them, and at the end of the
block the source's tensors take their places, by name. Everything else that a constructor makes is real.
"""

from __future__ import annotations

import functools
import gc
import re
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import ModuleType, TracebackType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from shared_rpc.client.handle import Lease
from shared_rpc.errors import CapabilityError, ConfigurationError, StateMismatchError
from shared_rpc.forks import fork_safe_lock

__all__ = ["Rename", "materialize"]

#: A map of names and patterns, or a function: the model's name of a source's tensor, None to leave the tensor out.
Rename = Mapping[str, str | None] | Callable[[str], str | None]

#: Garbage collections at the end of a block before a tensor that is left counts as kept.
_COLLECTIONS = 5
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

    In the block, parameters of modules that this thread builds go to torch's meta device as they are registered, and
    ``torch.nn.init`` does nothing to them, so the model's weights take no memory beyond one at a time. At the end parameters
    and persistent buffers are those of ``source``, by name: the same memory, no copy. A parameter requires gradients if the
    source's does. Everything else is what the constructor makes: buffers that are not persistent and the names in ``own``,
    which are moved to the source's device, and tensors in plain attributes.

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
        tensor that it computed from one.
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
    # Under inference_mode, the model's tensors would be of no use for training.
    with torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext(), block:
        yield
    with torch.inference_mode(False), _unwatched():
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
#: In-place methods that change what a tensor is, and not its values.
_FORMS = frozenset(
    f"{name}_"
    for name in ("requires_grad", "detach", "t", "transpose", "swapaxes", "swapdims", "squeeze", "unsqueeze", "resize", "set")
)
_MOVES = frozenset({"cuda", "cpu", "xpu", "pin_memory", "share_memory_"})


class _Geometry(NamedTuple):
    """The part of a storage that a tensor sees."""

    offset: int
    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Geometry:
        return cls(int(tensor.storage_offset()), tensor.shape, tensor.stride(), tensor.dtype)

    def over(self, tensor: torch.Tensor, offset: int = 0) -> torch.Tensor:
        """View ``tensor``, which begins at element ``offset``, in the way of this geometry."""
        return tensor.as_strided(self.shape, self.strides, int(tensor.storage_offset()) + self.offset - offset)

    @property
    def span(self) -> tuple[int, int]:
        if 0 in self.shape:
            return self.offset, self.offset
        extent = sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True)) + 1
        return self.offset, self.offset + extent


class _Former(NamedTuple):
    """A parameter as the constructor made it. The storage is not kept alive, but its address is."""

    parameter: weakref.ref[nn.Parameter]
    storage: StorageWeakRef
    geometry: _Geometry
    stand_in: nn.Parameter


class _Block(TorchFunctionMode):
    """A block: the modules that its thread builds in it, and their parameters on the meta device.

    :param keeps: whether a parameter's values may be needed at the end. Then it is kept as the constructor made it (memory
        without a write takes none), and later operations on it are executed at the end.
    """

    def __init__(self, keeps: bool) -> None:
        super().__init__()
        self._keeps = keeps
        self._modules: list[weakref.ref[nn.Module]] = []
        self.formers: defaultdict[int, list[_Former]] = defaultdict(list)
        #: Names of parameters, by the storages of tensors computed from them. The storages are kept: the keys are addresses.
        self._origins: dict[int, tuple[str, torch.UntypedStorage]] = {}
        self._values: dict[int, torch.Tensor] = {}
        #: Later operations on values: key of the result, key of the operand, and the function, None if it is not known.
        self._steps: list[tuple[int, int, Callable[[torch.Tensor], torch.Tensor] | None]] = []
        default = torch.get_default_device()
        #: Device of tensors that code creates on "the parameter's device".
        self._device = torch.device("cpu") if default == _META else default

    def __enter__(self) -> _Block:
        _watch(1)
        _threads.blocks = [*_blocks(), self]
        TorchFunctionMode.__enter__(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        TorchFunctionMode.__exit__(self, kind, error, traceback)
        _threads.blocks = [block for block in _blocks() if block is not self]
        _watch(-1)

    def track(self, module: nn.Module) -> None:
        """Note a module that is being built."""
        self._modules.append(weakref.ref(module))

    def roots(self) -> list[nn.Module]:
        """List the modules that are alive and a part of no other one, in the order of their construction."""
        alive = [module for reference in self._modules if (module := reference()) is not None]
        alive = [module for module in alive if "_modules" in vars(module)]  # a failed constructor leaves an incomplete one
        parts = {id(part) for module in alive for part in module.children()}
        return [module for module in dict.fromkeys(alive) if id(module) not in parts]

    def register(self, module: nn.Module, name: str, parameter: nn.Parameter) -> None:
        """Replace a parameter that a module has registered by one on the meta device, the same one in two modules."""
        if is_lazy(parameter) or type(parameter.data) is not torch.Tensor or parameter.layout is not torch.strided:
            return
        label = f"{name} of {type(module).__name__}"
        if parameter.is_meta:
            self._origins[_key(parameter)] = label, parameter.untyped_storage()
            return
        formers = self.formers[_key(parameter)]
        stand_in = next((former.stand_in for former in formers if former.parameter() is parameter), None)
        if stand_in is None:
            with torch._C.DisableTorchFunction():  # of modes too: this one keeps tensors off the meta device
                values = parameter.detach()
                stand_in = torch.Tensor._make_subclass(type(parameter), values.to(_META), parameter.requires_grad)
            vars(stand_in).update(vars(parameter))  # marks that optimizers and libraries look for
            weak = StorageWeakRef(parameter.untyped_storage())
            formers.append(_Former(weakref.ref(parameter), weak, _Geometry.of(values), stand_in))
            self._origins[_key(stand_in)] = label, stand_in.untyped_storage()
            if self._keeps:
                self._values[_key(stand_in)] = values if values.stride() == stand_in.stride() else values.clone()
        module._parameters[name] = stand_in

    def name_of(self, tensor: torch.Tensor) -> str:
        """Return the name of the parameter that a tensor on the meta device is, or was computed from."""
        name, _ = self._origins.get(_key(tensor), ("a parameter", None))
        return name

    def values_of(self, parameters: Sequence[tuple[str, torch.Tensor]]) -> list[torch.Tensor]:
        """Compute the values that the constructor gave to named parameters.

        :raises CapabilityError: for a parameter that was computed from others.
        """
        needed = {_key(parameter) for _, parameter in parameters}
        for result, read, _ in reversed(self._steps):
            if result in needed:
                needed.add(read)
        values = {key: value for key, value in self._values.items() if key in needed}
        with torch.no_grad():
            for result, read, step in self._steps:
                if step is None:
                    values.pop(result, None)
                elif result in needed and read in values:
                    values[result] = step(values[read])
        for name, parameter in parameters:
            if _key(parameter) not in values:
                raise CapabilityError(
                    f"materialize(): {name} is in own=, and the constructor computes it from other parameters "
                    f"({self.name_of(parameter)}), which have no values in the block: do that after the block"
                )
        return [_Geometry.of(parameter).over(values[_key(parameter)]) for _, parameter in parameters]

    def _later(self, result: int, read: torch.Tensor, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Record an operation on a parameter, if its values may be needed."""
        if not self._keeps:
            return
        geometry, key = _Geometry.of(read), _key(read)
        rest = tree_map_only(torch.Tensor, torch.Tensor.clone, (args[1:], kwargs))
        known = (
            args and args[0] is read and not any(isinstance(leaf, torch.Tensor) and leaf.is_meta for leaf in tree_leaves(rest))
        )

        def step(values: torch.Tensor) -> torch.Tensor:
            made: torch.Tensor = func(geometry.over(values), *rest[0], **rest[1])
            return values if result == key else made

        self._steps.append((result, key, step if known else None))

    def write(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Leave a parameter as it is, and record the write."""
        self._later(_key(args[0]), args[0], func, args, kwargs)
        return args[0]

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Keep parameters on the meta device and everything else off it; see :class:`TorchFunctionMode`."""
        kwargs, name = dict(kwargs or {}), getattr(func, "__name__", "")
        if not args and "tensor" in kwargs:  # as functions of torch.nn.init call their overrides
            args = (kwargs.pop("tensor"),)
        if name == "__get__":
            return func(*args, **kwargs)
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        metas = [tensor for tensor in tensors if tensor.is_meta]
        first = args[0] if args else None
        if name in {"to", "type_as"} and isinstance(first, torch.Tensor):
            device, dtype, *_ = torch._C._nn._parse_to(*args[1:], **{key: kwargs[key] for key in kwargs if key != "copy"})
            if first.is_meta or device == _META:
                func, args = torch.Tensor.to, (first,)
                kwargs = {"dtype": dtype or first.dtype, "copy": kwargs.get("copy", False)}
                metas = [first] if first.is_meta else []
        if not metas:
            result = func(*args, **kwargs)
            if not tensors and isinstance(result, torch.Tensor) and result.is_meta:
                return func(*args, **kwargs | {"device": self._device})
            return result
        if (name.startswith("new_") or name.endswith("_like")) and "empty" not in name:
            asked = kwargs.get("device")
            return func(*args, **kwargs | {"device": self._device if asked in (None, _META, "meta") else asked})
        written = kwargs["out"] if isinstance(kwargs.get("out"), torch.Tensor) else first if _writes(name) else None
        if isinstance(written, torch.Tensor) and not written.is_meta:
            raise CapabilityError(self._refusal(f"writes what it computed from {self.name_of(metas[0])} to another tensor"))
        if name in _MOVES:
            return first
        if written is first and _writes(name) and name not in _FORMS and name != "__set__":
            return self.write(func, args, kwargs)
        return self._computed(func, name, metas, args, kwargs)

    def _computed(self, func: Any, name: str, metas: list[torch.Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Compute shapes: forward passes that a constructor makes, conversions, copies, parametrizations."""
        label = self.name_of(metas[0])
        moved = tree_map_only(torch.Tensor, lambda tensor: tensor.to(_META), (args, kwargs))
        try:
            result = func(*moved[0], **moved[1])
        except (NotImplementedError, RuntimeError, TypeError) as error:
            if "meta" not in str(error).lower():
                raise
            raise CapabilityError(self._refusal(f"asks for the values of {label} ({name})")) from error
        for leaf in tree_leaves(args[0] if name == "__set__" else result):
            if isinstance(leaf, torch.Tensor) and leaf.is_meta and (key := _key(leaf)) not in self._origins:
                self._origins[key] = label, leaf.untyped_storage()
                if self._keeps and name == "__set__":
                    self._values[key] = args[1]
                elif leaf is result:
                    self._later(key, metas[0], func, args, kwargs)
        return result

    def _refusal(self, what: str) -> str:
        return (
            f"materialize(): the constructor {what}, and parameters have no values while the block runs: do that after the "
            f"block, or in forward()"
        )

    def check_left(self, roots: list[nn.Module]) -> None:
        """Check that nothing is left on the meta device.

        :raises CapabilityError: with the names of the parameters.
        """
        self.formers.clear()
        self._steps.clear()
        self._values.clear()
        left: list[str] = []
        for attempt in range(_COLLECTIONS + 1):
            if attempt:
                time.sleep(0.01 * (attempt - 1))
                gc.collect()  # which does nothing where another thread collects just now
            # One use is the one here. A private count of torch, of 2.1 to 2.13; it spares a walk over all objects.
            left = [name for key, (name, _) in self._origins.items() if torch._C._storage_Use_Count(key) > 1]
            if not left:
                return
        names = list(dict.fromkeys(left))
        more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
        raise CapabilityError(
            f"materialize(): the block that built {', '.join(type(root).__name__ for root in roots)} has kept "
            f"{', '.join(names[:_LISTED])}{more}, or a copy, outside of the model's modules and their attributes, and these "
            f"have no memory: make optimizers, caches and copies after the block, and keep what the model needs in its "
            f"attributes"
        )


def _key(tensor: torch.Tensor) -> int:
    """Return the address of a tensor's storage; 0 if it has none, as sparse tensors and subclasses."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):
        return 0


def _writes(name: str) -> bool:
    if not name.startswith("__"):
        return name.endswith("_")
    return name.startswith(("__set", "__i")) and name not in {"__index__", "__int__", "__invert__"}


# Functions of torch that report modules.

_threads = threading.local()
_lock = fork_safe_lock()
_open = 0
#: Functions of torch that were replaced: their owners and names, and what was there.
_replaced: list[tuple[Any, str, Any, Any]] = []


def _blocks() -> list[_Block]:
    return getattr(_threads, "blocks", [])


@contextmanager
def _unwatched() -> Iterator[None]:
    """Hide operations from a block around this one."""
    blocks, _threads.blocks = _blocks(), []
    try:
        yield
    finally:
        _threads.blocks = blocks


def _watch(change: int) -> None:
    """Replace torch's functions by those below while any thread has a block open.

    torch's own registration hooks are no choice: every thread iterates over them, and adding one can break a constructor.
    """
    global _open
    with _lock:
        if _open == 0 and change > 0:
            watched: list[tuple[Any, str, Callable[..., Any]]] = [
                (nn.Module, "__init__", _initialising),
                (nn.Module, "register_parameter", _registering),
            ]
            inits = [(nn.init, name, _filling) for name in vars(nn.init) if name.endswith("_") and not name.startswith("_")]
            for owner, name, around in [*watched, *inits]:
                before = getattr(owner, name)
                replacement = functools.wraps(before)(around(before))
                _replaced.append((owner, name, before, replacement))
                setattr(owner, name, replacement)
        _open += change
        while _open == 0 and _replaced:
            owner, name, before, replacement = _replaced.pop()
            # Other code may have wrapped it meanwhile: then it stays, and finds no block.
            if getattr(owner, name) is replacement:
                setattr(owner, name, before)


def _initialising(before: Callable[..., None]) -> Callable[..., None]:
    def initialise(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        before(self, *args, **kwargs)
        if blocks := _blocks():
            blocks[-1].track(self)

    return initialise


def _registering(before: Callable[..., None]) -> Callable[..., None]:
    def register(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        before(self, name, param)
        if (blocks := _blocks()) and param is not None:
            blocks[-1].register(self, name, param)

    return register


def _filling(before: Callable[..., Any]) -> Callable[..., Any]:
    def fill(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        blocks = _blocks()
        if blocks and isinstance(tensor, torch.Tensor) and tensor.is_meta:
            return blocks[-1].write(before, (tensor, *args), kwargs)
        return before(tensor, *args, **kwargs)

    return fill


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
        """Put every tensor in its place, in plain attributes too. Returns the models."""
        successors = _Successors(self._block)
        for slots, name in self._shared:
            source = self._source[name]
            successors.put(slots, source.detach(), source.requires_grad, seen=True)
        lacking = [slots for slots in self._made if slots[0].tensor.is_meta and slots[0].kind == "parameter"]
        values = self._block.values_of([(slots[0].name, slots[0].tensor) for slots in lacking])
        for slots in self._made:
            old = slots[0].tensor
            if old.is_meta and slots[0].kind == "parameter":
                new = values.pop(0)
            else:
                new = old if is_lazy(old) else successors.of(old, slots[0].name)
            moved = new.to(self._device) if self._device and not is_lazy(new) else new
            if moved is not old:
                successors.put(slots, moved, old.requires_grad)
        for root in self.roots:
            _replace_attributes(root, successors.of)
        return self.roots


class _Successors:
    """The successors of tensors, for other tensors that see their memory."""

    def __init__(self, block: _Block) -> None:
        self._block = block
        self._of: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # the old one too: its id stays its own
        self._over: defaultdict[int, list[tuple[_Geometry, torch.Tensor]]] = defaultdict(list)
        self._formers: dict[int, list[tuple[int, _Former]]] = defaultdict(list)
        for key, formers in block.formers.items():
            for former in formers:
                self._formers[id(former.stand_in)].append((key, former))

    def put(self, slots: list[_Slot], tensor: torch.Tensor, requires_grad: bool, *, seen: bool = False) -> None:
        """Put one tensor in all slots, as ``load_state_dict(assign=True)`` does: some modules take note of it.

        :param seen: whether tensors that see the old memory shall see the new one.
        """
        old = slots[0].tensor
        new = tensor
        if isinstance(old, nn.Parameter):
            new = nn.Parameter(tensor, requires_grad)
            vars(new).update(vars(old))
        for slot in slots:
            setattr(slot.module, slot.attribute, new)
        self._of[id(old)] = old, new
        formers = self._formers[id(old)]
        for _, former in formers:
            if (parameter := former.parameter()) is not None:
                self._of[id(parameter)] = parameter, new
        if seen and (key := _key(old)):
            self._over[key].append((_Geometry.of(old), new))
            for former_key, former in formers:
                self._over[former_key].append((former.geometry, new))

    def of(self, tensor: torch.Tensor, path: str) -> torch.Tensor:
        """Return the successor of a tensor; the tensor itself if it does not see replaced memory.

        :raises CapabilityError: if it has no values, or sees memory that is gone.
        """
        if id(tensor) in self._of:
            return self._of[id(tensor)][1]
        key = _key(tensor)
        for old, new in self._over.get(key, ()) if key else ():
            view = _Geometry.of(tensor)
            (begin, end), (first, last) = view.span, old.span
            base = new if tensor.requires_grad and not tensor.is_leaf else new.detach()
            if first <= begin and end <= last and (new.stride(), view.dtype) == (old.strides, old.dtype):
                return view.over(base, old.offset)
            if begin < last and first < end:
                raise CapabilityError(
                    f"materialize(): {path}, of shape {tuple(tensor.shape)}, sees the memory that the constructor made for a "
                    f"parameter or buffer of the source, and the source's cannot be seen so: have the model make it from the "
                    f"weight when it needs it, or clone it"
                )
        if tensor.is_meta:
            raise CapabilityError(
                f"materialize(): {path}, of shape {tuple(tensor.shape)}, is computed from {self._block.name_of(tensor)}, and "
                f"parameters have no values while the block runs: have the model make it when it needs it, or after the block"
            )
        return tensor


def _replace_attributes(root: nn.Module, replaced: Callable[[torch.Tensor, str], torch.Tensor]) -> None:
    """Replace every tensor in plain attributes of the tree by what ``replaced`` returns: in lists, dicts, tuples, and the
    attributes of objects too. Without a replacement nothing is written: other code may own the container.
    """
    seen: set[int] = set()

    def visit(value: Any, path: str) -> Any:
        if isinstance(value, torch.Tensor):
            return replaced(value, path)
        if id(value) in seen or isinstance(value, (type, ModuleType, nn.Module)) or callable(value):
            return value
        # The third kind is that of torch's own results, as of torch.linalg.qr.
        if type(value) is tuple or (isinstance(value, tuple) and (hasattr(value, "_fields") or hasattr(value, "n_fields"))):
            parts = [visit(part, f"{path}[{number}]") for number, part in enumerate(value)]
            if all(new is old for new, old in zip(parts, value, strict=True)):
                return value
            return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
        seen.add(id(value))
        if isinstance(value, (list, dict)):
            visit_items(value, list(value) if isinstance(value, dict) else range(len(value)), f"{path}[{{}}]")
        elif hasattr(value, "__dict__"):
            visit_items(vars(value), list(vars(value)), f"{path}.{{}}")
        return value

    def visit_items(items: Any, keys: Iterable[Any], path: str) -> None:
        for key in keys:
            old = items[key]
            new = visit(old, path.replace("{}", str(key)))
            if new is not old:
                items[key] = new

    for prefix, module in root.named_modules():
        begin = f"{prefix}." if prefix else ""
        own = [name for name in vars(module) if name not in {"_parameters", "_buffers", "_modules"}]
        visit_items(vars(module), own, f"{begin}{{}}")


def _same_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one is other or (
        (one.data_ptr(), one.shape, one.stride(), one.dtype) == (other.data_ptr(), other.shape, other.stride(), other.dtype)
    )


def _described(tensor: torch.Tensor) -> str:
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


def _lines(title: str, names: Sequence[str]) -> list[str]:
    more = [f"    ... and {len(names) - _LISTED} more"] if len(names) > _LISTED else []
    return [f"  {title} ({len(names)}):", *(f"    {name}" for name in names[:_LISTED]), *more] if names else []
