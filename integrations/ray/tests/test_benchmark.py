"""``python -m benchmarks cluster`` with small sizes. Measurements need a quiet machine."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kit.processes import ROOT


@pytest.mark.timeout(240)
@pytest.mark.deep
def test_deploys_are_compared_with_rays_own_transfer(tmp_path: Path) -> None:
    """The goal applies to a deploy without its build; a swap is a part of a refresh."""
    path = tmp_path / "numbers.json"
    command = [sys.executable, "-m", "benchmarks", "cluster", "--megabytes", "8", "--rounds", "2"]
    ended = subprocess.run([*command, "--json", str(path)], cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)
    assert ended.returncode == 0, ended.stderr
    written = json.loads(path.read_text())
    assert written["host"]["ray"]
    assert all(row["name"] in ended.stdout for row in written["rows"])
    rows = {row["name"].removeprefix("8 MiB: "): row for row in written["rows"]}
    ours = {name: row["values"]["shared_rpc"] for name, row in rows.items()}
    assert 0 < ours["from all prepared to all current"] < ours["refresh until all are current"]
    assert rows["attach again"]["samples"]["shared_rpc"]["n"] == 2
    move = rows["from the build until all nodes have it"]
    assert move["met"] == (move["values"]["shared_rpc"] <= 2 * move["values"]["ray put, get"])
