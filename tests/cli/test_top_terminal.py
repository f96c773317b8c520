"""``shared-rpc top`` on a real terminal, with real servers: the screen, the keys, and the restored terminal."""

from __future__ import annotations

import os
import signal
import textwrap
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest
import torch

from shared_rpc import Client, Provider, Server, progress
from tests.kit.commands import MODULE, cli
from tests.kit.deep import deep
from tests.kit.terminals import ALTERNATE, Tty
from tests.kit.world import World

MIB = 1 << 20
Terminal = Callable[..., Tty]


@pytest.fixture
def world(world: World, go: threading.Event) -> World:
    """A server in this process."""

    @world.share(managed=True)
    def load(mib: int) -> torch.Tensor:
        return torch.zeros(mib * MIB, dtype=torch.uint8)

    @world.share
    def table(key: int) -> torch.Tensor:
        return torch.zeros(2 * MIB, dtype=torch.uint8)

    @world.share(cache=False)
    def gated() -> torch.Tensor:
        progress(1, 4, "the first shard")
        go.wait()
        progress(3, 4, "the third shard")
        return torch.zeros(1)

    world.serve(quotas={"cpu": 64 * MIB})
    return world


@pytest.fixture
def tty() -> Iterator[Callable[..., Tty]]:
    """``tty(*options, columns, lines)`` is a terminal with ``top``; it is closed at the end."""
    with ExitStack() as stack:

        def start(*options: str, command: tuple[str, ...] = (*MODULE, "top", "-d", "0.1"), **size: int) -> Tty:
            terminal = Tty(*command, *options, **size)
            stack.callback(terminal.close)
            return terminal

        yield start


def code(before: str) -> str:
    """Return ``top`` as a program that runs other code first; its options follow."""
    return (
        f"import sys\n{textwrap.dedent(before)}\nfrom shared_rpc.cli.__main__ import main\nsys.argv.insert(1, 'top')\nmain()\n"
    )


def row(top: Tty, beginning: str) -> str:
    """Return the first line of the screen with a prefix, ``""`` if there is none."""
    return next((line.strip() for line in top.lines if line.strip().startswith(beginning)), "")


def test_the_view_of_a_busy_server(world: World, go: threading.Event, threads: ThreadPoolExecutor, tty: Terminal) -> None:
    """Objects with sizes and holders, memory, builds, calls and clients, of which the view itself is none."""
    client = world.client()
    with client.call("load", 8), client.create_buffer(4 * MIB, ttl=600):
        client.call("table", 1)
        call = threads.submit(client.call, "gated")
        top = tty(columns=160, lines=40)
        screen = top.until("load(mib=8)", "table(key=1)", "buffer", "calls/s", "1/4 the first shard")
        assert f"pid {os.getpid()}" in screen and world.server.socket_path in screen
        assert "14.0 MiB in 3 objects" in screen and "2 leases" in screen and "1 client" in screen and "1 build" in screen
        assert f"{os.getpid()} python" in row(top, "load(mib=8)") and "8.0 MiB" in row(top, "load(mib=8)")
        go.set()
        call.result(20)
        top.until_gone("1/4 the first shard")
        top.press("q")
        assert (top.end(), top.restored) == (0, True)
    assert [one["pid"] for one in client.list_sessions()] == [os.getpid()]


def test_waiting_for_a_server(world: World, tty: Terminal) -> None:
    """The command that starts one is shown whole. After the end of a server, the view waits for the next one."""
    world.server.stop()
    top = tty(columns=40, lines=24)
    top.until("no server answers in", "'shared-rpc serve app.py'", "--base-path or --socket", "q Quit")
    top.resize(200, 30)
    world.server.start()
    top.until("objects 0", "s-cpu.sock")
    world.server.stop()
    top.until("server lost")
    elsewhere = Provider(f"{world.base_path}-next", device="cpu")
    elsewhere.share("twos")(lambda: torch.ones(2))
    with Server(elsewhere) as second, Client(socket_path=second.socket_path) as client:
        top.until_gone("server lost")
        client.call("twos")
        top.until("twos()", "s-next-cpu.sock")
        top.press("q")
        assert (top.end(), top.restored) == (0, True)


@pytest.mark.parametrize(
    ("end", "status"),
    [
        (lambda top: top.press("\x03"), 128 + signal.SIGINT),
        (lambda top: top.kill(signal.SIGTERM), 128 + signal.SIGTERM),
        *deep((lambda top: top.kill(signal.SIGHUP), 128 + signal.SIGHUP)),
    ],
)
def test_the_terminal_is_restored(base_path: str, tty: Terminal, end: Callable[[Tty], None], status: int) -> None:
    """Its settings, its screen and its cursor; nothing is printed."""
    top = tty()
    top.until("no server answers")
    assert ALTERNATE in top.written and top.attributes != top.before
    end(top)
    assert top.end() == status
    assert top.restored
    assert b"Traceback" not in top.written


@pytest.mark.parametrize("options", [["--once"], []], ids=str)
def test_one_frame(world: World, options: list[str]) -> None:
    """With --once, and where there is no terminal: all rows whole, without escape sequences."""
    world.client().call("table", 1)
    with world.client().call("load", 8):
        output = cli("top", "-d", "0.05", *options).succeeded
    assert "\x1b" not in output and "0.0 calls/s" in output
    line, _ = (line for line in output.splitlines() if line.startswith(("load(mib=8)", "table(key=1)")))
    assert line.startswith("load") and "8.0 MiB" in line and f"{os.getpid()} " in line


def test_without_textual(world: World, tty: Terminal) -> None:
    """The error says how to install it; --once works, and prints below the cursor, as wide as the terminal."""
    world.client().call("table", 1)
    without = ("-c", code("sys.modules['textual'] = None"), "-d", "0.05")
    top = tty(command=without)
    assert top.end() == 1
    assert "the live view needs the package textual: pip install 'shared-rpc[top]'" in " ".join(top.text.split())
    once = tty("--once", command=without, columns=140)
    assert once.end() == 0
    assert any(line.startswith("table(key=1)") for line in once.lines)
    assert ALTERNATE not in top.written + once.written
