"""Memory that is closed by another thread, for threads that must not wait; mappings across forks, and the cost of a model's."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from shared_rpc.execution import device_memory
from shared_rpc.memory.backends.host import HOST
from shared_rpc.memory.closing import CLOSER, LARGE
from shared_rpc.server.state.descriptors import Descriptors
from tests.kit.closings import late_closings
from tests.kit.processes import ROOT, python
from tests.kit.world import World


@pytest.fixture
def closes(monkeypatch: pytest.MonkeyPatch) -> dict[int, str]:
    """The threads that close descriptors, by these."""
    close, seen = os.close, {}

    def noted(number: int) -> None:
        seen[number] = threading.current_thread().name
        close(number)

    monkeypatch.setattr(os, "close", noted)
    return seen


@pytest.fixture
def spared() -> Iterator[None]:
    """Mark this thread as one that must not wait."""
    with CLOSER.spare_this_thread():
        yield


def close(nbytes: int) -> int:
    """Make memory, and close its descriptor; return the descriptor's number."""
    with HOST.create(nbytes) as segment:
        return segment.fileno()


def test_the_last_owner_closes_the_memory(spared: None, closes: dict[int, str]) -> None:
    """In another thread: memory still held by a reply is closed after that is sent."""
    segment = HOST.create(LARGE)
    reply, number = segment.duplicate(), segment.fileno()
    segment.close()
    assert len(CLOSER) == 0
    with late_closings():
        reply.close()
        assert (len(CLOSER), CLOSER.left(), number in closes) == (1, {"cpu": LARGE}, False)
    assert closes[number] == "shared-rpc-closer"


def test_other_memory_is_closed_at_once(closes: dict[int, str]) -> None:
    """By a thread that may block, and if it is small: waking another thread would take longer."""
    numbers = [close(LARGE)]
    with CLOSER.spare_this_thread():
        numbers.append(close(LARGE - 4096))
    for number in numbers:
        assert closes[number] == threading.current_thread().name


#: Forks while two pieces of memory are to be closed, of which one has a number that is in use again; prints what the child has.
FORKING = """
import os
from shared_rpc.memory.backends.host import HOST
from shared_rpc.memory.closing import CLOSER, LARGE
from tests.kit.closings import late_closings
from tests.kit.processes import links_of

with CLOSER.spare_this_thread(), late_closings():
    with HOST.create(LARGE) as one, HOST.create(LARGE):
        number = one.fileno()
    os.dup2(2, number)
    if os.fork() == 0:
        memory = any("memfd:shared-rpc-" in link for link in links_of())
        HOST.create(LARGE).close()
        os.write(1, str([memory, os.path.exists(f"/proc/self/fd/{number}"), len(CLOSER)]).encode())
        os._exit(0)
    os.wait()
"""


def test_a_forked_child_drops_pending_memory() -> None:
    """It would keep it until its end. It closes no number that is in use again, and its own memory itself."""
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", FORKING]
    child = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    assert child.stdout == "[False, True, 0]"


@pytest.mark.parametrize(
    ("left", "free", "lacks"), [({"cpu": 5}, 5, False), ({"cpu": 5}, 4, True), ({"cpu": 1, "GPU-1": 1}, 1 << 40, True)]
)
def test_pending_frees_are_detected(left: dict[str, int], free: int, lacks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU's memory is allocated as a whole, the host's page by page."""

    class Closer:
        def __len__(self) -> int:
            return len(left)

        def left(self) -> dict[str, int]:
            return left

    monkeypatch.setattr(device_memory, "CLOSER", Closer())
    monkeypatch.setattr(device_memory, "free_bytes", lambda device: free)
    assert device_memory.frees_are_pending() is lacks


def test_descriptors_being_closed_count_as_free() -> None:
    """Otherwise each new client would evict objects until the first ones are closed."""
    closing = [0]
    descriptors = Descriptors(lambda: 1600, closing=lambda: closing[0])
    assert not descriptors.are_scarce(1499)
    assert descriptors.are_scarce(1500)
    closing[0] = 64
    assert not descriptors.are_scarce(1500)
    assert descriptors.are_scarce(1564)


# Mappings across forks, without a GPU; the cost of a model's mappings.


def test_fork_keeps_mappings_with_their_descriptors(world: World) -> None:
    """A forked child reads and writes its parent's mappings, publishes nothing of them, and unmaps and closes for itself."""
    child = world.process(
        """
        import os
        from shared_rpc.memory.backends.host import HOST
        from shared_rpc.memory.mapping import MAPPINGS
        from tests.kit.processes import links_of

        class User: pass

        def state():
            maps = open("/proc/self/maps").read()
            return len(MAPPINGS), maps.count("memfd:shared-rpc"), sum("memfd:shared-rpc" in link for link in links_of())

        users = [User(), User()]
        with MAPPINGS.create(1, "cpu") as mapping:
            MAPPINGS.keep_for((mapping, user) for user in users)
        view = HOST.view(mapping.address, 5)
        view[:] = b"first"
        if os.fork() == 0:
            print("child reads:", bytes(view), mapping.descriptor)
            view[:] = b"other"
            users.clear()
            MAPPINGS.drain()
            print("child ends:", *state())
            os._exit(0)
        os.wait()
        print("parent reads:", bytes(view), *state())
        """
    )
    assert child.expect("child reads:") == "child reads: b'first' None"
    assert child.expect("child ends:") == "child ends: 0 0 0"
    assert child.expect("parent reads:") == "parent reads: b'other' 1 1 1"


@pytest.mark.gpu
def test_fork_leaves_gpu_memory_alone(world: World) -> None:
    """CUDA does not work in a forked child: it drops inherited mappings without a call, and its parent continues."""
    child = world.process(
        """
        import os, torch
        from shared_rpc.codec.results import decode_result, publish
        from shared_rpc.memory.mapping import MAPPINGS

        record = publish(torch.arange(4, device="cuda"), "cuda", "read_write", "e")
        value = decode_result(record.skeleton, record.table, record.segments)
        record.close()
        if os.fork() == 0:
            del value
            MAPPINGS.drain()
            print("child drained")
            os._exit(0)
        os.wait()
        print("parent reads:", value.tolist())
        """
    )
    child.expect("child drained")
    assert child.expect("parent reads:") == "parent reads: [0, 1, 2, 3]"


def test_a_gigabyte_is_built_without_memory() -> None:
    """A model of 1 GiB is built without growth of the process at any time."""
    child = python(
        """
        import resource, torch
        from shared_rpc import materialize
        from torch import nn

        def build(size):
            with materialize({"weight": torch.empty(size, size), "bias": torch.empty(size)}):
                model = nn.Linear(size, size)
                nn.init.normal_(model.weight)
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

        before = build(3)
        print("grown", (build(16384) - before) >> 10)
        """,
        fresh=True,
    )
    assert int(child.expect("grown").split()[1]) < 64
    assert child.close() == (0, "")
