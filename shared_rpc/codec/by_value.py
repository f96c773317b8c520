"""Modules whose classes and functions travel as code, because no client could import them. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

from cloudpickle.cloudpickle import _PICKLE_BY_VALUE_MODULES

from shared_rpc.forks import fork_safe_lock

#: Hugging Face puts remote code into this module. ``__main__`` is cloudpickle's own.
_names: set[str] = {"transformers_modules"}
#: Names of modules, each with its submodules. Private, in cloudpickle 3.0 to 3.1: its public function takes loaded modules
#: only, and transformers loads submodules of ``transformers_modules`` without that package.
_REGISTRY: set[str] = _PICKLE_BY_VALUE_MODULES
_lock = fork_safe_lock()


def pickle_by_value(module: ModuleType) -> None:
    """Have the classes and functions of ``module`` travel as code, as those of ``__main__`` do."""
    _names.add(module.__name__)


def travels_as_code(module: str) -> bool:
    """Return whether the classes and functions of a module travel as code now: as cloudpickle has it, with its packages."""
    parts = module.split(".")
    return any(".".join(parts[:count]) in _REGISTRY for count in range(1, len(parts) + 1))


@contextmanager
def registered() -> Iterator[None]:
    """Have cloudpickle know the modules in the block. Its registry is global, and is left as other users of it expect it."""
    with _lock:
        added = _names - _REGISTRY
        _REGISTRY.update(added)
        try:
            yield
        finally:
            _REGISTRY.difference_update(added)
