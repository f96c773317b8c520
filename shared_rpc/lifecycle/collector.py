"""Pauses of the cyclic garbage collector during the creation of thousands of live objects.

Rebuilding a module of 10,000 tensors, or importing modules in addition to torch, triggers repeated full collections, each over
all objects of torch: measured on the host, 34 µs a tensor with them and 9 µs without. ``python -m benchmarks rpc`` times the
import of this package.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

from shared_rpc.forks import after_fork, fork_safe_lock

#: Maximum number of frozen objects treated as none: some Pythons freeze a few of their own.
_FEW = 10_000

_lock = fork_safe_lock()
_users = 0
_was_enabled = False


@contextmanager
def paused() -> Iterator[None]:
    """Prevent automatic collections in this process while any thread is in such a block."""
    global _users, _was_enabled
    with _lock:
        if _users == 0:
            _was_enabled = gc.isenabled()
            gc.disable()
        _users += 1
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            if _users == 0 and _was_enabled:
                # Counting frozen objects walks over them: milliseconds if an application froze everything. A few frozen
                # objects of Python's own may be examined again.
                if gc.get_count()[0] > gc.get_threshold()[0] and gc.get_freeze_count() < _FEW:
                    # All objects count as old from here on; otherwise enabling would first walk over all new ones.
                    gc.freeze()
                    gc.unfreeze()
                gc.enable()


@after_fork
def _end_blocks() -> None:
    global _users  # the threads in such a block are the parent's
    if _users and _was_enabled:
        gc.enable()
    _users = 0
