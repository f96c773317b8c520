"""docs/reference/compatibility.md has the result of each case of tests/compat, and no other."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.compat import findings
from tests.compat.cases import LIBRARIES, cases_of, title
from tests.compat.page import PAGE, made
from tests.compat.places import OWN

WORKS = {"date": "2026-01-02", "of": "torch 2.6.0", "outcome": "works", "class": "a.B", "private_nbytes": 3000, "own": []}
REFUSED = {"date": "2026-01-02", "of": "torch 2.6.0", "outcome": "refused", "words": "result.x is __odd__ | so: do `y`"}
FOUND = [
    pytest.param(case, finding, id=f"{device}, {library}, {name}")
    for device in findings.DEVICES
    for library, found in findings.load(device).items()
    for name, finding in found.items()
    if (case := cases_of(library).get(name)) is not None
]


def _section(library: str) -> str:
    return PAGE.read_text().partition(f"\n### {title(library)}\n")[2].partition("\n### ")[0].partition("\n## ")[0]


def _objects(text: str) -> list[str]:
    """Return the names in the lists and in the first table columns of a section."""
    lists = re.findall(r"^- \*\*(?:works|not run).*?\*\*: (.*)", text, re.MULTILINE)
    tables = re.findall(r"^\| (?!refused object)(\S[^|]*) \|", text, re.MULTILINE)
    return [re.sub(r" \*\(.*\)\*$", "", name) for names in [*lists, *tables] for name in names.split("; ")]


def test_the_tables_are_made_of_what_was_found() -> None:
    """Making them again changes nothing."""
    page = PAGE.read_text()
    assert made(page) == page, "python -m tests.compat.page makes it anew"


@pytest.mark.parametrize("library", LIBRARIES)
def test_rows_and_cases_agree(library: str) -> None:
    """Every case is on the page once, and the page has no other."""
    assert sorted(_objects(_section(library))) == sorted(cases_of(library))


@pytest.mark.parametrize("library", LIBRARIES)
def test_every_case_was_run_on_the_cpu(library: str) -> None:
    """Except those of a GPU alone. Results on a GPU are among the cases too."""
    cases = cases_of(library)
    assert {name for name, case in cases.items() if "cpu" in case.devices} == set(findings.load("cpu").get(library, {}))
    assert set(findings.load("cuda").get(library, {})) <= {name for name, case in cases.items() if "cuda" in case.devices}


@pytest.mark.parametrize(("case", "finding"), FOUND)
def test_a_finding_has_its_date_and_releases(case: Any, finding: dict[str, Any]) -> None:
    """The day, and among the releases those of torch and Python."""
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", finding["date"])
    assert re.search(r"\btorch \d+\.\d+\.\d+, Python 3\.\d+", finding["of"])


@pytest.mark.parametrize(("case", "finding"), [param for param in FOUND if param.values[1]["outcome"] == "works"])
def test_what_works_was_to_work_and_copies_no_tensor(case: Any, finding: dict[str, Any]) -> None:
    """The page explains which parts each process has for itself."""
    assert case.refused is None
    assert set(finding["own"]) <= set(OWN) - {"tensors"}


@pytest.mark.parametrize(("case", "finding"), [param for param in FOUND if param.values[1]["outcome"] == "refused"])
def test_a_refusal_says_where_and_what_to_do(case: Any, finding: dict[str, Any]) -> None:
    """In the text that the case expects: the path of the attribute, its kind, and after a colon the remedy."""
    assert case.refused is not None
    assert case.refused in finding["words"]
    assert re.match(r"result\S* |returned a value of type ", finding["words"])
    assert re.search(r"(?:: |; |\. )(?:[Cc]hoose|[Cc]onvert|keep|load|make|return|run|share|use) ", finding["words"])


@pytest.mark.parametrize(
    ("library", "case", "own"),
    [
        ("torch", "Sequential", []),
        ("torch", "numpy in attributes", ["small arrays"]),
        ("torch", "a large numpy array in an attribute", ["arrays"]),
        ("torch", "generator in an attribute", ["random state"]),
        ("torch_ao", "dynamic int8", ["packed weights"]),
        ("transformers", "text-generation pipeline", ["tokenizer"]),
    ],
)
def test_what_is_copied_is_found(library: str, case: str, own: list[str]) -> None:
    """Each kind has an object of which it is known."""
    assert findings.load("cpu")[library][case]["own"] == own


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for findings that replaces the page's."""
    monkeypatch.setattr(findings, "FOLDER", tmp_path)
    return tmp_path


def test_an_object_may_work_on_one_device_only(kept: Path) -> None:
    """The lists and the errors name the devices."""
    kept.joinpath("cpu.json").write_text(json.dumps({"timm": {"resnet": WORKS, "vit": WORKS}}))
    kept.joinpath("cuda.json").write_text(json.dumps({"timm": {"resnet": REFUSED}}))
    page = made(PAGE.read_text())
    assert "- **works on the CPU**: resnet\n" in page
    assert "- **works on the CPU, not run on the GPU**: vit\n" in page
    assert r"| resnet | GPU | `result.x` is `__odd__` \| so: do \`y\` |" in page


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"outcome": "refused"}, "outcome: 'works' is now 'refused'"),
        ({"words": "result is odd"}, "words: None is now 'result is odd'"),
        ({"own": ["packed weights"]}, "own: [] is now ['packed weights']"),
        ({"private_nbytes": 1, "class": "x.Y", "date": "2027-01-01"}, ""),
    ],
)
def test_what_a_run_finds_otherwise_is_told(change: dict[str, Any], said: str) -> None:
    """The outcome, the texts and the parts private to each process; neither sizes nor releases."""
    assert findings.differs({"timm": {"resnet": WORKS}}, "timm", "resnet", {**WORKS, **change}) == said
