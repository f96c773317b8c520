"""``python -m docs.pictures``: pictures of the command line at work, from a real server, into docs/_static/cli.

A further picture is a further line in :data:`PICTURES`.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

from docs.pictures.terminal import Row, replaced, screen_of, svg_of

HERE = Path(__file__).parent
FOLDER = HERE.parent / "_static" / "cli"


class Picture(NamedTuple):
    """A command, and when its picture is taken: at its end, or as soon as ``until``, a regular expression, is on the screen."""

    name: str
    command: str
    until: str | None = None
    columns: int = 112
    lines: int = 40


PICTURES = [
    Picture("ls", "shared-rpc ls", columns=128),
    Picture("info", "shared-rpc info"),
    Picture("objects", "shared-rpc objects", columns=132),
    Picture("devices", "shared-rpc devices"),
    Picture("call", "shared-rpc call train steps=200", until=r"1[0-4]\d/200"),
    Picture("tasks", "shared-rpc tasks", columns=124),
    Picture("doctor", "shared-rpc doctor"),
]


def main() -> None:
    """Take all of them, or those that are named."""
    wanted = sys.argv[1:]
    FOLDER.mkdir(parents=True, exist_ok=True)
    with _scene() as (environ, runtime):
        for picture in PICTURES:
            if wanted and picture.name not in wanted:
                continue
            words = [sys.executable, "-m", "shared_rpc.cli", *shlex.split(picture.command)[1:]]
            rows = screen_of(words, environ, picture.columns, picture.lines, picture.until)
            drawn = svg_of(picture.name, picture.command, _settled(rows, runtime), picture.columns)
            (FOLDER / f"{picture.name}.svg").write_text("".join(f"{line.rstrip()}\n" for line in drawn.splitlines()))
            print(f"{picture.name}.svg: $ {picture.command}")


@contextmanager
def _scene() -> Iterator[tuple[dict[str, str], str]]:
    """A server with two processes that hold what it has, and a task that has ended."""
    with ExitStack() as stack:
        # As long as /run/user/1000, which stands for it in the pictures.
        runtime = stack.enter_context(tempfile.TemporaryDirectory(prefix="p", dir="/tmp"))
        roles = ("SHARED_TENSOR_ENABLED", "SHARED_TENSOR_ROLE", "PYTHONPATH")
        environ = {name: value for name, value in os.environ.items() if name not in roles} | {
            "SHARED_TENSOR_BASE_PATH": f"{runtime}/models",
            "PYTHONPATH": str(HERE.parent.parent),
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "CUDA_VISIBLE_DEVICES": "",
            "PYTHONWARNINGS": "ignore",
        }

        def start(*words: str, ready: str) -> None:
            process = subprocess.Popen(
                ["python", *words], cwd=HERE, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            stack.callback(process.communicate)
            stack.callback(process.terminate)
            assert process.stdout is not None
            if not any(ready in line for line in process.stdout):
                raise RuntimeError(f"{' '.join(words)} did not say {ready!r}")

        start("-m", "shared_rpc.cli", "serve", "app.py", "--quota", "cpu=8GiB", ready="serving")
        subprocess.run(
            ["python", "-m", "shared_rpc.cli", "call", "train", "steps=10"], env=environ, check=True, stdout=subprocess.DEVNULL
        )
        for _ in range(2):
            start("worker.py", ready="attached")
        yield environ, runtime


#: Ids and pids of this run, and those that stand for them in all pictures.
_IDS: dict[str, str] = {}
_PIDS: dict[str, str] = {}


def _settled(rows: list[Row], runtime: str) -> list[Row]:
    """What differs from run to run does not in the pictures: paths, ids, pids, times, the machine's memory."""
    rows = replaced(rows, runtime, lambda _: "/run/user/1000")
    rows = replaced(rows, r"\b[0-9a-f]{16,24}\b", _id)
    # "pid 123", a row of that name, one before a command, and a column after a socket.
    rows = replaced(rows, r"(?<=pid )\s*\d+|\b\d{3,}(?= \()|(?<=\.sock)\s+\d+", _pid)
    rows = replaced(rows, r"\b\d\d?(?= s\b)", lambda old: "12"[: len(old)])
    return replaced(rows, r"\b\d\d+\.\d(?= GiB)", lambda old: "31.2".rjust(len(old), "1"))


def _id(old: str) -> str:
    return _IDS.setdefault(old, hashlib.sha256(str(len(_IDS)).encode()).hexdigest()[: len(old)])


def _pid(old: str) -> str:
    digits = old.strip()
    return _PIDS.setdefault(digits, str(4 * 10 ** (len(digits) - 1) + 11 * (len(_PIDS) + 1))).rjust(len(old))


if __name__ == "__main__":
    main()
