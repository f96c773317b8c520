"""``shared-rpc`` run to its end, in this process or in one of its own: exit code, output and errors."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

from shared_rpc.cli.app import main
from tests.kit.processes import PYTHONPATH

MODULE = ("-m", "shared_rpc.cli")


class Ran:
    """A command that has ended."""

    def __init__(self, code: int, output: str, errors: str) -> None:
        self.code, self.output, self.errors = code, output, errors

    @property
    def succeeded(self) -> str:
        """Return the output of a command that succeeded without a message."""
        assert (self.code, self.errors) == (0, "")
        return self.output

    @property
    def data(self) -> Any:
        """The JSON document that is all of its output."""
        return json.loads(self.succeeded)

    @property
    def documents(self) -> list[Any]:
        """The JSON documents in its output, one for each line."""
        return [json.loads(line) for line in self.output.splitlines()]

    @property
    def rows(self) -> list[list[str]]:
        """The cells of the printed table, header first."""
        return [re.split(r"\s{2,}", line.strip()) for line in self.succeeded.splitlines()]

    @property
    def complaint(self) -> str:
        """Return the one line on standard error of a command that failed, and printed nothing else."""
        assert self.output == ""
        return self.failure

    @property
    def failure(self) -> str:
        """Return the one line on standard error of a command that failed, with any output before."""
        return self._line(1)

    @property
    def misuse(self) -> str:
        """Return the one line on standard error of a command whose options or arguments are invalid."""
        assert self.output == ""
        return self._line(2)

    def _line(self, code: int) -> str:
        assert self.code == code, self.errors
        (line,) = self.errors.splitlines()
        assert line.startswith("shared-rpc: ")
        return line.removeprefix("shared-rpc: ")


class _Output(io.TextIOWrapper):
    """The end of a pipe that calls functions once its reader can see their texts: when these have been flushed."""

    def __init__(self, when: Mapping[str, Callable[[], object]]) -> None:
        self._bytes = io.BytesIO()
        super().__init__(self._bytes, encoding="utf-8")
        self._when = dict(when)

    def flush(self) -> None:
        super().flush()
        for awaited in [awaited for awaited in self._when if awaited in self._seen()]:
            self._when.pop(awaited)()

    def text(self) -> str:
        """The complete output."""
        super().flush()
        return self._seen()

    def _seen(self) -> str:
        return self._bytes.getvalue().decode()


def cli(
    *arguments: str,
    environ: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    when: Mapping[str, Callable[[], object]] | None = None,
) -> Ran:
    """Run ``shared-rpc`` in this process. ``serve`` fails where it would become a broker: use a process for that.

    :param when: functions to call once the reader of the output could have seen their texts.
    """

    def become(path: str, words: list[str]) -> None:
        raise AssertionError(f"the command becomes {words}")

    output, errors, code = _Output(when or {}), io.StringIO(), 0
    with (
        patch.dict(os.environ, environ or {}),
        patch("os.execv", become),
        patch("sys.argv", ["shared-rpc", *arguments]),
        contextlib.chdir(cwd or "."),
        contextlib.redirect_stdout(output),
        contextlib.redirect_stderr(errors),
    ):
        try:
            main()
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else 0
    return Ran(code, output.text(), errors.getvalue())


def spawn(*arguments: str, cwd: Path | None = None, **options: Any) -> Ran:
    """Run ``shared-rpc`` in a process of its own."""
    done = subprocess.run(
        [sys.executable, *MODULE, *arguments],
        **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options},
        text=True,
        stdin=subprocess.DEVNULL,
        cwd=cwd,
        timeout=50,
        env={**os.environ, "PYTHONPATH": PYTHONPATH},
        check=False,
    )
    return Ran(done.returncode, done.stdout or "", done.stderr or "")
