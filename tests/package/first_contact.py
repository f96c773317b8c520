"""The first steps with a new installation: ``python first_contact.py BIN README``.

``BIN`` is the folder of the environment's programs. The README's app, its first block of Python, is run from a directory with
nothing else in it, in every role. This file uses the standard library only: the environment has just the dependencies.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_VERIFY = ("verify", "--size", "16MiB", "--workers", "2")
#: Seconds for any of the commands.
_LIMIT = 120


def main(programs: Path, readme: Path) -> None:
    """Run the commands, and print each with its time; a wrong exit code or output is an AssertionError."""
    block = re.search(r"^```python\n(.*?)^```$", readme.read_text(), re.DOTALL | re.MULTILINE)
    assert block is not None, f"{readme} has no block of Python"
    with tempfile.TemporaryDirectory() as place:
        here = _Directory(Path(place), programs)
        (here.work / "app.py").write_text(block[1])
        _begin(here)
        try:
            _roles(here)
        finally:
            here.run("shared-rpc", "stop", "--all")
        assert here.run("shared-rpc", "ls") == "no server is alive\n"


class _Directory:
    """An empty directory, and an environment with the installed programs only."""

    def __init__(self, place: Path, programs: Path) -> None:
        self.work, runtime = place / "work", place / "run"
        self.work.mkdir()
        runtime.mkdir(mode=0o700)
        self._programs = programs
        left_out = ("PYTHON", "SHARED_TENSOR_", "VIRTUAL_ENV")
        self._environ = {name: value for name, value in os.environ.items() if not name.startswith(left_out)}
        self._environ |= {"XDG_RUNTIME_DIR": str(runtime), "PATH": os.pathsep.join([str(programs), os.defpath])}

    def run(self, program: str, *arguments: str, role: str = "") -> str:
        """Run a program to its successful end, and return its output."""
        began = time.monotonic()
        ran = subprocess.run(
            [self._programs / program, *arguments],
            cwd=self.work,
            env=self._in_role(role),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=_LIMIT,
            check=False,
        )
        _show(time.monotonic() - began, role, program, *arguments)
        assert ran.returncode == 0, f"exit code {ran.returncode}:\n{ran.stdout}"
        return ran.stdout

    @contextmanager
    def serving(self, program: str, *arguments: str, role: str = "") -> Iterator[list[str]]:
        """Run a program that serves until SIGINT; yield the lines that it printed up to its readiness."""
        began = time.monotonic()
        with subprocess.Popen(
            [self._programs / program, *arguments],
            cwd=self.work,
            env=self._in_role(role) | {"PYTHONUNBUFFERED": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        ) as server:
            assert server.stdout is not None
            try:
                lines: list[str] = []
                for line in server.stdout:
                    lines.append(line)
                    if "serving " in line:
                        break
                else:
                    raise AssertionError(f"it ended before it served:\n{''.join(lines)}")
                _show(time.monotonic() - began, role, program, *arguments)
                yield lines
                server.send_signal(signal.SIGINT)
                said, _ = server.communicate(timeout=_LIMIT)
                assert server.returncode == 0, f"exit code {server.returncode}:\n{said}"
            finally:
                server.kill()

    def _in_role(self, role: str) -> dict[str, str]:
        return self._environ | ({"SHARED_TENSOR_ROLE": role} if role else {})


def _begin(here: _Directory) -> None:
    version = here.run("shared-rpc", "--version")
    assert re.fullmatch(r"shared-rpc \d+\.\d+\.\d+\n", version), version
    here.run("shared-rpc", "doctor")
    verified = here.run("shared-rpc", *_VERIFY)
    assert " passed, in " in verified, verified


def _roles(here: _Directory) -> None:
    """Every process prints its role and a sum, which is the same only with the same weights."""
    _result("local", here.run("python", "app.py").splitlines())

    with here.serving("python", "app.py", role="server") as lines:
        total = _result("server", lines)
        for _ in range(2):
            assert _result("client", here.run("python", "app.py", role="client").splitlines()) == total

    with here.serving("shared-rpc", "serve", "app.py"):
        totals = {_result("client", here.run("python", "app.py", role="client").splitlines()) for _ in range(2)}
        assert len(totals) == 1, totals

    spawned = [here.run("python", "app.py", role="spawn"), here.run("shared-rpc", "run", "app.py", role="spawn")]
    assert len({_result("spawn", output.splitlines()) for output in spawned}) == 1, spawned


def _result(role: str, lines: list[str]) -> str:
    found = [line.split()[1] for line in lines if line.startswith(f"{role} ")]
    assert len(found) == 1, f"one line begins with {role!r} where it works: {lines}"
    return found[0]


def _show(seconds: float, role: str, *words: str) -> None:
    print(f"{seconds:6.1f} s  {f'SHARED_TENSOR_ROLE={role} ' if role else ''}{' '.join(words)}", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute(), Path(sys.argv[2]))
