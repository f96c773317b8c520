"""The world of a test: an app in one role, its server, its clients, and the processes around them."""

from __future__ import annotations

import textwrap
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import cached_property
from typing import Any, TypeVar

import torch

from shared_rpc import Client, Provider, Server, SharedFunction
from shared_rpc.provider.loopback import LoopbackRuntime
from shared_rpc.provider.runtime import ServerRuntime
from shared_rpc.server.core import Core
from tests.kit.deep import deep
from tests.kit.interpreter import Interpreter
from tests.kit.processes import Child, eventually

T = TypeVar("T")

#: See :meth:`World.peer`.
_PEER = """
import os, sys, torch
from shared_rpc import Client

client = Client(device=sys.argv[1], connect_timeout=5.0)
exec(sys.argv[2])
print("ready", flush=True)
for line in sys.stdin:
    exec(line)
"""

ROLES = ("local", "server", "client")
#: The code that a server's own process and the two others run.
EACH_ROLE = ("local", "client", *deep("server"))


class World:
    """An app in one role, on one device; what it starts ends with it.

    ``server``: this process serves the endpoints. ``client``: a second provider in this process serves them to the app.
    ``local``: there is no server.

    :param interpreters: those of the test's module; :meth:`run` adds to them.
    """

    def __init__(
        self,
        base_path: str,
        role: Any = "server",
        device: str = "cpu",
        interpreters: dict[int, Interpreter] | None = None,
    ) -> None:
        self.base_path, self.role, self.device = base_path, role, device
        #: Started processes; those still running at the end are killed.
        self.children: list[Child] = []
        #: The endpoints as other endpoints call them, in the process that runs them.
        self.inside: dict[str, SharedFunction[..., Any]] = {}
        self._interpreters = {} if interpreters is None else interpreters
        self._stack = ExitStack()

    @cached_property
    def owner(self) -> Provider:
        """The provider that runs the endpoints."""
        role: Any = "local" if self.role == "local" else "server"
        owner = Provider(self.base_path, execution_mode=role, device=self.device)
        self._stack.callback(owner.close)
        return owner

    @cached_property
    def provider(self) -> Provider:
        """The app's provider."""
        if self.role != "client":
            return self.owner
        assert self.server
        provider = Provider(self.base_path, execution_mode="client", device=self.device, server_startup_timeout=0)
        self._stack.callback(provider.close)
        return provider

    @cached_property
    def server(self) -> Server:
        """The server; it has no options unless :meth:`serve` started it."""
        runtime = self.owner._runtime()
        assert isinstance(runtime, ServerRuntime)
        return runtime.server

    def share(self, name: Any = None, **options: Any) -> Callable[..., Any]:
        """Call ``Provider.share`` in both processes, as their common script does."""
        if callable(name):
            return self.share()(name)

        def decorate(function: Callable[..., Any]) -> Any:
            inside = self.owner.share(name, **options)(function)
            self.inside[inside.name] = inside
            return self.provider.share(name, **options)(function) if self.role == "client" else inside

        return decorate

    def share_held(self, go: threading.Event, begun: threading.Event | None = None, **options: Any) -> list[int]:
        """Share ``held(number)``, which sets ``begun`` and waits for ``go``; return the numbers of its runs."""
        ran: list[int] = []

        def held(number: int = 1) -> torch.Tensor:
            ran.append(number)
            if begun is not None:
                begun.set()
            go.wait(30)
            return torch.full((2,), float(number))

        self.share("held", **options)(held)
        return ran

    def serve(self, **options: Any) -> Server:
        """Start the server, with other options than one that runs; they are those of :class:`Server`."""
        if "server" in vars(self):
            self.server.stop()
        self.server = self._stack.enter_context(Server(self.owner, **options))
        return self.server

    def serve_result(self, value: Any, **options: Any) -> Server:
        """Serve the endpoint ``get``, whose result is ``value``."""
        self.share("get", **options)(lambda: value)
        return self.serve()

    def client(self, **options: Any) -> Client:
        """Return a client; a server of the endpoints is started first."""
        self._begin()
        options = {"device": self.device, "timeout": 30.0, "connect_timeout": 0.0, **options}
        return self._stack.enter_context(Client(self.base_path, **options))

    def _begin(self) -> None:
        if "owner" in vars(self):
            assert self.server

    def start(self, *words: str, **options: Any) -> Child:
        """Start a Python process; the options are those of :class:`Child`."""
        self.children.append(Child(*words, **options))
        return self.children[-1]

    def process(self, code: str, *arguments: str, **options: Any) -> Child:
        """Run a piece of code in another process; a server of the endpoints is started first."""
        self._begin()
        return self.start("-c", textwrap.dedent(code), *arguments, **options)

    def peer(self, code: str = "") -> Child:
        """Start a process with a ``client`` that runs a piece of code, and then each line that it is sent."""
        child = self.process(_PEER, self.device, textwrap.dedent(code))
        child.expect("ready")
        return child

    def run(self, code: str, process: int = 0, **names: Any) -> Any:
        """Run code in another process, where ``client`` is connected to the server; see :meth:`Interpreter.run`."""
        self._begin()
        if process not in self._interpreters:
            self._interpreters[process] = Interpreter()
        return self._interpreters[process].run(code, **{"base_path": self.base_path, "device": self.device, **names})

    def ask(self, question: Callable[[Core], T]) -> T:
        """Call ``question(core)`` with the core that runs the endpoints."""
        runtime = self.owner._runtime()
        assert isinstance(runtime, LoopbackRuntime)
        return runtime._engine.ask(question)

    def waiting(self) -> int:
        """Return the number of calls that wait for a run, including those that started one."""
        return self.ask(lambda core: sum(len(flight.waiters) for flight in core.runs.calls))

    def once_waiting(self, calls: int, *actions: Callable[[], Any]) -> Callable[[], Any]:
        """Return a function that acts once this many calls wait for a run, and returns what the last action does."""

        def act() -> Any:
            eventually(lambda: self.waiting() == calls)
            return [action() for action in actions][-1]

        return act

    def close(self) -> None:
        """End the processes, the clients and the server."""
        for child in self.children:
            if child.process.poll() is None:
                child.process.kill()
            child.process.communicate()
        self._stack.close()


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
