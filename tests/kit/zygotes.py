"""A zygote for a single test, and the output of its forks."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shared_rpc.scripts.starting import CODE
from shared_rpc.zygote.process import WatchedProcess
from shared_rpc.zygote.wire import GO, PADDING, Lost, ask, framed, receive, send
from tests.kit.processes import PYTHONPATH

#: A module that prints the result of its function ``tell`` as JSON.
TELL = """
    import json, sys

    def say(value):
        sys.stdout.write(json.dumps(value) + "\\n")
        sys.stdout.flush()
"""


class Fork:
    """A fork with its output and its end."""

    def __init__(self, process: WatchedProcess, output: int, errors: int) -> None:
        self.process = process
        self._output = os.fdopen(output, "rb")
        self._errors = os.fdopen(errors, "rb")
        self._closed = False

    @property
    def pid(self) -> int:
        """The process id."""
        return self.process.pid

    def read_message(self) -> Any:
        """Return the next line of its standard output, as JSON."""
        line = self._output.readline()
        assert line, f"it ended with {self.process.wait(30)}: {self._errors.read().decode()}"
        return json.loads(line)

    def close(self) -> tuple[int, str]:
        """Return its exit code, as :attr:`subprocess.Popen.returncode`, and its standard error."""
        self._closed = True
        with self._output, self._errors:
            errors = self._errors.read().decode()
            return self.process.wait(30), errors

    def end(self) -> None:
        """End it, and close its pipes."""
        if not self._closed:
            self.process.kill()
            self.close()


class Zygote:
    """``python -m shared_rpc.zygote`` for this process.

    :param folder: has the directory of installed modules in which :meth:`write` puts them; Python looks there first.
    """

    def __init__(self, folder: Path, environ: dict[str, str] | None = None, options: Sequence[str] = ()) -> None:
        self.folder = folder = folder / "site-packages"
        folder.mkdir()
        self.environ = {**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{PYTHONPATH}", **(environ or {})}
        self.options = list(options)
        self.write("tell", TELL)
        ours, theirs = socket.socketpair()
        words = ["-c", CODE, "--fd", str(theirs.fileno()), "--parent", str(os.getpid()), PADDING]
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, *self.options, *words],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                process_group=0,
                cwd=folder,
                env=self.environ,
            )
        self.socket = ours
        self._forks: list[Fork] = []

    def write(self, module: str, code: str) -> Path:
        """Write a module."""
        path = self.folder / f"{module}.py"
        path.write_text(textwrap.dedent(code))
        return path

    def ask(self, *modules: str, **options: Any) -> dict[str, Any]:
        """Send a preload request, and return its answer."""
        send(self.socket, framed({"type": "Preload", "modules": modules, **options}))
        self.socket.settimeout(120)
        try:
            return receive(self.socket)[0]
        except Lost:
            raise AssertionError(f"the zygote has hung up: {self.errors()}") from None

    def errors(self) -> str:
        """Return its standard error up to its end."""
        assert self.process.stderr is not None
        return self.process.stderr.read().decode()

    def prepare(self, *modules: str, **options: Any) -> dict[str, Any]:
        """Make it import modules, and wait until it is ready."""
        answer = self.ask(*modules, **options)
        assert answer["type"] == "Ready", answer
        return answer

    def begin(
        self, module: str, *words: str, fds: Sequence[int] = (), at: int = 50, **options: Any
    ) -> tuple[dict[str, Any], socket.socket, int, int]:
        """Request a fork; return the answer, the connection to its watcher, and the reading ends of its output and errors.

        :param at: the number that the first of ``fds`` is to have: lower ones may be those of libraries.
        """
        output, output_end = os.pipe()
        errors, errors_end = os.pipe()
        nothing = os.open(os.devnull, os.O_RDONLY)
        folder = os.open(self.folder, os.O_PATH)
        request = {
            "type": "Fork",
            "words": ["-m", module, *words],
            "options": self.options,
            "variables": self.environ,
            "fds": [0, 1, 2, *range(at, at + len(fds))],
            "blocked": [],
            **options,
        }
        ours, theirs = socket.socketpair()
        ours.settimeout(120)
        try:
            with theirs:
                socket.send_fds(self.socket, [GO], [theirs.fileno()])
            return ask(ours, request, [nothing, output_end, errors_end, *fds, folder]), ours, output, errors
        finally:
            for fd in (nothing, folder, output_end, errors_end):
                os.close(fd)

    def fork(self, module: str, *words: str, **options: Any) -> Fork:
        """Fork a process that runs a module."""
        answer, watcher, output, errors = self.begin(module, *words, **options)
        assert answer["type"] == "Forked", answer
        watcher.sendall(GO)
        self._forks.append(Fork(WatchedProcess(answer["pid"], watcher), output, errors))
        return self._forks[-1]

    def refused(self, module: str, **options: Any) -> dict[str, Any]:
        """Return the answer to a request that is refused."""
        answer, watcher, output, errors = self.begin(module, **options)
        watcher.close()
        os.close(output)
        os.close(errors)
        assert answer["type"] == "ForkRefused"
        return answer

    def plain(self, module: str, *words: str) -> subprocess.CompletedProcess[str]:
        """Run the same in a new process, as :class:`subprocess.Popen` starts it."""
        return subprocess.run(
            [sys.executable, *self.options, "-m", module, *words],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            process_group=0,
            cwd=self.folder,
            env=self.environ,
            timeout=120,
        )

    def close(self) -> None:
        """End it and its forks."""
        for fork in self._forks:
            fork.end()
        self.socket.close()
        self.process.kill()
        self.process.communicate()
