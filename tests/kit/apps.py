"""An app in each role, for behaviours that must be the same in all of them."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch

from shared_rpc import Client, Provider, Server, SharedFunction
from shared_rpc.provider.loopback import LoopbackRuntime
from shared_rpc.server.core import Core
from tests.kit.deep import deep

T = TypeVar("T")

ROLES = ("local", "server", "client")
#: For fixtures: the code that a server's own process and the two others run.
EACH_ROLE = ("local", "client", *deep("server"))

#: Results of the fixtures ``serve`` and ``connect``.
Serve = Callable[..., Server]
Connect = Callable[..., Client]


class App:
    """A script's provider in one role. A client's server is a second provider in this process, with the same endpoints."""

    def __init__(self, role: Any, base_path: str) -> None:
        self.role = role
        self.provider = Provider(base_path, execution_mode=role, device="cpu", server_startup_timeout=0)
        self.owner = self.provider
        #: The endpoints as other endpoints call them, in the process that runs them.
        self.inside: dict[str, SharedFunction[..., Any]] = {}
        if role == "client":
            self.owner = Provider(base_path, execution_mode="server", device="cpu")
            Server(self.owner).start()

    def share(self, name: str | None = None, **options: Any) -> Callable[[Callable[..., Any]], Any]:
        """Call ``Provider.share`` in both processes, as their common script does."""

        def decorate(function: Callable[..., Any]) -> Any:
            inside = self.owner.share(name, **options)(function)
            self.inside[inside.name] = inside
            return inside if self.owner is self.provider else self.provider.share(name, **options)(function)

        return decorate

    def ask(self, question: Callable[[Core], T]) -> T:
        """Call ``question(core)`` with the core that runs the endpoints."""
        runtime = self.owner._runtime()
        assert isinstance(runtime, LoopbackRuntime)
        return runtime._engine.ask(question)

    def waiting(self) -> int:
        """Return the number of calls that wait for a run, including those that started one."""
        return self.ask(lambda core: sum(len(flight.waiters) for flight in core.runs.calls))

    def close(self) -> None:
        """Close both."""
        self.provider.close()
        self.owner.close()


def shares_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether a write to one tensor is visible in the other."""
    one.data.fill_(3.0)
    return bool((other == 3.0).all())


def at_once(*calls: Callable[[], Any]) -> list[Any]:
    """Run calls concurrently, each in its own thread; return their results, exceptions included."""

    def outcome(call: Callable[[], Any]) -> Any:
        try:
            return call()
        except BaseException as error:
            return error

    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(outcome, calls))
