"""The registry of forks: what a child does first, in which order, and whatever fails on the way."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.kit.processes import ROOT

PRELUDE = """
import gc, os, sys, threading
from shared_rpc.forks import after_fork, around_fork, fork_safe_lock

def say(*words):
    # In one piece: two processes may speak at once.
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())

def fork(in_child=lambda: None):
    if os.fork() == 0:
        in_child()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.wait()[1]) == 0
"""


def run(program: str) -> subprocess.CompletedProcess[str]:
    """Run a program that forks, to its end."""
    return subprocess.run(
        [sys.executable, "-c", PRELUDE + program], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )


def test_callbacks_run_in_the_order_of_their_registration() -> None:
    """Functions and methods alike, once in each child, and in a child's child too."""
    ran = run("""
class Thing:
    def method(self): say("method")

@after_fork
def first(): say("first")
thing = Thing()
after_fork(thing.method)
@after_fork
def last(): say("last")
fork(lambda: fork())
""")
    assert (ran.stdout.split(), ran.stderr) == (["first", "method", "last"] * 2, "")


def test_a_callback_that_raises_does_not_keep_the_others_from_running() -> None:
    """Every failure is reported, as CPython reports what nobody can catch, and the child goes on."""
    ran = run("""
@after_fork
def one(): raise ValueError("of one")
@after_fork
def two(): say("two")
@after_fork
def three(): sys.exit("of three")
@after_fork
def four(): say("four")
fork(lambda: say("child"))
""")
    assert ran.stdout.split() == ["two", "four", "child"]
    assert "Exception ignored" in ran.stderr
    assert "ValueError: of one" in ran.stderr
    assert "SystemExit: of three" in ran.stderr


def test_a_method_is_called_while_its_object_lives() -> None:
    """The registry does not keep the object; one that an earlier callback drops is called once more."""
    ran = run("""
class Thing:
    def __init__(self, name):
        self.name = name
        after_fork(self.method)
    def method(self): say(self.name)

gone = Thing("gone")
del gone
@after_fork
def drop(): things.clear()
things = [Thing("dropped")]
fork()
""")
    assert ran.stdout.split() == ["dropped"]


def test_a_lock_that_another_thread_held_is_free() -> None:
    """In every child, and before the first callback."""
    ran = run("""
@after_fork
def use():
    with lock: say("callback")
lock = fork_safe_lock()
held, release = threading.Event(), threading.Event()
def hold():
    with lock:
        held.set()
        release.wait()
thread = threading.Thread(target=hold)
thread.start()
held.wait()
fork(lambda: say(lock.acquire(timeout=1)))
say("still held:", not lock.acquire(blocking=False))
release.set()
thread.join()
""")
    assert ran.stdout.splitlines() == ["callback", "True", "still held: True"]


def test_a_lock_that_the_forking_thread_holds_stays_its_own() -> None:
    """The child leaves the block as its parent does."""
    ran = run("""
lock = fork_safe_lock()
def taken_by_another():
    found = []
    thread = threading.Thread(target=lambda: found.append(lock.acquire(blocking=False)))
    thread.start()
    thread.join()
    return not found[0]
with lock:
    pid = os.fork()
    inside = taken_by_another()
if pid == 0:
    say(inside, taken_by_another())
    os._exit(0)
assert os.waitstatus_to_exitcode(os.wait()[1]) == 0
""")
    assert ran.stdout.split() == ["True", "False"]


@pytest.mark.parametrize(
    ("module", "use"),
    [
        ("memory.backends.choice", "module.backend_for('cpu')"),
        ("execution.reporter", "module.Reporter(None, None, _scheduled=True).put(None)"),
    ],
)
def test_locks_of_modules_do_not_stop_a_child(module: str, use: str) -> None:
    """Another thread holds the lock during the fork."""
    ran = run(f"""
import signal
import shared_rpc.{module} as module
held, release = threading.Event(), threading.Event()
def hold():
    with module._lock:
        held.set()
        release.wait()
thread = threading.Thread(target=hold)
thread.start()
held.wait()
def in_child():
    signal.alarm(30)
    {use}
    say("done")
fork(in_child)
release.set()
thread.join()
""")
    assert ran.stdout.split() == ["done"]


def test_what_is_around_a_fork() -> None:
    """It begins in the thread that forks, before it does, and ends in both processes: in the child when all callbacks have run.

    What the second one begins it ends first.
    """
    ran = run("""
def around(name):
    @around_fork
    def begin():
        say("begins", name, threading.current_thread().name)
        forking = os.getpid()
        return lambda: say("ends", name, "in parent" if os.getpid() == forking else "in child")
around("outer")
around("inner")
@after_fork
def callback(): say("callback")
thread = threading.Thread(target=fork, name="T")
thread.start()
thread.join()
""")
    said = ran.stdout.splitlines()
    assert said[:2] == ["begins outer T", "begins inner T"]
    assert [line for line in said if "parent" in line] == ["ends inner in parent", "ends outer in parent"]
    assert [line for line in said[2:] if "parent" not in line] == ["callback", "ends inner in child", "ends outer in child"]


def test_a_callback_that_forks() -> None:
    """What is around its fork is not what is around the first one."""
    ran = run("""
numbers = iter("12")
@around_fork
def begin():
    number = next(numbers)
    return lambda: say(number, os.getpid() == first)
first = os.getpid()
@after_fork
def callback():
    if not forked:
        forked.append(True)
        fork()
forked = []
fork()
""")
    assert sorted(ran.stdout.splitlines()) == ["1 False", "1 True", "2 False", "2 False"]


def test_a_failure_around_a_fork_is_reported() -> None:
    """What else is around it begins and ends, and both processes go on."""
    ran = run("""
@around_fork
def one(): return lambda: 1 / 0
@around_fork
def two(): return lambda: say("two")
fork(lambda: say("child"))
say("parent")
""")
    assert sorted(ran.stdout.split()) == ["child", "parent", "two", "two"]
    assert ran.stderr.count("ZeroDivisionError") == 2


def test_the_end_of_a_process_reports_nothing() -> None:
    """Objects whose methods are registered, as a server's modules have, live until the interpreter takes its modules apart."""
    assert run("import shared_rpc.server.server").stderr == ""


def test_nothing_else_registers_with_the_interpreter() -> None:
    """Its order is that of the registry, and a module that registers itself is in no order."""
    users = {path.name for path in (ROOT / "shared_rpc").rglob("*.py") if "register_at_fork" in path.read_text()}
    assert users == {"forks.py"}
