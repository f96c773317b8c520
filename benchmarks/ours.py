"""shared_rpc: its server in a process of its own, and its client."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.memory import Watermark
from benchmarks.processes import configuration, say, until_told
from shared_rpc import Client

__all__ = ["Ours", "load_lazy_modules"]


class Ours:
    """A client of our server."""

    name = "shared_rpc"

    def __init__(self, path: str) -> None:
        self._client = Client(socket_path=path)

    def ping(self) -> None:
        """Make one round trip."""
        self._client.ping()

    def call(self, endpoint: str, *args: Any) -> Any:
        """Call a direct endpoint."""
        return self._client.call(endpoint, *args)

    def attach(self, endpoint: str, *args: Any) -> Any:
        """Call a managed endpoint."""
        return self._client.call(endpoint, *args)

    def task(self, endpoint: str) -> Any:
        """Submit an endpoint, and wait for its task."""
        return self._client.wait_for_task(self._client.submit(endpoint))

    def list_tasks(self) -> int:
        """Return the number of tasks that the server remembers."""
        return len(self._client.list_tasks())

    def close(self) -> None:
        """Hang up."""
        self._client.close()


def load_lazy_modules(device: str) -> None:
    """Import what a client imports with its first tensor."""
    import shared_rpc.codec.arguments
    import shared_rpc.codec.results

    if device != "cpu":
        import shared_rpc.memory.backends.vmm  # noqa: F401


def main() -> None:
    """Serve until stdin is closed.

    Configuration: ``socket``, ``device``, ``checkpoint``, and ``build``: managed calls to make first. What each of them
    cost is in the line that tells that the server is ready.
    """
    from benchmarks.workload import Workload
    from shared_rpc import Provider, Server

    config = configuration()
    workload = Workload(config["device"], Path(config["checkpoint"]) if config.get("checkpoint") else None)
    provider = Provider(device=config["device"])
    managed: list[Callable[..., Any]] = [workload.model, workload.chain, workload.kept]
    for function in managed:
        provider.share(managed=True)(function)
    provider.share(workload.small)
    provider.share(cache=False)(workload.fresh)
    provider.share(cache=False)(workload.fresh_on_loop)
    provider.share(cache=False)(workload.echo_on_loop)
    provider.share(cache=False)(workload.plus_one)
    provider.share(cache=False)(workload.echo)
    provider.share(cache=False)(workload.nothing)
    with Server(provider, socket_path=config["socket"]):
        built = []
        for name, *args in config["build"]:
            with Watermark(config["device"]) as mark:
                loaded = [0.0]

                def when_loaded(mark: Watermark = mark, loaded: list[float] = loaded) -> None:
                    mark.reset()
                    loaded[0] = time.perf_counter()

                workload.when_loaded = when_loaded
                provider.call(name, *args).release()
                seconds = time.perf_counter() - loaded[0]
            built.append(
                {
                    "call": [name, *args],
                    "load": workload.load_seconds,
                    "publish": seconds,
                    "publish_peak": mark.rise,
                    "largest_storage": workload.largest_storage,
                }
            )
        say(ready=True, pid=os.getpid(), built=built)
        until_told()


if __name__ == "__main__":
    main()
