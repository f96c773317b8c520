"""Each object of each library, attached from either kind of server, is as one of one's own."""

from __future__ import annotations

from typing import Any

import pytest

from tests.compat.cases import LIBRARIES, cases_of
from tests.compat.findings import differs, load
from tests.compat.hosts import HOSTS, LIMIT
from tests.compat.reports import Reports

VISITS = [(library, host) for library in LIBRARIES for host in HOSTS]
NAMES = [f"{library}, {host}" for library, host in VISITS]
CASES = [((library, host), case) for library, host in VISITS for case in cases_of(library)]
OF_CASES = [f"{library}, {case}, {host}" for (library, host), case in CASES]

# One visit is waited for by the first test that needs it, after those that were asked for before.
pytestmark = pytest.mark.timeout(LIMIT * 4)


@pytest.fixture
def report(visit: tuple[str, str], reports: Reports, request: pytest.FixtureRequest) -> dict[str, Any]:
    """The report of a visit, which is waited for; skip a library, or a case, that does not run here."""
    library, host = visit
    missing = reports.missing(library)
    if missing and request.config.getoption("--require-all"):
        pytest.fail(f"{library} is not tested, because {', '.join(missing)} cannot be imported here")
    if missing:
        pytest.skip(f"{', '.join(missing)} cannot be imported here")
    case = request.node.callspec.params.get("case")
    found = reports.of(library, host) if case is None or case in reports.cases(library) else None
    if found is None:
        pytest.skip(f"{library} does not run it on {reports.device}")
    return found


@pytest.mark.parametrize(("visit", "case"), CASES, ids=OF_CASES)
def test_attached_objects_behave_like_own_ones(case: str, report: dict[str, Any]) -> None:
    """Compared bit for bit, and everything that ``checks.py`` lists works as with an object of one's own."""
    assert case in report["cases"], report["visitor"] or report["log"]
    fails = {check: words for check, (outcome, words, _) in report["cases"][case].items() if outcome == "fails"}
    assert not fails, "\n".join(f"{check}: {words}" for check, words in fails.items())
    outcome, words, _ = report["cases"][case].get("outputs", ("works", "", 0))
    assert outcome == "works", f"the case shows nothing, because one's own object does not compute: {words}"


@pytest.mark.parametrize(("visit", "case"), CASES, ids=OF_CASES)
def test_findings_are_those_of_the_page(
    visit: tuple[str, str], case: str, reports: Reports, report: dict[str, Any], pytestconfig: pytest.Config
) -> None:
    """The outcome, the words of a refusal and what is each process's own are those of docs/reference/compatibility."""
    if pytestconfig.getoption("--write"):
        pytest.skip("it will, at the end")
    found = report["found"].get(case)
    assert found, "nothing was found: another test says why"
    said = differs(load(reports.device), visit[0], case, found)
    assert not said, f"{said}. If that is right: nox -s compat -- --device {reports.device} --write -k {visit[0]}"


@pytest.mark.parametrize("visit", VISITS, ids=NAMES)
def test_client_and_server_end_as_they_should(report: dict[str, Any]) -> None:
    """The client ends by itself, and the server at SIGINT, with nothing left to say."""
    assert not report["visitor"]
    assert report["ended"] == 0, report["log"]
    assert "Traceback" not in report["log"], report["log"]
