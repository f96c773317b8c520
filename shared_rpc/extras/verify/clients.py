"""Client processes of a verification: what they do, and how the verification drives them."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import signal
import sys
import time
from ctypes import pythonapi
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from shared_rpc import Client, Provider
from shared_rpc.extras.verify import model

if TYPE_CHECKING:
    import torch

    from shared_rpc import Handle

__all__ = ["LOG", "ClientFailed", "Subject", "VerifyClient"]

#: Name of the file that client processes write to, in the verification's directory.
LOG = "clients.log"
#: Seconds for anything that a client process is asked for; to wait for a server; and for a process to end.
_PATIENCE, _STARTUP, _END = 60.0, 10.0, 120.0


class Subject:
    """What a client process does with the library: the thing that is verified. Tests put others in its place."""

    def attach(self, client: Client, endpoint: str, nbytes: int, seed: int) -> Handle[torch.nn.Module]:
        """Take a lease on a model of :mod:`shared_rpc.extras.verify.app`."""
        handle: Handle[torch.nn.Module] = client.call(endpoint, nbytes, seed)
        return handle

    def digest(self, handle: Any) -> str:
        """Compute with the model."""
        return model.digest(handle.value)

    def release(self, handle: Any) -> None:
        """Give the lease back."""
        handle.release()


class ClientProcess:
    """A client process: each command is a method, and what it returns is the answer."""

    def __init__(self, server: str, subject: Subject) -> None:
        self._client = Client(socket_path=server, timeout=_PATIENCE, connect_timeout=_STARTUP)
        self._subject = subject
        #: Handles, by the names that the commands give them.
        self._held: dict[str, Any] = {}

    def device(self, asked: str) -> dict[str, Any]:
        """Tell what ``--device`` means here: the device as torch and as the library name it.

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

    def warm_up(self, device: str) -> None:
        """Take what a device takes once in a process, which is not the library's: a context."""
        import torch

        torch.zeros(1, device=device)

    def attach(self, nbytes: int, seed: int, endpoint: str = "model", name: str = "model") -> tuple[str, float]:
        """Call an endpoint, and keep the handle under a name: the object's id, and seconds."""
        begin = time.perf_counter()
        self._held[name] = self._subject.attach(self._client, endpoint, nbytes, seed)
        return self._held[name].object_id, time.perf_counter() - begin

    def digest(self, name: str = "model") -> str:
        """Compute with what was attached."""
        return self._subject.digest(self._held[name])

    def alone(self, nbytes: int, seed: int, device: str) -> str:
        """Compute with a model of this process' own, which no server knows of."""
        return model.digest(model.build(nbytes, seed, device))

    def read(self, count: int) -> list[float]:
        """Read the first numbers of the first weight."""
        values: list[float] = self._weight()[0, :count].tolist()
        return values

    def write(self, first: int, values: list[float]) -> None:
        """Put other numbers in the place of some, complete when the answer comes."""
        import torch

        weight = self._weight()
        with torch.no_grad():
            weight[0, first : first + len(values)] = torch.tensor(values)
        if weight.is_cuda:
            torch.cuda.synchronize(weight.device)

    def _weight(self) -> torch.Tensor:
        weight: torch.Tensor = self._held["model"].value[0].weight
        return weight

    def used(self, device: str) -> tuple[int, int]:
        """Tell the bytes of a GPU that are in use, by whomever, and those that are not."""
        import torch

        free, total = torch.cuda.mem_get_info(device)
        return total - free, free

    def cycles(self, count: int, nbytes: int, seed: int) -> float:
        """Attach and release, so often: seconds."""
        begin = time.perf_counter()
        for _ in range(count):
            self._subject.release(self._subject.attach(self._client, "model", nbytes, seed))
        return time.perf_counter() - begin

    def end(self, how: str) -> None:
        """End: ``"closed"`` with the client closed, ``"left"`` without any clearing up, ``"killed"`` by SIGKILL, and
        ``"finished"`` as a script does, with all that the interpreter has to do then: a third of a second.
        """
        if how == "finished":
            pythonapi.Py_Exit(0)  # a process of multiprocessing would leave that out
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "closed":
            self._client.close()
        os._exit(0)


def _serve(connection: Connection, server: str, subject: str, folder: Path) -> None:
    """Answer commands until the connection ends; then the process ends as forked workers do, without any clearing up."""
    os.chdir(folder)
    log = os.open(LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for standard in (1, 2):
        os.dup2(log, standard)
    os.close(log)
    module, _, name = subject.partition(":")
    process = ClientProcess(server, getattr(importlib.import_module(module), name)())
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
    """An error of a client process that could not do what it was asked for, or is not there any more."""


class VerifyClient:
    """A new client process; it ends with the block, whatever it does.

    :param words: see :func:`_serve`.
    """

    def __init__(self, server: str, subject: str, folder: Path) -> None:
        context = multiprocessing.get_context("forkserver")
        self._connection, theirs = context.Pipe()
        with theirs:
            self._process = context.Process(target=_serve, args=(theirs, server, subject, folder), daemon=True)
            # A child would import the main module once more: a program that verifies need not be made for that.
            main, sys.modules["__main__"] = sys.modules["__main__"], ModuleType("__main__")
            try:
                self._process.start()
            finally:
                sys.modules["__main__"] = main

    @property
    def pid(self) -> int:
        """The process's id."""
        assert self._process.pid is not None, "it was started"
        return self._process.pid

    def ask(self, do: str, **options: Any) -> Any:
        """Have it carry out a command of :class:`ClientProcess`: the answer.

        :raises ClientFailed: if it cannot, ends instead, or does not answer.
        """
        self.tell(do, **options)
        return self.answer()

    def tell(self, do: str, **options: Any) -> None:
        """Send a command, for :meth:`answer` to be called later."""
        try:
            self._connection.send((do, options))
        except OSError as error:
            raise ClientFailed(f"client process {self.pid} has ended: {error}") from error

    def answer(self) -> Any:
        """Wait for the answer to the command that was sent."""
        try:
            if not self._connection.poll(_PATIENCE):
                raise ClientFailed(f"client process {self.pid} did not answer within {_PATIENCE:g} s")
            answer, error = self._connection.recv()
        except (EOFError, OSError):
            code = self.wait()
            raise ClientFailed(
                f"client process {self.pid} ended with exit code {code} while it was asked for something"
            ) from None
        if error is not None:
            raise ClientFailed(f"client process {self.pid}: {error}")
        return answer

    def end(self, how: str) -> int:
        """Have it end in a way that the command ``end`` knows: its exit code."""
        self.tell("end", how=how)
        return self.wait()

    def wait(self) -> int:
        """Return the exit code of a process that is about to end; minus the signal where it was killed."""
        self._process.join(_END)
        if self._process.exitcode is None:
            raise ClientFailed(f"client process {self.pid} does not end")
        return self._process.exitcode

    def close(self) -> None:
        """Hang up, which ends it."""
        self._connection.close()

    def __enter__(self) -> VerifyClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
