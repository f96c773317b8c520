"""The tables of docs/reference/compatibility.md, made of the cases and of what was found: ``python -m tests.compat.page``.

The rest of the page is written by hand; what is made stands between two comments, and everything there is overwritten.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.compat.cases import LIBRARIES, Case, cases_of, title
from tests.compat.findings import DEVICES, FOLDER, Findings, load
from tests.compat.places import OWN

__all__ = ["PAGE", "made", "write"]

PAGE = FOLDER.with_suffix(".md")
_CALLED = {"cpu": "CPU", "cuda": "GPU"}
#: In a text: the path of an attribute, a call, a name of torch's, an attribute, all of which are set as code.
_CODE = re.compile(
    r"^result\S*|\bresult(?:[.\[][\w'\]]*)+(?:\(\))?"
    r"|(?<![\w.])(?:\.?[A-Za-z_][\w.]*\([^()]*\)|(?:\w+=)?torch\.\w[\w.]*\w|\w+='\w+'|\.[a-z_]+(?=[ ,:;]|$)|__\w+__)"
)


def write() -> Path:
    """Make the tables anew, in the page."""
    PAGE.write_text(made(PAGE.read_text()))
    return PAGE


def made(page: str) -> str:
    """Return the text of the page with its tables made anew."""
    found = {device: load(device) for device in DEVICES}
    parts = {"libraries": _overview(found), "objects": _sections(found), "own": _own()}
    for name, lines in parts.items():
        begin, end = f"<!-- made of tests/compat: {name} -->", f"<!-- end of {name} -->"
        before, rest = page.split(begin)
        page = "\n".join([before + begin, "", *lines, "", end + rest.split(end)[1]])
    return page


def _overview(found: dict[str, Findings]) -> Iterator[str]:
    yield from _head("library", "objects", *(f"on the {name}" for name in _CALLED.values()))
    for library in _alphabetically():
        counts = [_count(library, device, found[device]) for device in DEVICES]
        yield _row(f"[{title(library)}](#{_anchor(title(library))})", f"{len(cases_of(library))}", *counts)


def _alphabetically() -> list[str]:
    return sorted(LIBRARIES, key=lambda library: title(library).lower())


def _anchor(text: str) -> str:
    return re.sub(r"[^\w -]", "", text.lower()).replace(" ", "-")


def _count(library: str, device: str, findings: Findings) -> str:
    outcomes = Counter(
        findings.get(library, {}).get(name, {"outcome": "not run"})["outcome"]
        for name, case in cases_of(library).items()
        if device in case.devices
    )
    words = {"works": "work", "refused": "refused", "not run": "not run"}
    if len(outcomes) == 1:
        return "all work" if "works" in outcomes else f"all {next(iter(outcomes))}" if "refused" in outcomes else "not run"
    return ", ".join(f"{outcomes[name]} {said}" for name, said in words.items() if outcomes[name]) or "CPU only"


def _sections(found: dict[str, Findings]) -> Iterator[str]:
    for library in _alphabetically():
        yield from _section(library, found)


def _section(library: str, found: dict[str, Findings]) -> Iterator[str]:
    yield f"### {title(library)}"
    yield ""
    for device in DEVICES:
        yield f"{'On the CPU' if device == 'cpu' else 'On a GPU'}: {_releases(found[device].get(library, {}))}"
    besides = dict.fromkeys(name for case in cases_of(library).values() for name in case.besides)
    if besides:
        yield f"Done besides: {', '.join(besides)}."
    yield ""
    yield from _head("object", *_CALLED.values(), "each process's own, or why not")
    for name, case in cases_of(library).items():
        yield _row(*_cells(name, case, {device: found[device].get(library, {}).get(name) for device in DEVICES}))
    yield ""


def _releases(findings: dict[str, dict[str, Any]]) -> str:
    runs = dict.fromkeys((finding["of"], finding["date"]) for finding in findings.values())
    return "; ".join(f"{of} ({date})" for of, date in runs) + "." if runs else "not run yet."


def _cells(name: str, case: Case, findings: dict[str, dict[str, Any] | None]) -> Iterator[str]:
    known = [finding for finding in findings.values() if finding]
    module, _, kind = known[0].get("class", "").rpartition(".") if known else ("", "", "")
    foreign = module.partition(".")[0] not in ("", "builtins", "collections", "tests", "torch")
    yield f"{name}: `{kind}`" if foreign and kind != name else name
    for device, finding in findings.items():
        elsewhere = f"{_CALLED[case.devices[0]]} only" if device not in case.devices else ""
        yield elsewhere or (finding["outcome"] if finding else "not run")
    said = {device: _says(finding) for device, finding in findings.items() if finding}
    texts = [text if number == 0 else f"on a GPU: {text}" for number, text in enumerate(dict.fromkeys(said.values()))]
    yield "; ".join([*texts, case.note] if case.note else texts)


def _says(finding: dict[str, Any]) -> str:
    if finding["outcome"] == "refused":
        return _escaped(finding["words"])
    return ", ".join([f"{max(1, round(finding['private_nbytes'] / 1024))} KiB", *finding["own"]])


def _escaped(words: str) -> str:
    """Return words as Markdown that shows them, with what is code in them as such."""
    pieces, end = [], 0
    for found in _CODE.finditer(words):
        pieces += [re.sub(r"([\\`*_<>|\[\]])", r"\\\1", words[end : found.start()]), f"`{found[0]}`"]
        end = found.end()
    return "".join([*pieces, re.sub(r"([\\`*_<>|\[\]])", r"\\\1", words[end:])])


def _own() -> Iterator[str]:
    yield from _head("it says", "each process has")
    yield _row(
        "a size alone", "the Python objects around the tensors: modules, names, configuration; so many bytes as a pickle"
    )
    yield from (_row(name, why) for name, why in OWN.items() if name != "tensors")


def _head(*cells: str) -> Iterator[str]:
    yield _row(*cells)
    yield f"|{'---|' * len(cells)}"


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    print(write())
