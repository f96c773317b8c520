"""In-place writes to read-only weights by functions whose names do not show it, and the alternatives that the docs name."""

from __future__ import annotations

import signal
from collections.abc import Callable

import pytest
import torch

from shared_rpc import Provider, Server
from tests.kit.apps import Serve
from tests.kit.processes import Child, python

pytestmark = pytest.mark.usefixtures("no_leaks")

#: The beginning of every child. It prints a line before the step under test, and after it.
BEGIN = """
import copy
import torch
from torch import nn
from shared_rpc import Client

client = Client(device="cpu", connect_timeout=5)
model = client.call({endpoint!r})
x = torch.randn(3, 64)
print("begins", flush=True)
{code}
print("survived", flush=True)
"""

TRAIN = """
step = torch.optim.SGD([one for one in trained.parameters() if one.requires_grad], lr=0.1)
trained(x).sum().backward()
step.step()
"""

#: By name: the endpoint, the write, and the alternatives.
CASES: dict[str, tuple[str, str, list[str]]] = {
    "optimizer": (
        "linear",
        f"trained = model.requires_grad_(True)\n{TRAIN}",
        [
            f"trained = nn.Sequential(model, nn.Linear(64, 4))\n{TRAIN}",
            f"trained = copy.deepcopy(model).requires_grad_(True)\n{TRAIN}",
        ],
    ),
    "load_state_dict": (
        "linear",
        "model.load_state_dict(nn.Linear(64, 64).state_dict())",
        [
            "state = nn.Linear(64, 64).state_dict()\nmodel.load_state_dict(state, assign=True)\n"
            "assert torch.equal(model.weight, state['weight'])",
            "copy.deepcopy(model).load_state_dict(nn.Linear(64, 64).state_dict())",
        ],
    ),
    "batch norm": (
        "normed",
        "model.train()\nmodel(x)",
        [
            "model.train()\nfor part in model.modules():\n    if isinstance(part, nn.BatchNorm1d): part.eval()\nmodel(x)",
            "model.train()\nmodel[1] = copy.deepcopy(model[1])\nmodel(x)",
        ],
    ),
    "max_norm": (
        "embedding",
        "model(torch.arange(5))",
        ["model.max_norm = None\nmodel(torch.arange(5))", "model = copy.deepcopy(model)\nmodel(torch.arange(5))"],
    ),
    "torch.compile": (
        "linear",
        "torch.compile(lambda x: model.weight.mul_(2) @ x.T, backend='aot_eager')(x)",
        ["torch.compile(lambda x: (model.weight * 2) @ x.T, backend='aot_eager')(x)"],
    ),
}


@pytest.fixture
def server(provider: Provider, serve: Serve) -> Server:
    """A server of small models that clients may only read."""

    provider.share("linear", access="read")(lambda: torch.nn.Linear(64, 64).requires_grad_(False))

    @provider.share(access="read")
    def normed() -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.BatchNorm1d(64)).eval().requires_grad_(False)

    @provider.share(access="read")
    def embedding() -> torch.nn.Module:
        module = torch.nn.Embedding(8, 64, max_norm=0.1).eval().requires_grad_(False)
        module(torch.arange(8))
        return module

    return serve()


@pytest.fixture
def start(server: Server, children: list[Child]) -> Callable[..., Child]:
    """``start(endpoint, code)`` runs code in a client."""

    def start(endpoint: str, code: str) -> Child:
        child = python(BEGIN.format(endpoint=endpoint, code=code))
        children.append(child)
        return child

    return start


def ended(child: Child) -> tuple[int, str, str]:
    """Wait for the end; return the exit code, the last printed line, and the text on standard error."""
    output, errors = child.process.communicate(timeout=50)
    return child.process.returncode, output.splitlines()[-1], errors


@pytest.mark.parametrize("case", CASES)
def test_writes_end_the_process_with_a_message(start: Callable[..., Child], case: str) -> None:
    """Written by an operation whose name does not show it."""
    endpoint, code, _ = CASES[case]
    status, output, errors = ended(start(endpoint, code))
    assert (status, output) == (-signal.SIGSEGV, "begins")
    assert "wrote to memory that is shared with access='read'" in errors


@pytest.mark.parametrize(("case", "number"), [(case, number) for case in CASES for number in range(len(CASES[case][2]))])
def test_documented_remedies_work(start: Callable[..., Child], case: str, number: int) -> None:
    """The alternatives that the page gives."""
    endpoint, _, ways = CASES[case]
    status, output, errors = ended(start(endpoint, ways[number]))
    assert (status, output) == (0, "survived"), errors
