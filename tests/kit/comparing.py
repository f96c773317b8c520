"""Comparison of two objects, bit for bit: classes, attributes, memory layout, and what is one object in several places."""

from __future__ import annotations

import enum
import functools
import hashlib
import re
import types
import weakref
from collections.abc import Iterator
from typing import Any

import numpy
import torch

_ATOMS = (
    bool,
    int,
    str,
    bytes,
    type(None),
    type(Ellipsis),
    type(NotImplemented),
    range,
    slice,
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
    torch.Size,
    re.Pattern,
    enum.Enum,
    types.ModuleType,
)
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, type(len), types.MethodDescriptorType, types.WrapperDescriptorType)
#: Keyed by numbers that each process gives: only what they hold is compared.
#: transformers' hash of a text, torch's address of a function and number of a traced graph: others each time.
_OF_THE_PROCESS = r"_original_object_hash$|_torchdynamo_wrapper_id$|\._graph\._co_fields"
_HOOKS = re.compile(r"_(non_persistent|.*hooks.*|is_full_backward_hook)")


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a strided tensor's elements, in the order of its indices, on the host."""
    with torch.no_grad():
        plain = tensor.detach().as_subclass(torch.Tensor).resolve_conj().resolve_neg()
        plain = plain.to("cpu") if plain.device.type != "cpu" else plain
        return plain.contiguous().reshape(-1).view(torch.uint8).clone()


def _is_wrapper(tensor: torch.Tensor) -> bool:
    return torch.utils._python_dispatch.is_traceable_wrapper_subclass(tensor)


def _tensor_facts(tensor: torch.Tensor) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "dtype": tensor.dtype,
        "shape": None if tensor.is_nested else tuple(tensor.shape),
        "device": tensor.device.type,
        "layout": tensor.layout,
        "requires_grad": tensor.requires_grad,
        "is_leaf": tensor.is_leaf,
        "is_inference": tensor.is_inference(),
    }
    if tensor.layout is torch.strided and not tensor.is_nested and not _is_wrapper(tensor):
        facts["strides"] = tuple(tensor.stride())
        facts["offset"] = tensor.storage_offset()
        facts["conjugated"] = tensor.is_conj()
        facts["negated"] = tensor.is_neg()
        facts["bytes of the storage"] = tensor.untyped_storage().nbytes()
    return facts


def _parts(tensor: torch.Tensor) -> list[tuple[str, Any]] | None:
    """What a tensor that is no plain memory is made of; None for one that is."""
    if _is_wrapper(tensor):
        names, context = tensor.__tensor_flatten__()
        return [(name, getattr(tensor, name)) for name in names] + [("context", context)]
    if tensor.is_nested:
        return [(f"[{index}]", part) for index, part in enumerate(tensor.detach().unbind())]
    if tensor.layout is torch.sparse_coo:
        return [("indices", tensor.detach()._indices()), ("values", tensor.detach()._values())]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [("crow", tensor.crow_indices()), ("col", tensor.col_indices()), ("values", tensor.detach().values())]
    if tensor.is_quantized:
        parts: list[tuple[str, Any]] = [("int_repr", tensor.int_repr()), ("qscheme", str(tensor.qscheme()))]
        if tensor.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric):
            return [*parts, ("scale", tensor.q_scale()), ("zero point", tensor.q_zero_point())]
        return [*parts, ("scales", tensor.q_per_channel_scales()), ("zero points", tensor.q_per_channel_zero_points())]
    return None


def _slots(value: Any) -> Iterator[tuple[str, Any]]:
    for base in type(value).__mro__:
        slots = base.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                yield f".{name}", getattr(value, name)


def _own(value: Any) -> list[tuple[str, Any]]:
    """The attributes of an object, what a container holds, and for one that has neither what its reduction says."""
    found: list[tuple[str, Any]] = []
    if isinstance(value, dict):
        found.append((" keys", [key if isinstance(key, _ATOMS) else repr(key) for key in value]))
        found.extend((f"[{key!r}]", item) for key, item in value.items())
    elif isinstance(value, (list, tuple)):
        found.extend((f"[{index}]", item) for index, item in enumerate(value))
    elif isinstance(value, (set, frozenset)):
        found.append((" items", sorted(map(repr, value))))
    attributes = getattr(value, "__dict__", None)
    if isinstance(attributes, dict):
        for name, item in attributes.items():
            if isinstance(value, torch.nn.Module) and _HOOKS.fullmatch(name) and isinstance(item, dict):
                found.append((f".{name}", list(item.values())))
            else:
                found.append((f".{name}", item))
        found.sort(key=lambda part: part[0])
    found.extend(_slots(value))
    return found


def _reduction(value: Any) -> list[tuple[str, Any]]:
    try:
        reduced = value.__reduce_ex__(4)
    except Exception:
        return []
    if isinstance(reduced, str):
        return [(" reduction", reduced)]
    return [
        (f" reduction[{index}]", list(part) if index > 2 and part is not None else part) for index, part in enumerate(reduced)
    ]


def parts_of(value: Any) -> list[tuple[str, Any]]:
    """Return the parts of an object by name; empty for an object without comparable parts."""
    if isinstance(value, torch.Tensor):
        found = _parts(value) or []
        if value.is_leaf and value.grad is not None:
            found.append((".grad", value.grad))
        attributes = {} if found and _is_wrapper(value) else getattr(value, "__dict__", {})
        # The compiler leaves marks on tensors that it has met.
        found.extend((f".{name}", item) for name, item in sorted(attributes.items()) if not name.startswith("_dynamo_"))
        return found
    if isinstance(value, functools.partial):
        return [(".func", value.func), (".args", value.args), (".keywords", value.keywords)]
    if isinstance(value, types.MethodType):
        return [(".__func__", value.__func__), (".__self__", value.__self__)]
    if isinstance(value, types.FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or ()]
        return [(".__closure__", cells), (".__defaults__", value.__defaults__), (".__kwdefaults__", value.__kwdefaults__)]
    if isinstance(value, torch.utils.hooks.RemovableHandle):
        hooks = value.hooks_dict_ref()
        return [(" hooks", None if hooks is None else list(hooks.values()))]
    if type(value).__name__ == "_WrappedHook":  # torch's own pickling keeps these two of its attributes
        return [(".hook", value.hook), (".with_module", value.with_module)]
    if isinstance(value, weakref.ref):
        return [("()", value())]
    if isinstance(value, types.MappingProxyType):
        return [(" items", dict(value))]
    if isinstance(value, torch.Generator):
        return [(" state", value.get_state())]
    if isinstance(value, (dict, list, tuple, set, frozenset)) or isinstance(getattr(value, "__dict__", None), dict):
        return _own(value)
    return _own(value) or _reduction(value)


def _is_atom(value: Any) -> bool:
    return isinstance(value, (*_ATOMS, *_FUNCTIONS, type, float, complex)) or type(value).__module__ == "numpy"


def _atoms_differ(one: Any, other: Any) -> bool:
    if isinstance(one, (float, complex)):
        return repr(one) != repr(other)  # NaN, and minus zero
    if isinstance(one, (type, *_FUNCTIONS)):
        if isinstance(one, types.FunctionType) and one.__code__.co_code != other.__code__.co_code:
            return True
        return (one.__module__, one.__qualname__) != (other.__module__, other.__qualname__)
    if type(one).__module__ == "numpy":
        if not hasattr(one, "tobytes"):
            return bool(one != other)
        return (one.dtype, one.shape, one.strides, one.tobytes()) != (other.dtype, other.shape, other.strides, other.tobytes())
    return bool(one != other)


class _Comparison:
    def __init__(self, ignored: re.Pattern[str]) -> None:
        self.found: list[str] = []
        self._ignored = ignored
        self._others: dict[int, int] = {}
        self._ones: dict[int, int] = {}
        self._storages: dict[int, int] = {}
        self._kept: list[Any] = []  # ids are told apart only while their objects live

    def run(self, one: Any, other: Any) -> list[str]:
        pending = [("", one, other)]
        while pending and len(self.found) < 20:
            path, left, right = pending.pop()
            if left is right or self._ignored.search(path):
                continue
            self._kept.append((left, right))
            if not self._same_kind(path, left, right):
                continue
            if isinstance(left, torch.Tensor) and not self._same_tensor(path, left, right):
                continue
            if _is_atom(left):
                if _atoms_differ(left, right):
                    self._tell(path, left, right)
                if not isinstance(left, types.FunctionType):
                    continue
            if not self._first_time(path, left, right):
                continue
            pending.extend(reversed(self._paired(path, left, right)))
        return self.found

    def _tell(self, path: str, left: Any, right: Any) -> None:
        self.found.append(f"{path or 'it'}: {repr(left)[:100]} became {repr(right)[:100]}")

    def _same_kind(self, path: str, left: Any, right: Any) -> bool:
        kinds = [f"{type(value).__module__}.{type(value).__qualname__}" for value in (left, right)]
        if type(left) is not type(right) and (kinds[0] != kinds[1] or kinds[0].partition(".")[0] == "builtins"):
            self._tell(path, type(left), type(right))
            return False
        return True

    def _first_time(self, path: str, left: Any, right: Any) -> bool:
        """What is one object in several places is one object on the other side too."""
        before = self._others.get(id(left))
        if before is None:
            twice = self._ones.get(id(right))
            if twice is not None and isinstance(right, (torch.Tensor, torch.nn.Module)):
                self.found.append(f"{path}: two {type(left).__name__} became one")
            self._others[id(left)], self._ones[id(right)] = id(right), id(left)
            return True
        if before != id(right) and isinstance(left, (torch.Tensor, torch.nn.Module, list, dict)) and left:
            self.found.append(f"{path}: one {type(left).__name__} in two places became two")
        return False

    def _same_tensor(self, path: str, left: torch.Tensor, right: torch.Tensor) -> bool:
        facts, others = _tensor_facts(left), _tensor_facts(right)
        for name, fact in facts.items():
            if others.get(name) != fact and not self._ignored.search(f"{path} ({name})"):
                self._tell(f"{path} ({name})", fact, others.get(name))
        if facts["shape"] != others["shape"] or facts["layout"] != others["layout"] or facts["dtype"] != others["dtype"]:
            return False
        if _parts(left) is None:
            if left.numel() and not torch.equal(bits(left), bits(right)):
                self.found.append(f"{path}: other values")
            if left.numel():
                place = left.untyped_storage().data_ptr()
                if self._storages.setdefault(place, right.untyped_storage().data_ptr()) != right.untyped_storage().data_ptr():
                    self.found.append(f"{path}: shares its memory with another tensor, and did not afterwards")
        return True

    def _paired(self, path: str, left: Any, right: Any) -> list[tuple[str, Any, Any]]:
        ones, others = parts_of(left), parts_of(right)
        self._kept.append((ones, others))
        names, other_names = [name for name, _ in ones], [name for name, _ in others]
        if names != other_names:
            gone = [name for name in names if name not in other_names] or names
            new = [name for name in other_names if name not in names] or other_names
            self.found.append(f"{path or 'it'} ({type(left).__name__}): {gone[:8]} became {new[:8]}")
            return []
        return [(path + name, item, other) for (name, item), (_, other) in zip(ones, others, strict=True)]


def differences(one: Any, other: Any, ignored: str | None = None) -> list[str]:
    r"""Where two objects differ, at most twenty places; an empty list if they are the same bit for bit.

    :param ignored: a pattern for paths that may differ; one with ``\(strides\)`` at its end is for that fact of a tensor.
    """
    return _Comparison(re.compile(f"{_OF_THE_PROCESS}|{ignored}" if ignored else _OF_THE_PROCESS)).run(one, other)


def reached(value: Any) -> list[tuple[str, Any]]:
    """All that an object is made of, each once, by where it is and always in that order; numbers, texts and classes are not."""
    found, kept, seen = [], [], set()
    pending = [("", value)]
    while pending:
        path, item = pending.pop()
        array = isinstance(item, numpy.ndarray)
        if id(item) in seen or (_is_atom(item) and not array and not isinstance(item, types.FunctionType)):
            continue
        seen.add(id(item))
        found.append((path, item))
        parts = [] if array else parts_of(item)
        kept.append(parts)  # ids are told apart only while their objects live
        pending.extend((path + name, part) for name, part in reversed(parts))
    return found


def strided_tensors(value: Any) -> list[tuple[str, torch.Tensor]]:
    """All tensors that an object reaches and that are plain memory, each once, by where they are and always in that order."""
    every = reached(value)
    return [(path, part) for path, part in every if isinstance(part, torch.Tensor) and _parts(part) is None and part.numel()]


def digest(value: Any) -> str:
    """A short text that is the same for objects whose tensors have the same bytes."""
    summed = hashlib.sha256()
    for path, tensor in strided_tensors(value):
        summed.update(path.encode())
        summed.update(bits(tensor).numpy().tobytes())
    return summed.hexdigest()[:16]


def memories(value: Any) -> dict[int, str]:
    """The addresses of the memory that an object's tensors lie in, each with the path of a tensor there."""
    return {tensor.untyped_storage().data_ptr(): path for path, tensor in strided_tensors(value) if is_memory(path)}


def is_memory(path: str) -> bool:
    """Return True if the tensor at a path is memory of the object, not a copy made on access or by a reduction."""
    return not path.endswith(("int_repr", " state")) and " reduction" not in path
