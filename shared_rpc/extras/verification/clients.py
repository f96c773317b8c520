"""Client processes of a verification: their commands, and their control by the verification.

They are forks of one process that has imported torch (the fork server of ``multiprocessing``), so that a hundred of them take
seconds. No GPU is touched before the fork: each has a session, mappings and a CUDA context of its own.
"""

from __future__ import annotations

import gc
import importlib
import multiprocessing
import os
import resource
import signal
import sys
import time
from ctypes import pythonapi
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from shared_rpc import Client, Provider
from shared_rpc.extras.verification import app

if TYPE_CHECKING:
    import torch

    from shared_rpc import Handle

#: Log file of the client processes, in the verification's directory.
LOG = "clients.log"
#: Imports of the fork server.
PRELOAD = ["torch", __name__]
#: Seconds for a command of a client process, and to wait for a server.
_PATIENCE, _STARTUP = 60.0, 10.0


class Subject:
    """A client process: each command is a method, and its result is the answer. Tests override how it uses the library."""

    def __init__(self, server: str) -> None:
        self.client = Client(socket_path=server, timeout=_PATIENCE, connect_timeout=_STARTUP)
        #: Handles, by the names that the commands give them.
        self._held: dict[str, Handle[torch.nn.Module]] = {}

    def acquire(self, endpoint: str, nbytes: int, seed: int) -> Any:
        """Acquire a lease on a model of app.py."""
        return self.client.call(endpoint, nbytes, seed)

    def release(self, handle: Any) -> None:
        """Release the lease."""
        handle.release()

    def attach(self, nbytes: int, seed: int, endpoint: str = "model", name: str = "model") -> tuple[str, float]:
        """Call an endpoint, and keep the handle under a name. Returns the object's id, and seconds."""
        begin = time.perf_counter()
        self._held[name] = self.acquire(endpoint, nbytes, seed)
        return self._held[name].object_id, time.perf_counter() - begin

    def cycles(self, count: int, nbytes: int, seed: int) -> float:
        """Attach and release ``count`` times. Returns the seconds."""
        begin = time.perf_counter()
        for _ in range(count):
            self.release(self.acquire("model", nbytes, seed))
        return time.perf_counter() - begin

    def digest(self, name: str = "model") -> str:
        """Compute with an attached model."""
        return app.digest(self._held[name].value)

    def alone(self, nbytes: int, seed: int, device: str) -> str:
        """Compute with a model of this process alone."""
        return app.digest(app.build(nbytes, seed, device))

    def read(self, count: int) -> list[float]:
        """Read the first numbers of the first weight."""
        values: list[float] = next(self._held["model"].value.parameters())[0, :count].tolist()
        return values

    def write(self, first: int, values: list[float]) -> None:
        """Overwrite numbers of the first weight, from index ``first`` on. The write is complete when the answer comes."""
        import torch

        weight = next(self._held["model"].value.parameters())
        with torch.no_grad():
            weight[0, first : first + len(values)] = torch.tensor(values)
        if weight.is_cuda:
            torch.cuda.synchronize(weight.device)

    def device(self, asked: str) -> dict[str, Any]:
        """Describe the device that ``--device`` names, as torch and as the library name it.

        :raises SharedRPCError: if there is no such device.
        """
        import torch

        known = Provider(device=asked, execution_mode="local").device_id
        if known == "cpu":
            return {"device": "cpu", "id": known, "name": "host memory", "torch": torch.__version__, "cuda": None}
        _, _, index = asked.partition(":")
        where = torch.device("cuda", int(index) if index else torch.cuda.current_device())
        name = torch.cuda.get_device_properties(where).name
        return {"device": str(where), "id": known, "name": name, "torch": torch.__version__, "cuda": torch.version.cuda}

    def memory(self, device: str) -> tuple[int, int]:
        """Return the bytes of a GPU that are free, and all."""
        import torch

        return torch.cuda.mem_get_info(device)

    def end(self, how: str) -> None:
        """End: ``"closed"`` with the client closed, ``"left"`` without any cleaning up, ``"killed"`` by SIGKILL, and
        ``"finished"`` as a script does, with the interpreter's own end, which takes a third of a second.
        """
        if how == "finished":
            pythonapi.Py_Exit(0)  # a process of multiprocessing skips the interpreter's end
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "closed":
            self.client.close()
        os._exit(0)


def _serve(connection: Connection, server: str, subject: str, folder: Path) -> None:
    """Answer commands until the connection ends; then end the process as forked workers do, without any cleaning up."""
    import torch

    gc.freeze()  # a collection would write to memory that the forks share
    os.setsid()  # Ctrl-C and a closed terminal are for the verification alone
    os.chdir(folder)
    torch.set_num_threads(1)  # all processes must add in the same order
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # some of them crash on purpose
    log = os.open(LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for standard in (1, 2):
        os.dup2(log, standard)
    os.close(log)
    module, _, name = subject.partition(":")
    process = getattr(importlib.import_module(module), name)(server)
    while True:
        try:
            do, options = connection.recv()
        except (EOFError, OSError):
            os._exit(0)
        try:
            answer, error = getattr(process, do)(**options), None
        except Exception as raised:
            answer, error = None, f"{type(raised).__name__}: {raised}"
        connection.send((answer, error))


class ClientFailed(Exception):
    """Failure of a client process: its command raised an error, or the process has ended."""


class VerifyClient:
    """A new client process, which ends with the block."""

    def __init__(self, server: str, subject: str, folder: Path) -> None:
        context = multiprocessing.get_context("forkserver")
        self._connection, theirs = context.Pipe()
        with theirs:
            self._process = context.Process(target=_serve, args=(theirs, server, subject, folder), daemon=True)
            # A child would import the main module again, for which that need not be written.
            main, sys.modules["__main__"] = sys.modules["__main__"], ModuleType("__main__")
            try:
                self._process.start()
            finally:
                sys.modules["__main__"] = main

    @property
    def pid(self) -> int:
        """Id of the process."""
        assert self._process.pid is not None, "it was started"
        return self._process.pid

    def ask(self, do: str, **options: Any) -> Any:
        """Execute a command of :class:`Subject`, and return its answer.

        :raises ClientFailed: if the command fails, or the process ends or does not answer.
        """
        self.send(do, **options)
        return self.receive()

    def send(self, do: str, **options: Any) -> None:
        """Send a command; :meth:`receive` returns its answer."""
        try:
            self._connection.send((do, options))
        except OSError as error:
            raise ClientFailed(f"client process {self.pid} has ended: {error}") from error

    def receive(self) -> Any:
        """Wait for the answer to the latest command."""
        try:
            if not self._connection.poll(_PATIENCE):
                raise ClientFailed(f"client process {self.pid} did not answer within {_PATIENCE:g} s")
            answer, error = self._connection.recv()
        except (EOFError, OSError):
            code = self.wait()
            raise ClientFailed(f"client process {self.pid} ended with exit code {code} while it executed a command") from None
        if error is not None:
            raise ClientFailed(f"client process {self.pid}: {error}")
        return answer

    def wait(self) -> int:
        """Wait for the end of the process, and return its exit code: minus the signal if it was killed."""
        self._process.join(_PATIENCE)
        if self._process.exitcode is None:
            raise ClientFailed(f"client process {self.pid} does not end")
        return self._process.exitcode

    def close(self) -> None:
        """Close the connection, which ends the process."""
        self._connection.close()

    def __enter__(self) -> VerifyClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
