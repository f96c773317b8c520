"""Client processes, seen from the verification that drives them."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["ClientFailed", "RemoteClient"]

#: Seconds for anything that a client process is asked for.
_PATIENCE = 60.0


class ClientFailed(Exception):
    """A client process could not do what it was asked for, or is not there any more."""


class RemoteClient:
    """A new client process; it ends with the block, whatever it does.

    :param nursery: the socket of the nursery that forks it.
    :param exit_code: waits for the end of a process, and tells how it ended.
    """

    def __init__(self, nursery: Path, exit_code: Callable[[int], int]) -> None:
        self._exit_code = exit_code
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.settimeout(_PATIENCE)
        try:
            self._socket.connect(str(nursery))
            self._lines = self._socket.makefile("rw", encoding="utf-8")
            self.pid = -1
            self.pid = int(self.answer()["pid"])
        except BaseException:
            self._socket.close()
            raise

    def ask(self, do: str, **options: Any) -> dict[str, Any]:
        """Have it carry out a command of :class:`~shared_rpc.verification.client_process.ClientProcess`.

        :raises ClientFailed: if it cannot, ends instead, or does not answer.
        """
        self.tell(do, **options)
        return self.answer()

    def tell(self, do: str, **options: Any) -> None:
        """Send a command, for :meth:`answer` to be called later."""
        try:
            print(json.dumps({"do": do, **options}), file=self._lines, flush=True)
        except OSError as error:
            raise ClientFailed(f"client process {self.pid} has ended: {error}") from error

    def answer(self) -> dict[str, Any]:
        """What it says next."""
        try:
            line = self._lines.readline()
        except TimeoutError as error:
            raise ClientFailed(f"client process {self.pid} did not answer within {_PATIENCE:g} s") from error
        except OSError as error:
            raise ClientFailed(f"client process {self.pid} has ended: {error}") from error
        if not line:
            raise ClientFailed(f"client process {self.pid} ended with exit code {self.wait()} while it was asked for something")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise ClientFailed(f"client process {self.pid}: {answer['error']}")
        return answer

    def end(self, how: str) -> int:
        """Have it end in a way that the command ``end`` knows: its exit code."""
        self.tell("end", how=how)
        return self.wait()

    def wait(self) -> int:
        """The exit code of a process that is about to end; minus the signal where it was killed."""
        return self._exit_code(self.pid)

    def close(self) -> None:
        """Hang up, which ends it."""
        self._lines.close()
        self._socket.close()

    def __enter__(self) -> RemoteClient:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.close()
        except OSError:  # it has ended, with something unread
            self._socket.close()
