"""Search for the attribute that cannot be shared, for the error text."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

#: Maximum length of a path: a longer one is not readable, and cycles end here.
_DEPTH = 40
#: The same for values that are nested too deeply.
_RECURSION = 8


def locate(value: Any, path: str, attempt: Callable[[Any], object], error: Exception) -> tuple[str, Exception]:
    """Return path and error of the deepest part of ``value`` for which ``attempt`` still fails.

    An error whose ``subject`` is the part itself ends the search there. For excessive nesting only the beginning of the path
    is returned: every part of it fails.
    """
    seen: set[int] = set()
    for _ in range(_DEPTH if not isinstance(error, RecursionError) else _RECURSION):
        if getattr(error, "subject", None) is value:
            break
        seen.add(id(value))
        for name, part in _parts(value):
            if id(part) in seen:
                continue
            try:
                attempt(part)
            except Exception as cause:
                value, path, error = part, path + name, cause
                break
        else:
            break
    return path, error


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the parts of a value, with the text of the access to each."""
    if isinstance(value, dict):
        for key, part in value.items():
            yield f"[{key!r}]", part
        yield from ((f".<key {index}>", key) for index, key in enumerate(value) if not isinstance(key, (str, int)))
    elif isinstance(value, (list, tuple, set, frozenset, deque)):
        for index, part in enumerate(value):
            yield f"[{index}]", part
    says = any("__getstate__" in vars(base) for base in type(value).__mro__[:-1])  # every object has one
    attributes = _state(value) if says else getattr(value, "__dict__", None)
    if isinstance(attributes, dict):
        # Children, parameters and buffers of a module read as its attributes, and precede other references to them.
        children = [name for name in ("_parameters", "_buffers", "_modules") if isinstance(attributes.get(name), dict)]
        for name in children:
            for key, child in attributes[name].items():
                yield f".{key}", child
        for name, part in attributes.items():
            if name not in children:
                yield f".{name}", part
    elif says:
        yield ".<state>", attributes
    for kind in type(value).__mro__ if not says else ():
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if hasattr(value, name):
                yield f".{name}", getattr(value, name)


def _state(value: Any) -> Any:
    """Return the state that an object's class gives to pickle, by default the attributes."""
    try:
        return value.__getstate__()
    except Exception:
        return getattr(value, "__dict__", None)
