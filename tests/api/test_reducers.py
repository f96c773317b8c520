"""Tensors that are sent by name: the receiver maps memory from the server, also after the sender's end."""

from __future__ import annotations

import base64
import os
import pickle
import textwrap
from contextlib import ExitStack
from multiprocessing.reduction import ForkingPickler
from typing import Any

import pytest
import torch
from torch import nn

from shared_rpc import Client
from shared_rpc.errors import ConnectError, StaleHandleError
from shared_rpc.extras.by_name import dumps
from tests.kit.attacker import CONTAINER, needs_namespaces
from tests.kit.processes import eventually
from tests.kit.world import World

#: The device first: of provider and clients too.
pytestmark = pytest.mark.usefixtures("device")

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


def receive(world: World, code: str, **names: Any) -> Any:
    """Run code in a process of another family, which has no client of the server."""
    return world.run("import base64, pickle\n" + textwrap.dedent(code), base_path="", **names)


def sent_by_a_dead_process(world: World) -> str:
    """Return the pickles that a program sent before it was killed."""
    sender = world.process(SENDER.format(device=world.device), fresh=True)
    data = sender.expect("handle:").split()[1]
    assert sender.process.wait(30) == -9
    return data


def test_killed_senders_do_not_affect_receivers(device: str, world: World) -> None:
    """A process of another family gets the server's memory from a killed program's message, and writes to it."""
    value = torch.arange(40.0, device=device).reshape(4, 10)
    world.serve_result(value)
    data = sent_by_a_dead_process(world)
    assert receive(world, REBUILT + "got[0].fill_(7); answer = got.tolist()", data=data)[0] == [7.0] * 10
    if device == "cuda":
        torch.cuda.synchronize()
    assert value[1].tolist() == [7.0] * 10


@pytest.mark.deep
@pytest.mark.parametrize("device", ["cpu"])
@needs_namespaces
def test_receivers_in_a_container_map_the_memory(device: str, world: World) -> None:
    """They have their own user, pid and ipc namespaces, and need none of the sender's."""
    world.serve_result(torch.arange(4.0))
    data = sent_by_a_dead_process(world)
    code = f"import torch; device = 'cpu'; data = {data!r}" + REBUILT + "print('got:', got.tolist())"
    receiver = world.start("-c", code, before=(*CONTAINER, "--ipc"), fresh=True)
    assert receiver.expect("got:") == "got: [1.0, 2.0, 3.0]"


def test_multiprocessing_pickles_load_in_unrelated_processes(device: str, world: World, client: Client) -> None:
    """Without a common key; ties, storages and flags are the same."""
    module = nn.Sequential(nn.Linear(3, 3, device=device), nn.Linear(3, 3, device=device))
    module[1].weight = module[0].weight
    module[0].bias.requires_grad_(False)
    world.serve_result(module)
    data = text_of(bytes(ForkingPickler.dumps(client.call("get"))))
    answer = receive(
        world,
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


def test_plain_pickles_name_tensors(device: str, world: World, client: Client) -> None:
    """``dumps()`` names the server's tensors, and copies the rest; ``pickle.loads()`` rebuilds both."""
    world.serve_result(torch.zeros(4, device=device))
    shared, own = client.call("get"), torch.ones(2)
    data = dumps({"shared": shared, "own": own, "name": "x"})
    assert len(data) < 2000
    code = """
got = pickle.loads(base64.b64decode(data))
got["shared"].add_(got["own"].sum().item())
torch.cuda.synchronize() if device == "cuda" else None
answer = got["name"]
"""
    assert receive(world, code, data=text_of(data)) == "x"
    assert shared.tolist() == [2] * 4


@pytest.mark.parametrize("device", ["cpu"])
def test_messages_share_one_storage_and_lease(device: str, world: World) -> None:
    """Rows in separate pickles share a storage; the receiver's lease ends with the last of them."""
    world.serve_result(torch.arange(40.0).reshape(4, 10), managed=True)
    with world.provider.call("get") as handle, Client(world.provider.base_path, device=device) as client:
        with client.call("get") as other:
            rows = [text_of(dumps(row)) for row in other.value]
        code = "kept['rows'] = [pickle.loads(base64.b64decode(row)) for row in rows]\n"
        code += "answer = [len({row.untyped_storage()._cdata for row in kept['rows']}), kept['rows'][3][0].item()]"
        assert receive(world, code, rows=rows) == [1, 30.0]
        pids = [holder["pid"] for holder in client.holders(handle.object_id)]
        receive(world, "answer = kept.clear()")
        assert len(pids) == 2 and os.getpid() in pids
        eventually(lambda: len(client.holders(handle.object_id)) == 1)


@pytest.mark.parametrize("device", ["cpu"])
def test_receivers_of_tensors_are_clients_while_they_have_one(device: str, world: World, client: Client) -> None:
    """The session ends with the last tensor, so that a server can end when it is idle; the next message begins another."""
    world.serve_result(torch.arange(4.0))
    data = text_of(dumps(client.call("get")))
    for _ in range(2):
        assert (
            receive(world, "kept['got'] = pickle.loads(base64.b64decode(data)); answer = kept['got'].tolist()", data=data)[3]
            == 3
        )
        assert len(client.list_sessions()) == 2
        receive(world, "answer = kept.clear()")
        eventually(lambda: [session["pid"] for session in client.list_sessions()] == [os.getpid()])


@pytest.mark.parametrize("device", ["cpu"])
def test_receptions_leak_nothing(device: str, world: World, client: Client) -> None:
    """After a thousand buffers a receiver has the same descriptors and mappings as after one."""
    world.serve_result(torch.zeros(1))
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
            *first, mappings, fds = receive(world, code, batch=[text_of(dumps(buffer.value)) for buffer in buffers])
            assert first == list(range(100))
            counts.append((mappings, fds))
    assert counts[-1] == counts[1]


@pytest.mark.parametrize("device", ["cpu"])
def test_holders_of_a_freed_buffer_send_its_tensors(device: str, world: World, client: Client) -> None:
    """Until they release it: nothing changes for them."""
    with world.serve(), client.create_buffer(4) as buffer:
        buffer.value.fill_(7)
        client.free_buffer(buffer)
        code = "answer = pickle.loads(base64.b64decode(data)).tolist()"
        assert receive(world, code, data=text_of(dumps(buffer.value))) == [7] * 4


def test_missing_objects_are_reported(device: str, world: World) -> None:
    """The error says that the object must be held; without a server, that the socket must be at the same path."""
    world.share("get", managed=True)(lambda: torch.zeros(4, device=device))
    code = """
errors = []
for text in texts:
    try:
        pickle.loads(base64.b64decode(text))
    except Exception as error:
        errors.append([type(error).__name__, " ".join(error.__notes__)])
answer = errors
"""
    with world.serve(), Client(world.base_path, device=device) as client:
        with client.create_buffer(16) as buffer, client.call("get") as handle:
            texts = [text_of(dumps(buffer.value)), text_of(dumps(handle.value))]
        world.provider.invalidate_endpoint_cache("get")
        gone, dropped = receive(world, code, texts=texts)
    (lost,) = receive(world, code, texts=texts[:1])
    assert gone[0] == StaleHandleError.__name__ and "ttl= or keep=True" in gone[1]
    assert dropped[0] == StaleHandleError.__name__ and "must hold" in dropped[1]
    assert lost[0] == ConnectError.__name__ and "same path" in lost[1]
