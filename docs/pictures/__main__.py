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
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

from docs.pictures.terminal import Row, replaced, screen_of, svg_of
from shared_rpc import Client

HERE = Path(__file__).parent
FOLDER = HERE.parent / "_static" / "cli"


class Picture(NamedTuple):
    """A command, and when its picture is taken.

    That is at its end, or as soon as ``until``, a regular expression, is on the screen.
    ``beside`` is a script of this folder that runs at the same time. ``measured``: times and sizes are what the picture
    is about.
    ``gpu``: the server has a model of 16 GB on a GPU, and four processes hold it.
    """

    name: str
    command: str
    until: str | None = None
    columns: int = 112
    lines: int = 40
    beside: str = ""
    measured: bool = False
    gpu: bool = False


PICTURES = [
    Picture("ls", "shared-rpc ls", columns=128),
    Picture("info", "shared-rpc info"),
    Picture("objects", "shared-rpc objects", columns=148),
    Picture("devices", "shared-rpc devices"),
    Picture(
        "top", "shared-rpc top", until=r" ([5-9]\d\d|[12]\d{3})/3000", columns=124, lines=28, beside="traffic.py", measured=True
    ),
    # The task of this one runs on when the picture is taken.
    Picture("call", "shared-rpc call train steps=200", until=r"1[0-4]\d/200"),
    Picture("tasks", "shared-rpc tasks", columns=124),
    Picture("doctor", "shared-rpc doctor"),
    Picture("verify", "shared-rpc verify", lines=60, measured=True),
    Picture("top-gpu", "shared-rpc top", until=r"up [1-9]\ds", columns=112, lines=26, measured=True, gpu=True),
]


def main() -> None:
    """Take those that are named, or all that need no GPU."""
    chosen = [picture for picture in PICTURES if (picture.name in sys.argv[1:] if sys.argv[1:] else not picture.gpu)]
    FOLDER.mkdir(parents=True, exist_ok=True)
    for gpu in {picture.gpu for picture in chosen}:
        _take([picture for picture in chosen if picture.gpu is gpu], gpu)


def _take(pictures: list[Picture], gpu: bool) -> None:
    with _gpu_scene() if gpu else _scene() as (environ, runtime):
        for picture in pictures:
            words = [sys.executable, "-m", "shared_rpc.cli", *shlex.split(picture.command)[1:]]
            with ExitStack() as stack:
                if picture.beside:
                    stack.enter_context(_running(environ, picture.beside))
                rows = screen_of(words, environ, picture.columns, picture.lines, picture.until)
            drawn = svg_of(picture.name, picture.command, _settled(rows, runtime, picture.measured), picture.columns)
            (FOLDER / f"{picture.name}.svg").write_text("".join(f"{line.rstrip()}\n" for line in drawn.splitlines()))
            print(f"{picture.name}.svg: $ {picture.command}")


@contextmanager
def _scene() -> Iterator[tuple[dict[str, str], str]]:
    """A server with two processes that hold what it has, and a task that has ended."""
    with ExitStack() as stack:
        runtime = stack.enter_context(_runtime())
        environ = _environ(runtime) | {"CUDA_VISIBLE_DEVICES": ""}
        serve = ("-m", "shared_rpc.cli", "serve", "app.py", "--quota", "cpu=8GiB")
        stack.enter_context(_running(environ, *serve))
        subprocess.run(
            ["python", "-m", "shared_rpc.cli", "call", "train", "steps=10"], env=environ, check=True, stdout=subprocess.DEVNULL
        )
        for _ in range(2):
            stack.enter_context(_running(environ, "worker.py"))
        _await_zygote(environ["SHARED_TENSOR_BASE_PATH"])
        yield environ, runtime


@contextmanager
def _gpu_scene() -> Iterator[tuple[dict[str, str], str]]:
    """A server with a model of 16 GB on a GPU, and four processes that hold it."""
    with ExitStack() as stack:
        runtime = stack.enter_context(_runtime())
        environ = _environ(runtime)
        stack.enter_context(_running(environ, "-m", "shared_rpc.cli", "serve", "app_gpu.py"))
        for _ in range(4):
            stack.enter_context(_running(environ, "worker.py"))
        yield environ, runtime


def _runtime() -> tempfile.TemporaryDirectory[str]:
    # As long as /run/user/1000, which stands for it in the pictures.
    return tempfile.TemporaryDirectory(prefix="p", dir="/tmp")


def _environ(runtime: str) -> dict[str, str]:
    own = ("SHARED_TENSOR_ENABLED", "SHARED_TENSOR_ROLE")
    return {name: value for name, value in os.environ.items() if name not in own} | {
        "SHARED_TENSOR_BASE_PATH": f"{runtime}/models",
        "PYTHONPATH": os.pathsep.join([str(HERE.parent.parent), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONWARNINGS": "ignore",
    }


def _await_zygote(base_path: str) -> None:
    """Wait until later workers of the server would be forks, as in the life of a server they are nearly always."""
    until = time.monotonic() + 60
    with Client(base_path, device="cpu") as client:
        while client.get_server_info()["zygote"]["state"] != "ready":
            if time.monotonic() > until:
                raise RuntimeError(f"the server has no zygote: {client.get_server_info()['zygote']}")
            time.sleep(0.05)


@contextmanager
def _running(environ: dict[str, str], *words: str) -> Iterator[None]:
    """A process, from its first line on."""
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


#: Ids and pids of this run, and those that stand for them in all pictures.
_IDS: dict[str, str] = {}
_PIDS: dict[str, str] = {}


def _settled(rows: list[Row], runtime: str, measured: bool) -> list[Row]:
    """What differs from run to run does not in the pictures: paths, ids, pids, and but for ``measured`` times and the machine's
    memory.
    """
    rows = replaced(rows, runtime, lambda _: "/run/user/1000")
    if measured:
        return rows
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
