"""The end of a fork, without destroying the objects that it shares with its zygote.

The interpreter finalises a process when all exit callbacks have run: it clears every module, and so touches every object in
memory. In a fork, this copies each of them, which takes 0.1 s and 150 MB. Here, a fork clears its main module only, and ends.
The actions of tests at the end of a process are unaffected; new processes end as usual.
"""

from __future__ import annotations

import atexit
import gc
import os
import sys
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

#: The exit code of this process, once its program has ended with one.
_code: int | None = None


def register() -> None:
    """Install this end of forks. Before all imports: the callback that is registered first is called last."""
    atexit.register(_leave)


def spare_what_there_is() -> None:
    """Keep the finalizers of imported objects from running at the end of each fork.

    torch's remove 134 libraries of operators from its dispatcher, and touch 27 MB.
    """
    # Private: 3.4 to 3.14 have it.
    for info in weakref.finalize._registry.values():
        info.atexit = False


@contextmanager
def noted() -> Iterator[None]:
    """Record the exit code with which the interpreter is about to end this process."""
    global _code
    try:
        yield
    except SystemExit as end:
        # As in sys.exit(); the interpreter prints all but numbers.
        _code = 0 if end.code is None else end.code if isinstance(end.code, int) else 1
        raise
    except KeyboardInterrupt:  # it ends by the signal
        raise
    except BaseException:
        _code = 1
        raise


def _leave() -> None:
    if _code is None:
        return
    if threading.active_count() == 1:  # the interpreter has stopped the others by then
        main = vars(sys.modules["__main__"])
        for name in sorted(main, key=lambda name: not name.startswith("_")):
            if name != "__builtins__":
                main[name] = None
    gc.collect()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except (OSError, ValueError, AttributeError):
        return  # the interpreter has an exit code for that
    os._exit(_code & 0xFF)
