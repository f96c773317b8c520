"""What a check found, and what that means."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

__all__ = ["Outcome", "Problem", "Verdict", "size"]

State = Literal["passed", "failed", "skipped"]


@dataclass(frozen=True)
class Problem:
    """Something that is not as it must be: what was expected, what was found instead, what to do about it."""

    expected: str
    found: str
    advice: str


@dataclass(frozen=True)
class Outcome:
    """A check that was made.

    ``name`` is for programs, ``title`` for people. ``figures`` are numbers; their names end in their units, ``_bytes`` or
    ``_seconds``, where they are no counts.
    """

    name: str
    title: str
    state: State
    seconds: float
    found: str
    problems: tuple[Problem, ...]
    figures: dict[str, float]

    def as_json(self) -> dict[str, Any]:
        """For programs; the documentation has the schema."""
        return {
            "name": self.name,
            "title": self.title,
            "state": self.state,
            "seconds": round(self.seconds, 3),
            "found": self.found,
            "problems": [vars(problem) for problem in self.problems],
            "figures": self.figures,
        }


@dataclass
class Verdict:
    """Filled by a check while it runs, so that what was found stays where the check breaks off.

    :param step: is told how much of the check is done, of how much.
    """

    step: Callable[[int, int], object] = lambda done, total: None
    #: One line for people.
    found: str = ""
    figures: dict[str, float] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    #: Why the check is not possible here, where it is not.
    skipped: bool = False

    def require(self, good: bool, expected: str, found: str, advice: str) -> bool:
        """Note a problem unless ``good``, which is returned."""
        if not good:
            self.problems.append(Problem(expected, found, advice))
        return good

    @contextmanager
    def crashes_are_failures(self) -> Iterator[None]:
        """A check that breaks off has failed; the others go on."""
        try:
            yield
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            self.require(False, "the check runs to its end", text, "see the server's log below, and 'shared-rpc doctor'")

    @property
    def state(self) -> State:
        """Failed where there is a problem."""
        return "failed" if self.problems else "skipped" if self.skipped else "passed"


def size(nbytes: float) -> str:
    """Bytes for people: ``"64.0 MiB"``, with the sign of what is missing."""
    amount, unit = abs(float(nbytes)), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if amount < 1024:
            break
        amount, unit = amount / 1024, larger
    sign = "-" if nbytes < 0 else ""
    return f"{sign}{amount:.0f} B" if unit == "B" else f"{sign}{amount:.1f} {unit}"
