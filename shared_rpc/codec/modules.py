"""Modules and their parameters in a skeleton: the attributes to pickle, and rebuilding.

Most modules consist of their ``__dict__``, half of which is the same in every new module. A class with its own pickling is
followed.
"""

from __future__ import annotations

import copyreg
import sys
import types
import weakref
from typing import Any

import torch
from torch.nn.utils import parametrize
from torch.utils.hooks import RemovableHandle

from shared_rpc.codec.refusals import PickleRefused

#: With the functions by which pickle reduces an object, which its annotations leave out.
_copyreg: Any = copyreg

#: The state of a new module, mostly a dozen empty containers for hooks, which few modules fill.
_NEW = torch.nn.Module().__dict__
_CONSTANTS = {name: value for name, value in _NEW.items() if value is None or isinstance(value, bool)}
_CONTAINERS = {name: type(value) for name, value in _NEW.items() if name not in _CONSTANTS}

#: Containers of hooks. The other containers, ``_forward_hooks_with_kwargs`` and the like, have some of the same keys.
_HOOKS = tuple(name for name in _CONTAINERS if name.endswith("_hooks"))

#: The attribute set by ``module.compile()`` for this process; ``torch.nn.Module.__getstate__`` leaves it out too.
_COMPILED = "_compiled_call_impl"

_PICKLING = {
    "__getnewargs__",
    "__getnewargs_ex__",
    "__getstate__",
    "__new__",
    "__reduce__",
    "__reduce_ex__",
    "__setstate__",
}


def reduce_module(module: torch.nn.Module) -> Any:
    """Return a module's reduction for pickle; NotImplemented to follow its class."""
    if "parametrizations" in module.__dict__.get("_modules", ()):
        return _reduce_parametrized(module)
    kind = type(module)
    if _restores_plainly(kind):
        return _copyreg.__newobj__, (kind,), _state(module), None, None, _restore
    if isinstance(module, torch.fx.GraphModule):
        # torch rebuilds the module from its code, without its hooks.
        hooks = {name: value for name, value in module.__dict__.items() if name in _CONTAINERS and "_hooks" in name and value}
        return *module.__reduce__(), hooks, None, None, _add_hooks
    if any((base.__module__, base.__name__) == _UNINITIALISED for base in kind.__mro__):
        return _make_new, (kind,), module.__getstate__()
    return NotImplemented


#: Quantised convolutions set attributes before the module's constructor has run, which breaks with torch's own pickle.
_UNINITIALISED = ("torch.ao.nn.quantized.modules.conv", "_ConvNd")


def _restores_plainly(kind: type) -> bool:
    """Return True if pickling a module of that class amounts to its ``__dict__`` and its slots."""
    return not _PICKLING & _defined(kind)


def _defined(kind: type) -> set[str]:
    """Return the names defined by a class and its bases below :class:`torch.nn.Module`."""
    return {name for base in kind.__mro__ if base not in (torch.nn.Module, object) for name in base.__dict__}


def _state(module: torch.nn.Module) -> Any:
    """Return a module's attributes, except those that every new module has: they would be half of the pickle.

    For a class with slots, a pair: the attributes, and the contents of the slots.
    """
    attributes = {
        name: value
        for name, value, references in _counted(module)
        if name != _COMPILED and not _is_new(name, value, references)
    }
    slots = _copyreg._slotnames(type(module))
    return (attributes, {name: getattr(module, name) for name in slots if hasattr(module, name)}) if slots else attributes


def _counted(module: torch.nn.Module) -> list[tuple[str, Any, int]]:
    """Return the attributes of a module, with the number of references to each."""
    return [(name, value, sys.getrefcount(value)) for name, value in module.__dict__.items()]


#: References to a container used by its module only. The interpreter's own references differ between Pythons.
_ALONE = max(references for name, _, references in _counted(torch.nn.Module()) if name in _CONTAINERS)


def _is_new(name: str, value: Any, references: int) -> bool:
    if name in _CONSTANTS:
        return value is _CONSTANTS[name]
    # Some objects refer to one particular empty container: the handle of a hook, a shallow copy of the module.
    return type(value) is _CONTAINERS.get(name) and not value and references <= _ALONE and not weakref.getweakrefcount(value)


def _restore(module: torch.nn.Module, state: Any) -> None:
    own, slots = state if type(state) is tuple else (state, {})
    attributes = module.__dict__
    attributes.update(_CONSTANTS)
    for name, kind in _CONTAINERS.items():
        attributes[name] = kind()
    attributes.update(own)
    for name, value in slots.items():
        object.__setattr__(module, name, value)


def _make_new(kind: type[torch.nn.Module]) -> torch.nn.Module:
    module = kind.__new__(kind)
    _restore(module, {})
    return module


def _add_hooks(module: torch.nn.Module, hooks: dict[str, Any]) -> None:
    module.__dict__.update(hooks)


def _reduce_parametrized(module: Any) -> Any:
    # torch refuses to pickle parametrised modules because their class is created at run time; the receiver creates it again.
    base: Any
    (base,) = type(module).__bases__
    names = tuple(module.parametrizations)
    plainly = _restores_plainly(base)
    if {"__reduce__", "__reduce_ex__"} & _defined(base):
        raise PickleRefused(
            f"is parametrised, and its class {base.__name__} has its own __reduce__: share it after "
            f"torch.nn.utils.parametrize.remove_parametrizations()",
            module,
        )
    arguments = module.__getnewargs__() if hasattr(base, "__getnewargs__") else ()
    state = _state(module) if plainly else base.__getstate__(module)
    return _make_parametrized, (base, *arguments), (names, plainly, state), None, None, _restore_parametrized


def _make_parametrized(base: type[torch.nn.Module], *arguments: Any) -> torch.nn.Module:
    module = base.__new__(base, *arguments)
    parametrize._inject_new_class(module)
    return module


def _restore_parametrized(module: Any, state: tuple[tuple[str, ...], bool, Any]) -> None:
    names, plainly, own = state
    if plainly:
        _restore(module, own)
    elif isinstance(own, dict):
        # torch reads the attribute first, and a __getattr__ of the class may read others.
        module.__dict__.update(own)
    for name in names:
        parametrize._inject_property(module, name)
    if not plainly:
        module.__setstate__(own)


def reduce_parameter(parameter: torch.nn.Parameter) -> Any:
    """Return the reduction of a parameter with its own class, as in 4-bit layers; NotImplemented to follow its class.

    torch's own rebuilds plain parameters, whatever their class, and uses the class's method for ``copy.deepcopy``.
    """
    kind = type(parameter)
    if kind is torch.nn.Parameter or kind.__reduce_ex__ is not torch.nn.Parameter.__reduce_ex__:
        return NotImplemented
    slots = _copyreg._slotnames(kind)
    state = {**parameter.__dict__, **{name: getattr(parameter, name) for name in slots if hasattr(parameter, name)}}
    return _make_parameter, (kind, parameter.data, parameter.requires_grad), state, None, None, _restore_parameter


def _make_parameter(kind: type[torch.nn.Parameter], data: torch.Tensor, requires_grad: bool) -> torch.nn.Parameter:
    return torch.Tensor._make_subclass(kind, data, requires_grad)


def _restore_parameter(parameter: torch.nn.Parameter, state: dict[str, Any]) -> None:
    for name, value in state.items():
        # Not setattr(): a class may define its own.
        object.__setattr__(parameter, name, value)


def next_hook(module: torch.nn.Module) -> int:
    """Return an id above those of a module's hooks; 0 if it has none."""
    attributes = module.__dict__
    ids = [key for name in _HOOKS if (hooks := attributes.get(name)) for key in hooks if type(key) is int]
    return max(ids) + 1 if ids else 0


def raise_next_hook(value: int) -> None:
    """Prevent later hooks from getting the id of a hook from another process."""
    # Other threads do not interrupt statements without a call; torch's own counting relies on that too.
    if RemovableHandle.next_id < value:  # noqa: PLR1730  max() would be a call
        RemovableHandle.next_id = value


def reduce_handle(handle: RemovableHandle) -> Any:
    """Return the reduction of a hook's handle, whose module may have been collected."""
    # torch would store a collected dict too, and could not load it.
    extras = tuple(extra for reference in handle.extra_dict_ref if (extra := reference()) is not None)
    return _copyreg.__newobj__, (type(handle),), (handle.hooks_dict_ref(), handle.id, extras)


def reduce_compiled(function: types.FunctionType) -> Any:
    """Return the reduction of a function made by ``torch.compile``: it is compiled again on first call.

    None for any other function.
    """
    original = function.__dict__.get("_torchdynamo_orig_callable")
    if original is None or function.__dict__.get("_torchdynamo_disable"):
        return None
    # The options of torch.compile() are in an object in the wrapper's closure; torch.compile(module) has it in an attribute
    # (torch 2.6 to 2.13). With a later torch that hides it, the original function is returned.
    names = function.__code__.co_freevars
    context = function.__closure__[names.index("self")].cell_contents if function.__closure__ and "self" in names else _same
    return _call, (context, original)


def _call(context: Any, function: Any) -> Any:
    return context(function)


def _same(function: Any) -> Any:
    return function
