"""Shared memory through torch.multiprocessing: it is not copied, and the receiver maps the same memory."""

from __future__ import annotations

import signal
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.kit.brokers import ROLE, broker_words
from tests.kit.family import settle
from tests.kit.models import Tied
from tests.kit.world import World

#: The device first: of provider and clients too.
pytestmark = pytest.mark.usefixtures("device")

#: The beginning of every piece of code: an attached model, and its place.
BEGIN = """
import multiprocessing, os
import torch.multiprocessing as mp
from tests.kit import family
from tests.kit.family import Peer, peer
from tests.kit.processes import mapped_segments

# Its children are there at once: they have imported torch before they were forked.
multiprocessing.set_forkserver_preload(["tests.kit.family"])

def addresses(module):
    return [tensor.data_ptr() for tensor in (*module.parameters(), *module.buffers())]

"""

#: An app whose endpoint starts a process.
APP = """
import os, torch
from shared_rpc import Provider
from tests.kit import family

provider = Provider(device=os.environ["DEVICE"], mechanism=os.environ.get("MECHANISM", "auto"))

@provider.share
def get() -> torch.Tensor:
    return torch.zeros(4, device=os.environ["DEVICE"])

@provider.share
def fill(number: float) -> torch.Tensor:
    value = provider.call("get")
    with family.peer("forkserver", value) as child:
        child.call(family.write, 0, number)
        return child.call(family.first)
"""


def run(world: World, code: str, **names: Any) -> Any:
    """Run code in the client process."""
    return world.run(BEGIN + textwrap.dedent(code), **names)


def matrix(device: str) -> torch.Tensor:
    """A matrix whose four rows begin with 0, 10, 20 and 30."""
    return torch.arange(40.0, device=device).reshape(4, 10)


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_process_arguments_stay_shared(device: str, world: World, method: str) -> None:
    """The sender's weights stay in place; a child's writes are visible to the server and its parent, and the reverse."""
    model = Tied(device)
    world.serve_result(model)
    answer = run(
        world,
        """
        model = client.call("get")
        before = addresses(model)
        with peer(method, model.embed.weight, model.head.weight, model.head.weight[1:].detach()) as child:
            answer = [addresses(model) == before, child.call(family.facts)]
            child.call(family.write, 2, 5)
            answer += [model.embed.weight[1:].unique().tolist()]
            model.embed.weight.data.fill_(6)
            family.settle()
            answer += [child.call(family.read)]
        """,
        method=method,
    )
    assert answer == [True, [1, 1, 0], [5], [6, 6, 6]]
    settle()
    assert model.embed.weight.unique().tolist() == [6]


def test_a_module_is_the_same_in_a_child(device: str, world: World) -> None:
    """It is sent whole, including ties, flags and buffers, and computes the same."""
    model = nn.Sequential(Tied(device), nn.LayerNorm(7, device=device)).eval()
    model.register_buffer("steps", torch.tensor(3, device=device))
    model[1].bias.requires_grad_(False)
    world.serve_result(model)
    answer = run(
        world,
        """
        model = client.call("get")
        before = addresses(model)
        with peer("forkserver", model) as child:
            back = child.call(family.first)
            tokens = torch.tensor([1, 5], device=device)
            answer = [
                addresses(model) == before,
                addresses(back) == before,
                back[0].head.weight is back[0].embed.weight,
                [parameter.requires_grad for parameter in back.parameters()],
                back.training,
                back.steps.item(),
                bits(back(tokens)) == bits(model(tokens)),
            ]
        """,
    )
    assert answer == [True, True, True, [True, True, False], False, 3, True]


def test_many_segments_arrive_in_a_child(device: str, world: World) -> None:
    """260 separate objects arrive in one child; a fork server takes fewer than 256 descriptors."""
    world.share("number")(lambda number: torch.full((2,), float(number), device=device))
    answer = run(
        world,
        """
        values = [client.call("number", number) for number in range(260)]
        places = [value.data_ptr() for value in values]
        with peer("forkserver", *values) as child:
            child.call(family.write, 259, 5)
            answer = [child.call(family.read)[::100], child.call(family.facts)[0], values[259].tolist()]
            answer += [[value.data_ptr() for value in values] == places]
        """,
    )
    assert answer == [[0, 100, 200], 260, [5, 5], True]


def test_other_tensors_are_sent_by_torch(device: str, world: World) -> None:
    """Tensors of the process's own, including empty ones, are shared with the child as usual."""
    world.serve_result(matrix(device))
    answer = run(
        world,
        """
        value, own = client.call("get"), torch.ones(3, device=device)
        with peer("forkserver", own, value, torch.empty(0, device=device)) as child:
            child.call(family.write, 0, 5)
            answer = [own.tolist(), own.is_shared(), child.call(family.listed)]
        """,
    )
    assert answer == [[5, 5, 5], True, [5, 5, 5]]


def test_sharing_shared_memory_moves_nothing(device: str, world: World) -> None:
    """``share_memory_()`` of a tensor, a storage and a module."""
    world.serve_result(nn.ParameterDict({"matrix": matrix(device)}))
    answer = run(
        world,
        """
        module = client.call("get")
        tensor, before = module["matrix"], module["matrix"].data_ptr()
        shared = tensor.share_memory_(), tensor.untyped_storage().share_memory_(), module.share_memory()
        answer = [shared[0] is tensor, shared[2] is module, tensor.is_shared(), tensor.data_ptr() == before]
        """,
    )
    assert answer == [True] * 4


@pytest.mark.parametrize("device", ["cpu"])
def test_pooled_results_are_moved_by_torch(world: World) -> None:
    """A result in a pool is its caller's own: later calls, which reuse the chunk, do not change the moved one."""
    world.share("new", cache=False)(lambda value: torch.full((1000,), float(value)))
    answer = run(
        world,
        """
        value = client.call("new", 1)
        shared = client.call("new", 2).share_memory_()
        with peer("forkserver", value) as child:
            child.call(family.keep, value[3:])
            del value
            for number in range(50):
                client.call("new", 9)
            answer = [child.call(family.read), shared.unique().tolist()]
        """,
    )
    assert answer == [[1, 1], [2]]


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda"])
def test_pooled_results_on_a_gpu_cannot_be_sent(world: World) -> None:
    """torch cannot move them, and the error gives the remedy."""
    world.share("new", cache=False)(lambda value: torch.full((1000,), float(value), device="cuda"))
    problem = run(
        world,
        """
        try:
            multiprocessing.reduction.ForkingPickler.dumps(client.call("new", 1))
        except Exception as error:
            answer = [type(error).__name__, str(error)]
        """,
    )
    assert problem[0] == "CapabilityError" and "Send tensor.clone()" in problem[1]


def test_read_only_memory_stays_read_only(device: str, world: World) -> None:
    """A child that writes ends, and nothing was written; a child that reads sees the server's writes."""
    world.serve_result(matrix(device), access="read")
    answer = run(
        world,
        """
        value = client.call("get")
        writer = Peer("forkserver", value)
        with peer("forkserver", value) as reader:
            try:
                writer.call(family.write, 0, 5)
            except Exception:  # on a GPU the error comes back, on the host the child is gone
                pass
            writer.close()
            back = reader.call(family.first)
            answer = [value[:, 0].tolist(), back.data_ptr() == value.data_ptr(), writer.process.exitcode]
        """,
    )
    code = answer.pop()
    assert answer == [[0, 10, 20, 30], True]
    assert device != "cpu" or code == -signal.SIGSEGV


def test_nothing_is_left_after_the_last_tensor(device: str, world: World) -> None:
    """Neither mappings nor descriptors, in the child and in the sender."""
    world.serve_result(nn.Parameter(matrix(device), requires_grad=False))  # in a separate segment
    answer = run(
        world,
        """
        from tests.kit.processes import open_fds
        import gc

        def use(child):
            value = client.call("get")
            child.call(family.keep, value, value[1])
            held = child.call(family.facts)[1:], mapped_segments(), family.descriptors()
            child.call(family.drop)
            return held

        with peer("forkserver") as child:
            use(child)  # opens what stays open: the listener that hands out descriptors
            gc.collect(); family.settle()
            before = open_fds(), child.call(family.facts)[1:]
            held = use(child)
            gc.collect(); family.settle()
            answer = [held, [open_fds() - before[0], child.call(family.facts)[1:] == before[1], before[1], mapped_segments()]]
        """,
    )
    assert answer == [[[1, 0], 1, 0], [0, True, [0, 0], 0]]


def test_a_child_outlives_its_parent_and_the_server(device: str, world: World) -> None:
    """The memory exists while any process has it: after both ends the child still reads and computes."""
    world.share("get")(lambda: matrix(device))
    with world.server:
        parent = world.process(
            f"""
            import multiprocessing, os, sys
            from shared_rpc import Client
            from tests.kit.family import outlive

            client = Client(device={device!r}, connect_timeout=0)
            value = client.call("get")
            context = multiprocessing.get_context("spawn")
            child = context.Process(target=outlive, args=(value,))
            child.start()
            sys.stdin.readline()
            os.kill(os.getpid(), 9)
            """
        )
        parent.expect("child has it")
        parent.tell("end")
    assert parent.process.wait(30) == -signal.SIGKILL
    assert parent.expect("alone:") == "alone: [0.0, 10.0, 20.0, 30.0]"
    parent.close()


def test_children_pass_the_memory_to_the_server_by_name(device: str, world: World) -> None:
    """As an argument of a call it is named, not copied; the child has its own lease."""
    world.share("get", managed=True)(lambda: torch.arange(4.0, device=device))
    world.share("where", cache=False)(lambda value: torch.tensor([value.data_ptr()], device=device))

    answer = run(
        world,
        """
        with client.call("get") as handle, peer("forkserver", handle.value[1:]) as child:
            answer = [*child.call(family.call, base_path, device, "where"), [os.getpid(), child.process.pid]]
        """,
    )
    with world.provider.call("get") as handle:
        at = handle.value.data_ptr() + 4
    (found,), copied, leased, pids = answer
    assert (found, copied, sorted(leased)) == (at, 0, sorted(pids))


def test_endpoints_can_send_published_objects_to_children(device: str, tmp_path: Path, world: World) -> None:
    """The server's object stays in place, and writes of the server's child are visible to all."""
    (tmp_path / "app.py").write_text(APP)
    server = world.start(*broker_words(tmp_path / "app.py"), environ={"DEVICE": device, **ROLE})
    server.expect("serving")
    answer = run(
        world,
        """
        mine = client.call("get")
        filled = client.call("fill", 5)
        family.settle()
        answer = [mine.tolist(), filled.data_ptr() == mine.data_ptr()]
        """,
    )
    assert answer == [[5, 5, 5, 5], True]


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda"])
@pytest.mark.parametrize("mechanism", ["vmm", "ipc", "pool"])
def test_every_mechanism_works_in_children(device: str, tmp_path: Path, world: World, mechanism: str) -> None:
    """Memory that belongs to its maker is opened once in the child, and closed there before its maker frees it."""
    (tmp_path / "app.py").write_text(APP)
    environ = {"DEVICE": device, "MECHANISM": mechanism}
    server = world.start(str(tmp_path / "app.py"), environ=environ | {"SHARED_TENSOR_ROLE": "server"})
    server.expect_error("serving")
    answer = run(
        world,
        """
        value = client.call("get")
        with peer("forkserver", value) as child:
            child.call(family.write, 0, 5)
            answer = [value.tolist(), child.call(family.same, value[1:]).data_ptr() - value.data_ptr()]
        """,
    )
    assert answer == [[5, 5, 5, 5], 4]


@pytest.mark.parametrize("device", ["cpu"])
def test_receivers_that_cannot_map_report_the_reason(world: World) -> None:
    """The memory is refused, and no descriptor is left."""
    world.serve_result(torch.ones(64 << 20))
    answer = run(
        world,
        """
        value = client.call("get")
        with peer("forkserver") as child:
            child.call(family.limit_address_space)
            try:
                child.call(family.keep, value)
            except RuntimeError as error:
                answer = [str(error), child.call(family.facts)]
        """,
    )
    assert answer[0].startswith("CapabilityError: cannot map 268435456 bytes of host memory: Cannot allocate memory")
    assert answer[1] == [0, 0, 0]
