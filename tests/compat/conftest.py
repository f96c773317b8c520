"""Options of these tests: the device, whether every library has to be there, what is written. And what they say at the end."""

from __future__ import annotations

import pytest

from tests.compat import page
from tests.compat.cases import cases_of
from tests.compat.findings import load, merged, save
from tests.compat.reports import Reports, tables


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--device``, ``--at-once``, ``--require-all``, ``--write``."""
    group = parser.getgroup("compat")
    group.addoption("--device", choices=("cpu", "cuda"), default="cpu", help="where the objects are")
    group.addoption("--at-once", type=int, default=2, help="how many servers are visited at a time, with about a core for each")
    group.addoption("--require-all", action="store_true", help="a library that is missing is a failure, and is not skipped")
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
    """Print what does not simply work; with ``--write``, keep the findings and write the page."""
    reports = config.stash.get(_REPORTS, None)
    if reports is None:
        return
    found = reports.finished()
    terminalreporter.section("other people's libraries")
    lines = [*tables(found)]
    if config.getoption("--write"):
        findings, left = merged(load(reports.device), reports.device, found)
        lines.append(f"written: {save(reports.device, findings)}, {page.write()}")
        lines.extend(f"not written: {line}" for line in left)
    for line in lines:
        terminalreporter.write_line(line)
