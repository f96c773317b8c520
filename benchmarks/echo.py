"""The floor: bytes to a process and back over a Unix socket, in Python, with no protocol at all."""

from __future__ import annotations

import socket
import threading

from benchmarks.processes import configuration, say, until_told

__all__ = ["Echo"]

#: As many bytes as a ping of ours has on the wire.
_MESSAGE = b"." * 25
_CHUNK = 65536


class Echo:
    """A connection to the echo server."""

    name = "raw echo"

    def __init__(self, path: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.connect(path)

    def ping(self) -> None:
        """Make one round trip."""
        self._socket.sendall(_MESSAGE)
        left = len(_MESSAGE)
        while left:
            left -= len(self._socket.recv(_CHUNK))

    def close(self) -> None:
        """Hang up."""
        self._socket.close()


def _serve(listener: socket.socket) -> None:
    while True:
        connection, _ = listener.accept()
        threading.Thread(target=_echo, args=(connection,), daemon=True).start()


def _echo(connection: socket.socket) -> None:
    with connection:
        while data := connection.recv(_CHUNK):
            connection.sendall(data)


def main() -> None:
    """Serve until stdin is closed."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(configuration()["socket"])
    listener.listen()
    threading.Thread(target=_serve, args=(listener,), daemon=True).start()
    say(ready=True)
    until_told()


if __name__ == "__main__":
    main()
