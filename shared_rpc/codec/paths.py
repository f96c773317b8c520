"""Finding the attribute that makes a value unpicklable, for the person who has to change it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from types import MethodType
from typing import Any

__all__ = ["locate"]

#: A path this long is not read by anybody, and cycles end here.
_DEPTH = 40


def locate(value: Any, path: str, attempt: Callable[[Any], object], error: Exception) -> tuple[str, Exception]:
    """The deepest part of ``value`` for which ``attempt`` still fails: ``(its path, its error)``.

    An error whose ``subject`` is the part itself ends the search there.
    """
    seen: set[int] = set()
    for _ in range(_DEPTH):
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
    """What a value holds, with the text that reaches it."""
    if isinstance(value, dict):
        for key, part in value.items():
            yield f"[{key!r}]", part
    elif isinstance(value, (list, tuple, set, frozenset, deque)):
        for index, part in enumerate(value):
            yield f"[{index}]", part
    elif isinstance(value, MethodType):
        yield ".__self__", value.__self__
        return
    elif isinstance(value, partial):
        yield ".func", value.func
        for index, part in enumerate(value.args):
            yield f".args[{index}]", part
        for name, part in value.keywords.items():
            yield f".keywords[{name!r}]", part
    attributes = getattr(value, "__dict__", None)
    if isinstance(attributes, dict):
        for name, part in attributes.items():
            # Children, parameters and buffers of a module read as attributes of it.
            if name in ("_modules", "_parameters", "_buffers") and isinstance(part, dict):
                for key, child in part.items():
                    yield f".{key}", child
            else:
                yield f".{name}", part
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if hasattr(value, name):
                yield f".{name}", getattr(value, name)
    for index, cell in enumerate(getattr(value, "__closure__", None) or ()):
        try:
            part = cell.cell_contents
        except ValueError:
            continue  # a name that is not bound yet
        yield f".<closure {value.__code__.co_freevars[index]}>", part
