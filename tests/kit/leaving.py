"""The end of a fork, without taking apart what it has in common with its zygote.

The interpreter takes a process apart when all exit callbacks have run: it clears every module, and so touches every object that
there is. In a fork each of them is copied for that, for 0.1 s and 150 MB. Here a fork takes its main module apart, and ends.
What tests do at the end of a process is with that as it is without; new processes end as they always do.
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
    """Have the end of forks be this one. Before all imports: the callback that is registered first is called last."""
    atexit.register(_leave)


def spare_what_there_is() -> None:
    """Have objects that imports have made keep their finalizers, which would run at the end of each fork.

    torch takes 134 libraries of operators out of its dispatcher with those, and touches 27 MB.
    """
    # Private: 3.4 to 3.14 have it.
    for info in weakref.finalize._registry.values():
        info.atexit = False


@contextmanager
def noted() -> Iterator[None]:
    """Note the exit code that the interpreter is about to end this process with."""
    global _code
    try:
        yield
    except SystemExit as end:
        # As sys.exit() has it; the interpreter prints what is no number.
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
