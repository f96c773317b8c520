"""Scripts that are run by ``python`` and by ``shared-rpc run``, to be compared."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from shared_rpc.scripts.listing import live_zygotes, stop_zygotes
from tests.kit import forks
from tests.kit.processes import PYTHONPATH, Child

#: The words for ``shared-rpc run``, behind the interpreter.
RUN = ("-m", "shared_rpc.cli", "run")
#: How a script begins that waits for a line, or a signal: by ``line()`` in place of ``sys.stdin.readline()``. A signal between
#: the interpreter's last look for one and the system call that waits does not interrupt that, in any program in Python: its
#: handler runs when something else ends the wait. Here its number does, in a pipe.
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
#: The first script of a place waits for a zygote; on a busy machine that takes long.
_PATIENCE = 120.0


class Outcome(NamedTuple):
    """How a program ended, and what it said."""

    code: int
    output: str
    errors: str


class Place:
    """A directory for scripts, and for the zygotes of those who run them.

    :param forks: whether commands, and the zygotes that they start, may begin as forks of the tests' own zygote, which has
        imported torch: where it is of no matter what they are, but what becomes of them.
    """

    def __init__(self, folder: Path, sockets: Path, forks: bool = False) -> None:
        self.folder = folder
        self._forks = forks
        self.base_path = str(sockets / "s")
        self.environ = {
            name: value for name, value in os.environ.items() if not name.startswith(("SHARED_TENSOR_", "COLUMNS", "LINES"))
        }
        self.environ |= {"SHARED_TENSOR_BASE_PATH": self.base_path, "PYTHONPATH": PYTHONPATH, "PYTHONUNBUFFERED": ""}

    def write(self, source: str, name: str = "script.py") -> Path:
        """Write a script, or another file beside it."""
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
        """Run a program both ways: how each one ended."""
        return self.python(*words, **options), self.run(*words, **options)

    def start(self, *words: object, run: bool = True, **environ: str) -> Child:
        """Start a program that goes on."""
        return Child(
            *(RUN if run else ()),
            *map(str, words),
            cwd=self.folder,
            environ={**self.environ, **environ},
            options=(),
            has_workers=self._forks,
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
        options |= {"env": variables, "cwd": cwd or self.folder, "input": text.encode(), "capture_output": True}
        if self._forks and setup is None and command[1 : 1 + len(RUN)] == [*RUN]:
            ran = forks.run(command, timeout=_PATIENCE, has_workers=True, **options)
        else:
            ran = subprocess.run(command, preexec_fn=setup or _begin, timeout=_PATIENCE, check=False, **options)
        return Outcome(ran.returncode, ran.stdout.decode(errors="replace"), ran.stderr.decode(errors="replace"))

    def zygotes(self) -> list[dict[str, Any]]:
        """What the zygotes of this place tell of themselves."""
        return live_zygotes(self.base_path, lambda reason: None)

    def close(self) -> None:
        """End them."""
        stop_zygotes(self.base_path, lambda reason: None)


def _begin() -> None:
    # What runs the tests may ignore it, and programs would too.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
