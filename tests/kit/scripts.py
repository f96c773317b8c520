"""Scripts that are run by ``python`` and by ``shared-rpc run``, to be compared."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from shared_rpc.scripts.listing import live_zygotes, stop_zygotes
from tests.kit.processes import PYTHONPATH, Child

#: The command line of ``shared-rpc run``, after the interpreter.
RUN = ("-m", "shared_rpc.cli", "run")
#: The beginning of scripts that wait for a line, or a signal: they call ``line()`` in place of ``sys.stdin.readline()``. In any
#: Python program, a signal between the interpreter's last check and the blocking system call does not interrupt the latter:
#: its handler runs when something else ends the wait. Here its number does, in a pipe.
WAITS = """
        import os, select, signal, sys
        noted, noting = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(noting)
        def line():
            while True:
                ready = select.select([0, noted], [], [])[0]
                if noted in ready:
                    os.read(noted, 4096)
                if 0 in ready:
                    return sys.stdin.readline()
"""
#: The first script of a place waits for a zygote, which takes long on a busy machine.
_PATIENCE = 120.0


class Outcome(NamedTuple):
    """The end of a program, and its output."""

    code: int
    output: str
    errors: str


class Place:
    """A directory for scripts, and for the zygotes of their commands."""

    def __init__(self, folder: Path, sockets: Path) -> None:
        self.folder = folder
        self.base_path = str(sockets / "s")
        self.environ = {
            name: value for name, value in os.environ.items() if not name.startswith(("SHARED_TENSOR_", "COLUMNS", "LINES"))
        }
        self.environ |= {"SHARED_TENSOR_BASE_PATH": self.base_path, "PYTHONPATH": PYTHONPATH, "PYTHONUNBUFFERED": ""}

    def write(self, source: str, name: str = "script.py") -> Path:
        """Write a script, or another file in its directory."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(source))
        return path

    def python(self, *words: object, **options: Any) -> Outcome:
        """Run a program as python does."""
        return self._finish([sys.executable, *map(str, words)], **options)

    def run(self, *words: object, **options: Any) -> Outcome:
        """Run a program with ``shared-rpc run``."""
        return self._finish([sys.executable, *RUN, *map(str, words)], **options)

    def both(self, *words: object, **options: Any) -> tuple[Outcome, Outcome]:
        """Run a program both ways; return both outcomes."""
        return self.python(*words, **options), self.run(*words, **options)

    def start(self, *words: object, run: bool = True, **environ: str) -> Child:
        """Start a long-running program."""
        return Child(
            *(RUN if run else ()),
            *map(str, words),
            cwd=self.folder,
            environ={**self.environ, **environ},
            options=(),
            fresh=True,
        )

    def _finish(
        self,
        command: Sequence[str],
        environ: dict[str, str | None] | None = None,
        cwd: Path | None = None,
        setup: Callable[[], None] | None = None,
        text: str = "",
        **options: Any,
    ) -> Outcome:
        variables = {name: value for name, value in {**self.environ, **(environ or {})}.items() if value is not None}
        options |= {"env": variables, "cwd": cwd or self.folder, "input": text.encode()}
        ran = subprocess.run(command, preexec_fn=setup, timeout=_PATIENCE, capture_output=True, check=False, **options)
        return Outcome(ran.returncode, ran.stdout.decode(errors="replace"), ran.stderr.decode(errors="replace"))

    def zygotes(self) -> list[dict[str, Any]]:
        """Return the state of this place's zygotes, as they report it."""
        return live_zygotes(self.base_path, lambda reason: None)

    def close(self) -> None:
        """End the zygotes."""
        stop_zygotes(self.base_path, lambda reason: None)
