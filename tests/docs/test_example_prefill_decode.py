"""The example of two engines: the whole story, as a user plays it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kit.processes import PYTHONPATH, ROOT, Child, eventually

RUN = ROOT / "examples" / "prefill_decode" / "run.py"


def play(*options: str, environ: dict[str, str]) -> str:
    """What it prints, where it succeeds."""
    done = subprocess.run(
        [sys.executable, str(RUN), *options],
        env=os.environ | {"PYTHONPATH": PYTHONPATH} | environ,
        capture_output=True,
        text=True,
        timeout=55,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def test_two_engines_share_weights_and_cache(base_path: str) -> None:
    """Tokens are those of one process, neither engine has the weights, and requests wait for blocks that are in use."""
    told = play("--size", "tiny", "--requests", "4", "--new", "6", "--blocks", "6", environ={"CUDA_VISIBLE_DEVICES": ""})
    assert "4 requests, 24 tokens" in told
    assert len(re.findall(r"^ok   ", told, re.MULTILINE)) == 4
    saved = re.search(r"saved .*: (\d+) MiB", told)
    assert saved is not None
    assert int(saved[1]) > 0


def test_a_request_that_can_never_fit(base_path: str) -> None:
    """It ends the program, with the option that would help: nobody waits for blocks that there are not."""
    done = subprocess.run(
        [sys.executable, str(RUN), "--size", "tiny", "--blocks", "1"],
        env=os.environ | {"PYTHONPATH": PYTHONPATH, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=55,
        check=False,
    )
    assert done.returncode == 1, done.stdout
    assert "blocks, and the KV cache has 1: use more --blocks" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("option", ["--requests", "--new", "--blocks"])
def test_options_that_leave_nothing_to_do(option: str) -> None:
    """They are refused before anything is started."""
    done = subprocess.run([sys.executable, str(RUN), option, "0"], capture_output=True, text=True, timeout=30, check=False)
    assert (done.returncode, "at least 1" in done.stderr) == (2, True), done.stderr


def test_it_leaves_nothing_behind(base_path: str, children: list[Child], tmp_path: Path) -> None:
    """Ctrl-C ends the server and the engines too."""
    (tmp_path / "t").mkdir()
    environ = {"CUDA_VISIBLE_DEVICES": "", "TMPDIR": str(tmp_path / "t")}
    run = Child(str(RUN), "--size", "tiny", "--new", "1500", "--blocks", "600", environ=environ)
    children.append(run)
    run.expect("both engines are ready")
    processes = started(run.pid)
    assert len(processes) == 3
    run.process.send_signal(signal.SIGINT)
    assert run.process.wait(30) == 130
    eventually(lambda: not any(Path(f"/proc/{pid}").exists() for pid in processes))
    assert not list((tmp_path / "t").iterdir())


def started(pid: int) -> list[int]:
    """A process's children."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()]


@pytest.mark.gpu
def test_two_engines_on_a_gpu() -> None:
    """The same files, with weights and cache in GPU memory."""
    told = play("--size", "small", "--requests", "6", environ={})
    assert len(re.findall(r"^ok   ", told, re.MULTILINE)) == 4
