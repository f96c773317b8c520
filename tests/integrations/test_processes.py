"""Scripts that attach: several processes, a server that comes up by itself, and one that ends."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from shared_rpc import Client, Provider
from shared_rpc.errors import ConnectError
from shared_rpc.integrations.transformers import shared
from tests.integrations.checkpoints import inputs
from tests.integrations.comparing import shared_parameters
from tests.kit.brokers import is_running
from tests.kit.processes import Child, eventually, skip_without_late_threads
from tests.kit.world import World

#: A user's script, which also answers the test's requests.
SCRIPT = """
import sys, torch
from transformers import AutoModelForCausalLM
from shared_rpc.integrations.transformers import shared

def load():
    with shared(fallback=False):
        return AutoModelForCausalLM.from_pretrained(sys.argv[1])

model = load()
tokens = torch.tensor([[1, 17, 42, 5], [1, 3, 3, 90]])
for line in sys.stdin:
    with torch.no_grad():
        print("computes", model(tokens).logits.double().sum().item(), flush=True)
"""
Run = Callable[..., Child]


@pytest.fixture
def run(tmp_path: Path, base_path: str, world: World) -> Iterator[Run]:
    """``run(checkpoint)`` starts the script in the role ``spawn``; its server ends with the test."""

    def start(checkpoint: str) -> Child:
        script = tmp_path / "script.py"
        script.write_text(SCRIPT)
        environ = {
            **{"SHARED_TENSOR_ROLE": "spawn", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"},
            **{"CUDA_VISIBLE_DEVICES": "", "HF_HUB_DISABLE_PROGRESS_BARS": "1"},
        }
        return world.start(str(script), checkpoint, environ=environ)

    yield start
    for child in world.children:
        child.process.kill()
    with suppress(ConnectError):  # one of the test itself has ended
        if (pid := server_of(base_path)) != os.getpid():
            os.kill(pid, signal.SIGTERM)
            eventually(lambda: not is_running(pid), seconds=20)


def server_of(base_path: str) -> int:
    """Return the process id of the server."""
    with Client(base_path, device="cpu", connect_timeout=0) as client:
        return int(client.get_server_info()["pid"])


def computed(child: Child) -> float:
    """Make a script compute, and return its output."""
    child.tell("compute")
    return float(child.expect("computes").split()[1])


def expected(checkpoint: str) -> float:
    """Return the same for a model that is not shared."""
    return result_of(AutoModelForCausalLM.from_pretrained(checkpoint))


def result_of(model: Any) -> float:
    """What a script computes with a model."""
    with torch.no_grad():
        return float(model(**inputs(model)).logits.double().sum())


@pytest.mark.timeout(180)
def test_a_script_starts_its_server(run: Run, checkpoint: str, base_path: str) -> None:
    """It loads once, and another process attaches; after its SIGKILL both continue to compute."""
    script = run(checkpoint)
    assert computed(script) == expected(checkpoint)
    provider = Provider(base_path, execution_mode="client", device="cpu")
    with shared(provider, fallback=False):
        mine = AutoModelForCausalLM.from_pretrained(checkpoint)
    with closing(provider), Client(base_path, device="cpu", connect_timeout=0) as client:
        server = client.get_server_info()["pid"]
        found = [client.get_object_info(each["object_id"]) for each in client.list_objects()]
    assert [(each["generation"], each["leases"]) for each in found] == [(1, 2)]
    os.kill(server, signal.SIGKILL)
    eventually(lambda: not is_running(server))
    assert [computed(script), result_of(mine)] == [expected(checkpoint)] * 2


def test_the_app_is_a_command(base_path: str, checkpoint: str, world: World) -> None:
    """``python -m shared_rpc.integrations.transformers`` serves until it is stopped."""
    skip_without_late_threads()
    environ = {"SHARED_TENSOR_ROLE": "server", "CUDA_VISIBLE_DEVICES": ""}
    child = world.start("-m", "shared_rpc.integrations.transformers", environ=environ)
    child.expect_error(f"serving at {base_path}-cpu.sock")
    provider = Provider(base_path, execution_mode="client", device="cpu")
    with shared(provider, fallback=False):
        model = AutoModelForCausalLM.from_pretrained(checkpoint)
    assert shared_parameters(model).keys() == dict(model.named_parameters()).keys()
    provider.close()
    assert child.close(signal.SIGTERM)[0] == 0
