"""Modules whose classes and functions travel as code, because no client could import them. Imports no torch."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

import cloudpickle

__all__ = ["pickle_by_value", "registered"]

#: Hugging Face writes remote code into this one. ``__main__`` is cloudpickle's own.
_names: set[str] = {"transformers_modules"}
_lock = threading.Lock()


def pickle_by_value(module: ModuleType) -> None:
    """Have the classes and functions of ``module`` travel as code, as those of ``__main__`` do."""
    _names.add(module.__name__)


@contextmanager
def registered() -> Iterator[None]:
    """While something is pickled. cloudpickle's registry is global, and is left as other users of it expect it."""
    with _lock:
        known = cloudpickle.list_registry_pickle_by_value()
        modules = [sys.modules[name] for name in _names if name in sys.modules and name not in known]
        for module in modules:
            cloudpickle.register_pickle_by_value(module)
        try:
            yield
        finally:
            for module in modules:
                cloudpickle.unregister_pickle_by_value(module)


def _after_fork() -> None:
    global _lock  # noqa: PLW0603  another thread of the parent may have held it
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_after_fork)
