"""Events of a server, and the hooks that receive them: to count, trace or log.

A **hook** is a function that takes one event, a frozen object of one of the classes below. It is called in the thread of the
server's loop, so it must be quick, and neither wait nor send requests to the server. An exception of a hook does no harm: the
first of each hook is logged. A :class:`HookFactory` makes its hook when the first event comes, and may import libraries.

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

#: How a call ended: answered from the cache, by a run under way, by a record of the source of records, or by a run of its own;
#: with an error; or abandoned by its caller.
Outcome = Literal["hit", "joined", "adopted", "built", "failed", "left"]

#: Why an object changed its tier: a request named it; a device's or the host's capacity was needed; a suspended
#: handle was resumed; or an object was to be used, by a call, a ticket, an export.
MoveReason = Literal["request", "capacity", "resume", "use"]


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """Base of all events. ``server_id`` is the server's, ``""`` for an event of the whole process and in a broker's workers."""

    server_id: str = ""


class CallStarted(Event, frozen=True, kw_only=True):
    """A call, or the submit of a task, of a registered endpoint with arguments that fit.

    ``request_id`` identifies it; ``session`` and ``pid`` are its caller's.
    """

    endpoint: str
    request_id: str
    session: str
    pid: int


class CallFinished(Event, frozen=True, kw_only=True):
    """The end of a call, ``seconds`` after its :class:`CallStarted`. ``error`` is the code of its error, see
    :mod:`shared_rpc.errors`; ``"remote"`` is any exception of an endpoint.
    """

    endpoint: str
    request_id: str
    session: str
    pid: int
    outcome: Outcome
    seconds: float
    error: str = ""


class BuildStarted(Event, frozen=True, kw_only=True):
    """The beginning of a run of an endpoint. ``request_id`` is that of the call that started it."""

    endpoint: str
    request_id: str
    cached: bool


class BuildFinished(Event, frozen=True, kw_only=True):
    """The end of a run, ``seconds`` later. ``cached``: the cache would list its result."""

    endpoint: str
    request_id: str
    cached: bool
    seconds: float
    error: str = ""


class ObjectPublished(Event, frozen=True, kw_only=True):
    """A result or a buffer that the server keeps from now on."""

    object_id: str
    endpoint: str
    kind: Literal["result", "buffer"]
    nbytes: int
    device: str
    generation: int


class ObjectFreed(Event, frozen=True, kw_only=True):
    """An object that the server keeps no longer. Memory that clients have mapped goes with the last of them."""

    object_id: str
    endpoint: str
    kind: Literal["result", "buffer"]
    nbytes: int
    device: str


class ObjectEvicted(Event, frozen=True, kw_only=True):
    """The move of an object to a lower tier, ``seconds`` after it began.

    ``nbytes`` are what the tier above has got back, and ``copied`` those that were copied for it: none where there was a good
    copy. A move that fails is none: the object stays where it is.
    """

    object_id: str
    endpoint: str
    device: str
    from_tier: Tier
    to_tier: Tier
    nbytes: int
    copied: int
    seconds: float
    reason: MoveReason


class ObjectRestored(Event, frozen=True, kw_only=True):
    """The move of an object back to its device, for all processes at once, ``seconds`` after it began. ``copied`` bytes of
    ``nbytes`` came from the copy.
    """

    object_id: str
    endpoint: str
    device: str
    from_tier: Tier
    to_tier: Tier
    nbytes: int
    copied: int
    seconds: float
    reason: MoveReason


class LeaseGiven(Event, frozen=True, kw_only=True):
    """A new lease of a session, or of a task whose result waits to be fetched; ``session`` is the id of either."""

    object_id: str
    kind: HolderKind
    session: str


class LeaseEnded(Event, frozen=True, kw_only=True):
    """The end of a lease. ``reclaimed``: the client's process ended without closing, as a killed one does."""

    object_id: str
    kind: HolderKind
    session: str
    reclaimed: bool


class SessionOpened(Event, frozen=True, kw_only=True):
    """The first connection of a client process."""

    session: str
    pid: int


class SessionClosed(Event, frozen=True, kw_only=True):
    """The end of a session's last connection. ``clean``: the client closed; else its process ended, or was killed."""

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
    """The end of a worker's process. ``crashed``: it ended without a request; ``signal`` or ``exit_code`` is how."""

    number: int
    pid: int
    seconds: float
    crashed: bool
    signal: str | None
    exit_code: int | None


Hook = Callable[[Event], object]


@dataclass(frozen=True)
class HookFactory:
    """A hook that is made when the first event comes.

    :param make: called once; it may import a library that loads slowly, or is not installed.
    """

    make: Callable[[], Hook]


class _Entry:
    """A registered hook, with its original and a note whether an exception of it was logged."""

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
        #: Whether any hook is registered. Read before an event is made.
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
        """Call every hook. Of a hook's exceptions only KeyboardInterrupt, in the main thread, is raised."""
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
