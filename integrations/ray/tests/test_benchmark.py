"""``python -m benchmarks cluster``, in small: what it measures is for a quiet machine to say."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from tests.kit.processes import ROOT

pytestmark = pytest.mark.timeout(240)

WHOLE, BUILD = "call until all have it, build included", "the build, the function alone"
SWAP = "from all prepared to all current"


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a run of two small deploys has written."""
    path = tmp_path_factory.mktemp("results") / "numbers.json"
    command = [sys.executable, "-m", "benchmarks", "cluster", "--megabytes", "8", "--rounds", "2", "--fresh", "1"]
    ended = subprocess.run([*command, "--json", str(path)], cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)
    assert ended.returncode == 0, ended.stderr
    for row in json.loads(path.read_text())["rows"]:
        assert row["name"] in ended.stdout
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def row(written: dict[str, Any], end: str) -> dict[str, Any]:
    """The row of the deploys of 8 MiB whose name ends so."""
    found: dict[str, Any]
    (found,) = (row for row in written["rows"] if row["name"] == f"8 MiB: {end}")
    return found


def test_a_deploy_is_measured_beside_the_transfer_of_ray(written: dict[str, Any]) -> None:
    """Its goal is about what remains of it without the build."""
    whole, build = (row(written, end)["samples"]["shared_rpc"] for end in (WHOLE, BUILD))
    move = row(written, "from the build until all have it")
    assert whole["n"] == build["n"] == 2
    assert 0 < build["min"] < whole["min"]
    assert move["goal"] and move["measured"] == pytest.approx(move["values"]["shared_rpc"] / move["values"]["ray put, get"])


def test_a_refresh_is_a_swap_and_what_comes_before(written: dict[str, Any]) -> None:
    """The swap is a part of it."""
    refresh, swap = (row(written, end)["samples"]["shared_rpc"] for end in ("refresh until all are current", SWAP))
    assert refresh["n"] == swap["n"] == 2
    assert 0 < swap["max"] < refresh["max"]


def test_other_processes_attach(written: dict[str, Any]) -> None:
    """One has its first attach, and one that has had others has one in each round."""
    assert row(written, "first attach of another process of a node")["samples"]["shared_rpc"]["n"] == 1
    assert row(written, "attach again")["samples"]["shared_rpc"]["n"] == 2


def test_ray_is_named_with_its_version(written: dict[str, Any]) -> None:
    """Ratios to it depend on it."""
    assert written["host"]["ray"]
