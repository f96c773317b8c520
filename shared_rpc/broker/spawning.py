"""Tasks that are started by callbacks of the loop, not by another task."""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Coroutine
from typing import Any

import anyio.abc

__all__ = ["Spawner"]


class Spawner:
    """Starts tasks of a group from wherever on its loop: anyio wants to know the loop from the context, and what a descriptor
    calls has the context of its first watcher.

    Made in a task of the group.
    """

    def __init__(self, tasks: anyio.abc.TaskGroup) -> None:
        self._tasks = tasks
        self._context = contextvars.copy_context()

    def __call__(self, function: Callable[..., Coroutine[Any, Any, Any]], *arguments: object) -> None:
        """Start a task."""
        self._context.copy().run(lambda: self._tasks.start_soon(function, *arguments))
