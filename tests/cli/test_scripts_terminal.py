"""``shared-rpc run`` on a terminal: what people type, and what they see."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.kit.processes import eventually
from tests.kit.scripts import RUN, Place
from tests.kit.terminals import Tty

pytestmark = pytest.mark.timeout(180)

#: Seconds for what a first script may wait for.
LONG = 60.0


@pytest.fixture
def terminal(place: Place) -> Iterator[Callable[..., Tty]]:
    """``terminal(*words)`` runs python at a terminal of its own."""
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


def test_a_script_asks_and_is_answered(place: Place, terminal: Callable[..., Tty]) -> None:
    """``input()`` has a prompt, and what is typed is edited and shown."""
    script = place.write("name = input('who? '); print(f'hello {name}'); print(repr(input()))")
    tty = terminal(*RUN, script)
    tty.until("who?", seconds=LONG)
    tty.press("you\x7f\x7f\x7fme\n")
    tty.until("hello me")
    tty.press("\x04")
    tty.until("EOFError")
    assert tty.end() == 1


def test_a_script_knows_its_terminal(place: Place, terminal: Callable[..., Tty]) -> None:
    """It is one, has a size, and that changes when the window does."""
    script = place.write("""
        import os, signal, sys
        def tell(*_):
            print("size", *os.get_terminal_size(), *(stream.isatty() for stream in (sys.stdin, sys.stdout, sys.stderr)))
        signal.signal(signal.SIGWINCH, tell)
        tell()
        print(os.ttyname(0), sys.stdout.line_buffering)
        input()
    """)
    tty = terminal(*RUN, script)
    tty.until("size 100 30 True True True", f"{tty.device} True", seconds=LONG)
    tty.resize(71, 22)
    tty.until("size 71 22 True True True")
    tty.press("\n")
    assert tty.end() == 0


def test_a_secret_is_not_shown(place: Place, terminal: Callable[..., Tty]) -> None:
    """``getpass`` cannot open /dev/tty, and uses standard input, which is the same terminal."""
    tty = terminal(*RUN, place.write("import getpass; print(len(getpass.getpass('secret: ')))"))
    tty.until("secret:", seconds=LONG)
    tty.press("hidden\n")
    tty.until("6")
    assert "hidden" not in tty.text
    assert tty.end() == 0
    assert tty.attributes == tty.before


def test_a_debugger(place: Place, terminal: Callable[..., Tty]) -> None:
    """``breakpoint()`` stops there, and has a history of lines."""
    script = place.write("x = 41\nbreakpoint()\nx += 1\nprint('x is', x)\n")
    tty = terminal(*RUN, script)
    tty.until("(Pdb)", seconds=LONG)
    tty.press("p x + 100\n")
    tty.until("141")
    tty.press("w\n")
    tty.until("script.py")
    tty.press("x = 1\n")
    tty.press("\x1b[A\x1b[A\x1b[A\n")  # p x + 100 again, from the history of readline
    tty.until("\n101")
    tty.press("c\n")
    tty.until("x is 2")
    assert tty.end() == 0


def test_single_keys(place: Place, terminal: Callable[..., Tty]) -> None:
    """A script sets the terminal as full-screen programs do, and it is theirs: Ctrl-C is a key."""
    script = place.write("""
        import os, sys, termios, tty
        before = termios.tcgetattr(0)
        tty.setraw(0)
        print("raw", end="\\r\\n", flush=True)
        keys = b""
        while not keys.endswith(b"q"):
            keys += os.read(0, 1)
        termios.tcsetattr(0, termios.TCSADRAIN, before)
        print(keys)
    """)
    tty = terminal(*RUN, script)
    tty.until("raw", seconds=LONG)
    tty.press("a\x03\x1aq")
    tty.until(r"b'a\x03\x1aq'")
    assert tty.end() == 0
    assert tty.attributes == tty.before


def test_a_full_screen(place: Place, terminal: Callable[..., Tty]) -> None:
    """Curses works, and leaves the screen as it was."""
    script = place.write("""
        import curses
        def main(screen):
            screen.addstr(3, 5, f"full {curses.LINES} {curses.COLS}")
            screen.refresh()
            return screen.getkey()
        print("pressed", curses.wrapper(main))
    """)
    tty = terminal(*RUN, script)
    tty.until("full 30 100", seconds=LONG)
    tty.press("k")
    tty.until("pressed k")
    assert tty.end() == 0


def test_ctrl_c_arrives_once(place: Place, terminal: Callable[..., Tty]) -> None:
    """And at the script's children too, as at all processes of a job."""
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


def test_ctrl_c_ends_a_script(place: Place, shell: Tty) -> None:
    """With its traceback, and the shell knows why: a loop of it ends too."""
    place.write("import time\nprint('ready')\nwhile True: time.sleep(0.01)\n")
    shell.press("for i in 1 2; do go script.py; done; echo no; \n")
    shell.until("ready", seconds=LONG)
    shell.press("\x03")
    shell.until("KeyboardInterrupt")
    shell.press("echo code $?\n")
    shell.until("code 130")
    assert shell.text.count("ready") == 1


def test_a_script_is_suspended_and_continued(place: Place, shell: Tty) -> None:
    """Ctrl-Z gives the shell back, and ``fg`` the script; it is told of both."""
    place.write("""
        import os, signal
        # Not print(), which the signal may have interrupted.
        signal.signal(signal.SIGCONT, lambda *_: os.write(1, b"continued\\n"))
        print("pid", os.getpid(), flush=True)
        while True: print("read", input(), flush=True)
    """)
    shell.press("go script.py\n")
    shell.until("pid ", seconds=LONG)
    pid = int(next(line for line in shell.lines if line.startswith("pid ")).split()[1])
    for turn in ("one", "two"):
        shell.press("\x1a")
        shell.until("Stopped")
        eventually(lambda: state_of(pid) == "T")
        shell.press("clear; jobs -s\n")
        shell.until_gone(f"read {turn}")
        shell.press("fg\n")
        shell.until("continued")
        shell.press(f"{turn}\n")
        shell.until(f"read {turn}")
        assert shell.text.count("continued") == 1
    shell.press("\x04")
    shell.until("EOFError")


def state_of(pid: int) -> str:
    """A letter, see proc_pid_stat(5)."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_a_script_goes_on_in_the_background(place: Place, shell: Tty) -> None:
    """``bg`` continues it; the terminal's Ctrl-C is not its any more, and ``kill`` is."""
    place.write("""
        import os, time
        print("pid", os.getpid())
        while not os.path.exists("go on"): time.sleep(0.01)
        print("went on")
        time.sleep(600)
    """)
    shell.press("go script.py\n")
    shell.until("pid ", seconds=LONG)
    shell.press("\x1a")
    shell.until("Stopped")
    shell.press("bg\n")
    (place.folder / "go on").touch()
    shell.until("went on")
    shell.press("\x03")
    shell.until("^C")
    shell.press("kill %1; wait %1; echo code $?\n")
    shell.until("code 143")


def test_one_that_begins_in_the_background_is_pythons(place: Place, shell: Tty) -> None:
    """The kernel stops who reads the terminal there, and would not stop a process of another session."""
    place.write("print('read', input())")
    shell.press("go script.py &\n")
    shell.until("runs without a zygote", "belongs to another job", seconds=LONG)

    def is_stopped() -> bool:
        shell.press("\n")  # the shell tells of its jobs before each prompt
        return "Stopped" in shell.text

    eventually(is_stopped, LONG)
    shell.press("fg\n")
    shell.press("this\n")
    shell.until("read this")


def test_without_the_terminal_it_begins_in_the_background(place: Place, shell: Tty) -> None:
    """It has nothing to read there."""
    place.write("import sys; print('is', 'torch' in sys.modules)")
    shell.press("go script.py < /dev/null & wait\n")
    shell.until("is True", seconds=LONG)


def test_the_end_of_the_terminal_is_the_scripts(place: Place, terminal: Callable[..., Tty]) -> None:
    """Its window is closed: SIGHUP, which it may handle."""
    told = place.folder / "told"
    script = place.write(f"""
        import os, signal, time
        def hung_up(*_):
            open({str(told)!r}, "w").write("hung up")
            os._exit(0)
        signal.signal(signal.SIGHUP, hung_up)
        print("pid", os.getpid())
        while True: time.sleep(0.01)
    """)
    tty = terminal(*RUN, script)
    tty.until("pid ", seconds=LONG)
    tty.hang_up()
    eventually(lambda: told.exists() and told.read_text() == "hung up")
    assert tty.process.wait(20) == 0


def test_ctrl_c_while_the_zygote_starts(place: Place, terminal: Callable[..., Tty], tmp_path: Path) -> None:
    """The command ends at once; the next script has that zygote, or starts one."""
    other = Place(place.folder, tmp_path)
    tmp_path.chmod(0o700)
    script = place.write("print('ran')")
    tty = Tty(*RUN, str(script), environ=other.environ, cwd=place.folder)
    try:
        eventually(lambda: bool(list(tmp_path.glob("*.log"))), LONG)
        tty.press("\x03")
        assert tty.process.wait(20) == -signal.SIGINT
        assert "Traceback" not in tty.text
        assert other.run(script).output == "ran\n"
        assert other.zygotes()[0]["runs"] == 1
    finally:
        tty.close()
        other.close()


def test_a_progress_bar(place: Place, terminal: Callable[..., Tty]) -> None:
    """It is drawn as wide as the terminal."""
    script = place.write("""
        import tqdm
        for i in tqdm.tqdm(range(3), mininterval=0, desc="bar"): pass
    """)
    tty = terminal(*RUN, script)
    tty.until("bar: 100%", "3/3", seconds=LONG)
    assert tty.end() == 0
    assert max(map(len, tty.lines)) > 95


def test_where_the_terminal_is_not(place: Place, terminal: Callable[..., Tty]) -> None:
    """What cannot be as with python: the script has no controlling terminal, and another parent."""
    script = place.write("""
        import os
        try:
            os.open("/dev/tty", os.O_RDWR)
        except OSError as error:
            print(error.strerror)
        try:
            os.tcgetpgrp(0)
        except OSError as error:
            print(error.strerror)
        print(os.getsid(0) == os.getppid(), os.getpgrp() == os.getpid())
    """)
    tty = terminal(*RUN, script)
    tty.until("No such device or address", "Inappropriate ioctl", "True True", seconds=LONG)
    assert tty.end() == 0
