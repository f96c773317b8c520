"""Outcomes of checks, and the observer that is notified of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

__all__ = ["Observer", "Outcome", "Problem", "size"]


@dataclass(frozen=True)
class Problem:
    """A difference between what was expected and what was found, with advice."""

    expected: str
    found: str
    advice: str


class Observer:
    """Observer of a verification. Its methods do nothing; a subclass overrides those that it needs."""

    def prepare(self, checks: int) -> None:
        """Note that processes are started, for so many checks."""

    def begin(self, outcome: Outcome) -> None:
        """Note that a check begins."""

    def step(self, done: int, total: int) -> None:
        """Note how much of the check is done."""

    def end(self, outcome: Outcome) -> None:
        """Note that the check has ended."""


#: Advice where a promise of the library itself is broken.
_REPORT = "please report this, with the server's log"


@dataclass
class Outcome:
    """The outcome of a check, filled while it runs: a check that breaks off keeps what it found.

    ``name`` is for programs, ``title`` for people. ``figures`` are counts, or have a unit at the end of their name, ``_bytes``
    or ``_seconds``.
    """

    name: str
    title: str
    watcher: Observer = field(default_factory=Observer)
    seconds: float = 0.0
    #: One line for people.
    found: str = ""
    figures: dict[str, float] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    #: Whether the check is not possible here.
    skipped: bool = False

    def require(self, good: bool, expected: str, found: str, advice: str = _REPORT) -> None:
        """Note a problem unless ``good``."""
        if not good:
            self.problems.append(Problem(expected, found, advice))

    @contextmanager
    def crashes_are_failures(self) -> Iterator[None]:
        """Turn an exception of the check into a problem; the other checks go on."""
        try:
            yield
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            self.require(False, "the check runs to its end", text, "see the server's log below, and 'shared-rpc doctor'")

    @property
    def state(self) -> Literal["passed", "failed", "skipped"]:
        """State of the check, ``"failed"`` if there is a problem."""
        return "failed" if self.problems else "skipped" if self.skipped else "passed"

    def as_json(self) -> dict[str, Any]:
        """Return the outcome for programs; the documentation has the schema."""
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
    """Format bytes: ``"64.0 MiB"``, with a sign if negative."""
    amount, unit = abs(float(nbytes)), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if amount < 1024:
            break
        amount, unit = amount / 1024, larger
    sign = "-" if nbytes < 0 else ""
    return f"{sign}{amount:.0f} B" if unit == "B" else f"{sign}{amount:.1f} {unit}"
