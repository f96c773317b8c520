"""Endpoints that share parameters only: these have one memory, all other tensors one copy for each process."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from shared_rpc import Client
from shared_rpc.errors import CapabilityError
from tests.kit.models import LARGE_ARRAY as LARGE
from tests.kit.models import Everything, arrays_of, beside_a_tensor
from tests.kit.world import World

Elsewhere = Callable[..., Any]


def normed(device: str = "cpu") -> nn.Module:
    """A linear layer, and one with statistics that training updates."""
    model = nn.Sequential(nn.Linear(4, 4, device=device), nn.BatchNorm1d(4, device=device)).requires_grad_(False)
    model[0].weight.fill_(1)
    return model


@pytest.mark.parametrize("tensors", ["all", "parameters"])
def test_writes_reach_only_shared_tensors(device: str, world: World, tensors: str) -> None:
    """Writes of server and client to a shared tensor are visible to both; writes to any other tensor are private."""
    module = Everything(device)
    shared = ["parameter"] if tensors == "parameters" else [*module.tensors()]
    world.serve_result(module, tensors=tensors)
    world.run('kept["held"] = client.call("get")')
    with torch.no_grad():
        for tensor in module.tensors().values():
            tensor[0] = -1
    if device == "cuda":
        torch.cuda.synchronize()
    seen = world.run(
        """
        answer = {}
        with torch.no_grad():
            for where, tensor in kept.pop("held").tensors().items():
                answer[where] = tensor[0].item()
                tensor[1] = -2
        if device == "cuda":
            torch.cuda.synchronize()
        """
    )
    assert [where for where, value in seen.items() if value == -1] == shared
    assert [where for where, tensor in module.tensors().items() if tensor[1] == -2] == shared


def test_reattached_objects_have_the_published_bytes(device: str, world: World) -> None:
    """After a release, whatever this process, another one or the server has written."""
    model = normed(device)
    world.serve_result(model, managed=True, tensors="parameters")
    write = """
        with client.call("get") as handle:
            answer = handle.value[1].running_mean[0].item()
            handle.value[1].running_mean.fill_(5)
            kept["writes"] = handle.value[1].running_mean
        """
    assert [world.run(write), world.run(write, 1)] == [0, 0]
    model[1].running_mean.fill_(7)
    assert [world.run(write), world.run(write, 1)] == [0, 0]
    assert world.run('answer = kept["writes"][0].item()') == 5


def test_the_process_of_the_endpoint_has_its_own_object(world: World, role: str) -> None:
    """With its own tensors; a client also has one object for all its calls."""
    made = []

    @world.share("load", tensors="parameters")
    def load() -> nn.Module:
        made.append(normed())
        return made[-1]

    one, other = world.provider.call("load"), world.provider.call("load")
    assert one is other
    one[1].running_mean.fill_(3)
    assert (one is made[0], made[0][1].running_mean[0].item() == 3) == (
        (True, True) if world.role != "client" else (False, False)
    )
    one[0].weight.fill_(4)
    assert made[0][0].weight[0, 0] == 4


@pytest.mark.parametrize("cache", [True, False])
def test_each_call_of_a_list_has_private_tensors(device: str, world: World, client: Client, cache: bool) -> None:
    """The same holds for a result that is not kept."""
    world.serve_result(
        [nn.Parameter(torch.zeros(3, device=device)), torch.zeros(3, device=device)], cache=cache, tensors="parameters"
    )
    one, other = client.call("get"), client.call("get")
    one[1].fill_(1)
    assert other[1].tolist() == [0, 0, 0]
    assert (one[0].data_ptr() == other[0].data_ptr()) is cache


def test_parts_of_results_share_parameters(device: str, world: World, client: Client) -> None:
    """A short result in shared memory: its parameters stay there, and its other tensors do not."""
    model = normed(device)
    world.share("whole")(lambda: model)
    world.share("part", cache=False, tensors="parameters")(lambda: model[1])
    world.serve()
    whole, part = client.call("whole"), client.call("part")
    assert part.weight.data_ptr() == whole[1].weight.data_ptr()
    part.running_mean.fill_(1)
    assert [one[1].running_mean[0].item() for one in (whole, model)] == [0, 0]
    whole[1].running_mean.fill_(2)
    assert (model[1].running_mean[0].item(), part.running_mean[0].item()) == (2, 1)


def test_attached_objects_can_be_arguments(device: str, world: World) -> None:
    """The endpoint gets its own parameters, and the caller's present private tensors as copies."""
    model = normed(device)
    seen: dict[str, Any] = {}
    world.share("load", managed=True, tensors="parameters")(lambda: model)

    @world.share(cache=False)
    def use(given: nn.Module) -> torch.Tensor:
        seen["same"] = given[0].weight.data_ptr() == model[0].weight.data_ptr()
        seen["mean"] = given[1].running_mean[0].item()
        given[1].running_mean.fill_(9)
        return given[1].running_mean

    world.serve()
    answer = world.run(
        """
        with client.call("load") as handle:
            handle.value[1].running_mean.fill_(6)
            returned = client.call("use", handle.value)
            answer = [returned[0].item(), handle.value[1].running_mean[0].item()]
        """
    )
    assert (seen, answer, model[1].running_mean[0].item()) == ({"same": True, "mean": 6}, [9, 6], 0)


# Memory that is no tensor's: arrays exist once for all clients, until one of them writes.


#: The kernel's figures for the array's memory in the process: private pages.
OWN_PAGES = """
def own_pages(array):
    address = array.__array_interface__["data"][0]
    inside = False
    for line in open("/proc/self/smaps"):
        first = line.split()[0]
        if "-" in first and not first.endswith(":"):
            begin, end = (int(part, 16) for part in first.split("-"))
            inside = begin <= address < end
        elif inside and first == "Anonymous:":
            return int(line.split()[1]) // 4
"""


def test_pages_are_copied_on_write(device: str, world: World) -> None:
    """Reading an array takes no memory; writing takes a page, which only the writer sees."""
    value = beside_a_tensor(device, numpy.arange(LARGE))
    world.share("get")(lambda: value)
    world.serve()
    read = """
        kept["array"] = array = client.call("get").moments["arrays"][0]
        answer = [int(array.sum()), own_pages(array)]
        """
    for number in (0, 1):
        assert world.run(OWN_PAGES + textwrap.dedent(read), number) == [int(numpy.arange(LARGE).sum()), 0]
    look = f"{OWN_PAGES}answer = [int(kept['array'][0]), own_pages(kept['array'])]"
    world.run("kept['array'][0] = 7")
    assert [world.run(look), world.run(look, 1), arrays_of(value)[0][0]] == [[7, 1], [0, 0], 0]


def test_written_arrays_are_sent_as_arguments(device: str, world: World) -> None:
    """The client's copy is sent: the memory that others have of it is not named instead."""
    world.share("get")(lambda: beside_a_tensor(device, numpy.zeros(LARGE)))
    world.share("first", cache=False)(lambda x: x[:1].clone())
    world.serve()
    seen = world.run(
        """
        array = client.call("get").moments["arrays"][0]
        array[0] = 5
        answer = client.call("first", torch.from_numpy(array).to(device)).tolist()
        """
    )
    assert seen == [5]


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
def test_read_only_arrays_are_copied_as_arguments(world: World, role: str) -> None:
    """Regardless of the owner of their memory."""
    world.share("get", access="read")(lambda: beside_a_tensor("cpu", numpy.ones(LARGE)))
    total = world.share("total", cache=False)(lambda x: x.sum())
    array = arrays_of(world.provider.call("get"))[0]
    assert total(torch.from_numpy(array)).item() == LARGE


def test_quotas_count_arrays_as_host_memory(world: World, device: str) -> None:
    """Whatever the server's device is."""
    world.share("get")(lambda: beside_a_tensor(device, numpy.arange(LARGE)))
    world.serve(quotas={"cpu": 1 << 20})
    with pytest.raises(CapabilityError, match="are more than"):
        world.client().call("get")
