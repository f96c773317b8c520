"""What a check found, and what that means."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

__all__ = ["Observer", "Outcome", "Problem", "Silent", "size"]


@dataclass(frozen=True)
class Problem:
    """Something that is not as it must be: what was expected, what was found instead, what to do about it."""

    expected: str
    found: str
    advice: str


class Observer(Protocol):
    """Observer of a verification; a subclass implements what it wants to know."""

    def prepare(self, checks: int) -> None:
        """Note that processes are started, for so many checks."""
        return

    def begin(self, outcome: Outcome) -> None:
        """Note that a check begins."""
        return

    def step(self, done: int, total: int) -> None:
        """Note how much of the check is done."""
        return

    def end(self, outcome: Outcome) -> None:
        """Note that it has ended."""
        return


class Silent(Observer):
    """Observer that wants to know nothing."""


@dataclass
class Outcome:
    """Filled by a check while it runs, so that what was found stays where the check breaks off.

    ``name`` is for programs, ``title`` for people. ``figures`` are numbers; their names end in their units, ``_bytes`` or
    ``_seconds``, where they are no counts.
    """

    name: str
    title: str
    watcher: Observer = field(default_factory=Silent)
    seconds: float = 0.0
    #: One line for people.
    found: str = ""
    figures: dict[str, float] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    #: Whether the check is not possible here.
    skipped: bool = False

    def require(self, good: bool, expected: str, found: str, advice: str) -> None:
        """Note a problem unless ``good``."""
        if not good:
            self.problems.append(Problem(expected, found, advice))

    @contextmanager
    def crashes_are_failures(self) -> Iterator[None]:
        """Have a check that breaks off fail; the others go on."""
        try:
            yield
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            self.require(False, "the check runs to its end", text, "see the server's log below, and 'shared-rpc doctor'")

    @property
    def state(self) -> Literal["passed", "failed", "skipped"]:
        """Failed where there is a problem."""
        return "failed" if self.problems else "skipped" if self.skipped else "passed"

    def as_json(self) -> dict[str, Any]:
        """Describe it for programs; the documentation has the schema."""
        return {
            "name": self.name,
            "title": self.title,
            "state": self.state,
            "seconds": round(self.seconds, 3),
            "found": self.found,
            "problems": [vars(problem) for problem in self.problems],
            "figures": self.figures,
        }


def size(nbytes: float) -> str:
    """Write bytes for people: ``"64.0 MiB"``, with the sign of what is missing."""
    amount, unit = abs(float(nbytes)), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if amount < 1024:
            break
        amount, unit = amount / 1024, larger
    sign = "-" if nbytes < 0 else ""
    return f"{sign}{amount:.0f} B" if unit == "B" else f"{sign}{amount:.1f} {unit}"
