"""Other ways to call a function of another process with a tensor, for ``rpc --peers``: each as its users would write it.

``multiprocessing.connection`` passes tensors by torch's own sharing; the others copy their bytes, those of a GPU through the
host. A peer takes part where it is installed.
"""

from __future__ import annotations

import importlib.util
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import connection, current_process
from typing import Any, ClassVar

import msgspec
import torch

from benchmarks.workload import SMALL

__all__ = ["PEERS", "RpcPeer", "installed"]

#: The limit of a message, for those that have one.
_LARGEST = 1 << 30
_KEY = b"benchmarks"
#: Seconds for a server to listen.
_PATIENCE = 10.0

_Ready = Callable[[], None]


def answer(endpoint: str, device: str, tensor: torch.Tensor | None) -> torch.Tensor | None:
    """Do what the endpoints of :class:`benchmarks.workload.Workload` do."""
    if endpoint == "ping":
        return None
    if tensor is None:
        return torch.ones(SMALL, device=device)
    return tensor + 1 if endpoint == "plus_one" else tensor


class RpcPeer:
    """A client. ``module`` must be installed; a subclass connects in ``__init__``."""

    name: ClassVar[str]
    module: ClassVar[str]

    def __init__(self, address: str, device: str) -> None:
        self.address = address
        self.device = device

    @staticmethod
    def serve(address: str, device: str, ready: _Ready) -> None:
        """Serve for ever, and call ``ready`` as soon as clients can connect."""
        ready()

    def request(self, endpoint: str, tensor: torch.Tensor | None) -> Any:
        """Call an endpoint."""
        return _unpacked(self.exchange(_packed(endpoint, tensor)), self.device)[1]

    def exchange(self, data: bytes) -> bytes:
        """Send a message of msgspec and wait for the answer, for those that carry bytes."""
        raise TypeError(f"{self.name} carries tensors by itself")

    def ping(self) -> None:
        """Make one round trip."""
        self.request("ping", None)

    def call(self, endpoint: str, *args: Any) -> Any:
        """Call an endpoint, with a tensor or without."""
        return self.request(endpoint, *(args or (None,)))

    def close(self) -> None:
        """Hang up."""


class Connection(RpcPeer):
    """``multiprocessing.connection``, with torch's reducers."""

    name, module = "multiprocessing", "torch"

    def __init__(self, address: str, device: str) -> None:
        import torch.multiprocessing  # noqa: F401  it registers the reducers

        current_process().authkey = _KEY
        self._connection = connection.Client(address, authkey=_KEY)
        self.close = self._connection.close  # type: ignore[method-assign]

    @staticmethod
    def serve(address: str, device: str, ready: _Ready) -> None:
        import torch.multiprocessing  # noqa: F401

        current_process().authkey = _KEY
        with connection.Listener(address, authkey=_KEY) as listener:
            ready()
            with suppress(EOFError), listener.accept() as accepted:
                while True:
                    endpoint, tensor = accepted.recv()
                    result = answer(endpoint, device, tensor)
                    # What came by CUDA's IPC cannot be sent on.
                    accepted.send(result.clone() if result is not None and result is tensor and result.is_cuda else result)

    def request(self, endpoint: str, tensor: torch.Tensor | None) -> Any:
        self._connection.send((endpoint, tensor))
        return self._connection.recv()


class _Message(msgspec.Struct, array_like=True):
    endpoint: str
    dtype: str = ""
    shape: tuple[int, ...] = ()
    data: memoryview = memoryview(b"")


_DECODER = msgspec.msgpack.Decoder(_Message)
warnings.filterwarnings("ignore", message="The given buffer is not writable")


def _packed(endpoint: str, tensor: torch.Tensor | None) -> bytes:
    if tensor is None:
        return msgspec.msgpack.encode(_Message(endpoint))
    flat = tensor.contiguous().cpu().view(-1).view(torch.uint8).numpy()
    return msgspec.msgpack.encode(_Message(endpoint, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), flat.data))


def _unpacked(data: bytes, device: str) -> tuple[str, torch.Tensor | None]:
    message = _DECODER.decode(data)
    if not message.dtype:
        return message.endpoint, None
    tensor = torch.frombuffer(message.data, dtype=getattr(torch, message.dtype)).view(message.shape)
    return message.endpoint, tensor.to(device)


def _answered(data: bytes, device: str) -> bytes:
    endpoint, tensor = _unpacked(data, device)
    return _packed(endpoint, answer(endpoint, device, tensor))


class Zmq(RpcPeer):
    """pyzmq, a request socket over a Unix socket."""

    name, module = "pyzmq, msgspec", "zmq"

    def __init__(self, address: str, device: str) -> None:
        import zmq

        super().__init__(address, device)
        self._socket: Any = zmq.Context.instance().socket(zmq.REQ)
        self._socket.connect(f"ipc://{address}")

    @staticmethod
    def serve(address: str, device: str, ready: _Ready) -> None:
        import zmq

        replies: Any = zmq.Context.instance().socket(zmq.REP)
        replies.bind(f"ipc://{address}")
        ready()
        while True:
            replies.send(_answered(replies.recv(), device), copy=False)

    def exchange(self, data: bytes) -> bytes:
        self._socket.send(data, copy=False)
        return bytes(self._socket.recv())

    def close(self) -> None:
        self._socket.close(linger=0)


class Rpyc(RpcPeer):
    """rpyc over a Unix socket, a thread for each connection."""

    name = module = "rpyc"

    def __init__(self, address: str, device: str) -> None:
        from rpyc.utils.factory import unix_connect

        super().__init__(address, device)
        until = time.monotonic() + _PATIENCE
        while True:
            try:
                self._connection: Any = unix_connect(address)
                return
            except OSError:  # it does not listen yet
                if time.monotonic() > until:
                    raise
                time.sleep(0.01)

    @staticmethod
    def serve(address: str, device: str, ready: _Ready) -> None:
        import rpyc
        from rpyc.utils.server import ThreadedServer

        class Service(rpyc.Service):  # type: ignore[misc]  # it has no types
            def exposed_answer(self, data: bytes) -> bytes:
                return _answered(data, device)

        ready()  # it does not report when it listens
        ThreadedServer(Service, socket_path=address).start()

    def exchange(self, data: bytes) -> bytes:
        return bytes(self._connection.root.answer(data))

    def close(self) -> None:
        self._connection.close()


class Grpc(RpcPeer):
    """gRPC over a Unix socket, with messages of bytes."""

    name, module = "gRPC", "grpc"
    _OPTIONS: ClassVar = [("grpc.max_send_message_length", _LARGEST), ("grpc.max_receive_message_length", _LARGEST)]

    def __init__(self, address: str, device: str) -> None:
        import grpc

        super().__init__(address, device)
        self._channel: Any = grpc.insecure_channel(f"unix:{address}", options=self._OPTIONS)
        self._answer = self._channel.unary_unary("/benchmarks/answer")

    @staticmethod
    def serve(address: str, device: str, ready: _Ready) -> None:
        from concurrent.futures import ThreadPoolExecutor

        import grpc

        server = grpc.server(ThreadPoolExecutor(4), options=Grpc._OPTIONS)
        handler = grpc.unary_unary_rpc_method_handler(lambda data, _: _answered(data, device))
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("benchmarks", {"answer": handler}),))
        server.add_insecure_port(f"unix:{address}")
        server.start()
        ready()
        server.wait_for_termination()

    def exchange(self, data: bytes) -> bytes:
        return bytes(self._answer(data))

    def close(self) -> None:
        self._channel.close()


def _host_answer(endpoint: str, device: str, tensor: torch.Tensor | None) -> torch.Tensor | None:
    result = answer(endpoint, device, tensor.to(device) if tensor is not None else None)
    return result.cpu() if result is not None else None


class TorchRpc(RpcPeer):
    """``torch.distributed.rpc``, which speaks TCP."""

    name, module = "torch RPC", "torch"

    @staticmethod
    def _join(address: str, rank: int) -> Any:
        from torch.distributed import rpc

        # One of both writes the port down.
        options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{address}")
        rpc.init_rpc(("client", "server")[rank], rank=rank, world_size=2, rpc_backend_options=options)
        return rpc

    def __init__(self, address: str, device: str) -> None:
        super().__init__(address, device)
        self._rpc = self._join(address, 0)

    @staticmethod
    def serve(address: str, device: str, ready: _Ready) -> None:
        ready()
        TorchRpc._join(address, 1)

    def request(self, endpoint: str, tensor: torch.Tensor | None) -> Any:
        given = tensor.cpu() if tensor is not None else None
        result = self._rpc.rpc_sync("server", _host_answer, (endpoint, self.device, given))
        return result.to(self.device) if result is not None else None

    def close(self) -> None:
        self._rpc.shutdown(graceful=False)


class RayActor(RpcPeer):
    """A call of an actor of Ray, on a node of its own that ends with the client."""

    name, module = "Ray actor", "ray"

    def __init__(self, address: str, device: str) -> None:
        import ray

        super().__init__(address, device)
        ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False, configure_logging=False)

        class Actor:
            def answer(self, endpoint: str, device: str, tensor: torch.Tensor | None) -> Any:
                return _host_answer(endpoint, device, tensor)

        self._ray = ray
        self._actor: Any = ray.remote(Actor).remote()

    def request(self, endpoint: str, tensor: torch.Tensor | None) -> Any:
        given = tensor.cpu() if tensor is not None else None
        result = self._ray.get(self._actor.answer.remote(endpoint, self.device, given))
        return result.to(self.device) if result is not None else None

    def close(self) -> None:
        self._ray.shutdown()


PEERS: dict[str, type[RpcPeer]] = {peer.__name__: peer for peer in (Connection, Zmq, Rpyc, Grpc, TorchRpc, RayActor)}


def installed() -> tuple[list[str], str | None]:
    """Return the peers that can take part, and a note about those that cannot."""
    there = [name for name, peer in PEERS.items() if importlib.util.find_spec(peer.module) is not None]
    left_out = [PEERS[name].name for name in PEERS if name not in there]
    return there, f"not installed and left out: {', '.join(left_out)}" if left_out else None
