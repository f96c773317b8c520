"""One name for one thing: what the glossary says, and what the code is called."""

from __future__ import annotations

import ast
import functools
import re
from collections import defaultdict

import pytest

from tests.kit.processes import ROOT

PACKAGE = ROOT / "shared_rpc"
GLOSSARY = (ROOT / "docs" / "reference" / "glossary.md").read_text()

#: Words that stand for a term no more, whole or as a part of a name, and what it is called.
GONE = {
    "borrower": "chunk references",
    "crowd": "load client",
    "desk": "descriptor server",
    "hungry": "out of pool memory",
    "lane": "transfer",
    "loan": "chunk reference",
    "reaper": "finaliser thread",
    "starved": "out of pool memory",
    "voucher": "export descriptor",
}


def classes() -> dict[str, list[str]]:
    """The public classes of the package, with the files that have one of that name."""
    found: dict[str, list[str]] = defaultdict(list)
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found[node.name].append(str(path.relative_to(PACKAGE)))
    return dict(found)


def test_a_class_has_a_name_of_its_own() -> None:
    """Whoever searches for one finds one."""
    assert {name: files for name, files in classes().items() if len(files) > 1} == {}


@pytest.mark.parametrize("place", sorted(set(re.findall(r"`([a-z_/]+(?:\.py|/))`", GLOSSARY))))
def test_what_the_glossary_names_is_there(place: str) -> None:
    """A file or a folder of the package, or of a distribution of its own."""
    assert any((folder / place).exists() for folder in (PACKAGE, *(ROOT / "integrations").iterdir()))


@functools.cache
def names() -> list[tuple[str, str]]:
    """Each name of a module, class, function, argument or variable, written with underscores, and where it stands."""
    found = []
    for path in sorted([*PACKAGE.rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py")]):
        found.append((path.stem, str(path)))
        for node in ast.walk(ast.parse(path.read_text())):
            for name in {getattr(node, "name", None), getattr(node, "arg", None), getattr(node, "id", None)}:
                if isinstance(name, str):
                    found.append((_snake(name), f"{path}, line {node.lineno}: {name}"))
    return found


@pytest.mark.parametrize("word", sorted(GONE))
def test_a_word_that_is_gone_names_nothing(word: str) -> None:
    """It is no part of a name either."""
    named = re.compile(rf"(?:^|_){word}s?(?:_|$)")
    assert [place for name, place in names() if named.search(name)] == [], f"it is called {GONE[word]}"


def _snake(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()


def test_a_part_of_a_name_is_found() -> None:
    """The check above would see it."""
    assert re.search(r"(?:^|_)desks?(?:_|$)", _snake("OldDesk")) and not re.search(r"(?:^|_)desk(?:_|$)", _snake("desktop"))


def test_the_glossary_is_sorted_by_nothing_but_names_each_term_once() -> None:
    """A term has one row."""
    terms = re.findall(r"^\| \*\*(.+?)\*\*", GLOSSARY, re.MULTILINE)
    assert len(terms) == len(set(terms)) > 30
