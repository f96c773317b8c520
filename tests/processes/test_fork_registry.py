"""The registry of forks: callbacks in the child, their order, and locks."""

from __future__ import annotations

import subprocess
import sys

from tests.kit.processes import ROOT

PRELUDE = """
import os, threading
from shared_rpc.forks import after_fork, fork_safe_lock

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
    """In the child, and before its signals are unblocked."""
    ran = run("""
class Thing:
    def __init__(self, name):
        self.name = name
        after_fork(self.method)
    def method(self): say(self.name)

import signal
from shared_rpc.lifecycle import signals

def unblocked(): return signal.SIGHUP not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
signals._earlier[signal.SIGHUP] = signal.SIG_DFL
@after_fork
def first(): say("first", unblocked())
thing, gone = Thing("method"), Thing("gone")
del gone
fork(lambda: say("child", unblocked()))
say("parent", unblocked())
""")
    assert ran.stdout.splitlines() == ["first False", "method", "child True", "parent True"]
    assert ran.stderr == ""


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


def test_a_lock_of_the_forking_thread_stays_locked() -> None:
    """The child releases it as its parent does."""
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


def test_the_exit_of_a_process_reports_nothing() -> None:
    """Objects with registered methods live until the interpreter clears its modules."""
    assert run("import shared_rpc.server.server").stderr == ""


def test_nothing_else_registers_with_the_interpreter() -> None:
    """Other registrations would have no defined order."""
    users = {path.name for path in (ROOT / "shared_rpc").rglob("*.py") if "register_at_fork" in path.read_text()}
    assert users == {"forks.py", "signals.py"}
