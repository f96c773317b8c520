"""Receivers of weights in other trainers take tensors from our memory: verl's and checkpoint-engine's, as published.

They are the packages' own classes; the packages' other modules, which need Ray, CUDA and more, are not imported.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import reduce_tensor

from shared_rpc import Client
from tests.kit.interpreter import bits
from tests.kit.processes import Child, eventually
from tests.kit.world import World

zmq = pytest.importorskip("zmq")

#: A receiving process: packages without the imports of their ``__init__``, and functions of torch for a missing GPU.
RECEIVER = """
    import importlib, importlib.util, json, sys, types
    import torch
    from tests.kit.interpreter import bits

    device, address = torch.device({device!r}), {address!r}
    (place,) = importlib.util.find_spec({packages!r}[0]).submodule_search_locations
    for name in {packages!r}:
        package = sys.modules[name] = types.ModuleType(name)
        package.__path__ = ["/".join([place, *name.split(".")[1:]])]
    module = importlib.import_module({module!r})
    nothing = lambda *_: None
    host = types.SimpleNamespace(synchronize=nothing, ipc_collect=nothing, empty_cache=nothing)

    def received(weights, *_):
        print("received:", json.dumps({{name: bits(tensor) for name, tensor in weights}}), flush=True)
"""
VERL = """
    if device.type == "cpu":
        module.get_torch_device, module.is_support_ipc = lambda: host, lambda: False
    module.BucketedWeightReceiver(address, device).receive_weights(received)
    print("done", flush=True)
    sys.stdin.readline()
"""
CHECKPOINT_ENGINE = """
    import zmq

    if device.type == "cpu":
        module.DeviceManager = lambda: types.SimpleNamespace(device_module=host)
    hook = lambda: print("hook", flush=True)
    module.update_weights_from_ipc(zmq.Context(), address, 0, run=received, post_hook=hook)
    print("done", flush=True)
    sys.stdin.readline()
"""
_ROLLOUT = ("verl", "verl.utils", "verl.workers", "verl.workers.rollout", "verl.workers.rollout.vllm_rollout")


@pytest.fixture
def client(device: str, world: World) -> Client:
    """A client of a running server."""
    world.serve()
    return world.client()


class Sender:
    """The other end of a receiver's socket."""

    def __init__(self, address: str) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.REQ)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.RCVTIMEO, 30_000)
        self._socket.bind(address)

    def send(self, value: Any) -> None:
        """Send a value, and wait until the receiver has processed it."""
        self._socket.send_pyobj(value)
        assert self._socket.recv() == b""

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()
        self._context.term()


@contextmanager
def sending(body: str, world: World, folder: Path, **names: Any) -> Iterator[tuple[Sender, Child]]:
    """Yield a sender, with a receiver in another process."""
    package = names["module"].partition(".")[0]
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} cannot be imported here")
    address = f"ipc://{folder}/z"
    sender = Sender(address)
    try:
        receiver = world.process(RECEIVER.format(address=address, **names) + body, fresh=True)
        yield sender, receiver
    finally:
        sender.close()


def weights(device: str, seed: int) -> dict[str, torch.Tensor]:
    """Return a trainer's weights after a step."""
    torch.manual_seed(seed)
    made = {"a": torch.randn(3, 5, dtype=torch.bfloat16), "b": torch.randn(7), "c": torch.arange(9).reshape(3, 3)}
    return {name: tensor.to(device) for name, tensor in made.items()}


def packed(buffer: torch.Tensor, tensors: dict[str, torch.Tensor]) -> list[dict[str, Any]]:
    """Copy tensors into a bucket, and return the offset of each."""
    found = []
    for place, (name, tensor) in enumerate(tensors.items()):
        offset = 512 * place
        buffer[offset : offset + tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)
        found.append({"name": name, "shape": tensor.shape, "dtype": tensor.dtype, "offset": offset})
    if buffer.is_cuda:
        torch.cuda.synchronize()
    return found


def expect(receiver: Child, tensors: dict[str, torch.Tensor]) -> None:
    """Check that the receiver has these tensors, bit for bit."""
    line = receiver.expect("received:").removeprefix("received:")
    assert json.loads(line) == {name: bits(tensor) for name, tensor in tensors.items()}


def holders(client: Client) -> list[int]:
    """Return the number of leases on each object of the server."""
    return [info["leases"] for info in client.list_objects()]


def test_the_receiver_of_verl_gets_all_weights(device: str, client: Client, world: World, tmp_path: Path) -> None:
    """In buckets, and a tensor that is larger than one; it keeps no memory afterwards."""
    names = {"device": device, "packages": _ROLLOUT, "module": f"{_ROLLOUT[-1]}.bucketed_weight_transfer"}
    with sending(VERL, world, tmp_path, **names) as (sender, receiver):
        bucket, large = client.create_buffer(4096), client.create_buffer((2000,), "float32")
        large.value.copy_(torch.arange(2000))
        sender.send(reduce_tensor(bucket.value))
        for step in range(3):
            tensors = weights(device, step)
            meta = {each["name"]: {**each, "handle": None} for each in packed(bucket.value, tensors)}
            sender.send({"bucket_meta": meta, "is_last": False})
            expect(receiver, tensors)
        extent = {"shape": large.value.shape, "dtype": large.value.dtype, "offset": 0}
        meta = {"large": {"name": "large", **extent, "handle": reduce_tensor(large.value)}}
        sender.send({"bucket_meta": meta, "is_last": True})
        expect(receiver, {"large": large.value})
        receiver.expect("done")
        eventually(lambda: holders(client) == [1, 1])


def test_the_receiver_of_checkpoint_engine_gets_all_weights(device: str, client: Client, world: World, tmp_path: Path) -> None:
    """In buckets, whose memory it returns before it processes the weights."""
    names = {"device": device, "packages": ("checkpoint_engine",), "module": "checkpoint_engine.worker"}
    with sending(CHECKPOINT_ENGINE, world, tmp_path, **names) as (sender, receiver):
        bucket = client.create_buffer(4096)
        sender.send(reduce_tensor(bucket.value))
        for step in range(3):
            tensors = weights(device, step)
            sender.send(packed(bucket.value, tensors))
            expect(receiver, tensors)
        assert holders(client) == [2]
        sender.send(None)
        eventually(lambda: holders(client) == [1])
        sender.send(None)
        receiver.expect("hook")
        receiver.expect("done")
