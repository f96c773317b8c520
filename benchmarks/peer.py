"""shared-tensor 0.2.16: its server in a process of its own, and its client. Its tensors are on a GPU, or nowhere."""

from __future__ import annotations

import importlib.metadata
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.processes import configuration, say, until_told

__all__ = ["Peer", "missing", "socket_of"]

VERSION = "0.2.16"
_NAME = f"shared-tensor {VERSION}"


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
        return f"{_NAME} shares CUDA memory only and was left out of the rows with tensors on the host"
    return None


def socket_of(base_path: str) -> str:
    """Return the socket of a server with that base path on GPU 0, which need not exist."""
    return f"{base_path}-0.sock"


@contextmanager
def _imported_for(device: str) -> Iterator[None]:
    """Hide transformers on the host, where shared-tensor shares nothing: it imports transformers where that is installed, to
    examine its results, which would take seconds in every process and change nothing.
    """
    if device != "cpu":
        yield
        return
    known = sys.modules.get("transformers")
    sys.modules["transformers"] = known  # type: ignore[assignment]  # None makes an import fail
    try:
        yield
    finally:
        if known is None:
            del sys.modules["transformers"]


class Peer:
    """A client of its server. It opens a connection for every request."""

    name = _NAME

    def __init__(self, base_path: str, device: str = "cpu", timeout: float = 600.0) -> None:
        with _imported_for(device):
            from shared_tensor import SharedTensorClient

        self._client: Any = SharedTensorClient(base_path, device_index=0, timeout=timeout, verbose_debug=False)

    def ping(self) -> None:
        """Make one round trip.

        :raises TimeoutError: if there is no answer.
        """
        if not self._client.ping():
            raise TimeoutError(f"{_NAME} does not answer at {self._client.socket_path}")

    def call(self, endpoint: str, *args: Any) -> Any:
        """Call a direct endpoint."""
        return self._client.call(endpoint, *args)

    def attach(self, endpoint: str, *args: Any) -> Any:
        """Call a managed endpoint."""
        return self._client.call(endpoint, *args)

    def task(self, endpoint: str) -> Any:
        """Submit an endpoint, wait for its task, and fetch the result."""
        task_id = self._client.submit(endpoint)
        self._client.wait_task(task_id, timeout=60)
        return self._client.get_task_result(task_id)

    def close(self) -> None:
        """Do nothing: no connection stays open."""
        self._client.close()


def main() -> None:
    """Serve until stdin is closed. Configuration: as in :func:`benchmarks.ours.main`, with ``base_path``."""
    from benchmarks.workload import Workload

    config = configuration()
    with _imported_for(config["device"]):
        from shared_tensor import SharedTensorProvider, SharedTensorServer

    workload = Workload(config["device"], Path(config["checkpoint"]) if config.get("checkpoint") else None)
    provider = SharedTensorProvider(config["base_path"], device_index=0, execution_mode="server", verbose_debug=False)
    # Its default key is the function's name alone.
    provider.share(managed=True, cache_format_key="{shape}")(workload.model)
    provider.share(managed=True, cache_format_key="{tensors}:{nbytes}")(workload.chain)
    provider.share(managed=True)(workload.kept)
    provider.share(workload.small)
    provider.share(cache=False)(workload.fresh)
    provider.share(cache=False)(workload.plus_one)
    provider.share(cache=False)(workload.echo)
    provider.share(cache=False, execution="task")(workload.nothing)
    server = SharedTensorServer(provider, verbose_debug=False)
    server.start(blocking=False)
    built = []
    # A managed object goes with its last reference there, cached or not: this process keeps one of each.
    kept = []
    for name, *args in config["build"]:
        kept.append(server.call_local_client(name, args=tuple(args)))
        built.append({"call": [name, *args], "load": workload.load_seconds})
    say(ready=True, pid=os.getpid(), built=built)
    until_told()
    # Stopping it takes ten seconds: its thread sits in accept.
    os._exit(0)


if __name__ == "__main__":
    main()
