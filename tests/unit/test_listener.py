"""Sockets that several servers want at once."""

from __future__ import annotations

import socket
import threading

import pytest

from shared_rpc.errors import ConfigurationError
from shared_rpc.server.listener import bind_socket


@pytest.fixture
def path(base_path: str) -> str:
    """Where servers of this test listen."""
    return f"{base_path}-cpu.sock"


def test_many_races(path: str) -> None:
    """However the steps of several servers interleave, one of them has the socket."""
    for _ in range(25):
        start = threading.Barrier(4)
        won: list[socket.socket] = []

        def race(start: threading.Barrier = start, won: list[socket.socket] = won) -> None:
            start.wait()
            try:
                won.append(bind_socket(path))
            except ConfigurationError as error:
                assert "is served by" in str(error)

        threads = [threading.Thread(target=race) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        (listener,) = won
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(path)
            listener.accept()[0].close()
        listener.close()  # its file stays, as after SIGKILL
