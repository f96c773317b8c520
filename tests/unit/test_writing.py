"""The first words of docstrings: a function does something, a class or a module is something.

``python -m tests.unit.test_writing [ROOM]`` counts for each room what is not so yet, or lists it for one.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kit.processes import ROOT

PACKAGE = ROOT / "shared_rpc"

#: What is written by the same rules, beside the package.
OTHER_ROOMS = {
    "benchmarks": "benchmarks/*.py",
    "ray": "integrations/ray/shared_rpc_ray/*.py",
    "vllm": "integrations/vllm/shared_rpc_vllm/*.py",
}

#: Rooms whose docstrings are to be written anew; ``root`` has the modules that are in no room.
UNFINISHED: set[str] = set()

#: A clause, or a hint at another place, where the thing has a name.
CLAUSES = """
    How If Is It See Since That There This Those What Whatever When Where Whether Which Who Whoever Whose Why
"""
#: No verbs: the first word of a function says what the function does.
OTHERS = """
    A After Again All Also An And Another Any Around As At Because Before Both But By Each Either Else Every For From Her His
    Ids In Into Its Later Like Many Memory Most Much New News No Nobody None Nothing Now Nowhere Of On Once One Only Or Other
    Others Our Out Over Several She So Some Somebody Something Than The Their Then These They To Too Two Under Unless Until Up
    We While With Within Without You Your
"""
#: What a class would do, and not what it is.
VERBS = """
    Answers Are Ask Asks Begin Does Drives Give Gives Had Has Have Keeps Make Makes Reads Says Serves Takes Tell Tells Waits
    Watches
"""
#: No clauses in an attribute but this one: it is true or false.
ATTRIBUTE = {"Whether"}
#: Verbs that look like nouns in the plural, participles or gerunds.
LOOKING = re.compile(r".*ss|Focus|Alias|Need|Feed|Seed|Embed|Shed|Proceed|Succeed|Exceed|Speed|Bring|Ring|Spring|String")


def complaint(kind: str, text: str) -> str | None:
    """Return what is wrong with the first word of a docstring; None if it is right."""
    first = re.match(r"[A-Za-z]+(?=[\s.,:;]|$)", text)
    word = first.group() if first else text.split(maxsplit=1)[0]
    if word in CLAUSES.split() and not (kind == "attribute" and word in ATTRIBUTE):
        return f"{word!r} begins a clause"
    if kind == "function":
        if first is None:
            return f"{word!r} is a name, and no verb"
        if word in OTHERS.split() or (re.search(r"(s|ed|ing)$", word) and not LOOKING.fullmatch(word)):
            return f"{word!r} is no verb in the imperative"
    elif word in VERBS.split():
        return f"{word!r} is a verb"
    return None


def complaints(path: Path) -> Iterator[str]:
    """Yield what is wrong with the docstrings of a file."""
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        text, kind = ast.get_docstring(node), "class or module"
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            decorators = {ast.unparse(decorator).rpartition(".")[2] for decorator in node.decorator_list}
            kind = "attribute" if decorators & {"property", "cached_property"} else "function"
        if text and (found := complaint(kind, text)):
            name, line = getattr(node, "name", path.stem), getattr(node, "lineno", 1)
            yield f"{path.relative_to(ROOT)}:{line}: {name}: {found}: {text.splitlines()[0]}"


def rooms() -> dict[str, list[Path]]:
    """Return the files of each room, of the benchmarks, and of the plugins."""
    found: dict[str, list[Path]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        place = path.relative_to(PACKAGE).parts
        found.setdefault(place[0] if len(place) > 1 else "root", []).append(path)
    others = {name: sorted(ROOT.glob(pattern)) for name, pattern in OTHER_ROOMS.items()}
    return found | others


@pytest.mark.parametrize("room", sorted(rooms().keys() - UNFINISHED))
def test_docstrings_begin_with_a_verb_or_a_noun(room: str) -> None:
    """A function's begins with a verb in the imperative; a class's, a module's and an attribute's names what it is."""
    assert [found for path in rooms()[room] for found in complaints(path)] == []


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("function", "Whether it is alive."),
        ("function", "See :meth:`close`."),
        ("function", "The tensors of a checkpoint."),
        ("function", "``value`` as bytes."),
        ("function", "Bytes that are in use."),
        ("function", "Returns a tensor."),
        ("class", "What carries out a provider's calls."),
        ("class", "Serves what was asked for."),
        ("attribute", "Where the metrics are."),
    ],
)
def test_a_docstring_that_names_nothing_is_found(kind: str, text: str) -> None:
    """The check above would see it."""
    assert complaint(kind, text)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("function", "Return whether it is alive."),
        ("function", "Pass a descriptor on."),
        ("function", "Begin."),
        ("class", "Runtime of a role."),
        ("class", "The runs of endpoints."),
        ("attribute", "Whether the server was closed."),
        ("attribute", "Bytes that are in use."),
    ],
)
def test_a_docstring_that_names_the_thing_passes(kind: str, text: str) -> None:
    """It is not refused."""
    assert complaint(kind, text) is None


if __name__ == "__main__":
    for name, files in rooms().items():
        found = [line for file in files for line in complaints(file)]
        if name in sys.argv[1:]:
            print("\n".join(found))
        elif len(sys.argv) == 1:
            print(f"{name:<15}{len(found):>5}")
