"""Shared functions that travel to other processes, as those do which tasks and actors of Ray and pools of processes use."""

from __future__ import annotations

import importlib
import os
import pickle
import sys
import textwrap
from pathlib import Path

import pytest

from tests.kit.deep import deep
from tests.kit.processes import PYTHONPATH, Child, python

MODULE = """
from shared_rpc import Provider
import torch

provider = Provider()

@provider.share
def load(size: int = 3):
    return torch.ones(size)
"""

#: A script that sends a function to another interpreter, which calls it.
SENDER = """
import subprocess
import sys
import cloudpickle
{origin}
receiver = '''
import sys, cloudpickle
load = cloudpickle.load(sys.stdin.buffer)
print("sum:", float(load().sum()), load.__module__)
'''
ran = subprocess.run([sys.executable, "-c", receiver], input=cloudpickle.dumps(load), capture_output=True, check=True)
print(ran.stdout.decode(), flush=True)
"""


@pytest.mark.parametrize(("origin", "there"), [(MODULE, "__main__"), *deep(("from models import load", "models"))])
def test_it_is_called_in_another_interpreter(tmp_path: Path, children: list[Child], origin: str, there: str) -> None:
    """It gets there by its name if it can be imported, else as code, with a provider that has the endpoint."""
    (tmp_path / "models.py").write_text(MODULE)
    path = os.pathsep.join([str(tmp_path), PYTHONPATH])
    child = python(SENDER.format(origin=origin), environ={"PYTHONPATH": path}, fresh=True)
    children.append(child)
    assert child.expect("sum:").split() == ["sum:", "3.0", there]


def test_it_is_pickled_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the standard library's pickle too: what arrives is the module's own function."""
    (tmp_path / "models_to_pickle.py").write_text(textwrap.dedent(MODULE))
    monkeypatch.syspath_prepend(str(tmp_path))
    module = importlib.import_module("models_to_pickle")
    monkeypatch.setitem(sys.modules, "models_to_pickle", module)
    assert pickle.loads(pickle.dumps(module.load)) is module.load
