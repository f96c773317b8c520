"""Client processes of a verification: their commands, and their control by the verification.

``python -m`` this module imports torch once and forks a process for each client, so that a hundred of them take seconds. No GPU
is accessed before the fork: each client has its own session, mappings and CUDA context.
"""

from __future__ import annotations

import gc
import importlib
import os
import resource
import signal
import socket
import sys
import time
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from shared_rpc import Client
from shared_rpc.extras.verification import app

if TYPE_CHECKING:
    import torch

    from shared_rpc import Handle

#: Seconds for a command of a client process, including the import of torch; and to wait for a server.
_PATIENCE, _STARTUP = 120.0, 10.0


class Subject:
    """A client process: each command is a method, and its result is the answer. Tests override its use of the library."""

    def __init__(self, server: str) -> None:
        self.client = Client(socket_path=server, timeout=_PATIENCE, connect_timeout=_STARTUP)
        #: Handles acquired by ``attach``. The other commands use the last one.
        self._held: list[Handle[torch.nn.Module]] = []

    def acquire(self, endpoint: str, nbytes: int, seed: int) -> Any:
        """Acquire a lease on a model of app.py."""
        return self.client.call(endpoint, nbytes, seed)

    def release(self, handle: Any) -> None:
        """Release the lease."""
        handle.release()

    def attach(self, nbytes: int, seed: int, endpoint: str = "model") -> tuple[str, float]:
        """Call an endpoint, and keep the handle. Returns the object's id, and seconds."""
        begin = time.perf_counter()
        self._held.append(self.acquire(endpoint, nbytes, seed))
        return self._held[-1].object_id, time.perf_counter() - begin

    def cycles(self, count: int, nbytes: int, seed: int) -> float:
        """Attach and release ``count`` times. Returns the seconds."""
        begin = time.perf_counter()
        for _ in range(count):
            self.release(self.acquire("model", nbytes, seed))
        return time.perf_counter() - begin

    def digest(self) -> str:
        """Compute with the attached model."""
        return app.digest(self._held[-1].value)

    def alone(self, nbytes: int, seed: int, device: str) -> str:
        """Compute with a model of this process alone."""
        return app.digest(app.build(nbytes, seed, device))

    def read(self, count: int) -> list[float]:
        """Read the first numbers of the first weight."""
        values: list[float] = next(self._held[-1].value.parameters())[0, :count].tolist()
        return values

    def write(self, index: int, value: float) -> None:
        """Overwrite a number of the first weight. The write is complete when the answer arrives."""
        import torch

        weight = next(self._held[-1].value.parameters())
        with torch.no_grad():
            weight[0, index] = value
        if weight.is_cuda:
            torch.cuda.synchronize(weight.device)

    def end(self, how: str) -> None:
        """End: ``"closed"`` with the client closed, ``"left"`` without any clean-up, ``"killed"`` by SIGKILL, and
        ``"finished"`` like a script, with the interpreter's own shutdown, which takes a third of a second.
        """
        if how == "finished":
            sys.exit()
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "closed":
            self.client.close()
        os._exit(0)


def main(control: socket.socket, server: str, subject: str) -> None:
    """Fork a client for each descriptor of a connection that arrives, until the verification has ended."""
    import torch

    torch.set_num_threads(1)  # all processes must add in the same order
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # some of them crash on purpose
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # reaps them
    gc.freeze()  # a collection would write to memory that the forks share
    while fds := socket.recv_fds(control, 1, 1)[1]:
        with Connection(fds[0]) as connection:
            if os.fork() == 0:
                control.close()
                return _serve(connection, server, subject)


def _serve(connection: Connection, server: str, subject: str) -> None:
    """Answer commands in a child, whose exit code is the last message."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    if child := os.fork():
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        with suppress(OSError):
            connection.send((None, f"ended with exit code {code}", code))
        os._exit(0)
    module, _, name = subject.partition(":")
    process = getattr(importlib.import_module(module), name)(server)
    connection.send((os.getpid(), None, None))
    while True:
        try:
            do, options = connection.recv()
        except (EOFError, OSError):
            os._exit(0)
        try:
            answer, error = getattr(process, do)(**options), None
        except Exception as raised:
            answer, error = None, f"raised {type(raised).__name__}: {raised}"
        connection.send((answer, error, None))


class ClientFailed(Exception):
    """Failure of a client process: its command raised an error, or the process has ended.

    :param code: the exit code if it has ended, minus the signal if it was killed.
    """

    def __init__(self, text: str, code: int | None = None) -> None:
        super().__init__(text)
        self.code = code


class VerifyClient:
    """A new client process.

    :param control: socket of :func:`main`.
    """

    #: Id of the process.
    pid = 0

    def __init__(self, control: socket.socket) -> None:
        self._connection, its = Pipe()
        with its, suppress(OSError):  # an error if main() has ended
            socket.send_fds(control, [b"f"], [its.fileno()])
        self.pid = self.receive()

    def ask(self, do: str, **options: Any) -> Any:
        """Execute a command of :class:`Subject`, and return its answer.

        :raises ClientFailed: if the command fails, or the process ends or does not answer.
        """
        self.send(do, **options)
        return self.receive()

    def send(self, do: str, **options: Any) -> None:
        """Send a command; :meth:`receive` returns its answer."""
        with suppress(OSError):  # an error if the process has ended
            self._connection.send((do, options))

    def receive(self) -> Any:
        """Wait for the answer to the latest command."""
        answer, error, code = None, f"did not answer within {_PATIENCE:g} s", None
        try:
            if self._connection.poll(_PATIENCE):
                answer, error, code = self._connection.recv()
        except (EOFError, OSError):
            error = "has ended"
        if error is not None:
            raise ClientFailed(f"client process {self.pid} {error}", code)
        return answer

    def code(self) -> int | None:
        """Wait for the end of the process, and return its exit code; None if its command did not end it."""
        try:
            self.receive()
        except ClientFailed as failure:
            return failure.code
        return None

    def close(self) -> None:
        """End the process."""
        self._connection.close()


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])), *sys.argv[2:])
