"""Reports of visitors, made a few at a time, and the tables of them."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from tests.compat.cases import cases_of, requires
from tests.compat.hosts import HOSTS, report_of

#: A library and a host.
Visited = tuple[str, str]


class Reports:
    """What visitors report: each visit begins as soon as there is a place, in the order in which tests want them.

    :param wanted: the cases of each visit.
    :param at_once: how many visits there are at a time.
    """

    def __init__(self, device: str, wanted: dict[Visited, list[str]], at_once: int) -> None:
        self.device = device
        self._pool = ThreadPoolExecutor(at_once)
        self._made: dict[Visited, Future[dict[str, Any]]] = {}
        for (library, host), names in wanted.items():
            here = [name for name in names if name in self.cases(library)]
            # A server without callers may be asked to exit before it has started.
            if here and not self.missing(library):
                # What takes seconds and does not depend on the host is tried once, with the host that most people use.
                heavy = host == next(iter(HOSTS))
                self._made[library, host] = self._pool.submit(report_of, library, host, device, heavy, here)

    def cases(self, library: str) -> list[str]:
        """The names of those of a library's cases that it runs on this device."""
        return [name for name, case in cases_of(library).items() if self.device in case.devices]

    def missing(self, library: str) -> list[str]:
        """The modules that a library needs and that are not installed."""
        return [name for name in requires(library) if importlib.util.find_spec(name) is None]

    def of(self, library: str, host: str) -> dict[str, Any] | None:
        """Return the report of a visit, which is waited for; None if none of the wanted cases runs here."""
        made = self._made.get((library, host))
        return made.result() if made is not None else None

    def finished(self) -> dict[Visited, dict[str, Any]]:
        """The reports that there are."""
        return {visit: made.result() for visit, made in self._made.items() if made.done() and not made.cancelled()}

    def close(self) -> None:
        """Begin no more."""
        self._pool.shutdown(cancel_futures=True)


def tables(found: dict[Visited, dict[str, Any]]) -> Iterator[str]:
    """Yield a line for each check that does not simply work: refused, excused, failed, or impossible without sharing too."""
    for (library, host), report in found.items():
        yield f"{library} under {host}: {len(report['cases'])} objects, {report['seconds']} s"
        for case, checks in report["cases"].items():
            for check, (outcome, words, _) in checks.items():
                if outcome != "works":
                    yield f"  {case}: {outcome}: {check}: {' '.join(words.split())[:300]}"
