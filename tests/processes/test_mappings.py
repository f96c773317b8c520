"""Mappings across forks, without a GPU, and under pending kernels when they are dropped; the cost of a model's mappings."""

from __future__ import annotations

import pytest

from tests.kit.processes import Child, python


def test_fork_keeps_mappings_with_their_descriptors(children: list[Child]) -> None:
    """A forked child reads and writes its parent's mappings, publishes nothing of them, and unmaps and closes for itself."""
    child = python(
        """
        import os
        from shared_rpc.memory.backends.host import HOST
        from shared_rpc.memory.mapping import MAPPINGS
        from tests.kit.processes import links_of

        class User: pass

        def segments():
            return sum("memfd:shared-rpc" in link for link in links_of())

        users = [User(), User()]
        with MAPPINGS.create(1, "cpu") as mapping:
            MAPPINGS.keep_for((mapping, user) for user in users)
        HOST.view(mapping.address, 5)[:] = b"first"
        if os.fork() == 0:
            print("child reads:", bytes(HOST.view(mapping.address, 5)).decode(), "descriptors:", segments(), mapping.segment)
            HOST.view(mapping.address, 5)[:] = b"other"
            users.clear()
            MAPPINGS.drain()
            maps = open("/proc/self/maps").read()
            print("child mappings:", len(MAPPINGS), maps.count("memfd:shared-rpc"), "descriptors:", segments())
            os._exit(0)
        os.wait()
        text = bytes(HOST.view(mapping.address, 5)).decode()
        print("parent reads:", text, "descriptors:", segments(), "mappings:", len(MAPPINGS))
        """
    )
    children.append(child)
    assert child.expect("child reads:") == "child reads: first descriptors: 1 None"
    assert child.expect("child mappings:") == "child mappings: 0 0 descriptors: 0"
    assert child.expect("parent reads:") == "parent reads: other descriptors: 1 mappings: 1"


@pytest.mark.gpu
def test_fork_leaves_gpu_memory_alone(children: list[Child]) -> None:
    """CUDA does not work in a forked child: it drops inherited mappings without a call, and its parent continues."""
    child = python(
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
    children.append(child)
    child.expect("child drained")
    assert child.expect("parent reads:") == "parent reads: [0, 1, 2, 3]"


def test_devices_without_a_visible_gpu(children: list[Child]) -> None:
    """``auto`` is the host, and CUDA is an error with the remedy."""
    child = python(
        """
        from shared_rpc.errors import CapabilityError
        from shared_rpc.memory.devices import device_id
        print("auto:", device_id("auto"))
        for device in ("cuda", "cuda:1"):
            try:
                device_id(device)
            except CapabilityError as error:
                print("refused:", error)
        """,
        environ={"CUDA_VISIBLE_DEVICES": ""},
    )
    children.append(child)
    assert child.expect("auto:") == "auto: cpu"
    for device in ("cuda", "cuda:1"):
        line = child.expect("refused:")
        assert f"device='{device}'" in line
        assert "use device='cpu'" in line


@pytest.mark.gpu
def test_kernels_finish_before_their_memory_is_unmapped(children: list[Child]) -> None:
    """A tensor that is dropped while a kernel still reads it is unmapped after that kernel."""
    child = python(
        """
        import torch
        from shared_rpc.codec.results import decode_result, publish
        from shared_rpc.memory.mapping import MAPPINGS

        record = publish(torch.arange(1 << 20, device="cuda"), "cuda", "read_write", "e")
        value = decode_result(record.skeleton, record.table, record.segments)
        torch.cuda._sleep(2_000_000_000)  # cycles: about a second
        copy = value.clone()
        del value
        MAPPINGS.drain()
        print("mappings:", len(MAPPINGS), "right:", torch.equal(copy.cpu(), torch.arange(1 << 20)))
        record.close()
        """
    )
    children.append(child)
    assert child.expect("mappings:") == "mappings: 0 right: True"


@pytest.mark.gpu
def test_nothing_is_unmapped_while_a_graph_is_captured(children: list[Child]) -> None:
    """A mapping dropped during a CUDA graph's capture stays until after it, and the graph works."""
    child = python(
        """
        import torch
        from shared_rpc.codec.results import decode_result, publish
        from shared_rpc.memory.mapping import MAPPINGS

        def shared(number):
            record = publish(torch.full((1024,), float(number), device="cuda"), "cuda", "read_write", "e")
            try:
                return decode_result(record.skeleton, record.table, record.segments)
            finally:
                record.close()

        kept, dropped = shared(1), shared(2)
        out = torch.empty_like(kept)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out.copy_(kept * 3)
            del dropped
            MAPPINGS.drain()
            during = len(MAPPINGS)
        MAPPINGS.drain()
        graph.replay()
        torch.cuda.synchronize()
        print("during:", during, "after:", len(MAPPINGS), "sum:", out.sum().item())
        """
    )
    children.append(child)
    assert child.expect("during:") == "during: 2 after: 1 sum: 3072.0"


BIG = """
    import resource, sys, torch
    from shared_rpc import materialize
    from torch import nn

    class Big(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(8192, 8192) for _ in range(4))
            for layer in self.layers:
                nn.init.normal_(layer.weight)

    def resident():
        return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()

    source = {name: torch.empty(shape) for number in range(4) for name, shape in
              ((f"layers.{number}.weight", (8192, 8192)), (f"layers.{number}.bias", (8192,)))}
    with materialize({"weight": torch.ones(3, 3), "bias": torch.ones(3)}):
        nn.init.normal_(nn.Linear(3, 3).weight)
        warm = nn.Linear(3, 3)
    before, peak_before = resident(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with materialize(source):
        model = Big()
        inside = resident()
    total = sum(parameter.nbytes for parameter in model.parameters())
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print("compiler", "torch._dynamo" in sys.modules)
    print("grown", total >> 20, (inside - before) >> 20, (resident() - before) >> 20, (peak - peak_before) >> 10)
"""


def test_a_gigabyte_is_built_without_memory() -> None:
    """A model of 1 GiB is built without growth of the process at any time."""
    child = python(BIG, fresh=True)
    assert child.expect("compiler") == "compiler False"  # which takes seconds to load, for shapes of the meta device
    total, inside, after, peak = map(int, child.expect("grown").split()[1:])
    assert child.close() == (0, "")
    assert total >= 1024
    assert max(inside, after, peak) < 64
