"""Pages to be followed: their files are written, their commands run, and the output is compared.

A code block with the caption ``app.py`` is that file. A block of the language ``console`` with a caption is a terminal of that
name: lines after ``$`` are run, by real processes, and the lines below them are the expected output. ``^C`` is Ctrl-C, and a
line with only ``…`` stands for any lines. Times, ids, socket paths and pids may differ; equal pids of the page must be equal
in the output too, and commands may use them.

``python -m tests.kit.walkthrough PAGE`` follows a page and inserts the actual output.
"""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from tests.kit.processes import PYTHONPATH, eventually

#: Seconds for a command, or for the expected output of a long-running one.
PATIENCE = 120.0
_FENCE = re.compile(r"^```(?:\{code-block\} )?(\w+)\n((?::\w+: [^\n]*\n)*)\n?(.*?)^```$", re.MULTILINE | re.DOTALL)
_CAPTION = re.compile(r"^:caption: (.*)$", re.MULTILINE)
#: Commands that serve run until Ctrl-C, or until another command ends them.
_SERVES = re.compile(r"ROLE=server |^shared-rpc serve ")
#: What may differ, by its kind, besides pids.
_PATTERNS = {
    "task": r"\b[0-9a-f]{8,}-\d+\b",
    "id": r"\b[0-9a-f]{8,}\b",
    "socket": r"/\S+\.sock",
    "time": r"\b\d+(?:\.\d+)? (?:µs|ms|s|min)\b",
    # Of a skeleton: another release of a library, another size.
    "copied": r"\b\d+(?:\.\d+)? (?:B|KiB)(?=\s{2,}cpu\b)",
    "space": r"\s+",
}
_TOKENS = re.compile(
    r"(?P<pid>(?<=pid )\d+|\b\d+(?= \(python))" + "".join(f"|(?P<{kind}>{pattern})" for kind, pattern in _PATTERNS.items())
)


class Step(NamedTuple):
    """A line that is typed, and the lines under it; ``at`` is where these are in the page."""

    terminal: str
    typed: str
    expected: list[str]
    at: tuple[int, int]


class Page:
    """The files and the steps of a page."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.text = path.read_text()
        self.files: dict[str, str] = {}
        self.steps: list[Step] = []
        for block in _FENCE.finditer(self.text):
            language, options, content = block.groups()
            caption = _CAPTION.search(options)
            if caption and language == "console":
                self.steps += self._read(caption[1], content, block.start(3))
            elif caption and "." in caption[1]:
                self.files[caption[1]] = content

    @property
    def missing(self) -> set[str]:
        """Return the packages that its files import and this machine lacks."""
        imported = set(re.findall(r"^(?:import|from) (\w+)", "\n".join(self.files.values()), re.MULTILINE))
        return {name for name in imported if f"{name}.py" not in self.files and importlib.util.find_spec(name) is None}

    @staticmethod
    def _read(terminal: str, content: str, start: int) -> Iterator[Step]:
        typed = list(re.finditer(r"^(?:\$ (.+)|(\^C))\n", content, re.MULTILINE))
        for number, line in enumerate(typed):
            end = typed[number + 1].start() if number + 1 < len(typed) else len(content)
            lines = content[line.end() : end].splitlines()
            yield Step(terminal, line[1] or line[2], lines, (start + line.end(), start + end))


class Program:
    """A program in a terminal."""

    def __init__(self, command: str, folder: Path, environ: dict[str, str]) -> None:
        self.process = subprocess.Popen(
            ["bash", "-c", command],
            cwd=folder,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as printed:
            for line in printed:
                self.lines.append(line.rstrip())

    def finish(self, patience: float = PATIENCE) -> None:
        """Wait for its end; return all output."""
        self.process.wait(patience)
        self._reader.join(patience)

    def signal(self, number: int) -> None:
        """Send a signal to all its processes, like a terminal."""
        os.killpg(self.process.pid, number)


class Walk:
    """Follows a page in an empty folder. ``with Walk(page, folder) as walk: walk.follow()``."""

    def __init__(self, page: Page, folder: Path) -> None:
        self.page = page
        self.folder = folder
        #: The page's pids, mapped to those of this run.
        self.pids: dict[str, str] = {}
        #: The output of each step.
        self.printed: list[list[str]] = []
        self._running: dict[str, Program] = {}
        commands = folder / ".bin"
        commands.mkdir()
        for name, words in {"python": "-u", "shared-rpc": "-m shared_rpc.cli"}.items():
            (commands / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {words} "$@"\n')
            (commands / name).chmod(0o700)
        self.base_path = str(folder / ".run" / "s")
        (folder / ".run").mkdir(mode=0o700)
        roles = ("SHARED_TENSOR_ENABLED", "SHARED_TENSOR_ROLE")
        self._environ = {name: value for name, value in os.environ.items() if name not in roles} | {
            "PATH": f"{commands}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": PYTHONPATH,
            "SHARED_TENSOR_BASE_PATH": self.base_path,
            "CUDA_VISIBLE_DEVICES": "",  # the pages show a machine without a GPU
            "PYTHONWARNINGS": "ignore",
        }
        for name, content in page.files.items():
            (folder / name).write_text(content)

    def __enter__(self) -> Walk:
        return self

    def __exit__(self, *_: object) -> None:
        for program in self._running.values():
            if program.process.poll() is None:
                program.signal(signal.SIGKILL)
            program.finish()

    def follow(self, *, compare: bool = True) -> None:
        """Perform the page's steps in order.

        :raises AssertionError: if the output differs from the page.
        """
        for step in self.page.steps:
            lines = self._do(step, compare)
            self.printed.append(lines)
            if compare:
                self._compare(step, lines)
            else:
                self.pids.update(zip(_pids(step.expected), _pids(lines), strict=False))

    def _do(self, step: Step, compare: bool) -> list[str]:
        if step.typed == "^C":
            program = self._running.pop(step.terminal)
            before = len(program.lines)
            program.signal(signal.SIGINT)
            program.finish()
            return program.lines[before:]
        if step.terminal in self._running:
            # The prompt is back when the server has ended, as after 'shared-rpc stop' in another terminal.
            self._running.pop(step.terminal).finish()
        command = re.sub(r"\b\d+\b", lambda number: self.pids.get(number[0], number[0]), step.typed)
        program = Program(command, self.folder, self._environ)
        if not _SERVES.search(command):
            program.finish()
            return list(program.lines)
        self._running[step.terminal] = program
        wanted = len(step.expected) if compare or step.expected else 1
        eventually(
            lambda: len(program.lines) >= wanted or program.process.poll() is not None, PATIENCE, f"the output of {command}"
        )
        return list(program.lines)

    def _compare(self, step: Step, lines: Sequence[str]) -> None:
        left = list(lines)
        skipping = False
        for expected in step.expected:
            if expected == "…":
                skipping = True
                continue
            pattern = self._pattern(expected)
            while left and skipping and not pattern.fullmatch(left[0]):
                left.pop(0)
            found = pattern.fullmatch(left.pop(0)) if left else None
            assert found, self._complaint(step, expected, lines)
            self.pids.update({name[1:]: number for name, number in found.groupdict().items()})
            skipping = False
        assert skipping or not left, self._complaint(step, "no more", lines)

    def _pattern(self, expected: str) -> re.Pattern[str]:
        pattern, end = "", 0
        for token in _TOKENS.finditer(expected):
            pattern += re.escape(expected[end : token.start()])
            kind, text = token.lastgroup or "", token[0]
            if kind != "pid":
                pattern += _PATTERNS[kind]
            elif f"(?P<p{text}>" in pattern:
                pattern += f"(?P=p{text})"
            else:
                pattern += self.pids.get(text, rf"(?P<p{text}>\d+)")
            end = token.end()
        return re.compile(pattern + re.escape(expected[end:]))

    def _complaint(self, step: Step, expected: str, lines: Sequence[str]) -> str:
        where = self.page.text.count("\n", 0, step.at[0]) + 1
        shown = "\n    ".join(lines)
        return f"{self.page.path.name}, line {where}, $ {step.typed}\n  expected: {expected}\n  printed:\n    {shown}"

    def rewritten(self) -> str:
        """Return the page with the actual output, except where it has ``…``."""
        text = self.page.text
        for step, lines in reversed(list(zip(self.page.steps, self.printed, strict=True))):
            if "…" not in step.expected:
                shown = "".join(f"{line}\n" for line in lines).replace(self.base_path, "/run/user/1000/shared-tensor")
                for ours, theirs in self.pids.items():
                    shown = re.sub(rf"\b{theirs}\b", ours, shown)
                text = text[: step.at[0]] + shown + text[step.at[1] :]
        return text


def _pids(lines: Sequence[str]) -> list[str]:
    return [token[0] for token in _TOKENS.finditer("\n".join(lines)) if token["pid"]]


def main() -> None:
    """Write the output of the page's commands to the page."""
    path = Path(sys.argv[1])
    with tempfile.TemporaryDirectory() as folder, Walk(Page(path), Path(folder)) as walk:
        walk.follow(compare=False)
        path.write_text(walk.rewritten())


if __name__ == "__main__":
    main()
