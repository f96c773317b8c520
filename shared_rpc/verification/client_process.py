"""One client process of a verification: commands and answers are lines of JSON."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from typing import TYPE_CHECKING, Any

from shared_rpc import Client, Provider
from shared_rpc.verification import model
from shared_rpc.verification.subject import Subject

if TYPE_CHECKING:
    import torch

__all__ = ["ClientProcess"]

#: Seconds that an operation of the library may take, and to wait for a server.
_PATIENCE, _STARTUP = 60.0, 10.0


class ClientProcess:
    """Answers ``{"do": name, ...}`` with what the method of that name returns, or ``{"error": ...}``."""

    def __init__(self, connection: socket.socket, server: str, subject: Subject) -> None:
        self._lines = connection.makefile("rw", encoding="utf-8")
        connection.close()  # the file has a copy
        self._client = Client(socket_path=server, timeout=_PATIENCE, connect_timeout=_STARTUP)
        self._subject = subject
        #: Handles, by the names that the commands give them.
        self._held: dict[str, Any] = {}

    def serve(self) -> None:
        """Answer until the connection ends; then the process ends as forked workers do, without any clearing up."""
        self._say(pid=os.getpid())
        for line in self._lines:
            command = json.loads(line)
            try:
                answer = getattr(self, command.pop("do"))(**command)
            except Exception as error:
                answer = {"error": f"{type(error).__name__}: {error}"}
            self._say(**(answer or {}))
        os._exit(0)

    def _say(self, **facts: Any) -> None:
        print(json.dumps(facts), file=self._lines, flush=True)

    # Commands.

    def device(self, asked: str) -> dict[str, Any]:
        """What ``--device`` means here: the device as torch and as the library name it.

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
        """Have what a device takes once in a process, which is not the library's: a context."""
        import torch

        torch.zeros(1, device=device)

    def attach(self, nbytes: int, seed: int, endpoint: str = "model", name: str = "model") -> dict[str, Any]:
        """Call an endpoint, and keep the handle under a name."""
        begin = time.perf_counter()
        handle = self._subject.attach(self._client, endpoint, nbytes, seed)
        seconds = time.perf_counter() - begin
        self._held[name] = handle
        return {"seconds": seconds, "object_id": handle.object_id}

    def release(self, name: str = "model") -> None:
        """Give a lease back."""
        self._subject.release(self._held.pop(name))

    def digest(self, name: str = "model") -> dict[str, Any]:
        """Compute with what was attached."""
        return {"digest": self._subject.digest(self._held[name])}

    def alone(self, nbytes: int, seed: int, device: str) -> dict[str, Any]:
        """Compute with a model of this process' own, which no server knows of."""
        return {"digest": model.digest(model.build(nbytes, seed, device))}

    def read(self, count: int, name: str = "model") -> dict[str, Any]:
        """The first numbers of the first weight."""
        return {"values": self._weight(name)[0, :count].tolist()}

    def write(self, first: int, values: list[float], name: str = "model") -> None:
        """Other numbers in the place of some, complete when the answer comes."""
        import torch

        weight = self._weight(name)
        with torch.no_grad():
            weight[0, first : first + len(values)] = torch.tensor(values)
        if weight.is_cuda:
            torch.cuda.synchronize(weight.device)

    def used(self, device: str) -> dict[str, Any]:
        """Bytes of a GPU that are in use, by whomever, and those that are not."""
        import torch

        free, total = torch.cuda.mem_get_info(device)
        return {"used": total - free, "free": free}

    def cycles(self, count: int, nbytes: int, seed: int) -> dict[str, Any]:
        """Attach and release, so often."""
        begin = time.perf_counter()
        for _ in range(count):
            self._subject.release(self._subject.attach(self._client, "model", nbytes, seed))
        return {"seconds": time.perf_counter() - begin}

    def end(self, how: str) -> None:
        """``"closed"``: close the client, and end. ``"left"``: end without any clearing up. ``"killed"``: by
        SIGKILL. ``"finished"``: as a script does, with all that the interpreter has to do then: a third of a second.
        """
        if how == "finished":
            sys.exit(0)
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "closed":
            self._client.close()
        os._exit(0)

    def _weight(self, name: str) -> torch.Tensor:
        weight: torch.Tensor = self._subject.module(self._held[name])[0].weight  # type: ignore[index]
        return weight
