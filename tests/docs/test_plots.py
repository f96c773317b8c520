"""``python -m benchmarks plot``: pictures that are well-formed, say what they show, and are the same each time."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from benchmarks.__main__ import app
from benchmarks.echo import Echo
from benchmarks.ours import Ours
from benchmarks.peer import Peer
from benchmarks.plot import Unplottable, plot
from benchmarks.report import Row, document
from benchmarks.stats import SHARES, Sample
from tests.kit.processes import ROOT

pytest.importorskip("matplotlib")

SVG = "{http://www.w3.org/2000/svg}"
GPU = {"cores": 16, "gpu": "NVIDIA H100 80GB HBM3", "driver": "580.1", "python": "3.12.3", "torch": "2.11.0"}
ECHO, PEER, OURS = SIDES = (Echo.name, Peer.name, Ours.name)


def result(name: str, rows: list[Row], **others: Any) -> dict[str, Any]:
    """What a benchmark would write."""
    return {
        "benchmark": name,
        "date": "2026-11-21T10:00:00+00:00",
        "command": f"python -m benchmarks {name} --rounds 3",
        "host": GPU,
        "shares": list(SHARES),
        "rows": [row.as_json() for row in rows],
        **others,
    }


def attach() -> dict[str, Any]:
    """Both sweeps, with both sides; shared-tensor could not do the last module."""
    rows = []
    for sweep, tensors, nbytes in [("tensors", 10**n, 4096 * 10**n) for n in range(1, 5)] + [
        ("bytes", 100, 10**6),
        ("bytes", 100, 10**9),
    ]:
        values = {ECHO: 2e-5, PEER: 1e-4 * tensors, OURS: 1e-5 * tensors}
        if nbytes == 10**9:
            del values[PEER]
        rows.append(Row(f"{tensors}", values, extra={"sweep": sweep, "tensors": tensors, "nbytes": nbytes}))
    return result("attach", [Row("first attach", {OURS: 1.0}), *rows])


def rpc() -> dict[str, Any]:
    """Two of the rows that are drawn, and one that is not."""
    samples = {side: Sample([[1e-5 * number * factor for number in range(1, 200)]]) for factor, side in enumerate(SIDES, 1)}
    names = ("ping, p50", "managed call and release, 4 KiB", "import of every public name")
    return result("rpc", [Row(name, {}, samples=samples) for name in names])


def clients() -> dict[str, Any]:
    """One endpoint, of both sides."""
    rows = [
        Row("calls/s", {OURS: 1e4 * n, PEER: 1e3}, "number", extra={"processes": n, "endpoint": "small"}) for n in (1, 4, 2)
    ]
    return result("clients", rows)


def drawn(folder: Path, content: Any) -> dict[str, str]:
    """The pictures of a result, by what ends their names."""
    path = folder / "gpu.json"
    path.write_text(document(content))
    return {target.stem.removeprefix("gpu-"): target.read_text() for target in plot(path, folder / "plots")}


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, str]]:
    """Those of one result of each benchmark."""
    return {
        str(content["benchmark"]): drawn(tmp_path_factory.mktemp("drawn"), content) for content in (attach(), rpc(), clients())
    }


def texts(svg: str) -> str:
    """All that is written in a picture, which is well-formed XML."""
    root = ElementTree.fromstring(svg)
    assert root.tag == f"{SVG}svg"
    return " | ".join("".join(text.itertext()) for text in root.iter(f"{SVG}text"))


def lines(svg: str, colour: str) -> list[list[tuple[float, float]]]:
    """The points of each line of a colour, in the order of the picture; those of the legend too."""
    paths = [
        path
        for path in ElementTree.fromstring(svg).iter(f"{SVG}path")
        if f"stroke: {colour}; stroke-width: 1.8" in path.get("style", "")
    ]
    return [[(float(x), float(y)) for x, y in re.findall(r"[ML] ([-\d.]+) ([-\d.]+)", path.get("d", ""))] for path in paths]


BLUE, ORANGE = "#1b84c6", "#d55e00"


def test_attach_is_drawn_over_tensors_and_over_bytes(pictures: dict[str, dict[str, str]]) -> None:
    """Every side that took part, its points in order; one that could not do a module has a point less."""
    shown = pictures["attach"]

    assert shown.keys() == {"tensors", "bytes"}
    for name, ours, theirs in (("tensors", 4, 4), ("bytes", 2, 1)):
        written = texts(shown[name])
        assert all(side in written for side in SIDES)
        assert "(ms)" in written
        assert [len(lines(shown[name], colour)[0]) for colour in (BLUE, ORANGE)] == [ours, theirs]
    xs = [x for x, _ in lines(shown["tensors"], BLUE)[0]]
    assert xs == sorted(xs)


def test_latencies_are_drawn_as_distributions(pictures: dict[str, dict[str, str]]) -> None:
    """A panel for each call; calls done against time, which both only rise."""
    svg = pictures["rpc"]["latency"]

    written = texts(svg)
    assert "ping" in written and "attach and release" in written and "import" not in written
    assert "(µs)" in written and "(%)" in written
    curves = [line for line in lines(svg, BLUE) if len(line) == len(SHARES) - 1]
    assert len(curves) == 2
    for curve in curves:
        assert curve == sorted(curve, key=lambda point: (point[0], -point[1]))


def test_calls_a_second_are_drawn_against_clients(pictures: dict[str, dict[str, str]]) -> None:
    """In the order of their number, both sides in one panel, from zero."""
    svg = pictures["clients"]["throughput"]

    written = texts(svg)
    assert "client processes" in written and "calls a second" in written and PEER in written
    (points, *_) = lines(svg, BLUE)
    assert points == sorted(points) and len(points) == 3


@pytest.mark.parametrize("content", [attach(), rpc(), clients()], ids=lambda content: str(content["benchmark"]))
def test_a_picture_says_where_its_numbers_come_from(pictures: dict[str, dict[str, str]], content: dict[str, Any]) -> None:
    """Device, versions, day and command are those of the JSON, and nothing else is told of this machine or day."""
    for svg in pictures[content["benchmark"]].values():
        written = texts(svg).replace(" | ", " ")
        for fact in ("NVIDIA H100 80GB HBM3", "16 cores", "Python 3.12.3", "torch 2.11.0", "driver 580.1", "2026-11-21"):
            assert fact in written
        assert content["command"] in written
        assert "<dc:date>" not in svg and "Matplotlib" not in svg


def test_the_same_result_gives_the_same_bytes(pictures: dict[str, dict[str, str]], tmp_path: Path) -> None:
    """So that a picture in the repository changes with its numbers only."""
    for content in (attach(), rpc(), clients()):
        assert drawn(tmp_path, content) == pictures[str(content["benchmark"])]


def test_a_picture_has_no_ground_of_its_own(pictures: dict[str, dict[str, str]]) -> None:
    """Pages are light or dark."""
    for svg in pictures["rpc"].values():
        assert not re.search(r"fill: (#ffffff|white)", svg)
        assert "#000000" not in svg.replace("fill: #000000; stroke: none", "")


PLOTS, PUBLISHED = ROOT / "docs" / "_static" / "plots", ROOT / "benchmarks" / "results" / "published"


def test_the_pictures_of_the_documentation_are_those_of_the_results(tmp_path: Path) -> None:
    """All that is published can be drawn; each picture says and shows what its file has, and a page shows each."""
    pages = "".join(path.read_text() for path in (ROOT / "docs").rglob("*.md"))
    made = {target.name: target for path in PUBLISHED.glob("*.json") for target in plot(path, tmp_path)}

    assert made.keys() == {path.name for path in PLOTS.glob("*.svg")}
    for name, target in made.items():
        new, kept = target.read_text(), (PLOTS / name).read_text()
        assert texts(kept) == texts(new), f"{name}: draw it again with python -m benchmarks plot"
        for colour in (BLUE, ORANGE):
            assert [len(line) for line in lines(kept, colour)] == [len(line) for line in lines(new, colour)], name
        assert re.search(rf"_static/plots/{name}\n:alt: .+", pages), f"no page shows {name}"


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("no json {", "cannot be read as JSON"),
        ("[1, 2]", "nothing is drawn of None"),
        (
            json.dumps({"benchmark": "recovery"}),
            "nothing is drawn of 'recovery'; give the JSON of 'python -m benchmarks' attach, ",
        ),
        (json.dumps(result("attach", [])), "no rows that are drawn"),
        (json.dumps(rpc() | {"shares": None}), "earlier releases did not write: run python -m benchmarks rpc --rounds 3"),
        (json.dumps({"benchmark": "clients"}), "lacks 'rows'"),
    ],
)
def test_what_cannot_be_drawn_is_told(tmp_path: Path, content: str, complaint: str) -> None:
    """With the file, what is wrong with it, and what to do; nothing is written."""
    path = tmp_path / "that.json"
    path.write_text(content)

    with pytest.raises(Unplottable, match=re.escape(complaint)) as told:
        plot(path, tmp_path / "plots")

    assert str(path) in str(told.value)
    assert not list(tmp_path.glob("plots/*"))


def test_the_command_names_the_file_that_it_does_not_know(tmp_path: Path) -> None:
    """As misuse, with exit code 2."""
    done = CliRunner().invoke(app, ["plot", str(tmp_path / "missing.json")])

    assert done.exit_code == 2
    assert "cannot be read" in re.sub(r"[\s│]+", " ", done.output)
