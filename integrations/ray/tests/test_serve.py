"""The Ray Serve example: replicas on two nodes, and one copy of the model per node."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kit.processes import PYTHONPATH

pytest.importorskip("ray.serve")

PROGRAM = Path(__file__).with_name("two_nodes.py")


@pytest.mark.timeout(420)
def test_replicas_of_a_node_share_one_copy(tmp_path: Path) -> None:
    """On two nodes with two replicas each; no process is left."""
    environ = {**os.environ, "PYTHONPATH": PYTHONPATH, "TMPDIR": "/tmp", "RAY_SERVE_WIDTH": "256"}
    ran = subprocess.run(
        [sys.executable, str(PROGRAM)],
        env=environ,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "4 replicas on 2 nodes, one copy of the model on each" in ran.stdout
    assert ran.stdout.count("held by 2 replicas") == 2
