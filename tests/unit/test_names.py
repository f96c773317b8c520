"""Names: what the glossary says, and what the code is called."""

from __future__ import annotations

import ast
import re
from collections import defaultdict

import pytest

from tests.kit.processes import ROOT

PACKAGE = ROOT / "shared_rpc"
GLOSSARY = (ROOT / "docs" / "reference" / "glossary.md").read_text()


def test_public_classes_have_different_names() -> None:
    """A search for a name finds one class."""
    files: dict[str, list[str]] = defaultdict(list)
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                files[node.name].append(str(path.relative_to(PACKAGE)))
    assert {name: found for name, found in files.items() if len(found) > 1} == {}


@pytest.mark.parametrize("place", sorted(set(re.findall(r"`([a-z_/]+(?:\.py|/))`", GLOSSARY))))
def test_files_named_by_the_glossary_exist(place: str) -> None:
    """In the package or in a distribution of its own."""
    assert any((folder / place).exists() for folder in (PACKAGE, *(ROOT / "integrations").iterdir()))


def test_the_glossary_defines_each_term_once() -> None:
    """A term has one row."""
    terms = re.findall(r"^\| \*\*(.+?)\*\*", GLOSSARY, re.MULTILINE)
    assert len(terms) == len(set(terms)) > 30
