"""Runs that wait until a worker takes them, and how much of them is too much."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from shared_rpc.errors import ServerBusy
from shared_rpc.server.executor import Invocation
from shared_rpc.server.state.descriptors import open_limit

if TYPE_CHECKING:
    from shared_rpc.broker.relay import Relayed

__all__ = ["Backlog"]

#: Calls that wait, and bytes of what came with them. A call that comes alone is taken whatever it brings.
_RUNS, _NBYTES = 10_000, 1 << 30


class Backlog:
    """Runs that no worker has been sent, oldest first. What is taken out leaves nothing behind: its arguments are all there is.

    Of the descriptors that this process may have, waiting arguments take at most a quarter: objects and clients need some too.
    """

    def __init__(self, runs: int = _RUNS, nbytes: int = _NBYTES) -> None:
        #: With what each took of the limits when it came: its arguments may have been let go since.
        self._runs: dict[Invocation, tuple[Relayed, dict[str, int]]] = {}
        self._limits = {"calls": runs, "bytes": nbytes, "descriptors": open_limit() // 4}
        self._held = dict.fromkeys(self._limits, 0)

    def check(self, run: Relayed, why: str) -> None:
        """See that one more may wait.

        :param why: what all of them wait for.
        :raises ServerBusy: if not.
        """
        for unit, amount in _weight(run).items():
            if self._runs and self._held[unit] + amount > self._limits[unit]:
                raise ServerBusy(
                    f"{len(self._runs)} calls wait to be run, with {self._held['bytes']} bytes and {self._held['descriptors']} "
                    f"descriptors of arguments, and there is no room for more (at most {self._limits[unit]} {unit}): {why}"
                )

    def add(self, run: Relayed) -> None:
        """It waits from now on."""
        weight = _weight(run)
        self._runs[run.invocation] = run, weight
        for unit, amount in weight.items():
            self._held[unit] += amount

    def take(self, invocation: Invocation) -> Relayed | None:
        """It waits no more; None if it did not."""
        run, weight = self._runs.pop(invocation, (None, {}))
        for unit, amount in weight.items():
            self._held[unit] -= amount
        return run

    def __iter__(self) -> Iterator[Relayed]:
        return iter([run for run, _ in self._runs.values()])

    def __len__(self) -> int:
        return len(self._runs)


def _weight(run: Relayed) -> dict[str, int]:
    return {"calls": 1, "bytes": run.arguments.nbytes, "descriptors": len(run.arguments.segments)}
