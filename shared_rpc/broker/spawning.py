"""Tasks that are started by callbacks of the loop, not by another task."""

from __future__ import annotations

import contextvars
import logging
from collections.abc import Callable, Coroutine
from typing import Any

import anyio.abc

_log = logging.getLogger("shared_rpc.broker")


class Spawner:
    """Starts tasks of a group from wherever on its loop: anyio wants to know the loop from the context, and what a descriptor
    calls has the context of its first watcher.

    The error of a task is logged and ends that task alone: the group is the broker, which holds every object. That of
    :meth:`vital` ends the group.

    Made in a task of the group.
    """

    def __init__(self, tasks: anyio.abc.TaskGroup) -> None:
        self._tasks = tasks
        self._context = contextvars.copy_context()

    def __call__(self, function: Callable[..., Coroutine[Any, Any, Any]], *arguments: object) -> None:
        """Start a task."""
        self._context.copy().run(lambda: self._tasks.start_soon(_guarded, function, arguments))

    def vital(self, function: Callable[..., Coroutine[Any, Any, Any]], *arguments: object) -> None:
        """Start a task without which the broker is of no use: its error ends the broker."""
        self._context.copy().run(lambda: self._tasks.start_soon(function, *arguments))


async def _guarded(function: Callable[..., Coroutine[Any, Any, Any]], arguments: tuple[object, ...]) -> None:
    try:
        await function(*arguments)
    except Exception:
        _log.exception("a task of the broker failed, which goes on without it: %s", function.__qualname__)
