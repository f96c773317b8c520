"""``shared-rpc run`` on a terminal: a script reads keys, is interrupted and suspended."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.kit.processes import eventually
from tests.kit.scripts import RUN, Place
from tests.kit.terminals import Tty

pytestmark = pytest.mark.timeout(180)

#: Seconds for the waits of a first script.
LONG = 60.0


@pytest.fixture
def terminal(place: Place) -> Iterator[Callable[..., Tty]]:
    """``terminal(*words)`` runs python at a new terminal."""
    with ExitStack() as stack:

        def start(*words: object) -> Tty:
            tty = Tty(*map(str, words), environ=place.environ, cwd=place.folder)
            stack.callback(tty.close)
            return tty

        yield start


@pytest.fixture
def shell(place: Place, terminal: Callable[..., Tty]) -> Tty:
    """A shell with job control; ``go`` is ``shared-rpc run``."""
    place.write(f"go() {{ {sys.executable} {' '.join(RUN)} \"$@\"; }}\nPS1='$ '\nset +o history\n", "rc")
    tty = terminal("-c", "import os; os.execvp('bash', ['bash', '--rcfile', 'rc', '-i'])")
    tty.until("$")
    return tty


def test_ctrl_c_arrives_once(place: Place, terminal: Callable[..., Tty]) -> None:
    """At the script, and at its children as at all processes of a job."""
    script = place.write("""
        import os, signal, sys, time
        count = 0
        def got(*_):
            global count
            count += 1
        signal.signal(signal.SIGINT, got)
        reading, writing = os.pipe()
        if os.fork() == 0:
            signal.signal(signal.SIGINT, lambda *_: os._exit(7))
            os.write(writing, b".")
            while True: time.sleep(0.01)  # a signal just before a wait does not end it, see WAITS
        os.read(reading, 1)
        print("ready")
        code = os.waitstatus_to_exitcode(os.wait()[1])
        while not count: pass
        input("more? ")
        print("count", count, "child", code)
    """)
    tty = terminal(*RUN, script)
    tty.until("ready", seconds=LONG)
    tty.press("\x03")
    tty.until("more?")
    tty.press("\n")
    tty.until("count 1 child 7")
    assert tty.end() == 0


def test_suspending_and_resuming_a_script(place: Place, shell: Tty) -> None:
    """Ctrl-Z stops it and returns to the shell, ``fg`` sends it SIGCONT, and ``bg`` leaves Ctrl-C to the shell."""
    place.write("""
        import os, signal
        # Not print(), which the signal may have interrupted.
        signal.signal(signal.SIGCONT, lambda *_: os.write(1, b"continued\\n"))
        print("pid", os.getpid(), flush=True)
        while (line := input()) != "wait": print("read", line, flush=True)
        print("waits", flush=True)
        while True: signal.pause()
    """)
    shell.press("go script.py\n")
    shell.until("pid ", seconds=LONG)
    pid = int(next(line for line in shell.lines if line.startswith("pid ")).split()[1])

    def stop() -> None:
        shell.press("\x1a")
        shell.until("Stopped")
        eventually(lambda: Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T")
        shell.press("clear; jobs -s\n")

    stop()
    shell.press("fg\n")
    shell.until("continued")
    shell.press("one\n")
    shell.until("read one")
    assert shell.text.count("continued") == 1
    shell.press("wait\n")
    shell.until("waits")
    stop()
    shell.until_gone("waits")
    shell.press("bg\n")
    shell.until("continued")
    shell.press("\x03")
    shell.until("^C")
    shell.press("kill %1; wait %1; echo code $?\n")
    shell.until("code 143")
