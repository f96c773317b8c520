"""Tensors that are sent by name: the receiver maps memory from the server, also after the sender's end."""

from __future__ import annotations

import base64
import os
import pickle
import textwrap
from collections.abc import Callable
from contextlib import ExitStack
from multiprocessing.reduction import ForkingPickler
from typing import Any

import pytest
import torch
from torch import nn

from shared_rpc import Client, Provider
from shared_rpc.errors import ConnectError, StaleHandleError
from shared_rpc.extras.by_name import dumps
from tests.kit.apps import Connect, Serve
from tests.kit.attacker import CONTAINER, needs_namespaces
from tests.kit.interpreter import Interpreter
from tests.kit.processes import Child, eventually, python

#: The device first: of provider and clients too.
pytestmark = pytest.mark.usefixtures("device")

Run = Callable[..., Any]

#: The steps of the receivers of vLLM, verl, checkpoint-engine and SkyRL.
REBUILT = """
import base64, pickle

def rebuilt(handle, device_index):
    func, args = handle
    args = list(args)
    args[6] = device_index
    return func(*args)

index = torch.cuda.current_device() if device == "cuda" else 0
got = rebuilt(pickle.loads(base64.b64decode(data)), index)
"""

#: A program that imported torch's function before this package; it ends by SIGKILL after printing its pickles.
SENDER = """
    import base64, os, pickle
    from torch.multiprocessing.reductions import reduce_tensor
    from shared_rpc import Client

    with Client(device={device!r}, connect_timeout=0) as client:
        value = client.call("get")
        print("handle:", base64.b64encode(pickle.dumps(reduce_tensor(value[1:]))).decode(), flush=True)
        os.kill(os.getpid(), 9)
"""


def text_of(value: Any) -> str:
    """Return bytes, or a pickle of something else, as text."""
    return base64.b64encode(value if isinstance(value, bytes) else pickle.dumps(value)).decode()


@pytest.fixture
def elsewhere(interpreter: Interpreter, device: str) -> Run:
    """``elsewhere(code, data=…)`` runs in a process of another family, which has no client of the server."""
    return lambda code, **names: interpreter.run("import base64, pickle\n" + textwrap.dedent(code), device=device, **names)


@pytest.fixture
def client(connect: Connect) -> Client:
    """A client in this process."""
    return connect()


def sent_by_a_dead_process(children: list[Child], device: str) -> str:
    """Return the pickles that a program sent before it was killed."""
    sender = python(SENDER.format(device=device), fresh=True)
    children.append(sender)
    data = sender.expect("handle:").split()[1]
    assert sender.process.wait(30) == -9
    return data


def test_killed_senders_do_not_affect_receivers(device: str, get: Serve, elsewhere: Run, children: list[Child]) -> None:
    """A process of another family gets the server's memory from a killed program's message, and writes to it."""
    value = torch.arange(40.0, device=device).reshape(4, 10)
    get(value)
    data = sent_by_a_dead_process(children, device)
    assert elsewhere(REBUILT + "got[0].fill_(7); answer = got.tolist()", data=data)[0] == [7.0] * 10
    if device == "cuda":
        torch.cuda.synchronize()
    assert value[1].tolist() == [7.0] * 10


@pytest.mark.deep
@pytest.mark.parametrize("device", ["cpu"])
@needs_namespaces
def test_receivers_in_a_container_map_the_memory(device: str, get: Serve, children: list[Child]) -> None:
    """They have their own user, pid and ipc namespaces, and need none of the sender's."""
    get(torch.arange(4.0))
    data = sent_by_a_dead_process(children, device)
    code = f"import torch; device = 'cpu'; data = {data!r}" + REBUILT + "print('got:', got.tolist())"
    receiver = Child("-c", code, before=(*CONTAINER, "--ipc"), fresh=True)
    children.append(receiver)
    assert receiver.expect("got:") == "got: [1.0, 2.0, 3.0]"


def test_multiprocessing_pickles_load_in_unrelated_processes(device: str, get: Serve, elsewhere: Run, client: Client) -> None:
    """Without a common key; ties, storages and flags are the same."""
    module = nn.Sequential(nn.Linear(3, 3, device=device), nn.Linear(3, 3, device=device))
    module[1].weight = module[0].weight
    module[0].bias.requires_grad_(False)
    get(module)
    data = text_of(bytes(ForkingPickler.dumps(client.call("get"))))
    answer = elsewhere(
        """
        got = pickle.loads(base64.b64decode(data))
        with torch.no_grad():
            got[0].bias.fill_(4)
        torch.cuda.synchronize() if device == "cuda" else None
        answer = [got[0].weight is got[1].weight, got[0].bias.requires_grad, got[1].bias.requires_grad]
        """,
        data=data,
    )
    assert answer == [True, False, True]
    assert module[0].bias.tolist() == [4, 4, 4]


def test_plain_pickles_name_tensors(device: str, get: Serve, elsewhere: Run, client: Client) -> None:
    """``dumps()`` names the server's tensors, and copies the rest; ``pickle.loads()`` rebuilds both."""
    get(torch.zeros(4, device=device))
    shared, own = client.call("get"), torch.ones(2)
    data = dumps({"shared": shared, "own": own, "name": "x"})
    assert len(data) < 2000
    code = """
got = pickle.loads(base64.b64decode(data))
got["shared"].add_(got["own"].sum().item())
torch.cuda.synchronize() if device == "cuda" else None
answer = got["name"]
"""
    assert elsewhere(code, data=text_of(data)) == "x"
    assert shared.tolist() == [2] * 4


@pytest.mark.parametrize("device", ["cpu"])
def test_messages_share_one_storage_and_lease(device: str, provider: Provider, get: Serve, elsewhere: Run) -> None:
    """Rows in separate pickles share a storage; the receiver's lease ends with the last of them."""
    get(torch.arange(40.0).reshape(4, 10), managed=True)
    with provider.call("get") as handle, Client(provider.base_path, device=device) as client:
        with client.call("get") as other:
            rows = [text_of(dumps(row)) for row in other.value]
        code = "kept['rows'] = [pickle.loads(base64.b64decode(row)) for row in rows]\n"
        code += "answer = [len({row.untyped_storage()._cdata for row in kept['rows']}), kept['rows'][3][0].item()]"
        assert elsewhere(code, rows=rows) == [1, 30.0]
        pids = [holder["pid"] for holder in client.holders(handle.object_id)]
        elsewhere("answer = kept.clear()")
        assert len(pids) == 2 and os.getpid() in pids
        eventually(lambda: len(client.holders(handle.object_id)) == 1)


@pytest.mark.parametrize("device", ["cpu"])
def test_receivers_of_tensors_are_clients_while_they_have_one(device: str, get: Serve, elsewhere: Run, client: Client) -> None:
    """The session ends with the last tensor, so that a server can end when it is idle; the next message begins another."""
    get(torch.arange(4.0))
    data = text_of(dumps(client.call("get")))
    for _ in range(2):
        assert elsewhere("kept['got'] = pickle.loads(base64.b64decode(data)); answer = kept['got'].tolist()", data=data)[3] == 3
        assert len(client.list_sessions()) == 2
        elsewhere("answer = kept.clear()")
        eventually(lambda: [session["pid"] for session in client.list_sessions()] == [os.getpid()])


@pytest.mark.parametrize("device", ["cpu"])
def test_receptions_leak_nothing(device: str, get: Serve, elsewhere: Run, client: Client) -> None:
    """After a thousand buffers a receiver has the same descriptors and mappings as after one."""
    get(torch.zeros(1))
    code = """
from tests.kit.processes import mapped_segments, open_fds
import gc
def receive(data):
    return pickle.loads(base64.b64decode(data))[0].item()
answer = [receive(data) for data in batch]
gc.collect()
answer += [mapped_segments(), open_fds()]
"""
    counts = []
    for _ in range(10):
        with ExitStack() as stack:
            buffers = [stack.enter_context(client.create_buffer(4096)) for _ in range(100)]
            for number, buffer in enumerate(buffers):
                buffer.value.fill_(number)
            *first, mappings, fds = elsewhere(code, batch=[text_of(dumps(buffer.value)) for buffer in buffers])
            assert first == list(range(100))
            counts.append((mappings, fds))
    assert counts[-1] == counts[1]


@pytest.mark.parametrize("device", ["cpu"])
def test_missing_objects_are_reported(device: str, base_path: str, provider: Provider, serve: Serve, elsewhere: Run) -> None:
    """The error says that the object must be held; without a server, that the socket must be at the same path."""
    provider.share("get", managed=True)(lambda: torch.zeros(4))
    code = """
errors = []
for text in texts:
    try:
        pickle.loads(base64.b64decode(text))
    except Exception as error:
        errors.append([type(error).__name__, " ".join(error.__notes__)])
answer = errors
"""
    with serve(), Client(base_path, device=device) as client:
        with client.create_buffer(16) as buffer, client.call("get") as handle:
            texts = [text_of(dumps(buffer.value)), text_of(dumps(handle.value))]
        provider.invalidate_endpoint_cache("get")
        gone, dropped = elsewhere(code, texts=texts)
    (lost,) = elsewhere(code, texts=texts[:1])
    assert gone[0] == StaleHandleError.__name__ and "ttl= or keep=True" in gone[1]
    assert dropped[0] == StaleHandleError.__name__ and "must hold" in dropped[1]
    assert lost[0] == ConnectError.__name__ and "same path" in lost[1]
