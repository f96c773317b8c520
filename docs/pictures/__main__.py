"""``python -m docs.pictures``: render pictures of the command line with a real server into docs/_static/cli.

A further picture is a further line in :data:`PICTURES`.
"""

from __future__ import annotations

import asyncio
import os
import pty
import re
import shlex
import subprocess
import sys
import tempfile
import termios
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from io import StringIO
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.text import Text

from shared_rpc import Client

HERE = Path(__file__).parent
FOLDER = HERE.parent / "_static" / "cli"
#: Seconds for which ``top`` runs before its picture is taken.
_WATCHED = 12.0


class Picture(NamedTuple):
    """A command, and the size of its terminal. Commands run until they complete, except ``top``.

    ``gpu``: the server has a model of 16 GB on a GPU, held by four processes.
    """

    name: str
    command: str
    columns: int = 112
    lines: int = 40
    gpu: bool = False


PICTURES = [
    Picture("ls", "shared-rpc ls", columns=140),
    Picture("info", "shared-rpc info", columns=150),
    Picture("objects", "shared-rpc objects", columns=190),
    Picture("devices", "shared-rpc devices"),
    Picture("top", "shared-rpc top", columns=124, lines=28),
    Picture("call", "shared-rpc call train steps=200"),
    Picture("tasks", "shared-rpc tasks", columns=124),
    Picture("doctor", "shared-rpc doctor"),
    Picture("verify", "shared-rpc verify", columns=124),
    Picture("top-gpu", "shared-rpc top", lines=26, gpu=True),
]


def main() -> None:
    """Render the named pictures, or all that need no GPU."""
    chosen = [picture for picture in PICTURES if (picture.name in sys.argv[1:] if sys.argv[1:] else not picture.gpu)]
    FOLDER.mkdir(parents=True, exist_ok=True)
    for gpu in {picture.gpu for picture in chosen}:
        with _scene(gpu) as (environ, runtime):
            for picture in (picture for picture in chosen if picture.gpu is gpu):
                drawn = _top(picture, environ) if picture.name.startswith("top") else _printed(picture, environ, runtime)
                # rich fetches a font; a picture fetches nothing.
                drawn = re.sub(r"@font-face \{.*?\}\s*|<!--.*?-->\s*", "", drawn, flags=re.DOTALL)
                drawn = drawn.replace("Fira Code, monospace", "ui-monospace, 'DejaVu Sans Mono', Menlo, monospace")
                drawn = drawn.replace(runtime, "/run/user/1000")
                (FOLDER / f"{picture.name}.svg").write_text("".join(f"{line.rstrip()}\n" for line in drawn.splitlines()))
                print(f"{picture.name}.svg: $ {picture.command}")


@contextmanager
def _scene(gpu: bool) -> Iterator[tuple[dict[str, str], str]]:
    """Run a server with processes that hold its objects; on the host also with a completed task."""
    with ExitStack() as stack:
        # As long as /run/user/1000, which stands for it in the pictures.
        runtime = stack.enter_context(tempfile.TemporaryDirectory(prefix="p", dir="/tmp"))
        own = ("SHARED_TENSOR_ENABLED", "SHARED_TENSOR_ROLE")
        environ = {name: value for name, value in os.environ.items() if name not in own} | {
            "SHARED_TENSOR_BASE_PATH": f"{runtime}/models",
            "PYTHONPATH": os.pathsep.join([str(HERE.parent.parent), *filter(None, [os.environ.get("PYTHONPATH")])]),
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "PYTHONWARNINGS": "ignore",
        }
        serve = ["-m", "shared_rpc.cli", "serve", *(["app_gpu.py"] if gpu else ["app.py", "--quota", "cpu=8GiB"])]
        if not gpu:
            environ["CUDA_VISIBLE_DEVICES"] = ""
        stack.enter_context(_running(environ, *serve))
        if not gpu:
            command = ["python", "-m", "shared_rpc.cli", "call", "train", "steps=10"]
            subprocess.run(command, env=environ, check=True, stdout=subprocess.DEVNULL)
        for _ in range(4 if gpu else 2):
            stack.enter_context(_running(environ, "worker.py"))
        yield environ, runtime


@contextmanager
def _running(environ: dict[str, str], *words: str) -> Iterator[None]:
    """Run a process, and wait for its first line of output."""
    process = subprocess.Popen(
        ["python", *words], cwd=HERE, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        if not process.stdout.readline():
            raise RuntimeError(f"{' '.join(words)} ended and said nothing")
        yield
    finally:
        process.terminate()
        process.communicate()


def _top(picture: Picture, environ: dict[str, str]) -> str:
    """Draw ``top``; if the server is on the host, while a program makes calls."""
    from shared_rpc.cli.top.app import TopApp
    from shared_rpc.cli.top.watching import ServerWatcher

    device = "cuda:0" if picture.gpu else "cpu"
    watcher = ServerWatcher(lambda _: Client(environ["SHARED_TENSOR_BASE_PATH"], device=device))
    app = TopApp(watcher, 1.0)

    async def watch() -> str:
        async with app.run_test(size=(picture.columns, picture.lines)) as pilot:
            await pilot.pause(_WATCHED)
            return app.export_screenshot(title=picture.command)

    with closing(watcher), ExitStack() as stack:
        if not picture.gpu:
            stack.enter_context(_running(environ, "traffic.py"))
        return asyncio.run(watch())


def _printed(picture: Picture, environ: dict[str, str], runtime: str) -> str:
    """Draw a terminal with a command and its output."""
    master, slave = pty.openpty()
    termios.tcsetwinsize(slave, (picture.lines, picture.columns))
    words = [sys.executable, "-m", "shared_rpc.cli", *shlex.split(picture.command)[1:]]
    environ = environ | {"TERM": "xterm-256color", "COLUMNS": str(picture.columns), "LINES": str(picture.lines)}
    pieces: list[bytes] = []
    with subprocess.Popen(words, stdin=slave, stdout=slave, stderr=subprocess.DEVNULL, env=environ, start_new_session=True):
        os.close(slave)
        with suppress(OSError):  # the terminal's other side was closed
            while piece := os.read(master, 65536):
                pieces.append(piece)
    os.close(master)
    text = Text.from_ansi(b"".join(pieces).decode().replace("\r\n", "\n").rstrip().replace(runtime, "/run/user/1000"))
    console = Console(record=True, width=picture.columns, file=StringIO(), force_terminal=True, color_system="truecolor")
    console.print(Text.assemble(("$ ", "green"), (picture.command, "bold")))
    console.print(text, soft_wrap=True)
    return console.export_svg(title="", unique_id=f"cli-{picture.name}")


if __name__ == "__main__":
    main()
