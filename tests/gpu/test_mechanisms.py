"""Mechanisms that share a GPU's memory: the choice, its reasons, and the behaviour of each between processes."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from contextlib import closing

import pytest
import torch

from benchmarks.mechanisms import OPENS, READS, measure
from shared_rpc import Client, Provider
from shared_rpc.cli import doctor
from shared_rpc.errors import CapabilityError, ConfigurationError
from shared_rpc.memory.backends import choice as mechanisms
from shared_rpc.memory.backends.choice import Choice, backend_for, choose_mechanism, chosen, mechanism_info
from shared_rpc.memory.devices import device_id
from shared_rpc.protocol.records import Mechanism
from tests.kit.bound_host import BoundHost
from tests.kit.processes import Child, eventually
from tests.kit.world import World

GPU = "GPU-00000000-0000-0000-0000-00000000000a"


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """``gpu("vmm", "ipc")`` makes this process detect a GPU with exactly these mechanisms."""

    def has(*names: str) -> None:
        lacks = {name: "" if name in names else f"no {name}" for name in mechanisms.PREFERENCE}
        for module in (mechanisms, doctor):
            monkeypatch.setattr(module, "survey", lambda device: lacks)
            monkeypatch.setattr(module, "mps", lambda device: False)
        monkeypatch.setattr(mechanisms, "_chosen", {})
        monkeypatch.setattr(mechanisms, "_forced", set())

    return has


@pytest.mark.parametrize(
    ("there", "name", "reason"),
    [
        (("vmm", "ipc", "pool"), "vmm", "the GPU has virtual memory management and exports POSIX descriptors"),
        (("ipc", "pool"), "ipc", "the GPU has no vmm"),
        (("pool",), "pool", "the GPU has no vmm; the GPU has no ipc"),
    ],
)
def test_the_first_supported_mechanism_is_used(
    gpu: Callable[..., None], there: tuple[str, ...], name: str, reason: str
) -> None:
    """And the reason has the defects of the earlier ones."""
    gpu(*there)
    assert chosen(GPU) == choose_mechanism("auto", GPU) == Choice(name, reason)


def test_a_gpu_without_a_mechanism_is_refused_with_all_reasons(gpu: Callable[..., None]) -> None:
    """On use; information commands show the same text."""
    gpu()
    with pytest.raises(CapabilityError, match=re.escape("(vmm: no vmm; ipc: no ipc; pool: no pool): use device='cpu'")):
        chosen(GPU)
    assert mechanism_info("auto", GPU)["name"] is None
    assert "ipc: no ipc" in mechanism_info("auto", GPU)["reason"]


def test_the_requested_mechanism_is_used(gpu: Callable[..., None]) -> None:
    """For the whole process, even after an earlier query."""
    gpu("vmm", "ipc", "pool")
    assert chosen(GPU).name == "vmm"
    assert choose_mechanism("ipc", GPU) == Choice("ipc", "chosen by Provider(mechanism='ipc')")
    assert chosen(GPU) == choose_mechanism("auto", GPU) == choose_mechanism("ipc", GPU)


def test_unsupported_mechanisms_are_refused(gpu: Callable[..., None]) -> None:
    """The error names the missing feature and the alternatives."""
    gpu("ipc", "pool")
    with pytest.raises(CapabilityError, match=f"{GPU} has no vmm: use 'auto' or 'ipc' or 'pool'"):
        choose_mechanism("vmm", GPU)
    assert chosen(GPU).name == "ipc"


def test_conflicting_requests_of_two_providers_are_refused(gpu: Callable[..., None]) -> None:
    """A process makes the segments of a GPU in one way."""
    gpu("vmm", "ipc", "pool")
    choose_mechanism("ipc", GPU)
    with pytest.raises(ConfigurationError, match="mechanism='pool', but another provider of this process chose 'ipc'"):
        choose_mechanism("pool", GPU)


def test_invalid_options_are_refused(world: World) -> None:
    """On first use, with the valid ones."""
    world.provider.mechanism = "cuda_ipc"
    world.share("load")(lambda: torch.ones(1))
    with pytest.raises(ConfigurationError, match="mechanism='cuda_ipc': use 'auto', 'vmm', 'ipc' or 'pool'"):
        world.provider.call("load")


@pytest.mark.parametrize("mode", ["local", "server", "client"])
def test_the_host_has_no_choice(base_path: str, mode: str) -> None:
    """A mechanism of GPUs does not apply to host memory, in any role."""
    provider = Provider(base_path, device="cpu", mechanism="ipc", execution_mode=mode, server_startup_timeout=0.0)
    provider.share("load")(lambda: torch.ones(1))
    for action in (lambda: provider.call("load"), provider.get_runtime_info):
        with pytest.raises(ConfigurationError, match=r"mechanism='ipc' is for GPU memory.*device='cuda'"):
            action()
    provider.close()


@pytest.mark.parametrize(("device", "mechanism"), [("cpu", "ipc"), ("cpu", "vmm"), (GPU, "memfd")])
def test_mechanisms_that_do_not_fit_the_device_are_refused(device: str, mechanism: Mechanism) -> None:
    """In a segment from another process."""
    with pytest.raises(CapabilityError, match=f"device {device} does not share memory by the mechanism '{mechanism}'"):
        backend_for(device, mechanism)


@pytest.mark.parametrize(("mechanism", "module"), [("vmm", "vmm"), ("ipc", "legacy_ipc"), ("pool", "pool_ipc")])
def test_processes_without_bindings_cannot_attach(mechanism: Mechanism, module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error has the mechanism, the missing package, and its installation."""
    monkeypatch.setitem(sys.modules, f"shared_rpc.memory.backends.{module}", None)
    with pytest.raises(CapabilityError) as caught:
        backend_for("GPU-of-another-host", mechanism)
    text = str(caught.value)
    assert text.startswith(f"memory on GPU-of-another-host shared by the mechanism '{mechanism}' needs cuda-bindings (")
    assert text.endswith("pip install 'shared-rpc[cuda]'")


def test_unopenable_memory_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the driver's error, the mechanism, and the remedy."""

    def refuse(self: BoundHost, exported: object) -> None:
        raise CapabilityError("CUDA_ERROR_INVALID_VALUE")

    monkeypatch.setattr(BoundHost, "open", refuse)
    with (
        closing(BoundHost().create(1)) as segment,
        pytest.raises(CapabilityError, match=r"with the mechanism 'pool': CUDA_ERROR_INVALID_VALUE; there is none in a test"),
    ):
        BoundHost().map(segment.fileno(), 1, "read_write")


@pytest.mark.parametrize(
    ("there", "state", "text"),
    [
        (("vmm", "ipc", "pool"), "good", "vmm yes, ipc yes, pool yes; uses vmm: the GPU has virtual memory management"),
        (("ipc",), "limited", "vmm no, ipc yes, pool no; uses ipc: the GPU has no vmm"),
        ((), "limited", "supports no mechanism to share memory"),
    ],
)
def test_the_doctor_describes_the_mechanisms(gpu: Callable[..., None], there: tuple[str, ...], state: str, text: str) -> None:
    """For each GPU, with the remedy if it is not the best one."""
    gpu(*there)
    finding = doctor._gpu("GPU 0", GPU, ", no peers")
    assert (finding.state, bool(finding.fix)) == (state, state != "good")
    assert finding.found.startswith(f"{GPU}, no peers; ")
    assert text in finding.found


# Between processes, on a GPU.

#: A server of one mechanism; it ends with its standard input.
SERVER = """
    import sys, torch
    from shared_rpc import Provider, Server
    provider = Provider({base!r}, device="cuda:0", mechanism={mechanism!r})

    @provider.share(managed=True)
    def model():
        module = torch.nn.Linear(8192, 16384, bias=False, device="cuda:0")
        with torch.no_grad():
            module.weight.fill_(1.0)
        return module

    @provider.share(cache=False)
    def fill(weight: torch.Tensor, value: float):
        weight.fill_(value)
        return weight.sum(dim=1).double().sum().reshape(1)

    @provider.share(cache=False)
    def total(weight: torch.Tensor):
        return weight.sum(dim=1).double().sum().reshape(1)

    with Server(provider) as server:
        torch.cuda.synchronize()
        print("serving", server.socket_path)
        sys.stdin.readline()
"""

#: A client that attaches, and then executes commands.
CLIENT = """
    import sys, torch
    from shared_rpc import Client
    client = Client(socket_path={path!r}, connect_timeout=0.0)
    handle = client.call("model")
    weight = handle.value.weight.data
    print("attached", handle.object_id)
    for line in sys.stdin:
        try:
            match line.split():
                case ["sum"]:
                    print("sum", weight.sum(dim=1).double().sum().item())
                case ["write", value]:
                    weight.fill_(float(value))
                    torch.cuda.synchronize()
                    print("wrote", client.call("total", weight).item())
                case ["ask", value]:
                    print("asked", client.call("fill", weight, float(value)).item())
                case ["release"]:
                    del weight
                    handle.release()
                    print("released")
                    del handle
        except Exception as error:
            print("failed", type(error).__name__, error)
    client.close()
"""
COUNT = 8192 * 16384
#: Bytes that the driver takes for streams and kernels when they are first used, in two processes.
SLACK = 192 << 20


@pytest.fixture(params=mechanisms.PREFERENCE)
def mechanism(request: pytest.FixtureRequest) -> str:
    """Each mechanism of the first GPU."""
    lacks = mechanisms.survey(device_id("cuda:0"))
    if lacks[request.param]:
        pytest.skip(f"the GPU has {lacks[request.param]}")
    return str(request.param)


@pytest.fixture
def server(mechanism: str, base_path: str, world: World) -> tuple[Child, str]:
    """A server of that mechanism, and its socket."""
    child = world.process(SERVER.format(base=base_path, mechanism=mechanism))
    return child, child.expect("serving").split()[1]


@pytest.fixture
def attach(server: tuple[Child, str], world: World) -> Callable[[], Child]:
    """``attach()`` starts a client that has the model."""

    def start() -> Child:
        child = world.process(CLIENT.format(path=server[1]))
        child.expect("attached")
        return child

    return start


def used() -> int:
    """Return the bytes in use on the GPU, by any process."""
    free, total = torch.cuda.mem_get_info(0)
    return total - free


def drop(path: str) -> None:
    """Make the server drop the model."""
    with Client(socket_path=path) as client:
        client.invalidate_endpoint_cache("model")


@pytest.mark.gpu
def test_writes_are_visible_in_both_directions(mechanism: str, server: tuple[Child, str], attach: Callable[[], Child]) -> None:
    """To the server, to the writing client and to another one; info has the mechanism and the lifetime."""
    one, other = attach(), attach()

    one.tell("write 2")
    assert one.expect("wrote") == f"wrote {2.0 * COUNT}"
    other.tell("sum")
    assert other.expect("sum") == f"sum {2.0 * COUNT}"
    other.tell("ask 3")
    assert other.expect("asked") == f"asked {3.0 * COUNT}"
    one.tell("sum")
    assert one.expect("sum") == f"sum {3.0 * COUNT}"

    with Client(socket_path=server[1]) as client:
        found = client.get_server_info()["mechanism"]
        assert found == {"name": mechanism, "reason": f"chosen by Provider(mechanism={mechanism!r})", "mps": False}
        with client.call("model") as handle:
            bound = f"bound to the life of pid {server[0].pid}"
            expected = None if mechanism == "vmm" else bound
            assert handle.get_object_info().get("lifetime") == expected


@pytest.mark.gpu
@pytest.mark.whole_gpu
def test_memory_of_a_killed_client_is_freed(mechanism: str, server: tuple[Child, str], attach: Callable[[], Child]) -> None:
    """Half a gigabyte, once the kernel has closed its descriptors."""
    idle = used()
    first = attach()  # after this, the server has everything that it keeps permanently: kernels and workspaces
    first.tell("ask 1")
    first.expect("asked")
    first.tell("release")
    first.expect("released")
    first.close()
    drop(server[1])
    eventually(lambda: used() <= idle + 2 * COUNT, seconds=30.0, what=f"the model gone from {used()} bytes in use")
    before = used()

    client = attach()
    client.tell("write 2")
    client.expect("wrote")
    drop(server[1])
    client.tell("sum")
    assert client.expect("sum") == f"sum {2.0 * COUNT}"  # it holds an object that the server has dropped
    assert used() > before + 2 * COUNT
    client.kill()

    eventually(lambda: used() <= before + SLACK, seconds=30.0, what=f"{before} bytes in use, and not {used()}")


@pytest.mark.gpu
@pytest.mark.whole_gpu
def test_memory_of_a_killed_maker(mechanism: Mechanism) -> None:
    """By VMM all bytes stay, and new processes open them. By the others the library refuses to open them; reading
    existing mappings depends on the driver, and is printed.
    """
    found = measure(device_id("cuda:0"), mechanism, [256], rounds=1)
    print(mechanism, found)
    if mechanism == "vmm":
        assert ([found[row] for row in READS], found[OPENS]) == (["reads all bytes"] * 3, "yes")
    else:
        assert str(found[OPENS]).startswith("error: ")
