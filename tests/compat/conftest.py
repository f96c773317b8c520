"""Options of these tests: the device, whether every library has to be there, what is written. And what they say at the end."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.compat import page
from tests.compat.cases import LIBRARIES, cases_of
from tests.compat.findings import load, merged, save
from tests.compat.reports import Reports, tables


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--device``, ``--at-once``, ``--require-all``, ``--report``, ``--write``."""
    group = parser.getgroup("compat")
    group.addoption("--device", choices=("cpu", "cuda"), default="cpu", help="where the objects are")
    group.addoption("--at-once", type=int, default=2, help="how many servers are visited at a time, with about a core for each")
    group.addoption("--require-all", action="store_true", help="a library that is missing is a failure, and is not skipped")
    group.addoption("--report", type=Path, help="write what was found to this file, as JSON")
    group.addoption("--write", action="store_true", help="have docs/reference/compatibility say what was found")


@pytest.fixture(scope="session")
def reports(request: pytest.FixtureRequest) -> Reports:
    """What each visitor found, made as it is asked for."""
    made: Reports = request.config.stash[_REPORTS]
    return made


_REPORTS = pytest.StashKey[Reports]()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Begin with the visits that the selected tests need, of the cases that were selected; of all where none was."""
    wanted: dict[tuple[str, str], list[str]] = {}
    for item in session.items if not session.config.option.collectonly else []:
        if isinstance(item, pytest.Function):
            names = wanted.setdefault(item.callspec.params["visit"], [])
            names.extend(name for parameter, name in item.callspec.params.items() if parameter == "case")
    reports = session.config.stash[_REPORTS] = Reports(
        session.config.getoption("--device"),
        {(library, host): names or list(cases_of(library)) for (library, host), names in wanted.items()},
        session.config.getoption("--at-once"),
    )
    session.config.add_cleanup(reports.close)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """The tables, the times, and what was not run."""
    reports = config.stash.get(_REPORTS, None)
    if reports is None:
        return
    found = reports.finished()
    terminalreporter.section("other people's libraries")
    for line in tables(found):
        terminalreporter.write_line(line)
    missing = {library: names for library in LIBRARIES if (names := reports.missing(library))}
    for library, names in missing.items():
        terminalreporter.write_line(f"not run: {library}, because {', '.join(names)} cannot be imported here")
    total = sum(report["seconds"] for report in found.values())
    terminalreporter.write_line(f"{len(found)} visits took {total:.0f} s together, on {reports.device}")
    path = config.getoption("--report")
    if path is not None:
        path.write_text(json.dumps({" under ".join(visit): report for visit, report in found.items()}, indent=1))
    if config.getoption("--write"):
        for line in _written(reports.device, found):
            terminalreporter.write_line(line)


def _written(device: str, found: dict[tuple[str, str], dict[str, Any]]) -> Iterator[str]:
    """Keep what was found, and make the page anew; yield what there is to say of it."""
    findings, left = merged(load(device), device, found)
    yield f"written: {save(device, findings)}, {page.write()}"
    yield from (f"not written: {line}" for line in left)
