"""``shared-rpc top`` on a real terminal, with real servers: what is seen, what keys do, and how the terminal is left."""

from __future__ import annotations

import os
import re
import signal
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any, get_args

import pytest
import torch

from shared_rpc import Client, Provider, Server, progress
from shared_rpc.cli.top.command import Order
from shared_rpc.cli.top.tables import ORDERS
from shared_rpc.observability import events as happenings
from tests.kit.brokers import BrokerApp, another_worker, worker_pids
from tests.kit.commands import MODULE, Ran, cli
from tests.kit.processes import Child, eventually, sigstop
from tests.kit.terminals import ALTERNATE, NORMAL, Tty

MIB = 1 << 20


@pytest.fixture
def served(provider: Provider, serve: Callable[..., Server], go: threading.Event) -> Server:
    """A server in this process."""

    @provider.share(managed=True)
    def load(mib: int) -> torch.Tensor:
        return torch.zeros(mib * MIB, dtype=torch.uint8)

    @provider.share
    def table(key: int) -> torch.Tensor:
        return torch.zeros(2 * MIB, dtype=torch.uint8)

    @provider.share(cache=False)
    def gated() -> torch.Tensor:
        progress(1, 4, "the first shard")
        go.wait()
        progress(3, 4, "the third shard")
        return torch.zeros(1)

    return serve(quotas={"cpu": 64 * MIB})


@pytest.fixture
def tty() -> Iterator[Callable[..., Tty]]:
    """``tty(*options, columns, lines)`` is a terminal that shows ``top``; it is closed at the end."""
    with ExitStack() as stack:

        def start(*options: str, command: tuple[str, ...] = (*MODULE, "top", "-d", "0.1"), **size: int) -> Tty:
            terminal = Tty(*command, *options, **size)
            stack.callback(terminal.close)
            return terminal

        yield start


def quit_from(top: Tty) -> None:
    """End it with q, and find the terminal as it was."""
    top.press("q")
    assert top.end() == 0
    assert top.restored


def plain(written: bytes) -> str:
    """Text without colours, which Python 3.13 and later have in tracebacks."""
    return re.sub(r"\x1b\[[0-9;]*m", "", written.decode())


def row(top: Tty, beginning: str) -> str:
    """The first line of the screen that begins so, ``""`` if there is none."""
    return next((line.strip() for line in top.lines if line.strip().startswith(beginning)), "")


def test_what_is_seen(
    served: Server, connect: Callable[..., Client], go: threading.Event, threads: ThreadPoolExecutor, tty: Callable[..., Tty]
) -> None:
    """Objects with their sizes and who holds them, memory, builds, calls, clients; the view itself is no client."""
    client = connect()
    with client.call("load", 8), client.create_buffer(4 * MIB, ttl=600):
        client.call("table", 1)
        call = threads.submit(client.call, "gated")
        top = tty(columns=160, lines=40)
        screen = top.until("load(mib=8)", "table(key=1)", "buffer", "calls/s", "1/4 the first shard")
        assert f"pid {os.getpid()}" in screen and served.socket_path in screen
        assert "14.0 MiB in 3 objects" in screen and "2 leases" in screen and "1 client" in screen and "1 build" in screen
        assert f"{os.getpid()} python" in row(top, "load(mib=8)") and "8.0 MiB" in row(top, "load(mib=8)")
        assert row(top, "cpu").split()[:8] == ["cpu", "█" * 3 + "▓" + "░" * 16, "10.0", "MiB", "4.0", "MiB", "64.0", "MiB"]
        assert row(top, "gated").split()[1] == "█" * 5 + "░" * 15
        order = [line.split()[0] for line in top.lines if line.split()[:1] in (["load(mib=8)"], ["table(key=1)"], ["buffer"])]
        assert order == ["load(mib=8)", "buffer", "table(key=1)"]
        go.set()
        call.result(20)
        top.until_gone("1/4 the first shard")
        quit_from(top)
    assert [one["pid"] for one in client.list_sessions()] == [os.getpid()]


def test_an_object_is_invalidated(served: Server, connect: Callable[..., Client], tty: Callable[..., Tty]) -> None:
    """The one that is selected, after a question, and no other; a second time the whole endpoint."""
    client = connect()
    for key in range(3):
        client.call("table", key)
    top = tty("--sort", "name")
    top.until("table(key=2)")
    top.press("\x1b[Bi")
    top.until("invalidate table(key=1)?", "y yes  e all 3 of table  Esc no")
    assert len(client.list_objects()) == 3
    top.press("y")
    top.until("table(key=1) dropped from the cache", "objects 2 by name")
    assert sorted(item["cache_key"] for item in client.list_objects()) == ["table(key=0)", "table(key=2)"]

    top.press("i")
    top.until("e all 2 of table")
    top.press("e")
    top.until("2 cached results of table dropped", "objects 0")
    assert client.list_objects() == []
    quit_from(top)


def test_forty_columns_and_another_size(served: Server, connect: Callable[..., Client], tty: Callable[..., Tty]) -> None:
    """A narrow terminal has fewer columns; when it is made wider they come at once."""
    with connect().call("load", 8):
        top = tty("-d", "600", columns=40, lines=24)  # it is not by looking again that it notices
        top.until("load(mib=8)", "8.0 MiB")
        assert "endpoint" not in top.text
        top.resize(140, 30)
        top.until("held by", "endpoint", f"{os.getpid()} python")
        top.resize(1, 1)
        top.resize(80, 24)
        top.until("load(mib=8)", "q Quit")
        quit_from(top)


def test_waiting_for_a_server(
    provider: Provider, base_path: str, serve: Callable[..., Server], tty: Callable[..., Tty]
) -> None:
    """Without one it says what starts one, and shows the first that comes; when that goes it waits for the next."""
    provider.share("ones")(lambda: torch.ones(1))
    top = tty(columns=200)
    assert "shared-rpc serve app.py" in top.until("no server answers in", "start one with").replace("\n", " ")
    first = serve()
    top.until("objects 0", "s-cpu.sock")

    first.stop()
    top.until("lost the server")
    elsewhere = Provider(f"{base_path}-next", device="cpu")
    elsewhere.share("twos")(lambda: torch.ones(2))
    with Server(elsewhere) as second, Client(socket_path=second.socket_path) as client:
        top.until_gone("lost the server")
        client.call("twos")
        top.until("twos()", "s-next-cpu.sock")
        quit_from(top)


def test_forty_columns_and_no_server(base_path: str, tty: Callable[..., Tty]) -> None:
    """The reason and the command are shown whole, on as many lines as they need."""
    top = tty(columns=40, lines=24)
    screen = " ".join(top.until("no server answers in", "start one with", "q Quit").split())
    assert "'shared-rpc serve app.py'" in screen and "--base-path or --socket" in screen
    quit_from(top)


def test_several_servers(served: Server, base_path: str, tty: Callable[..., Tty]) -> None:
    """Which one is meant has to be said."""
    with Server(Provider(f"{base_path}-another", device="cpu")) as another:
        top = tty(columns=200)
        top.until("several servers answer; choose one with --socket", another.socket_path)
        quit_from(top)
        chosen = tty("--socket", another.socket_path, columns=200)
        chosen.until("objects 0", another.socket_path)
        quit_from(chosen)


def test_a_server_that_does_not_answer(base_path: str, children: list[Child], tty: Callable[..., Tty]) -> None:
    """Keys are answered all the same."""
    code = """
        from shared_rpc import Provider, Server
        with Server(Provider(device="cpu")) as server:
            print(server.socket_path, flush=True)
            input()
    """
    child = Child("-c", textwrap.dedent(code))
    children.append(child)
    path = child.expect(".sock")
    view = f"""
        import sys
        from shared_rpc.cli import discovery
        from shared_rpc.cli.__main__ import main

        discovery._PATIENCE = 0.5
        sys.argv[1:] = ["top", "-d", "0.1", "--socket", {path!r}]
        main()
    """
    top = tty(command=("-c", textwrap.dedent(view)), columns=100)
    top.until("objects 0")
    sigstop(child.pid)
    top.until("lost the server")
    top.press("?")
    top.until("Focus Next")
    child.process.send_signal(signal.SIGCONT)
    top.until_gone("lost the server")
    sigstop(child.pid)
    quit_from(top)


# How it ends.


@pytest.mark.parametrize(
    ("end", "code"),
    [
        (lambda top: top.press("q"), 0),
        (lambda top: top.press("\x03"), 128 + signal.SIGINT),
        (lambda top: top.press("\x1c"), 128 + signal.SIGQUIT),
        (lambda top: top.kill(signal.SIGTERM), 128 + signal.SIGTERM),
        (lambda top: top.kill(signal.SIGHUP), 128 + signal.SIGHUP),
    ],
    ids=["q", "Ctrl-C", "Ctrl-Backslash", "SIGTERM", "SIGHUP"],
)
def test_the_terminal_is_left_as_it_was(base_path: str, tty: Callable[..., Tty], end: Callable[[Tty], None], code: int) -> None:
    """Its settings, its screen and its cursor; nothing is printed."""
    top = tty()
    top.until("no server answers")
    assert ALTERNATE in top.written and top.attributes != top.before
    end(top)
    assert top.end() == code
    assert top.restored
    assert b"Traceback" not in top.written


def test_it_says_goodbye(served: Server, tty: Callable[..., Tty]) -> None:
    """To the server it is a client that has closed, and none that crashed."""
    events: list[happenings.Event] = []
    happenings.add_hook(events.append)
    try:
        top = tty()
        top.until("objects 0")
        quit_from(top)

        def of(kind: type[Any]) -> list[Any]:
            return [event for event in events if isinstance(event, kind) and event.pid == top.process.pid]

        eventually(lambda: len(of(happenings.SessionClosed)) == len(of(happenings.SessionOpened)))
        assert {event.clean for event in of(happenings.SessionClosed)} == {True}
    finally:
        happenings.remove_hook(events.append)


@pytest.mark.parametrize("where", ["app.totals", "watching.ServerWatcher.poll"])
def test_a_defect_leaves_the_terminal_as_it_was(served: Server, tty: Callable[..., Tty], where: str) -> None:
    """It ends the view, whichever thread it is in: a screen that stands still would be a lie. It is told where it stays."""
    code = f"""
        import sys
        from shared_rpc.cli.__main__ import main
        from shared_rpc.cli.top import app, watching

        def broken(*_):
            raise ZeroDivisionError("a defect")

        {where}, sys.argv[1:] = broken, ["top"]
        main()
    """
    top = tty(command=("-c", textwrap.dedent(code)))
    assert top.end() == 1
    assert top.restored
    assert "ZeroDivisionError: a defect" in plain(top.written[top.written.rfind(NORMAL) :])


def test_stopping_and_going_on(served: Server, tty: Callable[..., Tty]) -> None:
    """Ctrl-Z gives the shell its terminal as it was; in the foreground again the view is there again."""
    shell = tty(command=("-c", "import os; os.execvp('bash', ['bash', '--norc', '--noediting', '-i'])"))
    shell.press(f"{sys.executable} -m shared_rpc.cli top\n")
    shell.until("objects 0")
    viewing = shell.attributes
    shell.press("\x1a")
    eventually(lambda: b"Stopped" in shell.written and shell.in_foreground)
    assert shell.restored and shell.attributes != viewing
    stopped = len(shell.written)
    shell.press("fg\n")
    eventually(lambda: ALTERNATE in shell.written[stopped:] and b"objects 0" in shell.written[stopped:])
    shell.press("q")
    eventually(lambda: NORMAL in shell.written[stopped:] and shell.restored and shell.in_foreground)
    shell.press("exit\n")
    assert shell.end() == 0
    assert shell.restored


# A broker.


def test_workers(broker_app: BrokerApp, tty: Callable[..., Tty]) -> None:
    """Their state and device; one that crashed is followed by one that tells of it."""
    broker_app.start("--worker-device", "cpu")
    client = broker_app.connect()
    top = tty(columns=100)
    top.until("worker", "restarts")
    (pid,) = worker_pids(client)
    assert row(top, f"{pid} ").split()[:5] == [str(pid), "ready", "0", "0", "cpu"]
    os.kill(pid, signal.SIGKILL)
    top.until_gone(f"{pid} ")
    new = another_worker(client, pid)
    eventually(lambda: row(top, f"{new} ").split()[:4] == [str(new), "ready", "0", "1"])
    quit_from(top)


# Without a terminal.


def test_one_frame(served: Server, connect: Callable[..., Client]) -> None:
    """With --once, and where no terminal is: all rows, without what a terminal needs, however long the lines are."""
    with connect().call("load", 8):
        for options in (["--once"], []):
            ran = cli("top", "-d", "0.05", *options)
            assert (ran.code, ran.errors) == (0, "")
            assert "\x1b" not in ran.output
            (line,) = (line for line in ran.output.splitlines() if line.startswith("load(mib=8)"))
            assert "8.0 MiB" in line and f"{os.getpid()} python" in line
            assert "0.0 calls/s" in ran.output


def test_one_frame_on_a_terminal(served: Server, connect: Callable[..., Client], tty: Callable[..., Tty]) -> None:
    """It is printed where the cursor is, as wide as the terminal, and stays."""
    connect().call("table", 1)
    top = tty("--once", columns=60)
    assert top.end() == 0
    assert ALTERNATE not in top.written
    assert any(line.startswith("table(key=1)") for line in top.lines)


def test_one_frame_without_a_server(base_path: str) -> None:
    """That is an error, with the command that starts one."""
    assert "start one with 'shared-rpc serve app.py'" in cli("top", "--once").complaint
    assert "s-other.sock" in cli("top", "--once", "--socket", f"{base_path}-other.sock").complaint


def test_every_order_can_be_chosen() -> None:
    """The option's values are the orders of the table."""
    assert get_args(Order) == tuple(ORDERS)


def test_one_frame_loads_no_torch(served: Server) -> None:
    """As all commands that only ask it starts fast; no server, no event loop and no Textual either."""
    ran = Ran("-X", "importtime", *MODULE, "top", "--once", "-d", "0.05")
    assert ran.code == 0
    loaded = {line.rpartition("|")[2].strip() for line in ran.errors.splitlines()}
    assert "shared_rpc.cli.top.tables" in loaded
    assert not {"torch", "numpy", "shared_rpc.server.server", "shared_rpc.codec", "asyncio", "textual"} & loaded


def test_a_terminal_of_letters(served: Server, connect: Callable[..., Client]) -> None:
    """What it cannot show is shown in another way, and nothing is a traceback."""
    connect().call("table", 1)
    ran = cli("top", "--once", "-d", "0.05", environ={"PYTHONIOENCODING": "ascii"})
    assert (ran.code, ran.errors) == (0, "")
    assert "# objects" in ran.output and "█" not in ran.output


def test_without_textual(served: Server, tty: Callable[..., Tty]) -> None:
    """The error says how to install it; what needs no live view is there all the same."""
    code = """
        import sys
        sys.modules["textual"] = None
        from shared_rpc.cli.__main__ import main
        sys.argv[1:] = ["top", "-d", "0.05", *sys.argv[1:]]
        main()
    """
    top = tty(command=("-c", textwrap.dedent(code)))
    assert top.end() == 1
    assert "the live view needs the package textual: pip install 'shared-rpc[top]'" in " ".join(top.text.split())
    assert ALTERNATE not in top.written
    once = tty(command=("-c", textwrap.dedent(code), "--once"))
    assert once.end() == 0
    assert "objects" in once.text


@pytest.mark.gpu
def test_the_memory_of_a_gpu(base_path: str) -> None:
    """What results and buffers take of it, and what is free; the server's host memory is told of too."""
    provider = Provider(base_path, device="cuda:0")

    @provider.share(managed=True)
    def weights() -> torch.Tensor:
        return torch.zeros(64 * MIB, dtype=torch.uint8, device="cuda:0")

    with Server(provider) as server, Client(socket_path=server.socket_path, timeout=30.0) as client:
        with client.call("weights"), client.create_buffer(32 * MIB, ttl=600):
            ran = cli("top", "--once", "-d", "0.5")
        (gpu,) = (found["id"] for found in client.list_devices() if found["id"] == provider.device_id)
    assert (ran.code, ran.errors) == (0, "")
    rows = [" ".join(line.split()) for line in ran.output.splitlines()]
    (memory,) = (line for line in rows if line.startswith(f"{gpu[:12]} ") and "none" in line)
    assert " 64.0 MiB 32.0 MiB none " in memory and memory.count("GiB") == 2
    assert any(line.startswith("weights() 64.0 MiB 1 ") and gpu[:12] in line for line in rows)
    assert any(line.startswith("cpu ") for line in rows)
