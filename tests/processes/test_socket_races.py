"""Races of several servers for one socket."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from shared_rpc.errors import ConfigurationError
from shared_rpc.protocol.election import Election
from shared_rpc.server.listener import bind_socket
from tests.kit.apps import at_once


@pytest.fixture
def path(base_path: str) -> str:
    """The address of this test's servers."""
    return f"{base_path}-cpu.sock"


def test_one_of_several_servers_gets_the_socket(path: str) -> None:
    """However their steps interleave."""
    for _ in range(25):
        start = threading.Barrier(4)

        def race(start: threading.Barrier = start) -> socket.socket:
            start.wait()
            return bind_socket(path)

        outcomes = at_once(*[race] * 4)
        (listener,) = (one for one in outcomes if isinstance(one, socket.socket))
        for lost in outcomes:
            assert lost is listener or (isinstance(lost, ConfigurationError) and "is served by" in str(lost))
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(path)
            listener.accept()[0].close()
        listener.close()  # its file stays, as after SIGKILL


# Elections.


@pytest.fixture
def elections(tmp_path: Path) -> Iterator[tuple[Election, Election]]:
    """Two processes' views of one lock."""
    with closing(Election(f"{tmp_path}/s")) as one, closing(Election(f"{tmp_path}/s")) as other:
        yield one, other


@pytest.mark.parametrize("lasting", [True, False])
def test_failures_are_reported_to_waiting_processes(
    elections: tuple[Election, Election], tmp_path: Path, lasting: bool
) -> None:
    """A permanent one also to later ones, until it expires."""
    one, other = elections
    one.record_failure("the reason", lasting)
    assert other.failure() == "the reason"
    with closing(Election(f"{tmp_path}/s")) as later:
        assert later.failure() == ""
        assert later.lasting_failure(since=0.0) == ("the reason" if lasting else "")
        assert later.lasting_failure(since=float("inf")) == ""
