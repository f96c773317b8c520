"""Run pytest, and the tests that failed once more, alone: ``python tests/kit/rerun.py FLAKY ARGUMENTS``.

The run succeeds if every failed test passes the second time. Each of these prints a line ``flaky: NAME``, and its name
is written to the file FLAKY. A test that fails twice fails the run. An error of pytest itself, an error in collection, or
more than ``MOST`` failures fail the run at once.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import tempfile
from pathlib import Path

MOST = 10

_FAILED = 1  # pytest's exit status if tests failed; it has others for all else


def run(flaky: Path, arguments: list[str]) -> int:
    """Run pytest with these arguments as described above; return its exit status."""
    with tempfile.TemporaryDirectory() as folder:
        # A separate cache has the failures of this run only.
        pytest = ["pytest", *arguments, "-o", f"cache_dir={folder}"]
        status = subprocess.run(pytest, check=False).returncode
        failed = _failed(folder)
        # A file or a folder, which has no "::", failed to be collected.
        if status != _FAILED or not 0 < len(failed) <= MOST or not all("::" in name for name in failed):
            return status
        print(f"{len(failed)} failed: run once more, alone", flush=True)
        alone = ["-n", "0"] if importlib.util.find_spec("xdist") else []
        status = subprocess.run([*pytest, *alone, "--last-failed", "--last-failed-no-failures", "none"], check=False).returncode
        # Pytest removes passed tests from the list. Those that did not run are still in it.
        again = _failed(folder)
    names = [name for name in failed if name not in again]
    flaky.write_text("".join(f"{name}\n" for name in names))
    for name in names:
        print(f"flaky: {name}", flush=True)
    return status or (_FAILED if again else 0)


def _failed(folder: str) -> list[str]:
    path = Path(folder, "v", "cache", "lastfailed")
    return list(json.loads(path.read_text())) if path.exists() else []


if __name__ == "__main__":
    sys.exit(run(Path(sys.argv[1]), sys.argv[2:]))
