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

PAGE = FOLDER.with_suffix(".md")
_CALLED = {"cpu": "CPU", "cuda": "GPU"}
#: In a text: the path of an attribute, a call, a name of torch's, an attribute, all of which are set as code.
_CODE = re.compile(
    r"^result\S*|\bresult(?:[.\[][\w'\]]*)+(?:\(\))?"
    r"|(?<![\w.])(?:\.?[A-Za-z_][\w.]*\([^()]*\)|(?:\w+=)?torch\.\w[\w.]*\w|\w+='\w+'|\.[a-z_]+(?=[ ,:;]|$)|__\w+__)"
)


def write() -> Path:
    """Replace the tables in the page."""
    PAGE.write_text(made(PAGE.read_text()))
    return PAGE


def made(page: str) -> str:
    """Return the text of the page with new tables."""
    found = {device: load(device) for device in DEVICES}
    parts = {"libraries": _overview(found), "own": _own(), "objects": _sections(found), "releases": _releases(found)}
    for name, lines in parts.items():
        begin, end = f"<!-- made of tests/compat: {name} -->", f"<!-- end of {name} -->"
        before, rest = page.split(begin)
        page = "\n".join([before + begin, "", *lines, "", end + rest.split(end)[1]])
    return page


def _overview(found: dict[str, Findings]) -> Iterator[str]:
    yield from _head("library", "objects", *_CALLED.values(), "private to each process")
    for library in _alphabetically():
        counts = [_count(library, device, found[device]) for device in DEVICES]
        yield _row(
            f"[{title(library)}](#{_anchor(title(library))})", f"{len(cases_of(library))}", *counts, _sizes(library, found)
        )


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
    if set(outcomes) == {"works"}:
        return "✓"
    if set(outcomes) == {"not run"}:
        return "not run"
    said = {"works": "✓", "refused": "refused", "not run": "not run"}
    return ", ".join(f"{outcomes[name]} {text}" for name, text in said.items() if outcomes[name]) or "CPU only"


def _sizes(library: str, found: dict[str, Findings]) -> str:
    """Return the range of what a process has of its own of an object, in KiB."""
    sizes = [
        max(1, round(finding["private_nbytes"] / 1024))
        for device in DEVICES
        for finding in found[device].get(library, {}).values()
        if "private_nbytes" in finding
    ]
    return " to ".join(dict.fromkeys((f"{min(sizes)}", f"{max(sizes)}"))) + " KiB" if sizes else ""


def _sections(found: dict[str, Findings]) -> Iterator[str]:
    for library in _alphabetically():
        yield from _section(library, found)


def _section(library: str, found: dict[str, Findings]) -> Iterator[str]:
    """Yield the objects that work, in a list, and a table of the refused ones with their errors."""
    lists: dict[str, list[str]] = {}
    errors: dict[tuple[str, str], list[str]] = {}
    for name, case in cases_of(library).items():
        findings = {device: found[device].get(library, {}).get(name) for device in case.devices}
        outcomes = {_CALLED[device]: finding["outcome"] if finding else "not run" for device, finding in findings.items()}
        if label := _label(outcomes):
            lists.setdefault(label, []).append(_item(name, case, [finding for finding in findings.values() if finding]))
        for finding in findings.values():
            if finding and finding["outcome"] == "refused":
                where = ", ".join(place for place, outcome in outcomes.items() if outcome == "refused")
                names = errors.setdefault((finding["words"], where), [])
                names.extend([name] * (name not in names))
    yield from (f"### {title(library)}", "")
    besides = dict.fromkeys(name for case in cases_of(library).values() for name in case.besides)
    yield from (f"- **{label}**: {'; '.join(items)}" for label, items in lists.items())
    if besides:
        yield f"- **also tested**: {', '.join(besides)}"
    yield ""
    if errors:
        yield from _head("refused object", "on", "error")
        for (words, where), names in errors.items():
            yield _row("; ".join(names), where, _escaped(words))
        yield ""


def _label(outcomes: dict[str, str]) -> str:
    """Return in words on which devices an object works or was not run; an empty text where it is refused only."""
    told = {name: outcome for name, outcome in outcomes.items() if outcome != "refused"}
    if len(set(outcomes.values())) == 1 and told:
        return next(iter(told.values())) + ("" if len(told) == len(DEVICES) else f" ({next(iter(told))} only)")
    return ", ".join(f"{outcome} on the {name}" for name, outcome in told.items())


def _item(name: str, case: Case, findings: list[dict[str, Any]]) -> str:
    """Return an object's name, with what each process has of its own."""
    own = dict.fromkeys(part for finding in findings for part in finding.get("own", ()))
    notes = ", ".join([*own, *([case.note] if case.note else [])])
    return f"{name} *({notes})*" if notes else name


def _releases(found: dict[str, Findings]) -> Iterator[str]:
    """Yield a table of the releases of all packages, with the GPU and the dates."""
    rows: dict[str, dict[str, set[str]]] = {}
    for device in DEVICES:
        for finding in (finding for findings in found[device].values() for finding in findings.values()):
            for part in finding["of"].split(", "):
                package, _, version = part.rpartition(" ")
                name, text = (package, version) if re.match(r"\d+\.", version) else ("GPU", part)
                rows.setdefault(name, {}).setdefault(device, set()).add(text)
            rows.setdefault("date", {}).setdefault(device, set()).add(finding["date"])
    yield from _head("package", *_CALLED.values())
    for name in sorted(rows, key=lambda name: (name in ("GPU", "date"), name.lower())):
        yield _row(name, *(", ".join(sorted(rows[name].get(device, ()))) or "none" for device in DEVICES))


def _escaped(words: str) -> str:
    """Return words as Markdown that shows them, with what is code in them as such."""
    pieces, end = [], 0
    for found in _CODE.finditer(words):
        pieces += [re.sub(r"([\\`*_<>|\[\]])", r"\\\1", words[end : found.start()]), f"`{found[0]}`"]
        end = found.end()
    return "".join([*pieces, re.sub(r"([\\`*_<>|\[\]])", r"\\\1", words[end:])])


def _own() -> Iterator[str]:
    yield from _head("note", "private to each process")
    yield from (_row(name, why) for name, why in OWN.items() if name != "tensors")


def _head(*cells: str) -> Iterator[str]:
    yield _row(*cells)
    yield f"|{'---|' * len(cells)}"


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    print(write())
