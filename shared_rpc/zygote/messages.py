"""Messages between a zygote and the process that uses it: JSON in frames."""

from __future__ import annotations

import msgspec

from shared_rpc.zygote.framing import Incoming, framed

__all__ = [
    "Answer",
    "Fork",
    "ForkRefused",
    "Forked",
    "Preload",
    "Ready",
    "Request",
    "Step",
    "Unfit",
    "answers",
    "packed",
    "requests",
]

#: A step of a zygote's preparation: an import, or a change of environment variables (None removes one).
Step = str | dict[str, str | None]


class Preload(msgspec.Struct, tag=True):
    """The first message to a zygote.

    ``own`` are names of modules that it must not have: those of the person's own code. ``folders`` are directories whose
    modules it must not import: files of a person change at any time, and come first where Python looks for modules.
    """

    steps: list[Step]
    own: list[str] = []
    folders: list[str] = []


class Fork(msgspec.Struct, tag=True):
    """A request for a process.

    :param module: run as ``python -m module`` does, with ``words`` as further words of the command line.
    :param fds: the numbers that the descriptors of this message have in the process; 0, 1 and 2 must be among them.
    :param folders: directories that come first where the process looks for modules: none of them may have a module that the
        zygote has from elsewhere.
    """

    module: str
    words: list[str]
    fds: list[int]
    folders: list[str] = []


Request = Preload | Fork


class Ready(msgspec.Struct, tag=True):
    """A zygote that can be forked. ``modules`` are its imports; ``dropped`` the failed ones, with the reasons."""

    modules: list[str]
    dropped: dict[str, str]


class Unfit(msgspec.Struct, tag=True):
    """A zygote that must not be forked, and ends. ``module`` is the one whose import was the reason, where one was."""

    why: str
    module: str = ""


class Forked(msgspec.Struct, tag=True):
    """A started process: a child of the requesting one, if that is a subreaper, see prctl(2)."""

    pid: int


class ForkRefused(msgspec.Struct, tag=True):
    """A request that cannot be met. ``stale``: nor can any later one, as imported files have changed."""

    why: str
    stale: bool = False


Answer = Ready | Unfit | Forked | ForkRefused

_requests = msgspec.json.Decoder(Request)
_answers = msgspec.json.Decoder(Answer)


def packed(message: Request | Answer) -> bytes:
    """Return the bytes of a message."""
    return framed(msgspec.json.encode(message))


def requests() -> Incoming[Request]:
    """Return the receiver of requests."""
    return Incoming(_requests.decode)


def answers() -> Incoming[Answer]:
    """Return the receiver of answers."""
    return Incoming(_answers.decode)
