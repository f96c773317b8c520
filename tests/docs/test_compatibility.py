"""docs/reference/compatibility.md has the result of each case of tests/compat, and no other."""

from __future__ import annotations

import re

import pytest

from tests.compat import findings
from tests.compat.cases import LIBRARIES, cases_of
from tests.compat.page import PAGE, made
from tests.compat.places import OWN


def test_the_tables_are_made_of_the_findings() -> None:
    """Making them again changes nothing."""
    page = PAGE.read_text()
    assert made(page) == page, "python -m tests.compat.page makes it anew"


@pytest.mark.parametrize("library", LIBRARIES)
def test_every_case_was_run_on_the_cpu(library: str) -> None:
    """Except those of a GPU alone. Results on a GPU are among the cases too."""
    cases = cases_of(library)
    assert {name for name, case in cases.items() if "cpu" in case.devices} == set(findings.load("cpu").get(library, {}))
    assert set(findings.load("cuda").get(library, {})) <= {name for name, case in cases.items() if "cuda" in case.devices}


@pytest.mark.parametrize("device", findings.DEVICES)
@pytest.mark.parametrize("library", LIBRARIES)
def test_findings_are_the_expected_ones(library: str, device: str) -> None:
    """What works copies no tensor; a refusal names the attribute's path, its kind, and after a colon the remedy."""
    for name, finding in findings.load(device).get(library, {}).items():
        refused = cases_of(library)[name].refused
        if finding["outcome"] == "works":
            assert refused is None, name
            assert set(finding["own"]) <= set(OWN) - {"tensors"}, name
        else:
            assert refused is not None and refused in finding["words"], name
            assert re.match(r"result\S* |returned a value of type ", finding["words"])
            assert re.search(r"(?:: |; |\. )(?:[Cc]hoose|[Cc]onvert|keep|load|make|return|run|share|use) ", finding["words"])
