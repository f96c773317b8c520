"""Hooks: what happens in a server, event by event, for whoever wants to count, trace or log it.

A **hook** is a function that takes one event, a frozen object of one of the classes below. It is called in the thread of the
server's loop, so it must be quick, wait for nothing, and ask nothing of the server. One that raises harms nobody: that is
logged, once for each hook. A :class:`HookFactory` makes its hook when the first event comes, and may import what it needs then.

::

    def count(event):
        if isinstance(event, CallFinished):
            statsd.timing(f"calls.{event.endpoint}.{event.outcome}", event.seconds)

    add_hook(count)

Hooks are those of a process. In a server of the in-process kind they see all events. A broker, which does not load the app,
takes hooks from its command line (``--hook package.module:name``); those of the app are in its workers, and see what runs
there, as :class:`BuildStarted` and :class:`BuildFinished`. Times are seconds, sizes bytes.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import msgspec

__all__ = [
    "HOOKS",
    "BuildFinished",
    "BuildStarted",
    "CallFinished",
    "CallStarted",
    "Event",
    "Hook",
    "HookFactory",
    "Hooks",
    "LeaseEnded",
    "LeaseGiven",
    "ObjectFreed",
    "ObjectPublished",
    "Outcome",
    "RequestFailed",
    "SessionClosed",
    "SessionOpened",
    "TaskChanged",
    "WorkerEnded",
    "WorkerStarted",
    "add_hook",
    "get_hooks",
    "remove_hook",
]

_log = logging.getLogger("shared_rpc")

#: How a call ended: answered from the cache, by a run that went on already, or by one of its own; with an error; or its caller
#: no longer waited.
Outcome = Literal["hit", "joined", "built", "failed", "left"]


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """The base of all events. ``server_id`` is that of the server it happened in, ``""`` where it concerns the process, and in
    a broker's workers.
    """

    server_id: str = ""


class CallStarted(Event, frozen=True, kw_only=True):
    """A call, or the submit of a task, of an endpoint that there is, with arguments that fit.

    ``request_id`` tells it from all others; ``session`` and ``pid`` are its caller's.
    """

    endpoint: str
    request_id: str
    session: str
    pid: int


class CallFinished(Event, frozen=True, kw_only=True):
    """It ended, ``seconds`` after its :class:`CallStarted`. ``error`` is the code of what went wrong, see
    :mod:`shared_rpc.errors`; ``"remote"`` stands for whatever an endpoint raised.
    """

    endpoint: str
    request_id: str
    session: str
    pid: int
    outcome: Outcome
    seconds: float
    error: str = ""


class BuildStarted(Event, frozen=True, kw_only=True):
    """A run of an endpoint began. ``request_id`` is that of the call which it was started for."""

    endpoint: str
    request_id: str
    cached: bool


class BuildFinished(Event, frozen=True, kw_only=True):
    """It ended, ``seconds`` later. ``cached``: whether its result is one that the cache would list."""

    endpoint: str
    request_id: str
    cached: bool
    seconds: float
    error: str = ""


class ObjectPublished(Event, frozen=True, kw_only=True):
    """The server keeps a result or a buffer from now on."""

    object_id: str
    endpoint: str
    kind: Literal["result", "buffer"]
    nbytes: int
    device: str
    generation: int


class ObjectFreed(Event, frozen=True, kw_only=True):
    """Nothing keeps it any more. Memory that clients have mapped goes with the last of them."""

    object_id: str
    endpoint: str
    kind: Literal["result", "buffer"]
    nbytes: int
    device: str


class LeaseGiven(Event, frozen=True, kw_only=True):
    """A session holds an object that it did not hold before."""

    object_id: str
    session: str


class LeaseEnded(Event, frozen=True, kw_only=True):
    """It holds it no more. ``reclaimed``: its client's process ended without having closed, as one does that is
    killed.
    """

    object_id: str
    session: str
    reclaimed: bool


class SessionOpened(Event, frozen=True, kw_only=True):
    """A client process said hello for the first time."""

    session: str
    pid: int


class SessionClosed(Event, frozen=True, kw_only=True):
    """Its last connection has ended. ``clean``: by its client, which closed; else the process has ended, or been killed."""

    session: str
    pid: int
    seconds: float
    leases: int
    clean: bool


class TaskChanged(Event, frozen=True, kw_only=True):
    """A task has another status; of a new one that is ``"pending"``."""

    task_id: str
    endpoint: str
    status: str
    request_id: str


class RequestFailed(Event, frozen=True, kw_only=True):
    """A client was answered with an error, whatever it had asked for. Its exception has the same ``request_id``.
    ``text`` is the beginning of its message.
    """

    request_id: str
    session: str
    pid: int
    code: str
    text: str


class WorkerStarted(Event, frozen=True, kw_only=True):
    """A broker's worker has loaded the app. ``number`` is which of the broker's workers it is, ``pid`` its process."""

    number: int
    pid: int
    seconds: float


class WorkerEnded(Event, frozen=True, kw_only=True):
    """Its process is gone. ``crashed``: nobody had asked for that; ``signal`` or ``exit_code`` say how it ended."""

    number: int
    pid: int
    seconds: float
    crashed: bool
    signal: str | None
    exit_code: int | None


Hook = Callable[[Event], object]


@dataclass(frozen=True)
class HookFactory:
    """A hook that is made when it is first needed.

    :param make: called once, with the first event; it may import a library that takes long, or is not installed.
    """

    make: Callable[[], Hook]


class _Entry:
    """A hook that is registered, from then until it is removed: what a factory has made, and whether it was complained of."""

    __slots__ = ("_hook", "_made", "complained", "given")

    def __init__(self, given: Hook | HookFactory) -> None:
        self.given = given
        self.complained = False
        self._made = not isinstance(given, HookFactory)
        self._hook: Hook | None = None if isinstance(given, HookFactory) else given

    def hook(self) -> Hook | None:
        """What is to be called, None where a factory has failed, or is about to make it."""
        if not self._made:
            self._made = True  # one that fails is not asked again
            assert isinstance(self.given, HookFactory)
            self._hook = self.given.make()
        return self._hook


class Hooks:
    """The hooks of a process. Thread-safe."""

    def __init__(self) -> None:
        #: Whether anybody listens: what would make an event looks here first.
        self.registered = False
        self._entries: tuple[_Entry, ...] = ()
        self._changing = threading.Lock()

    def add(self, hook: Hook | HookFactory) -> None:
        """Have a hook called with every event from now on; one that is registered already stays so once."""
        with self._changing:
            if hook not in self.all():
                self._entries += (_Entry(hook),)
                self.registered = True

    def remove(self, hook: Hook | HookFactory) -> None:
        """Call it no more. One that is not registered is none to remove."""
        with self._changing:
            self._entries = tuple(entry for entry in self._entries if entry.given != hook)
            self.registered = bool(self._entries)

    def all(self) -> tuple[Hook | HookFactory, ...]:
        """Those that are registered, in that order."""
        return tuple(entry.given for entry in self._entries)

    def emit(self, event: Event) -> None:
        """Call every hook. Never raises, whatever a hook does; only Ctrl-C passes, where it comes in the main thread."""
        for entry in self._entries:
            try:
                hook = entry.hook()
                if hook is not None:
                    hook(event)
            except KeyboardInterrupt:
                raise
            except BaseException:  # sys.exit() and a cancelled wait would end the server's loop
                if not entry.complained:
                    entry.complained = True
                    kind = type(event).__name__
                    _log.exception("the hook %r failed with a %s; this is logged once", entry.given, kind)

    def _after_fork(self) -> None:
        # Another thread may have held it.
        self._changing = threading.Lock()


#: Those of this process.
HOOKS = Hooks()
os.register_at_fork(after_in_child=HOOKS._after_fork)


def add_hook(hook: Hook | HookFactory) -> None:
    """See :meth:`Hooks.add`."""
    HOOKS.add(hook)


def remove_hook(hook: Hook | HookFactory) -> None:
    """See :meth:`Hooks.remove`."""
    HOOKS.remove(hook)


def get_hooks() -> tuple[Hook | HookFactory, ...]:
    """See :meth:`Hooks.all`."""
    return HOOKS.all()
