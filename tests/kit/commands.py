"""``shared-rpc`` as a process that ends: its exit code, its output and its errors."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.kit.forks import run
from tests.kit.processes import PYTHONPATH

__all__ = ["MODULE", "Ran", "cli"]

MODULE = ("-m", "shared_rpc.cli")


class Ran:
    """A command that ended."""

    def __init__(self, *arguments: str, environ: dict[str, str] | None = None, cwd: Path | None = None) -> None:
        done = run(
            [sys.executable, *arguments],
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            cwd=cwd,
            timeout=50,
            check=False,
            env={**os.environ, "PYTHONPATH": PYTHONPATH, **(environ or {})},
        )
        self.code = done.returncode
        self.output = done.stdout
        self.errors = done.stderr

    @property
    def data(self) -> Any:
        """The JSON document that is all of its output, of a command that went well and had nothing to complain of."""
        assert (self.code, self.errors) == (0, "")
        return json.loads(self.output)

    @property
    def complaint(self) -> str:
        """The one line on standard error of a command that failed, and printed nothing else."""
        return self._line(1)

    @property
    def misuse(self) -> str:
        """The one line on standard error of a command whose options or arguments cannot be used."""
        return self._line(2)

    def _line(self, code: int) -> str:
        assert (self.code, self.output) == (code, "")
        (line,) = self.errors.splitlines()
        assert line.startswith("shared-rpc: ")
        return line.removeprefix("shared-rpc: ")


def cli(*arguments: str, environ: dict[str, str] | None = None, cwd: Path | None = None) -> Ran:
    """Run ``shared-rpc`` to its end."""
    return Ran(*MODULE, *arguments, environ=environ, cwd=cwd)
