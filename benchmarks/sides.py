"""The sides that are compared: a raw echo, shared-tensor 0.2.16, and shared_rpc. Each has a server in a process of its own.

:class:`Echo` is the floor: bytes to a process and back over a Unix socket, in Python, with no protocol at all.
"""

from __future__ import annotations

import importlib.metadata
import os
import socket
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.memory import Watermark
from benchmarks.runner import ECHO, OURS
from shared_rpc import Client

VERSION = "0.2.16"
PEER = f"shared-tensor {VERSION}"


class Echo:
    """A connection to the echo server."""

    name = ECHO

    def __init__(self, path: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.connect(path)

    def ping(self) -> None:
        """Make one round trip, of as many bytes as a ping of ours has."""
        self._socket.sendall(b"." * 25)
        left = 25
        while left:
            left -= len(self._socket.recv(65536))

    def close(self) -> None:
        """Hang up."""
        self._socket.close()


class EchoServer:
    """The server of the raw echo."""

    def __init__(self, address: str, **_: object) -> None:
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(address)
        self._listener.listen()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            threading.Thread(target=self._echo, args=self._listener.accept(), daemon=True).start()

    @staticmethod
    def _echo(connection: socket.socket, _: object) -> None:
        with connection:
            while data := connection.recv(65536):
                connection.sendall(data)


class Ours:
    """A client of our server."""

    name = OURS

    def __init__(self, path: str) -> None:
        self.client = Client(socket_path=path)
        self.ping, self.call, self.attach = self.client.ping, self.client.call, self.client.call
        self.close = self.client.close

    def task(self, endpoint: str) -> Any:
        """Submit an endpoint, and wait for its task."""
        return self.client.wait_for_task(self.client.submit(endpoint))


class OurServer:
    """Our server.

    :param build: managed calls that are made at once.
    """

    def __init__(self, address: str, device: str, checkpoint: str | None, build: Sequence[list[Any]] = ()) -> None:
        from shared_rpc import Provider, Server

        self._workload, self._device = _workload(device, checkpoint), device
        self._provider = Provider(device=device)
        for managed in (self._workload.model, self._workload.chain, self._workload.kept):
            self._provider.share(managed=True)(managed)
        self._provider.share(self._workload.small)
        for uncached in ("fresh", "fresh_on_loop", "echo", "echo_on_loop", "plus_one", "nothing"):
            self._provider.share(cache=False)(getattr(self._workload, uncached))
        self._server = Server(self._provider, socket_path=address).start()
        self.close = self._server.stop
        self._built = [self._build(name, *args) for name, *args in build]

    def _build(self, name: str, *args: Any) -> dict[str, Any]:
        """Make a managed call, and return what it cost."""
        workload = self._workload
        with Watermark(self._device) as mark:
            loaded = [0.0]

            def when_loaded() -> None:
                mark.reset()
                loaded[0] = time.perf_counter()

            workload.when_loaded = when_loaded
            self._provider.call(name, *args).release()
            seconds = time.perf_counter() - loaded[0]
        costs = {"load": workload.load_seconds, "publish": seconds, "publish_peak": mark.rise}
        return {**costs, "largest_storage": workload.largest_storage}

    def built(self) -> list[dict[str, Any]]:
        """Return the costs of the calls that were made."""
        return self._built


class Peer:
    """A client of shared-tensor, whose tensors are on a GPU, or nowhere. It opens a connection for every request."""

    name = PEER

    def __init__(self, base_path: str, timeout: float = 600.0) -> None:
        from shared_tensor import SharedTensorClient

        self._client: Any = SharedTensorClient(base_path, device_index=0, timeout=timeout, verbose_debug=False)
        self.call = self.attach = self._client.call
        self.close = self._client.close

    def ping(self) -> None:
        """Make one round trip.

        :raises TimeoutError: if there is no answer.
        """
        if not self._client.ping():
            raise TimeoutError(f"{PEER} does not answer at {self._client.socket_path}")

    def task(self, endpoint: str) -> Any:
        """Submit an endpoint, wait for its task, and fetch the result."""
        task_id = self._client.submit(endpoint)
        self._client.wait_task(task_id, timeout=60)
        return self._client.get_task_result(task_id)


class PeerServer:
    """The server of shared-tensor."""

    def __init__(self, address: str, device: str, checkpoint: str | None, build: Sequence[list[Any]] = ()) -> None:
        from shared_tensor import SharedTensorProvider, SharedTensorServer

        workload = _workload(device, checkpoint)
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
        # A managed object goes with its last reference there, cached or not: this process keeps one of each.
        self._kept, self._built = [], []
        for name, *args in build:
            self._kept.append(server.call_local_client(name, args=tuple(args)))
            self._built.append({"load": workload.load_seconds})

    def built(self) -> list[dict[str, Any]]:
        """Return the costs of the calls that were made."""
        return self._built

    def close(self) -> None:
        """End. Stopping it takes ten seconds: its thread sits in accept."""
        os._exit(0)


class RpcServer:
    """The server of one of :data:`benchmarks.peers.PEERS`. ``close`` does not wait for clients, as some of them would."""

    def __init__(self, address: str, device: str, peer: str, **_: object) -> None:
        from benchmarks.peers import PEERS

        listens = threading.Event()
        threading.Thread(target=PEERS[peer].serve, args=(address, device, listens.set), daemon=True).start()
        listens.wait()

    def close(self) -> None:
        """End."""
        os._exit(0)


def missing(*, tensors: str | None = None) -> str | None:
    """Return why shared-tensor takes no part; None if it does.

    :param tensors: the device of the tensors that are needed; None for pings alone, which need none.
    """
    try:
        version = importlib.metadata.version("shared-tensor")
    except importlib.metadata.PackageNotFoundError:
        return f"shared-tensor is not installed (pip install --no-deps shared-tensor=={VERSION}) and was left out"
    if version != VERSION:
        return f"shared-tensor {version} is installed, not the {VERSION} of the goals, and was left out"
    if tensors == "cpu":
        return f"{PEER} shares CUDA memory only and was left out of the rows with tensors on the host"
    return None


#: A client in the measuring process: ``call`` is for direct endpoints of a workload, ``attach`` for managed ones.
Side = Ours | Peer


def client_of(side: str, address: str, timeout: float = 600.0) -> Side:
    """Return a client of a side, by its name."""
    return Ours(address) if side == OURS else Peer(address, timeout)


def _workload(device: str, checkpoint: str | None) -> Any:
    from benchmarks.workload import Workload

    return Workload(device, Path(checkpoint) if checkpoint else None)


def load_lazy_modules(device: str) -> None:
    """Import what a client imports with its first tensor."""
    import shared_rpc.codec.arguments
    import shared_rpc.codec.results

    if device != "cpu":
        import shared_rpc.memory.backends.vmm  # noqa: F401
