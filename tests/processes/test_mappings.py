"""Mappings across forks, without a GPU, and under pending kernels when they are dropped; the cost of a model's mappings."""

from __future__ import annotations

import pytest

from tests.kit.processes import python
from tests.kit.world import World


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
