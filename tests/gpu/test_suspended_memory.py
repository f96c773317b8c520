"""Suspended objects on a GPU: memory is evicted and restored under tensors and CUDA graphs that have its address."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from tests.kit.brokers import BrokerApp
from tests.kit.processes import Child, python
from tests.kit.world import World

pytestmark = pytest.mark.gpu

#: A process with the tensor ``value`` in the published ``record`` of object "a"; its mechanism is vmm.
PROCESS = """
import torch
from shared_rpc.codec.results import decode_result, publish
from shared_rpc.memory.backends.choice import choose_mechanism
from shared_rpc.memory.devices import device_id
from shared_rpc.memory.mapping import MAPPINGS

choose_mechanism("vmm", device_id("cuda"))

def shared(size, access="read_write", object_id="a"):
    made = torch.arange(size, device="cuda", dtype=torch.int32)
    record = publish(made, "cuda", access, "e")
    del made
    return record, decode_result(record.skeleton, record.table, record.segments, object_id=object_id)

"""


def process(code: str) -> Child:
    """Start a child that runs code after a common beginning."""
    return python(PROCESS + textwrap.dedent(code))


def test_kernels_end_before_their_memory_is_suspended(world: World) -> None:
    """Earlier queued work reads the memory, not the empty range."""
    child = process(
        """
        record, value = shared(1 << 20)
        torch.cuda._sleep(2_000_000_000)  # cycles: about a second
        copy = value.clone()
        MAPPINGS.suspend("a")
        print("right:", torch.equal(copy.cpu(), torch.arange(1 << 20, dtype=torch.int32)))
        record.close()
        """
    )
    world.children.append(child)
    assert child.expect("right:") == "right: True"


def test_peers_can_access_resumed_memory(world: World) -> None:
    """It is copied to another GPU as before."""
    from shared_rpc.memory.backends.cuda import peer_capable, visible_gpus

    if len(visible_gpus()) < 2 or not peer_capable(1, 0):
        pytest.skip("needs two GPUs that are peers")
    child = process(
        """
        record, value = shared(1 << 20)
        MAPPINGS.suspend("a")
        MAPPINGS.resume("a", record.segments)
        away = value.to("cuda:1")
        there = torch.empty_like(away)
        there.copy_(value)
        print("right:", torch.equal(away.cpu(), value.cpu()), torch.equal(there.cpu(), value.cpu()))
        record.close()
        """
    )
    world.children.append(child)
    assert child.expect("right:") == "right: True True"


@pytest.fixture
def app(broker_app: BrokerApp, tmp_path: Path) -> BrokerApp:
    """A broker with an object on the GPU, which it evicts to host memory and to files."""
    broker_app.write(
        """
        provider.device = "cuda"
        provider.mechanism = "vmm"

        @provider.share(managed=True)
        def weights():
            return torch.arange(64 << 20, device="cuda", dtype=torch.int32)

        @provider.share(managed=True, access="read")
        def read_only():
            return torch.arange(64 << 20, device="cuda", dtype=torch.int32)
        """
    )
    broker_app.start(spill_dir=str(tmp_path))
    return broker_app


#: A client process with a graph over an object of the broker, whose result is in ``out``.
CLIENT = """
import torch
from shared_rpc import Client
client = Client(device="cuda", timeout=60.0)

def graphed(endpoint):
    handle = client.call(endpoint)
    value = handle.value
    out = torch.empty(1, device=value.device, dtype=torch.int64)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        out.copy_(value[::4096].sum())
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out.copy_(value[::4096].sum())
    return handle, value, graph, out

def replayed(graph, out):
    out.zero_()
    graph.replay()
    torch.cuda.synchronize()
    return out.item()

"""


def client_process(code: str, environ: dict[str, str] | None = None) -> Child:
    """Start a client of the broker that runs code."""
    return python(CLIENT + textwrap.dedent(code), environ=environ)


@pytest.mark.parametrize("endpoint", ["weights", "read_only"])
@pytest.mark.parametrize("to", ["", "host", "file"])
def test_replayed_graphs_survive_an_eviction(app: BrokerApp, world: World, endpoint: str, to: str) -> None:
    """Suspended, evicted to each tier or to none, and resumed: the graph reads the current memory at the address."""
    child = client_process(
        f"""
        handle, value, graph, out = graphed({endpoint!r})
        before, address = replayed(graph, out), value.data_ptr()
        same = []
        for _ in range(3):
            handle.suspend()
            if {to!r}:
                (moved,) = client.evict(handle, {to!r} or None)
                assert moved["tier"] == {to!r}
            handle.resume(60.0)
            same.append(replayed(graph, out) == before and value.data_ptr() == address and int(value[-1]) == (64 << 20) - 1)
        print("same:", same)
        """
    )
    world.children.append(child)
    assert child.expect("same:") == "same: [True, True, True]"


@pytest.mark.whole_gpu
def test_an_eviction_frees_the_gpu_when_all_have_suspended(app: BrokerApp, world: World) -> None:
    """The object's bytes are returned to the driver, and restored once for two processes."""
    other = client_process(
        """
        handle, value, graph, out = graphed("weights")
        before = replayed(graph, out)
        handle.suspend()
        print("suspended", flush=True)
        input()
        handle.resume(60.0)
        print("same:", replayed(graph, out) == before, flush=True)
        input()
        """
    )
    world.children.append(other)
    other.expect("suspended")
    child = client_process(
        """
        handle, value, graph, out = graphed("weights")
        before, whole = replayed(graph, out), value.nbytes
        full, _ = torch.cuda.mem_get_info()
        handle.suspend()
        client.evict(handle, "host")
        empty, _ = torch.cuda.mem_get_info()
        handle.resume(60.0)
        again, _ = torch.cuda.mem_get_info()
        # The first copy takes a tenth of a GiB of the GPU in the worker.
        print("told", empty - full >= whole // 2, abs(again - full) < whole // 2, replayed(graph, out) == before, flush=True)
        input()
        """
    )
    world.children.append(child)
    assert child.expect("told") == "told True True True"
    other.tell("go on")
    assert other.expect("same:") == "same: True"


def test_memory_of_a_lost_session_is_replaced_on_request(app: BrokerApp, world: World) -> None:
    """A kernel may use it at any time: the handle is suspended, and the graph reads the earlier memory until it is resumed."""
    child = client_process(
        """
        from tests.kit.raw import disconnect
        other = Client(device="cuda", timeout=60.0)
        handle, value, graph, out = graphed("weights")
        before, address = replayed(graph, out), value.data_ptr()
        disconnect(client)
        while other.get_object_info(handle.object_id)["leases"]:
            pass
        other.evict(handle.object_id, "host")
        client.ping()
        print("told:", handle.suspended, replayed(graph, out) == before)
        with handle.active(60.0), other.call("weights") as theirs:
            theirs.value[0] += 5
            torch.cuda.synchronize()
            print("same:", replayed(graph, out) == before + 5, value.data_ptr() == address, handle.suspended)
        """
    )
    world.children.append(child)
    assert child.expect("told:") == "told: True True"
    assert child.expect("same:") == "same: True True False"
