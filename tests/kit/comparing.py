"""Descriptions of values that two processes can compare: everything that sharing preserves.

A description is a dict of short texts by path, which travels as JSON. Two values with equal descriptions have the same classes,
attributes, strides, bits, ties, flags, hooks (in their order) and state dicts.
"""

from __future__ import annotations

import enum
import types
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


#: Compared by its text alone.
_PLAIN = (bool, int, float, complex, str, bytes, type(None), type(Ellipsis), range, slice, enum.Enum, type)

#: Specific to each process: the results of compilation, and of tracing by torch.
_OWN = {
    *("_compiled_call_impl", "dynamo_ctx", "get_compiler_config", "_graph"),
    *("_torchdynamo_orig_callable", "_torchdynamo_wrapper_id", "_dynamo_static_input_type"),
}

#: Dropped by torch's own pickling: attributes of wrapped hooks, and of optimisers.
_DROPPED = {
    *("__module__", "__name__", "__qualname__", "__doc__", "__wrapped__", "__annotations__", "__annotate__", "__type_params__"),
    "_from_public_api",
    "_warned_capturable_if_run_uncaptured",
}


def compare(value: Any, reference: Any) -> list[str]:
    """Return the differences between two values of one process."""
    return differences(describe(value), describe(reference))


def differences(found: Mapping[str, str], expected: Mapping[str, str]) -> list[str]:
    """Return one line for each path at which two descriptions differ, in the order of the paths."""
    return [
        f"{path}: {found.get(path, 'absent')}, expected {expected.get(path, 'absent')}"
        for path in dict.fromkeys((*expected, *found))
        if found.get(path) != expected.get(path)
    ]


def describe(value: Any) -> dict[str, str]:
    """Describe a value by path: everything that must be equal in every process."""
    return dict(_Walk().visit(value, "value"))


class _Walk:
    def __init__(self) -> None:
        self._paths: dict[int, str] = {}
        self._storages: dict[int, str] = {}
        #: Ids are unique only among living objects.
        self._kept: list[Any] = []

    def visit(self, value: Any, path: str) -> Iterator[tuple[str, str]]:
        import torch

        if isinstance(value, (*_PLAIN, torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format)):
            yield path, f"{_name(type(value))} {value!r}"
            return
        if isinstance(value, torch.SymInt):
            yield path, "a symbol"  # the lengths of ragged rows, which each process numbers
            return
        known = self._paths.get(id(value))
        if known is not None:
            yield path, f"is {known}"
            return
        self._paths[id(value)] = path
        self._kept.append(value)
        yield path, _name(type(value))
        if isinstance(value, torch.Tensor):
            yield from self._tensor(value, path)
        elif isinstance(value, torch.nn.Module):
            yield from self._module(value, path)
        elif isinstance(value, (types.FunctionType, types.MethodType, types.BuiltinFunctionType)):
            yield from self._function(value, path)
        elif isinstance(value, Mapping):
            yield f"{path}.keys", repr(list(value))
            for key, item in value.items():
                yield from self.visit(item, f"{path}[{key!r}]")
        elif isinstance(value, (list, tuple)):
            for index, item in enumerate(value):
                yield from self.visit(item, f"{path}[{index}]")
        elif isinstance(value, (set, frozenset)):
            yield f"{path}.items", repr(sorted(map(repr, value)))
        elif isinstance(value, torch.utils.hooks.RemovableHandle):
            yield f"{path}.id", str(value.id)
            yield from self.visit(value.hooks_dict_ref(), f"{path}.hooks")
            extras = [extra for reference in value.extra_dict_ref if (extra := reference()) is not None]
            yield from self.visit(extras, f"{path}.extras")
            return
        elif isinstance(value, torch.Generator):
            yield from self.visit(value.get_state(), f"{path}.state")
        yield from self._attributes(value, path)

    def _attributes(self, value: Any, path: str) -> Iterator[tuple[str, str]]:
        if isinstance(value, types.FunctionType):
            return
        for name, item in getattr(value, "__dict__", {}).items():
            if name not in _OWN and name not in _DROPPED:
                yield from self.visit(item, f"{path}.{name}")
        for kind in type(value).__mro__:
            slots = kind.__dict__.get("__slots__", ())
            for name in (slots,) if isinstance(slots, str) else slots:
                if name not in ("__dict__", "__weakref__") and isinstance(kind.__dict__.get(name), types.MemberDescriptorType):
                    yield from self.visit(getattr(value, name, "unset"), f"{path}.{name}")

    def _tensor(self, tensor: torch.Tensor, path: str) -> Iterator[tuple[str, str]]:
        import torch

        from tests.kit.interpreter import bits

        with torch.no_grad():
            # The results of autograd are shared as values.
            leaf = tensor if tensor.is_leaf else tensor.detach()
            flags = ", ".join(
                name
                for name, holds in {
                    "requires_grad": leaf.requires_grad,
                    "conj": tensor.is_conj(),
                    "neg": tensor.is_neg(),
                    "inference": tensor.is_inference(),
                }.items()
                if holds
            )
            shape = [size if type(size) is int else "ragged" for size in tensor.shape]
            yield f"{path}.flags", f"{tensor.dtype} {shape} {tensor.device.type} {tensor.layout} {flags}"
            if torch.utils._python_dispatch.is_traceable_wrapper_subclass(tensor):
                for name in tensor.__tensor_flatten__()[0]:
                    yield from self.visit(getattr(tensor, name), f"{path}.{name}")
            elif tensor.layout is torch.sparse_coo:
                yield from self.visit(tensor._indices(), f"{path}.indices")
                yield from self.visit(tensor._values(), f"{path}.values")
            elif tensor.is_quantized:
                yield f"{path}.quantised", f"{tensor.qscheme()} {bits(tensor.int_repr())} {bits(tensor.dequantize())}"
            elif type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__ or tensor.data_ptr():
                plain = tensor.as_subclass(torch.Tensor)
                storage = self._storages.setdefault(plain.untyped_storage()._cdata, path)
                self._kept.append(plain)
                yield f"{path}.layout", f"{plain.stride()} {plain.storage_offset()} of the storage of {storage}"
                yield f"{path}.bits", bits(plain)

    def _module(self, module: torch.nn.Module, path: str) -> Iterator[tuple[str, str]]:
        yield f"{path}.mro", " ".join(_name(kind) for kind in type(module).__mro__)
        state = module.state_dict(keep_vars=True)
        yield f"{path}.state_dict", " ".join(state)
        yield f"{path}.state_dict._metadata", repr(dict(state._metadata))
        yield f"{path}.named_parameters", " ".join(name for name, _ in module.named_parameters())
        yield f"{path}.named_buffers", " ".join(name for name, _ in module.named_buffers())

    def _function(self, function: Any, path: str) -> Iterator[tuple[str, str]]:
        compiled = getattr(function, "_torchdynamo_orig_callable", None)
        if compiled is not None:
            yield from self.visit(compiled, f"{path}.<compiled>")
            return
        yield f"{path}.name", f"{function.__module__}.{function.__qualname__}"
        if isinstance(function, types.MethodType):
            yield from self.visit(function.__self__, f"{path}.self")
        for index, cell in enumerate(getattr(function, "__closure__", None) or ()):
            try:
                content = cell.cell_contents
            except ValueError:
                continue  # a name that is not bound yet
            yield from self.visit(content, f"{path}.<closure {function.__code__.co_freevars[index]}>")


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def same_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors see the same bytes in the same way."""
    return (one.data_ptr(), one.shape, one.stride(), one.dtype) == (other.data_ptr(), other.shape, other.stride(), other.dtype)
