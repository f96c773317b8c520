"""Messages between a zygote and the processes that use it: brokers, and commands of ``shared-rpc run``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from shared_rpc.zygote.framing import Incoming, framed, unpacked

__all__ = [
    "Answer",
    "Ended",
    "Fork",
    "ForkRefused",
    "Forked",
    "Preload",
    "Ready",
    "Request",
    "Step",
    "StopListening",
    "TellState",
    "Unfit",
    "ZygoteState",
    "answers",
    "packed",
    "request_of",
    "requests",
]

#: A step of a zygote's preparation: an import, or a change of environment variables (None removes one).
Step = str | dict[str, str | None]


class Preload(msgspec.Struct, tag=True):
    """The imports of a zygote, its first message.

    ``own`` are names of modules that it must not have: those of the person's own code. ``folders`` are directories whose
    modules it must not import: files of a person change at any time, and come first where Python looks for modules.
    ``needed`` are modules without which the zygote is not wanted.
    """

    steps: list[Step]
    own: list[str] = []
    folders: list[str] = []
    needed: list[str] = []


class Fork(msgspec.Struct, tag=True):
    """A request for a process, with what it is to inherit from the one that asks.

    :param words: the command line behind the interpreter and its options: a script, or ``-m`` and a module, and arguments.
    :param variables: the environment.
    :param fds: the numbers that the descriptors of this message have in the process; 0, 1 and 2 must be among them in a
        process that has standard streams. One more descriptor is the working directory's.
    :param folders: directories that come first where the process looks for modules, apart from that of its program: none of
        them may have a module that the zygote has from elsewhere.
    :param options: those of the interpreter; None for the zygote's. Likewise the next ones.
    :param ignored: signals that it ignores.
    :param blocked: signals that it blocks.
    :param watched: whether a watcher is its parent, which reports its end, and which it does not outlive; else the process
        that asks is the parent. The watched process begins when its client has sent :data:`~shared_rpc.zygote.framing.GO`.
    :param idle_exit: seconds without a request after which a zygote that listens ends.
    """

    words: list[str]
    variables: dict[str, str]
    fds: list[int]
    folders: list[str] = []
    options: list[str] | None = None
    umask: int | None = None
    limits: dict[int, tuple[int, int]] = {}
    ignored: list[int] = []
    blocked: list[int] | None = None
    watched: bool = False
    idle_exit: float | None = None


class TellState(msgspec.Struct, tag=True):
    """A request to describe the zygote."""


class StopListening(msgspec.Struct, tag=True):
    """A request to end, answered like :class:`TellState`. The connection ends with the process."""


Request = Preload | Fork | TellState | StopListening


class Ready(msgspec.Struct, tag=True):
    """A zygote that can be forked. ``modules`` are its imports; ``dropped`` the failed ones, with the reasons."""

    modules: list[str]
    dropped: dict[str, str]


class Unfit(msgspec.Struct, tag=True):
    """A zygote that must not be forked, and ends. ``module`` is the one whose import was the reason, where one was."""

    why: str
    module: str = ""


class Forked(msgspec.Struct, tag=True):
    """A started process: a child of the requesting one, if that is a subreaper, see prctl(2); or one with a watcher."""

    pid: int


class ForkRefused(msgspec.Struct, tag=True):
    """A request that cannot be met. ``stale``: nor can any later one, as imported files have changed."""

    why: str
    stale: bool = False


class Ended(msgspec.Struct, tag=True):
    """The end of a watched process; ``code`` as :attr:`subprocess.Popen.returncode`."""

    code: int


class ZygoteState(msgspec.Struct, tag=True):
    """A zygote that listens. Times are in seconds, ``pss`` in bytes, see :func:`~shared_rpc.zygote.process.pss_of`."""

    kind: str
    pid: int
    socket_path: str
    key: str
    preload: list[str]
    runs: int
    idle: float
    idle_exit: float
    uptime: float
    pss: int


Answer = Ready | Unfit | Forked | ForkRefused | Ended | ZygoteState


def packed(message: Request | Answer) -> bytes:
    """Return the bytes of a message."""
    return framed(msgspec.to_builtins(message, str_keys=True))


def requests() -> Incoming[Request]:
    """Return the receiver of requests."""
    return Incoming(_decoder(Request))


def answers() -> Incoming[Answer]:
    """Return the receiver of answers."""
    return Incoming(_decoder(Answer))


def request_of(text: str) -> Request:
    """Return the request of a JSON text."""
    request: Request = _decoder(Request)(text.encode())
    return request


def _decoder(kind: Any) -> Callable[[bytes], Any]:
    # Keys that are numbers are strings in JSON.
    return lambda data: msgspec.convert(unpacked(data), kind, strict=False)
