"""Attached objects: the server's memory, the same results bit for bit, and independent state."""

from __future__ import annotations

import importlib
import signal
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shared_rpc import Provider, Server
from shared_rpc.codec import by_value, placement
from shared_rpc.codec.by_value import pickle_by_value
from shared_rpc.memory.arena import pack
from shared_rpc.memory.mapping import MAPPINGS
from tests.kit.apps import Serve
from tests.kit.deep import deep
from tests.kit.interpreter import Interpreter
from tests.kit.processes import Child, eventually, open_fds, python

Elsewhere = Callable[..., Any]


@pytest.fixture
def provider(base_path: str, device: str) -> Provider:
    """A provider on each kind of device."""
    return Provider(base_path, device=device)


@pytest.fixture(scope="module")
def interpreter() -> Iterator[Interpreter]:
    """The other process, common to all tests that do not harm it."""
    process = Interpreter({"HF_HUB_OFFLINE": "1"})
    yield process
    process.kill()


@pytest.fixture
def process() -> Iterator[Callable[[], Interpreter]]:
    """``process()`` starts a process that a test may harm."""
    started: list[Interpreter] = []

    def start() -> Interpreter:
        started.append(Interpreter())
        return started[-1]

    yield start
    for child in started:
        if child.process.stdout is not None and not child.process.stdout.closed:
            child.kill()


# One memory.


def test_objects_that_share_memory_are_mapped_once(device: str, provider: Provider, serve: Serve, elsewhere: Elsewhere) -> None:
    """A submodule from one endpoint and the whole module from another."""
    model = nn.Sequential(nn.Linear(2, 2, device=device), nn.Linear(2, 2, device=device))
    provider.share("whole")(lambda: model)
    provider.share("part")(lambda: model[1])
    serve()
    answer = elsewhere(
        """
        from shared_rpc.memory.mapping import MAPPINGS
        before = len(MAPPINGS)
        whole, part = client.call("whole"), client.call("part")
        answer = [whole[1].weight.data_ptr() == part.weight.data_ptr(), len(MAPPINGS) - before]
        """
    )
    assert answer == [True, 1]


def test_more_segments_than_a_message_carries_arrive(
    device: str, get: Serve, elsewhere: Elsewhere, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An object in 260 segments; a message carries 253 descriptors at most."""
    monkeypatch.setattr(placement, "pack", partial(pack, limit=1))
    get([torch.full((2,), number, device=device) for number in range(260)])
    answer = elsewhere('answer = [tensor.unique().tolist() for tensor in client.call("get")]')
    assert answer == [[number] for number in range(260)]


# The same results.


@pytest.mark.filterwarnings("ignore:RNN module weights are not part of single contiguous chunk")
@pytest.mark.parametrize("normed", [False, *deep(True)], ids=["plain", "weight_norm"])
def test_recurrent_layers_stay_in_shared_memory(device: str, get: Serve, elsewhere: Elsewhere, normed: bool) -> None:
    """On a GPU torch would move their weights into one block, on either side."""
    model = nn.LSTM(4, 4, device=device)
    if normed:
        nn.utils.parametrizations.weight_norm(model, "weight_hh_l0")
    get(model)
    inputs = torch.ones(1, 1, 4, device=device)
    for number in (2, 3):
        elsewhere(
            """
            import warnings
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                model = client.call("get")
                model.flatten_parameters()
                model.to(device)(torch.ones(1, 1, 4, device=device))
                model.weight_ih_l0.data.fill_(number)
                answer = model.weight_ih_l0.sum().item()  # waits for the GPU
            """,
            number=number,
        )
        assert model.weight_ih_l0.unique().tolist() == [number]
        model.flatten_parameters()
        model.to(device)(inputs)


# Classes that a client cannot import.

SCRIPT = """
    import functools, sys, torch
    from shared_rpc import Provider, Server

    def shift(by, tensor):
        return tensor + by

    class Net(torch.nn.Module):
        gain = staticmethod(lambda tensor: tensor * 3)

        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(2, device={device!r}))
            self.shift = functools.partial(shift, 10)
            self.register_forward_hook(lambda module, args, output: self.gain(output))

        def forward(self, tensor):
            return self.shift(tensor * self.weight)

    provider = Provider(device={device!r})
    net = Net()
    provider.share("get", managed=True)(lambda: net)
    with Server(provider):
        print("serving")
        sys.stdin.read()
    """


def test_classes_of_a_script_are_pickled_as_code(
    base_path: str, device: str, elsewhere: Elsewhere, children: list[Child]
) -> None:
    """A class, functions and lambdas of the server's ``__main__`` work in a process without them."""
    server = python(SCRIPT.format(device=device))
    children.append(server)
    server.expect("serving")
    answer = elsewhere(
        """
        with client.call("get") as handle:
            net = handle.value
            answer = [type(net).__module__, type(net).__name__, net(torch.ones(2, device=device)).tolist()]
        """
    )
    assert answer == ["__main__", "Net", [33, 33]]


@pytest.fixture
def private_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A module that only this process can import."""
    (tmp_path / "only_in_the_server.py").write_text("import torch\n\nclass Net(torch.nn.Linear):\n    answer = 42\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield importlib.import_module("only_in_the_server")
    del sys.modules["only_in_the_server"]


def test_modules_registered_by_value_are_not_needed(device: str, get: Serve, private_module: Any, elsewhere: Elsewhere) -> None:
    """Those given to ``pickle_by_value`` need not exist in the client."""
    pickle_by_value(private_module)
    try:
        get(private_module.Net(2, 2, device=device))
        assert elsewhere('answer = client.call("get").answer') == 42
    finally:
        by_value._names.discard(private_module.__name__)


# Reading only, and dying.


def test_writing_to_read_only_memory_ends_only_the_writer(
    device: str, get: Serve, elsewhere: Elsewhere, children: list[Child]
) -> None:
    """Server and other clients are unaffected."""
    value = torch.tensor([1.0, 2.0], device=device)
    get(value, access="read")
    elsewhere('kept["value"] = client.call("get")')
    culprit = python(
        f"""
        import torch
        from shared_rpc import Client
        value = Client(device={device!r}).call("get")
        print("reads:", value.tolist())
        value.add_(1)
        print("wrote:", value.tolist())
        """
    )
    children.append(culprit)
    assert culprit.expect("reads:") == "reads: [1.0, 2.0]"
    code, errors = culprit.close()
    assert (code == -signal.SIGSEGV) if device == "cpu" else ("illegal" in errors)
    assert elsewhere('answer = [kept["value"].tolist(), client.call("get").tolist()]') == [[1, 2], [1, 2]]
    value[1] = 5
    settle(device)
    assert elsewhere('answer = [kept.pop("value").tolist(), client.call("get").tolist()]') == [[1, 5], [1, 5]]


@pytest.mark.whole_gpu
def test_killed_clients_leave_nothing(
    base_path: str, device: str, get: Serve, provider: Provider, process: Callable[[], Interpreter]
) -> None:
    """Clients killed while attached leave no lease in the server and no memory in use on the device."""
    count = (256 << 20 if device == "cuda" else 1 << 20) // 4
    server = get(nn.ParameterList([torch.ones(count, device=device)]), managed=True)
    with provider.call("get"):
        before, descriptors = in_use(device), open_fds()
        clients = [process() for _ in range(2)]
        for client in clients:
            total = client.run(
                """
                from shared_rpc import Client
                kept["client"] = Client(base_path, device=device)
                kept["handle"] = kept["client"].call("get")
                answer = kept["handle"].value[0].sum(dtype=torch.float64).item()
                """,
                base_path=base_path,
                device=device,
            )
            assert total == count
        assert server.engine.ask(lambda core: core.info()["leases"]) == 3
        for client in clients:
            client.kill()
        eventually(lambda: server.engine.ask(lambda core: core.info()["leases"]) == 1, what="leases given back")
        eventually(lambda: in_use(device) <= before + SLACK[device], what=f"memory in use back to {before}")
        eventually(lambda: open_fds() <= descriptors, what="descriptors closed")


#: Tolerance of :func:`in_use`, in bytes.
SLACK = {"cpu": 0, "cuda": 1 << 20}


def in_use(device: str) -> int:
    """Return the bytes in use on the GPU, by any process; on the host, the mapped segments of this process."""
    MAPPINGS.drain()
    if device == "cpu":
        return len(MAPPINGS)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return total - free


def settle(device: str) -> None:
    """Wait until other processes can see writes to a GPU."""
    if device == "cuda":
        torch.cuda.synchronize()


@pytest.mark.gpu
def test_cuda_graphs_over_shared_memory_see_writes(base_path: str, process: Callable[[], Interpreter]) -> None:
    """A graph captured by a client over mapped weights computes with the server's later writes."""
    provider = Provider(base_path, device="cuda")
    weight = torch.ones(4, device="cuda")
    provider.share("get")(lambda: weight)
    with Server(provider):
        client = process()
        first = client.run(
            """
            weight, data = client.call("get"), torch.full((4,), 2.0, device="cuda")
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                output = weight * data
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                output = weight * data
            graph.replay()
            kept.update(graph=graph, output=output, weight=weight, data=data)
            answer = output.tolist()
            """,
            base_path=base_path,
            device="cuda",
        )
        weight.fill_(10)
        torch.cuda.synchronize()
        second = client.run('kept["graph"].replay(); answer = kept["output"].tolist()')
    assert (first, second) == ([2, 2, 2, 2], [20, 20, 20, 20])
