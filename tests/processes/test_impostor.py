"""Clients of a server that misbehaves: every call ends with an error, and leaves nothing open.

For a connection's reaction to each kind of answer, see `rules/test_exchange.py`.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress

import msgspec
import pytest

from shared_rpc import Client
from shared_rpc.client import link as link_module
from shared_rpc.errors import CodecError, ConnectError, DeadlineExceeded, ProtocolError
from shared_rpc.protocol import messages as m
from shared_rpc.protocol.records import EMPTY_TABLE, SegmentInfo, StorageEntry, TensorEntry, TensorTable
from tests.kit.raw import Raw, sealed_memory

pytestmark = pytest.mark.usefixtures("no_leaks")

Manners = Callable[[Raw], None]
WELCOME = m.Welcome("server-1", "cpu")


@pytest.fixture
def impostor(no_leaks: None, base_path: str) -> Iterator[Callable[[Manners], None]]:
    """``impostor(manners)`` listens in place of the server, and calls ``manners`` with every connection."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(f"{base_path}-cpu.sock")
    listener.listen()
    threads = []

    def listen(manners: Manners) -> None:
        while True:
            try:
                sock, _ = listener.accept()
            except OSError:
                return
            with Raw(sock, hello=False) as raw, suppress(ConnectionError):
                manners(raw)

    def start(manners: Manners) -> None:
        threads.append(threading.Thread(target=listen, args=[manners]))
        threads[0].start()

    yield start
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    for thread in threads:
        thread.join()


@pytest.fixture
def client(impostor: object, connect: Callable[..., Client], monkeypatch: pytest.MonkeyPatch) -> Client:
    """A client with a short timeout."""
    monkeypatch.setattr(link_module, "PROMPT", 0.5)
    return connect(timeout=0.5)


def greeting(then: Manners) -> Manners:
    """Complete the handshake correctly, once the client can check the sender of the answer."""

    def welcome(raw: Raw) -> None:
        raw.hear()
        raw.say(WELCOME, 0)
        then(raw)

    return welcome


def replying(message: m.Message, payload: bytes = b"", fds: int = 0) -> Manners:
    """Answer every request with this message."""

    def manners(raw: Raw) -> None:
        while True:
            number = raw.hear_frame().request_id
            memory = [sealed_memory() for _ in range(fds)]
            raw.say(message, number, payload, memory)
            for fd in memory:
                os.close(fd)

    return greeting(manners)


BAD: dict[str, tuple[Manners, type[Exception], str]] = {
    "no greeting": (lambda raw: raw.hear_end(), ConnectError, "did not answer"),
    "no reply": (greeting(lambda raw: raw.hear_end()), DeadlineExceeded, "is stuck"),
    "another reply": (replying(m.Welcome("", "")), ProtocolError, "answered ping with Welcome"),
}


@pytest.mark.parametrize(("manners", "kind", "text"), BAD.values(), ids=BAD)
def test_calls_to_a_bad_server_end(
    impostor: Callable[[Manners], None], client: Client, manners: Manners, kind: type[Exception], text: str
) -> None:
    """Whatever it does; an error of the connection names the socket."""
    impostor(manners)
    with pytest.raises(kind, match=text) as caught:
        client.ping()
    assert client.socket_path in str(caught.value) or kind is not ConnectError


TABLE = TensorTable(("cpu",), (StorageEntry(0, 4090, 16),), (TensorEntry(0, "float32", 0, (4,), (1,)),))


NO_RESULTS: dict[str, tuple[Manners, type[Exception], str]] = {
    "too few descriptors": (
        replying(m.Result(msgspec.Raw(EMPTY_TABLE), [SegmentInfo("a", 4096, "cpu")] * 2), fds=1),
        ProtocolError,
        "is no valid result",
    ),
    "no pickle": (replying(m.Result(msgspec.Raw(EMPTY_TABLE), []), b"no pickle"), CodecError, "cannot (be rebuilt|rebuild)"),
    "a table that does not fit": (
        replying(m.Result(msgspec.Raw(msgspec.msgpack.encode(TABLE)), [SegmentInfo("a", 4096, "cpu")]), b"\x80\x05K\x00Q.", 1),
        CodecError,
        "is not within its segment",
    ),
}


@pytest.mark.parametrize(("manners", "kind", "text"), NO_RESULTS.values(), ids=NO_RESULTS)
def test_malformed_results_are_refused(
    impostor: Callable[[Manners], None], client: Client, manners: Manners, kind: type[Exception], text: str
) -> None:
    """And their descriptors are closed."""
    impostor(manners)
    with pytest.raises(kind, match=text):
        client.call("anything")
