"""The example with more models than memory: what it claims, on the host and on a GPU."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
import torch

from tests.kit.processes import PYTHONPATH, ROOT

EXAMPLE = ROOT / "examples" / "model_zoo" / "run.py"

pytestmark = pytest.mark.timeout(300)


def run(*options: str) -> subprocess.CompletedProcess[str]:
    """The example, to its end."""
    environ = {**os.environ, "PYTHONPATH": PYTHONPATH}
    words = [sys.executable, str(EXAMPLE), *options]
    return subprocess.run(words, env=environ, capture_output=True, text=True, timeout=280, check=False)


def test_all_models_are_served_from_the_memory_of_some() -> None:
    """The answers are right, the quota is kept, and models were evicted and came back."""
    done = run("--megabytes", "2", "--requests", "80")
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(re.findall(r"^  ok", done.stdout, re.MULTILINE)) == 4, done.stdout
    (whole,) = re.findall(r"^ *all +80 .*$", done.stdout, re.MULTILINE)
    first, hits, wakes = map(int, whole.split()[2:5])
    assert first + hits + wakes == 80
    assert wakes > 0


def test_where_there_is_room_for_all_nothing_is_brought_back() -> None:
    """Then each request but the first ones finds its model on the device."""
    done = run("--megabytes", "1", "--requests", "40", "--models", "3", "--workers", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    (whole,) = re.findall(r"^ *all +40 .*$", done.stdout, re.MULTILINE)
    assert whole.split()[4] == "0"


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    """The same, with the copies in the host's memory."""
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    done = run("--device", "cuda", "--megabytes", "64", "--requests", "60")
    assert done.returncode == 0, done.stdout + done.stderr
