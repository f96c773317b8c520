"""Load clients: idle connections, and light clients, forked without torch, that hold a model."""

from __future__ import annotations

import os
import resource
import signal
import time
from typing import Any

from benchmarks.processes import configuration, next_command, say
from shared_rpc import Client
from shared_rpc.client.connection import Connection
from shared_rpc.client.results import ReceivedResult
from shared_rpc.client.steps import Request
from shared_rpc.memory.mapping import MAPPINGS
from shared_rpc.operations import calls

__all__: list[str] = []

#: Seconds that everything here may take.
_TIMEOUT = 60.0


def fetch(connection: Connection, endpoint: str, *args: Any) -> ReceivedResult:
    """Call an endpoint and take its memory, without torch."""
    operation = calls.fetch(endpoint, args, {}, "cpu")
    step = operation.send(None)
    try:
        while True:
            assert isinstance(step, Request), "a call without tensors is one request"
            step = operation.send(connection.exchange(step, time.monotonic() + _TIMEOUT))
    except StopIteration as stop:
        result: ReceivedResult = stop.value
        return result


class Idlers:
    """Connected clients without requests."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._clients: list[Client] = []

    def keep(self, count: int) -> int:
        """Keep that many clients, more or fewer than now."""
        while len(self._clients) > count:
            self._clients.pop().close()
        while len(self._clients) < count:
            client = Client(socket_path=self._path)
            client.ping()
            self._clients.append(client)
        return len(self._clients)


class Flock:
    """Forked clients that hold a lease on a model, and its memory mapped, until they are killed."""

    def __init__(self, path: str, call: list[Any]) -> None:
        self._path = path
        self._call = call
        self._pids: list[int] = []
        # A child reads from it to its end; only this process holds the other side, so it ends with this process.
        self._leash, self._hand = os.pipe()

    def grow(self, count: int) -> int:
        """Fork that many, and wait until each of them has the memory."""
        ready, tell = os.pipe()
        for _ in range(count):
            pid = os.fork()
            if pid == 0:
                os.close(ready)
                os.close(self._hand)
                self._live(tell)
            self._pids.append(pid)
        os.close(tell)
        told = 0
        while data := os.read(ready, 4096):
            told += len(data)
        os.close(ready)
        return told

    def _live(self, tell: int) -> None:
        try:
            connection = Connection(self._path).open("", _TIMEOUT)
            result = fetch(connection, *self._call)
            with MAPPINGS.attach(result.segments) as mappings:
                result.close()
                for mapping in mappings:
                    bytes(memoryview(mapping.view())[:1])  # type: ignore[arg-type]  # a host view has the buffer protocol
                os.write(tell, b".")
                os.close(tell)
                os.read(self._leash, 1)
        finally:
            os._exit(0)

    def kill(self) -> int:
        """Kill all of them by SIGKILL, and return how many were still alive."""
        for pid in self._pids:
            os.kill(pid, signal.SIGKILL)
        killed = sum(os.WIFSIGNALED(os.waitpid(pid, 0)[1]) for pid in self._pids)
        self._pids.clear()
        return killed


def main() -> None:
    """Run. Configuration: ``socket``, ``call``. Commands: ``{"idle": n}``, ``{"attach": n}``, ``{"kill": true}``."""
    config = configuration()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    idlers = Idlers(config["socket"])
    flock = Flock(config["socket"], config["call"])
    say(ready=True)
    while (command := next_command()) is not None:
        if "idle" in command:
            say(idle=idlers.keep(command["idle"]))
        elif "attach" in command:
            say(attached=flock.grow(command["attach"]))
        else:
            say(killed=flock.kill())
    idlers.keep(0)
    flock.kill()


if __name__ == "__main__":
    main()
