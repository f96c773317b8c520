"""Processes of the tests that begin as forks: they end as new ones do, though the interpreter takes only part of them apart."""

from __future__ import annotations

import os
import sys

import pytest

from tests.kit import forks
from tests.kit.deep import deep

#: How a program may end.
ENDS = {
    "quietly": "pass",
    "with a code": "import sys; print('x', end=''); sys.exit(7)",
    "with a large code": "import sys; sys.exit(259)",
    "with a negative code": "import sys; sys.exit(-1)",
    "with a text": "import sys; sys.exit('a text')",
    "with an error": "1 / 0",
    "with an interrupt": "raise KeyboardInterrupt",
    "by a signal": "import os; os.kill(os.getpid(), 15)",
    "with callbacks": "import atexit; atexit.register(print, 'one'); atexit.register(print, 'two'); 1 / 0",
    "with a thread that goes on": "import threading; threading.Timer(0.05, print, ['late']).start()",
    "with a thread that is left": "import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()",
    "with an object": "class A:\n    def __del__(self): print('gone')\na = A()\nb = [a]; b.append(b)",
    "with an object that fails": "class A:\n    def __del__(self): 1 / 0\na = A()",
    "with a line that is not flushed": "import sys; sys.stdout.write('no end'); sys.stderr.write('no end')",
    "without a place for what it wrote": "import os; print('x'); os.close(1)",
    "with a child that returns": "import os, sys\nif os.fork() == 0: sys.exit(9)\nprint(os.WEXITSTATUS(os.wait()[1]))",
}


@pytest.mark.parametrize("how", [*list(ENDS)[5:8], *deep(*ENDS)])
def test_a_fork_ends_as_a_new_process(how: str) -> None:
    """With the same code or signal and the same words."""
    command = [sys.executable, "-c", ENDS[how]]
    found = [forks.run(command, capture_output=True, text=True, timeout=50, fresh=fresh) for fresh in (True, False)]
    new, fork = [(ran.returncode, ran.stdout, ran.stderr.splitlines()[-1:]) for ran in found]
    assert fork == new


@pytest.mark.parametrize(("variable", "forked"), [("PYTHONBREAKPOINT", True), ("PYTHONHASHSEED", False)])
def test_only_what_is_read_at_the_start_needs_a_new_process(variable: str, forked: bool) -> None:
    """A driver of Ray, as tests of clusters are, sets the one that names the debugger."""
    code = "import sys; print('torch' in sys.modules)"
    ran = forks.run([sys.executable, "-c", code], env={**os.environ, variable: "7"}, capture_output=True, text=True, check=True)
    assert ran.stdout == f"{forked}\n"
