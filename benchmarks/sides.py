"""The compared sides: shared_rpc, shared-tensor 0.2.16, a raw echo, and other ways to call a function with a tensor.

Each serves the functions of :class:`benchmarks.workload.Workload` in a separate process, written like a user's code.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import os
import socket
import socketserver
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from multiprocessing import connection
from typing import Any, ClassVar, NamedTuple

import msgspec
import torch

from benchmarks.processes import Process
from benchmarks.runner import ECHO, OURS, Run
from benchmarks.workload import Workload
from shared_rpc import Client
from shared_rpc.settings import socket_path

VERSION = "0.2.16"
PEER = f"shared-tensor {VERSION}"


class Side:
    """A client of one side; :meth:`serve` is its server. ``module`` must be installed."""

    name: ClassVar[str]
    module: ClassVar[str] = "torch"

    def __init__(self, address: str, device: str = "", timeout: float = 600.0) -> None:
        self.device, self.timeout = device, timeout
        self.link = self.connect(address)

    @classmethod
    def missing(cls, device: str = "") -> str | None:
        """Return the reason if the side is left out.

        :param device: of the tensors of the calls; empty for calls without tensors.
        """
        return None if importlib.util.find_spec(cls.module) else f"{cls.name} is not installed and was left out"

    @staticmethod
    def serve(address: str, device: str) -> Callable[..., Any] | None:
        """Start to serve, and return when clients can connect; return a function that makes managed calls, if there are any."""

    def connect(self, address: str) -> Any:
        """Return the side's own client."""

    def call(self, endpoint: str, *args: Any) -> Any:
        """Call an endpoint."""
        raise NotImplementedError

    def ping(self) -> None:
        """Make one round trip."""
        self.call("nothing")

    def close(self) -> None:
        """Close the connection."""
        self.link.close()


class Served:
    """The server of a side, in a separate process."""

    def __init__(self, side: str, address: str, device: str) -> None:
        self._make: Any = SIDES[side].serve(address, device)

    def make(self, calls: Sequence[Sequence[Any]]) -> list[Any]:
        """Make managed calls, and return the results, which are measurements for our side."""
        return [self._make(*call) for call in calls]

    def close(self) -> None:
        """Exit without waiting for clients or threads."""
        os._exit(0)


class Started(NamedTuple):
    """A server that is ready."""

    process: Process
    address: str


def present(*sides: type[Side], device: str = "") -> list[type[Side]]:
    """Return the sides that are not :meth:`~Side.missing`."""
    return [side for side in sides if side.missing(device) is None]


def serve(run: Run, side: type[Side]) -> Started:
    """Start the server of a side. Ours listens at the run's base path, where ``shared-rpc ls`` finds it."""
    address = socket_path(run.base_path, "cpu") if side is Ours else str(run.folder / side.__name__)
    config = {"side": side.name, "address": address, "device": run.device}
    return Started(run.process(Served, cores=run.server_cores, **config).ready(), address)


def _in_background(action: Callable[..., object], *args: object) -> None:
    threading.Thread(target=action, args=args, daemon=True).start()


@functools.cache
def _workload(device: str) -> Workload:
    return Workload(device)


class Echo(Side):
    """The lower bound: bytes to a process and back over a Unix socket, in Python, without a protocol."""

    name = ECHO

    def connect(self, address: str) -> socket.socket:
        link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        link.connect(address)
        return link

    @staticmethod
    def serve(address: str, device: str) -> None:
        _in_background(socketserver.ThreadingUnixStreamServer(address, _EchoHandler).serve_forever)

    def ping(self) -> None:
        """Make one round trip with as many bytes as our ping."""
        self.link.sendall(b"." * 25)
        left = 25
        while left:
            left -= len(self.link.recv(65536))


class _EchoHandler(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        while data := self.request.recv(65536):
            self.request.sendall(data)


class Ours(Side):
    """This library: a server in one process."""

    name = OURS

    def connect(self, address: str) -> Client:
        client = Client(socket_path=address)
        self.ping, self.call = client.ping, client.call  # type: ignore[method-assign,assignment]
        return client

    def task(self, endpoint: str) -> Any:
        """Submit an endpoint, and wait for its task."""
        return self.link.wait_for_task(self.link.submit(endpoint))

    @staticmethod
    def serve(address: str, device: str) -> Callable[..., Any]:
        from shared_rpc import Provider, Server  # imported late, because attaches of clients are measured with their imports

        workload, provider = _workload(device), Provider(device=device)
        workload.share(provider)
        Server(provider, socket_path=address).start()

        def publish(endpoint: str, *args: Any) -> float:
            """Return the seconds of publishing a loaded module."""
            provider.call(endpoint, *args).release()
            return time.perf_counter() - workload.loaded

        return publish


class SharedTensor(Side):
    """shared-tensor, which supports GPU tensors only. Its client opens a connection for every request."""

    name, module = PEER, "shared_tensor"

    @classmethod
    def missing(cls, device: str = "") -> str | None:
        found = importlib.util.find_spec(cls.module) and importlib.metadata.version("shared-tensor")
        if found != VERSION:
            return f"{PEER} is not installed (pip install --no-deps shared-tensor=={VERSION}) and was left out"
        if device == "cpu":
            return f"{PEER} shares CUDA memory only and was left out of the rows with tensors on the host"
        return None

    def connect(self, address: str) -> Any:
        from shared_tensor import SharedTensorClient

        return SharedTensorClient(address, device_index=0, timeout=self.timeout, verbose_debug=False)

    def ping(self) -> None:
        """Make one round trip.

        :raises TimeoutError: if there is no answer.
        """
        if not self.link.ping():
            raise TimeoutError(f"{PEER} does not answer at {self.link.socket_path}")

    def call(self, endpoint: str, *args: Any) -> Any:
        """Call an endpoint. It has no ``async def`` endpoints."""
        return self.link.call(endpoint.removesuffix("_on_loop"), *args)

    def task(self, endpoint: str) -> Any:
        """Submit an endpoint, wait for its task, and fetch the result."""
        task_id = self.link.submit(endpoint)
        self.link.wait_task(task_id, timeout=60)
        return self.link.get_task_result(task_id)

    @staticmethod
    def serve(address: str, device: str) -> Callable[..., Any]:
        from shared_tensor import SharedTensorProvider, SharedTensorServer

        workload = _workload(device)
        provider = SharedTensorProvider(address, device_index=0, execution_mode="server", verbose_debug=False)
        # Its default key is the function's name alone.
        provider.share(managed=True, cache_format_key="{shape}")(workload.model)
        provider.share(managed=True, cache_format_key="{tensors}:{nbytes}")(workload.chain)
        provider.share(managed=True)(workload.kept)
        provider.share(workload.small)
        for uncached in ("fresh", "plus_one", "echo"):
            provider.share(cache=False)(getattr(workload, uncached))
        provider.share(cache=False, execution="task")(workload.nothing)
        server = SharedTensorServer(provider, verbose_debug=False)
        server.start(blocking=False)
        # It frees even a cached managed object with its last reference, so keep one of each.
        kept: list[Any] = []
        return lambda endpoint, *args: kept.append(server.call_local_client(endpoint, args=args))


# Other ways to call a function of another process with a tensor.


class Connection(Side):
    """``multiprocessing.connection``, with torch's reducers, which share the tensors' memory."""

    name = "multiprocessing"

    def connect(self, address: str) -> connection.Connection:
        return connection.Client(address)

    @staticmethod
    def serve(address: str, device: str) -> None:
        _in_background(Connection._answer, connection.Listener(address), _workload(device))

    @staticmethod
    def _answer(listener: connection.Listener, workload: Workload) -> None:
        with suppress(EOFError), listener.accept() as accepted:
            while True:
                endpoint, args = accepted.recv()
                result = getattr(workload, endpoint)(*args)
                # A tensor received by CUDA IPC cannot be sent again.
                accepted.send(result.clone() if args and result is args[0] and result.is_cuda else result)

    def call(self, endpoint: str, *args: Any) -> Any:
        self.link.send((endpoint, args))
        return self.link.recv()


class _Copied(Side):
    """A side that copies tensors, from and to a GPU through the host: it calls :func:`_answer` in the server."""

    def request(self, *words: Any) -> Any:
        """Call :func:`_answer` with these arguments in the server."""
        raise NotImplementedError

    def call(self, endpoint: str, *args: Any) -> Any:
        results = self.request(self.device, endpoint, *(tensor.cpu() for tensor in args))
        return results[0].to(self.device) if results else None


def _answer(device: str, endpoint: str, *args: torch.Tensor) -> list[torch.Tensor]:
    result = getattr(_workload(device), endpoint)(*(tensor.to(device) for tensor in args))
    return [result.cpu()] if result is not None else []


class TorchRpc(_Copied):
    """``torch.distributed.rpc`` over TCP."""

    name = "torch RPC"

    def connect(self, address: str) -> Any:
        return self._join(address, 0)

    @staticmethod
    def _join(address: str, rank: int) -> Any:
        from torch.distributed import rpc

        # The two processes rendezvous through this file.
        options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{address}")
        rpc.init_rpc(("client", "server")[rank], rank=rank, world_size=2, rpc_backend_options=options)
        return rpc

    @staticmethod
    def serve(address: str, device: str) -> None:
        _in_background(TorchRpc._join, address, 1)

    def request(self, *words: Any) -> Any:
        return self.link.rpc_sync("server", _answer, words)

    def close(self) -> None:
        self.link.shutdown(graceful=False)


class RayActor(_Copied):
    """A call of a Ray actor, on a separate node that exits with the client."""

    name, module = "Ray actor", "ray"

    def connect(self, address: str) -> Any:
        import ray

        ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False, configure_logging=False)

        class Actor:
            def answer(self, *words: Any) -> Any:
                return _answer(*words)

        self._get, self.close = ray.get, ray.shutdown  # type: ignore[method-assign]
        return ray.remote(Actor).remote()

    def request(self, *words: Any) -> Any:
        return self._get(self.link.answer.remote(*words))


class _Bytes(_Copied):
    """A side that transfers bytes: the tensors are copied into messages of msgspec."""

    def exchange(self, data: bytes) -> bytes:
        """Send a message and wait for the answer."""
        raise NotImplementedError

    def request(self, *words: Any) -> Any:
        return _unpacked(self.exchange(_packed(*words)))[2:]


#: The device, the endpoint, and the tensors, which are float32.
_DECODER = msgspec.msgpack.Decoder(tuple[str, str, list[memoryview]])
warnings.filterwarnings("ignore", message="The given buffer is not writable")


def _packed(device: str, endpoint: str, *tensors: torch.Tensor) -> bytes:
    return msgspec.msgpack.encode((device, endpoint, [tensor.numpy().data for tensor in tensors]))


def _unpacked(data: bytes) -> list[Any]:
    device, endpoint, contents = _DECODER.decode(data)
    return [device, endpoint, *(torch.frombuffer(content, dtype=torch.float32) for content in contents)]


def _answer_bytes(data: bytes) -> bytes:
    return _packed("", "", *_answer(*_unpacked(data)))


class Zmq(_Bytes):
    """pyzmq, a request socket over a Unix socket."""

    name, module = "pyzmq, msgspec", "zmq"

    def connect(self, address: str) -> Any:
        import zmq

        link: Any = zmq.Context.instance().socket(zmq.REQ)
        link.connect(f"ipc://{address}")
        return link

    @staticmethod
    def serve(address: str, device: str) -> None:
        import zmq

        replies: Any = zmq.Context.instance().socket(zmq.REP)
        replies.bind(f"ipc://{address}")

        def answer() -> None:
            while True:
                replies.send(_answer_bytes(replies.recv()), copy=False)

        _in_background(answer)

    def exchange(self, data: bytes) -> bytes:
        self.link.send(data, copy=False)
        return bytes(self.link.recv())


class Rpyc(_Bytes):
    """rpyc over a Unix socket, a thread for each connection."""

    name = module = "rpyc"

    def connect(self, address: str) -> Any:
        from rpyc.utils.factory import unix_connect

        return unix_connect(address)

    @staticmethod
    def serve(address: str, device: str) -> None:
        import rpyc
        from rpyc.utils.server import ThreadedServer

        class Service(rpyc.Service):  # type: ignore[misc]  # it has no types
            exposed_answer = staticmethod(_answer_bytes)

        server = ThreadedServer(Service, socket_path=address)
        server.listener.listen()  # start() does so too, but does not report when
        _in_background(server.start)

    def exchange(self, data: bytes) -> bytes:
        return bytes(self.link.root.answer(data))


class Grpc(_Bytes):
    """gRPC over a Unix socket, with messages of bytes."""

    name, module = "gRPC", "grpc"
    _OPTIONS: ClassVar = [(f"grpc.max_{way}_message_length", 1 << 30) for way in ("send", "receive")]

    def connect(self, address: str) -> Any:
        import grpc

        link: Any = grpc.insecure_channel(f"unix:{address}", options=self._OPTIONS)
        self.exchange = link.unary_unary("/benchmarks/answer")  # type: ignore[method-assign]
        return link

    @staticmethod
    def serve(address: str, device: str) -> None:
        import grpc

        server = grpc.server(ThreadPoolExecutor(4), options=Grpc._OPTIONS)
        handler = grpc.unary_unary_rpc_method_handler(lambda data, _: _answer_bytes(data))
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("benchmarks", {"answer": handler}),))
        server.add_insecure_port(f"unix:{address}")
        server.start()
        _in_background(server.wait_for_termination)


PEERS: tuple[type[Side], ...] = (Connection, Zmq, Rpyc, Grpc, TorchRpc, RayActor)
_ALL: list[type[Side]] = [Echo, SharedTensor, *PEERS, Ours]
SIDES = {side.name: side for side in _ALL}
