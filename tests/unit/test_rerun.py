"""The sessions of ``noxfile.py`` run failed tests once more, alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.kit import rerun

FLAKY = """
from pathlib import Path

def test_flaky():
    runs = Path(__file__).with_name("runs")
    runs.write_text(runs.read_text() + "x" if runs.exists() else "x")
    assert len(runs.read_text()) > 1

def test_good():
    Path(__file__).with_name("good").open("x")
"""

CLOSING = """
from pathlib import Path

import pytest

@pytest.fixture
def closing():
    yield
    assert Path(__file__).with_name("again").exists() or Path(__file__).with_name("again").touch()

def test_it(closing):
    pass
"""


def _run(folder: Path, text: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    (folder / "pytest.ini").write_text("[pytest]\n")
    (folder / "test_it.py").write_text(text)
    command = [sys.executable, rerun.__file__, "flaky", *arguments]
    path = str(Path(sys.executable).parent)
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, env={"PATH": path})


@pytest.mark.parametrize("arguments", [(), ("-n", "2", "--dist", "worksteal")], ids=["alone", "parallel"])
def test_a_test_that_passes_alone_is_named_as_flaky(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    """The run succeeds, names the test in its last line and in the file, and runs no other test again."""
    done = _run(tmp_path, FLAKY, *arguments)
    assert done.returncode == 0, done.stdout
    assert done.stdout.splitlines()[-1] == "flaky: test_it.py::test_flaky"
    assert (tmp_path / "flaky").read_text() == "test_it.py::test_flaky\n"


def test_a_test_that_fails_twice_fails_the_run(tmp_path: Path) -> None:
    """The flaky test beside it is named."""
    done = _run(tmp_path, f"{FLAKY}\ndef test_broken():\n    assert False\n")
    assert done.returncode == 1
    assert done.stdout.splitlines()[-1] == "flaky: test_it.py::test_flaky"


def test_a_fixture_that_fails_once_is_a_flake(tmp_path: Path) -> None:
    """A failure after the test itself passed counts too."""
    done = _run(tmp_path, CLOSING)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "flaky: test_it.py::test_it")


@pytest.mark.parametrize(
    ("text", "status"),
    [
        ("import nothing_of_this_name\n", 2),
        ("raise KeyboardInterrupt\n", 2),
        (f"import pytest\n@pytest.mark.parametrize('n', range({rerun.MOST + 1}))\ndef test_it(n):\n    assert 0\n", 1),
        ("", 5),
    ],
    ids=["collection", "interrupt", "too-many", "no-tests"],
)
def test_other_failures_are_not_run_again(tmp_path: Path, text: str, status: int) -> None:
    """An error of pytest or of collection, and more failures than flakes can be, fail the run at once."""
    done = _run(tmp_path, text)
    assert done.returncode == status
    assert "once more" not in done.stdout


def test_a_collection_error_in_parallel_fails_the_run_at_once(tmp_path: Path) -> None:
    """With pytest-xdist, pytest reports such an error by another exit status."""
    done = _run(tmp_path, "import nothing_of_this_name\n", "-n", "2")
    assert done.returncode != 0
    assert "once more" not in done.stdout
