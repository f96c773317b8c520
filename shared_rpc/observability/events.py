"""Events of a server, and the hooks that receive them: to count, trace or log.

A **hook** is a function that takes one event, a frozen object of one of the classes below. It is called in the thread of the
server's loop, so it must be quick, and neither block nor send requests to the server. Exceptions of hooks are caught; the
first of each hook is logged. A :class:`HookFactory` makes its hook with the first event, and may import libraries.

::

    def count(event):
        if isinstance(event, CallFinished):
            statsd.timing(f"calls.{event.endpoint}.{event.outcome}", event.seconds)

    add_hook(count)

Hooks belong to a process. In a server of the in-process kind they receive all events. A broker, which does not load the app,
takes hooks from its command line (``--hook package.module:name``); those of the app are in its workers, and receive the
events there: :class:`BuildStarted` and :class:`BuildFinished`. Times are seconds, sizes bytes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import msgspec

from shared_rpc.forks import fork_safe_lock
from shared_rpc.protocol.infos import HolderKind
from shared_rpc.protocol.records import Tier

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
    "MoveReason",
    "ObjectEvicted",
    "ObjectFreed",
    "ObjectPublished",
    "ObjectRestored",
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

#: The outcome of a call: answered from the cache, by an active run, by a record of the source of records, or by its own run;
#: failed; or abandoned by its caller.
Outcome = Literal["hit", "joined", "adopted", "built", "failed", "left"]

#: The reason for an object's change of tier: a request named it; a device's or the host's capacity was needed; a suspended
#: handle was resumed; or the object was needed by a call, a ticket or an export.
MoveReason = Literal["request", "capacity", "resume", "use"]


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """Base of all events. ``server_id`` is the server's, ``""`` for an event of the whole process and in a broker's workers."""

    server_id: str = ""


class _Call(Event, frozen=True, kw_only=True):
    endpoint: str
    request_id: str
    session: str
    pid: int


class CallStarted(_Call, frozen=True, kw_only=True):
    """The start of a call, or of a task's submit, of a registered endpoint with arguments that fit.

    ``request_id`` identifies it; ``session`` and ``pid`` are its caller's.
    """


class CallFinished(_Call, frozen=True, kw_only=True):
    """The end of a call, ``seconds`` after its :class:`CallStarted`. ``error`` is the code of its error, see
    :mod:`shared_rpc.errors`; ``"remote"`` is any exception of an endpoint.
    """

    outcome: Outcome
    seconds: float
    error: str = ""


class _Build(Event, frozen=True, kw_only=True):
    endpoint: str
    request_id: str
    cached: bool


class BuildStarted(_Build, frozen=True, kw_only=True):
    """The beginning of a run of an endpoint. ``request_id`` is that of the call that started it."""


class BuildFinished(_Build, frozen=True, kw_only=True):
    """The end of a run, ``seconds`` after its start. ``cached`` is True if the cache would list its result."""

    seconds: float
    error: str = ""


class _Object(Event, frozen=True, kw_only=True):
    object_id: str
    endpoint: str
    kind: Literal["result", "buffer"]
    nbytes: int
    device: str


class ObjectPublished(_Object, frozen=True, kw_only=True):
    """A new result or buffer of the server."""

    generation: int


class ObjectFreed(_Object, frozen=True, kw_only=True):
    """An object dropped by the server. Memory mapped by clients is freed with the last mapping."""


class _Move(Event, frozen=True, kw_only=True):
    object_id: str
    endpoint: str
    device: str
    from_tier: Tier
    to_tier: Tier
    nbytes: int
    copied: int
    seconds: float
    reason: MoveReason


class ObjectEvicted(_Move, frozen=True, kw_only=True):
    """The move of an object to a lower tier, ``seconds`` after it began.

    ``nbytes`` is the memory freed in the tier above, and ``copied`` the bytes copied for it: 0 if there was a good copy. A
    failed move causes no event: the object stays in its tier.
    """


class ObjectRestored(_Move, frozen=True, kw_only=True):
    """The move of an object back to its device, for all processes at once, ``seconds`` after it began. ``copied`` bytes of
    ``nbytes`` came from the copy.
    """


class _Lease(Event, frozen=True, kw_only=True):
    object_id: str
    kind: HolderKind
    session: str


class LeaseGiven(_Lease, frozen=True, kw_only=True):
    """A new lease of a session, or of a task whose result waits to be fetched; ``session`` is the id of either."""


class LeaseEnded(_Lease, frozen=True, kw_only=True):
    """The end of a lease. ``reclaimed`` is True if the client's process ended without closing, for example if killed."""

    reclaimed: bool


class SessionOpened(Event, frozen=True, kw_only=True):
    """The start of a session: the connection of a client process."""

    session: str
    pid: int


class SessionClosed(Event, frozen=True, kw_only=True):
    """The end of a session. ``clean`` is True if the client closed, False if its process ended."""

    session: str
    pid: int
    seconds: float
    leases: int
    clean: bool


class TaskChanged(Event, frozen=True, kw_only=True):
    """The new status of a task; the first one is ``"pending"``."""

    task_id: str
    endpoint: str
    status: str
    request_id: str


class RequestFailed(Event, frozen=True, kw_only=True):
    """An error as the answer to any request of a client, whose exception has the same ``request_id``.
    ``text`` is the beginning of its message.
    """

    request_id: str
    session: str
    pid: int
    code: str
    text: str


class WorkerStarted(Event, frozen=True, kw_only=True):
    """A worker of a broker that has loaded the app: the broker's worker ``number``, in the process ``pid``."""

    number: int
    pid: int
    seconds: float


class WorkerEnded(Event, frozen=True, kw_only=True):
    """The end of a worker's process. ``crashed`` is True if it was not requested; ``signal`` or ``exit_code`` is the status."""

    number: int
    pid: int
    seconds: float
    crashed: bool
    signal: str | None
    exit_code: int | None


Hook = Callable[[Event], object]


@dataclass(frozen=True)
class HookFactory:
    """A hook created with the first event.

    :param make: called once; it may import a library that is slow to load, or not installed.
    """

    make: Callable[[], Hook]


class _Entry:
    """A registered hook, with its original and a flag for a logged exception."""

    __slots__ = ("given", "hook", "logged")

    def __init__(self, given: Hook | HookFactory) -> None:
        self.given = given
        self.hook: Hook = self._make if isinstance(given, HookFactory) else given
        self.logged = False

    def _make(self, event: Event) -> None:
        assert isinstance(self.given, HookFactory)
        self.hook = _ignore  # a factory is called once, even if it fails or causes an event itself
        self.hook = self.given.make()
        self.hook(event)


def _ignore(event: Event) -> None:
    pass


class Hooks:
    """Hooks of a process. Thread-safe."""

    def __init__(self) -> None:
        #: True if any hook is registered. Checked before an event is created.
        self.registered = False
        self._entries: tuple[_Entry, ...] = ()
        self._changing = fork_safe_lock()

    def add(self, hook: Hook | HookFactory) -> None:
        """Call a hook with every event from now on; once, however often it is added."""
        with self._changing:
            if hook not in self.all():
                self._entries += (_Entry(hook),)
                self.registered = True

    def remove(self, hook: Hook | HookFactory) -> None:
        """Remove a hook. Does nothing if it is not registered."""
        with self._changing:
            self._entries = tuple(entry for entry in self._entries if entry.given != hook)
            self.registered = bool(self._entries)

    def all(self) -> tuple[Hook | HookFactory, ...]:
        """Return the registered hooks, in the order they were added."""
        return tuple(entry.given for entry in self._entries)

    def emit(self, event: Event) -> None:
        """Call every hook. Only KeyboardInterrupt, in the main thread, is raised from a hook."""
        for entry in self._entries:
            try:
                entry.hook(event)
            except KeyboardInterrupt:
                raise
            except BaseException:  # also SystemExit and CancelledError, which would end the server's loop
                if not entry.logged:
                    entry.logged = True
                    kind = type(event).__name__
                    _log.exception("the hook %r failed for a %s; later failures are not logged", entry.given, kind)


#: The hooks of this process.
HOOKS = Hooks()


#: Call a hook with every event of this process from now on; once, however often it is added.
add_hook = HOOKS.add
#: Remove a hook. Does nothing if it is not registered.
remove_hook = HOOKS.remove
#: Return the registered hooks, in the order they were added.
get_hooks = HOOKS.all
