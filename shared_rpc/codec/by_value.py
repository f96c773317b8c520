"""Modules whose classes and functions are pickled as code, because no client could import them. Imports no torch.

Of these, transformers finds the classes of ``transformers_modules`` by their module: ``save_pretrained()`` copies the file of
a class's module. So a client has a module of that name, with the received file and classes; it is executed when the client
itself loads that code.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from cloudpickle.cloudpickle import _PICKLE_BY_VALUE_MODULES

from shared_rpc.forks import fork_safe_lock

_PACKAGE = "transformers_modules."
#: Hugging Face puts remote code into this module. ``__main__`` is handled by cloudpickle itself.
_names: set[str] = {"transformers_modules"}
#: Names of modules, each including its submodules. Private, in cloudpickle 3.0 to 3.1: its public function takes only loaded
#: modules, and transformers loads submodules of ``transformers_modules`` without that package.
_REGISTRY: set[str] = _PICKLE_BY_VALUE_MODULES
_lock = fork_safe_lock()


def pickle_by_value(module: ModuleType) -> None:
    """Pickle the classes and functions of ``module`` as code, like those of ``__main__``."""
    _names.add(module.__name__)


def travels_as_code(module: str) -> bool:
    """Return True if a module's classes and functions are pickled as code now, by itself or a parent package."""
    parts = module.split(".")
    return any(".".join(parts[:count]) in _REGISTRY for count in range(1, len(parts) + 1))


@contextmanager
def registered() -> Iterator[None]:
    """Register the modules with cloudpickle while the block runs. Its registry is global, and restored for other users."""
    with _lock:
        added = _names - _REGISTRY
        _REGISTRY.update(added)
        try:
            yield
        finally:
            _REGISTRY.difference_update(added)


def reduce_remote_class(kind: type, reduced: tuple[Any, ...]) -> tuple[Any, ...]:
    """Add the data for :func:`_finish` to cloudpickle's reduction of a class, if it is one of those."""
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    if not kind.__module__.startswith(_PACKAGE) or file is None or len(reduced) != 6:
        return reduced
    *rest, setter = reduced
    rest[2] = (setter, rest[2], file)
    return *rest, _finish


def _finish(kind: type, state: tuple[Any, Any, str]) -> None:
    setter, own, file = state
    setter(kind, own)
    module = sys.modules.get(kind.__module__)
    if module is None:
        spec = importlib.util.spec_from_file_location(kind.__module__, file)
        if spec is None:
            return
        module = sys.modules[kind.__module__] = importlib.util.module_from_spec(spec)
        pickle_by_value(module)  # for every receiver
    if "__transformers_module_hash__" not in vars(module):  # present once the code has run
        setattr(module, kind.__qualname__, kind)
