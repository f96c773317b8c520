"""Several GPUs: objects that span them, and clients that see them in another order, one of them, or none."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from shared_rpc import Provider, Server
from tests.kit.models import Spanning
from tests.kit.processes import Child
from tests.kit.world import World

pytestmark = pytest.mark.gpu

#: The GPUs that a client sees, by their numbers in this process.
OTHER_ORDER = [1, 0]

#: The part common to all client processes. ``tell`` prints a line of JSON.
CLIENT = """
import json
import torch
from shared_rpc import Client, errors

def gpu_of(tensor):
    return "GPU-" + str(torch.cuda.get_device_properties(tensor.device).uuid)

def tell(**facts):
    print("told", json.dumps(facts))

"""


@pytest.fixture
def gpus() -> list[str]:
    """The UUIDs of this process's ``cuda:0`` and ``cuda:1``, which have peer access."""
    from shared_rpc.memory.backends.cuda import peer_capable, visible_gpus

    seen = visible_gpus()
    if len(seen) < 2 or not (peer_capable(0, 1) and peer_capable(1, 0)):
        pytest.skip("needs two GPUs that are peers")
    return list(seen[:2])


@pytest.fixture
def provider(base_path: str) -> Provider:
    """The server's script, on its first GPU; it uses the second one too."""
    provider = Provider(base_path, device="cuda:0")

    @provider.share(managed=True)
    def spanning() -> torch.nn.Module:
        return Spanning("cuda:0", "cuda:1")

    @provider.share(cache=False)
    def echo(x: torch.Tensor) -> torch.Tensor:
        return x

    @provider.share(cache=False)
    def plus_one(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    @provider.share(cache=False)
    def gathered(*tensors: torch.Tensor) -> torch.Tensor:
        return torch.stack([tensor.to("cuda:0") for tensor in tensors])

    return provider


@pytest.fixture
def server(gpus: list[str], provider: Provider) -> Iterator[Server]:
    """That script's server, in this process, with both GPUs visible."""
    with Server(provider) as server:
        yield server


def listed(gpus: list[str], order: list[int]) -> dict[str, str]:
    """Return the environment of a process with these of this process's GPUs, in that order."""
    return {"CUDA_VISIBLE_DEVICES": ",".join(gpus[number] for number in order)}


def client(world: World, environ: dict[str, str], code: str) -> Child:
    """Start a client process that runs ``code``."""
    return world.process(CLIENT + code, environ=environ)


def read_facts(child: Child) -> dict[str, Any]:
    """Return the next facts that a client reports."""
    facts: dict[str, Any] = json.loads(child.expect("told ").removeprefix("told "))
    return facts


def computed(provider: Provider) -> list[list[float]]:
    """Return the result computed by the server's own object."""
    with provider.call("spanning") as handle:
        result: list[list[float]] = handle.value(torch.ones(2, 8, device="cuda:0")).tolist()
        return result


def test_an_object_can_span_gpus(server: Server, provider: Provider, gpus: list[str], world: World) -> None:
    """Whatever a client calls its GPUs: each tensor, and each device in an attribute, keeps its GPU."""
    child = client(
        world,
        listed(gpus, OTHER_ORDER),
        f"""
with Client(socket_path={server.socket_path!r}) as client, client.call("spanning") as handle:
    model = handle.value
    tensors = [*model.parameters(), model.scale]
    tell(
        devices=[str(tensor.device) for tensor in tensors],
        gpus=[gpu_of(tensor) for tensor in tensors],
        attributes=[str(device) for device in model.devices],
        result=model(torch.ones(2, 8, device="cuda:0")).tolist(),
    )
""",
    )

    facts = read_facts(child)

    names = [f"cuda:{OTHER_ORDER.index(number)}" for number in (0, 1)]
    assert facts["devices"] == [names[0], names[0], names[1], names[1], names[1]]
    assert facts["gpus"] == [gpus[0], gpus[0], gpus[1], gpus[1], gpus[1]]
    assert facts["attributes"] == names
    assert facts["result"] == computed(provider)


@pytest.mark.parametrize("seen", [0, 1], ids=["first", "second"])
def test_an_object_that_spans_gpus_works_with_one_visible(
    server: Server, provider: Provider, gpus: list[str], world: World, seen: int
) -> None:
    """The part on the other GPU is accessed through a peer: it is read, computed with and written."""
    before = computed(provider)
    child = client(
        world,
        listed(gpus, [seen]),
        f"""
with Client(socket_path={server.socket_path!r}) as client, client.call("spanning") as handle:
    model = handle.value
    tensors = [*model.parameters(), model.scale]
    before = model(torch.ones(2, 8, device="cuda:0")).tolist()
    with torch.no_grad():
        for tensor in tensors:
            tensor.mul_(2)
    torch.cuda.synchronize()
    tell(
        count=torch.cuda.device_count(),
        devices=sorted({{str(tensor.device) for tensor in tensors}}),
        before=before,
        after=model(torch.ones(2, 8, device="cuda:0")).tolist(),
    )
""",
    )

    facts = read_facts(child)

    assert (facts["count"], facts["devices"]) == (1, ["cuda:0"])
    assert facts["before"] == before
    assert facts["after"] == computed(provider) != before


# Arguments.


def test_arguments_keep_their_gpu(server: Server, gpus: list[str], world: World) -> None:
    """Alone and with others, and the results computed from them stay there."""
    child = client(
        world,
        listed(gpus, OTHER_ORDER),
        f"""
here, there = "cuda:{OTHER_ORDER.index(0)}", "cuda:{OTHER_ORDER.index(1)}"
with Client(socket_path={server.socket_path!r}) as client:
    argument = torch.arange(6.0, device=there).reshape(2, 3).T
    same, more = client.call("echo", argument), client.call("plus_one", argument)
    both = client.call("gathered", torch.zeros(2, device=here), torch.ones(2, device=there))
    task = client.wait_for_task(client.submit("plus_one", argument), 30)
    tell(
        gpus=[gpu_of(tensor) for tensor in (same, more, task, both)],
        stride=same.stride(),
        values=[tensor.tolist() for tensor in (same, more, task, both)],
    )
""",
    )

    facts = read_facts(child)

    assert facts["gpus"] == [gpus[1], gpus[1], gpus[1], gpus[0]]
    assert facts["stride"] == [1, 3]
    more = [[1, 4], [2, 5], [3, 6]]
    assert facts["values"] == [[[0, 3], [1, 4], [2, 5]], more, more, [[0, 0], [1, 1]]]


def test_processes_without_a_gpu_are_refused(base_path: str, world: World) -> None:
    """The error has the GPU of the memory and where to look; the lease is released, and the server continues."""
    from shared_rpc.memory.backends.cuda import visible_gpus

    provider = Provider(base_path, device="cuda:0")
    provider.share("weights", managed=True)(lambda: torch.ones(4, device="cuda:0"))
    with Server(provider) as server:
        child = client(
            world,
            {"CUDA_VISIBLE_DEVICES": ""},
            f"""
with Client(socket_path={server.socket_path!r}) as client:
    try:
        client.call("weights")
    except errors.CapabilityError as error:
        (weights,) = client.list_objects()
        tell(count=torch.cuda.device_count(), error=str(error), leases=weights["leases"], ping=client.ping() > 0)
try:
    Client(device="cuda").ping()
except errors.CapabilityError as error:
    tell(error=str(error))
""",
        )

        facts = read_facts(child)
        assert (facts["count"], facts["leases"], facts["ping"]) == (0, 0, True)
        assert visible_gpus()[0] in facts["error"] and "CUDA_VISIBLE_DEVICES" in facts["error"]
        assert "device='cuda'" in read_facts(child)["error"]
