"""A client whose server misbehaves: every call ends with an error that says so, and leaves nothing open."""

from __future__ import annotations

import os
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress

import msgspec
import pytest

from shared_rpc import Client
from shared_rpc.client import link as link_module
from shared_rpc.errors import CodecError, ConnectError, ConnectionClosed, DeadlineExceeded, ProtocolError
from shared_rpc.protocol import messages as m
from shared_rpc.protocol.frames import VERSION
from shared_rpc.protocol.records import EMPTY_TABLE, SegmentInfo, StorageEntry, TensorEntry, TensorTable
from shared_rpc.protocol.tasks import TaskInfo, TaskStatus
from tests.kit.processes import eventually
from tests.kit.raw import Raw, frame_of, sealed_memory

pytestmark = pytest.mark.usefixtures("no_leaks")

Manners = Callable[[Raw], None]
WELCOME = m.Welcome("server-1", "cpu")


@pytest.fixture
def impostor(no_leaks: None, base_path: str) -> Iterator[Callable[[Manners], None]]:
    """``impostor(manners)`` listens where the server would, and has ``manners`` treat every connection."""
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
    """A client that is not patient."""
    monkeypatch.setattr(link_module, "PROMPT", 0.5)
    return connect(timeout=0.5)


def hearing(then: Manners) -> Manners:
    """Hear the client's first message: what is sent before it may come before the client asks who has sent it."""

    def manners(raw: Raw) -> None:
        raw.hear()
        then(raw)

    return manners


def greeting(then: Manners) -> Manners:
    """Behave until the handshake is done."""

    def welcome(raw: Raw) -> None:
        raw.say(WELCOME, 0)
        then(raw)

    return hearing(welcome)


def replying(message: m.Message, payload: bytes = b"", fds: int = 0) -> Manners:
    """Answer every request with that."""

    def manners(raw: Raw) -> None:
        while True:
            number = raw.hear_frame().request_id
            memory = [sealed_memory() for _ in range(fds)]
            raw.say(message, number, payload, memory)
            for fd in memory:
                os.close(fd)

    return greeting(manners)


@pytest.mark.parametrize(
    ("manners", "kind", "text"),
    [
        (lambda raw: raw.hear_end(), ConnectError, "did not answer"),
        (lambda raw: None, ConnectError, "hung up"),
        (hearing(lambda raw: raw.send(b"HTTP/1.1 400 Bad Request")), ProtocolError, "not a shared_rpc frame"),
        (
            hearing(lambda raw: raw.send(struct.pack("!4sBBHIIQ", b"sRPC", VERSION + 1, 2, 0, 0, 0, 0))),
            ProtocolError,
            "use the same release of shared-rpc on both",
        ),
        (hearing(lambda raw: raw.send(frame_of(WELCOME)[:-1])), ConnectError, "hung up"),
        (hearing(lambda raw: raw.say(m.Pong())), ProtocolError, "answered Hello with Pong"),
    ],
    ids=["silence", "hanging up", "another protocol", "another version", "half a greeting", "another greeting"],
)
def test_a_bad_handshake(
    impostor: Callable[[Manners], None], client: Client, manners: Manners, kind: type[Exception], text: str
) -> None:
    """What listens at the socket is no server of this release: the error names the socket, or the way out."""
    impostor(manners)
    with pytest.raises(kind, match=text) as caught:
        client.ping()
    assert client.socket_path in str(caught.value) or kind is ProtocolError


@pytest.mark.parametrize(
    ("manners", "kind", "text"),
    [
        (greeting(lambda raw: None), ConnectionClosed, "connection"),
        (greeting(lambda raw: raw.hear() and None), ConnectionClosed, "closed the connection"),
        (
            greeting(lambda raw: raw.send(frame_of(m.Pong(), 1)[:-1]) or (raw.hear() and None)),
            ConnectionClosed,
            "closed the connection",
        ),
        (greeting(lambda raw: raw.hear() and raw.send(b"garbage")), ProtocolError, "not a shared_rpc frame"),
        (greeting(lambda raw: raw.hear_end()), DeadlineExceeded, "is stuck"),
        (
            greeting(lambda raw: raw.hear() and raw.say(m.Error("protocol", "the server's last word"), 0)),
            ProtocolError,
            "last word",
        ),
        (replying(m.Welcome("", "")), ProtocolError, "answered ping with Welcome"),
        (replying(m.Error("a code of the future", "what?")), Exception, "what?"),
    ],
    ids=[
        "hanging up",
        "hearing and hanging up",
        "half a reply",
        "garbage",
        "silence",
        "farewell",
        "another reply",
        "another error",
    ],
)
def test_a_bad_answer(
    impostor: Callable[[Manners], None], client: Client, manners: Manners, kind: type[Exception], text: str
) -> None:
    """A call ends whatever the server does."""
    impostor(manners)
    with pytest.raises(kind, match=text):
        client.ping()


TABLE = TensorTable(("cpu",), (StorageEntry(0, 4090, 16),), (TensorEntry(0, "float32", 0, (4,), (1,)),))


@pytest.mark.parametrize(
    ("message", "payload", "fds", "kind", "text"),
    [
        (m.Pong(), b"", 1, ProtocolError, "with a Pong that is no valid result"),
        (
            m.Result(msgspec.Raw(EMPTY_TABLE), [SegmentInfo("a", 4096, "cpu")] * 2),
            b"",
            1,
            ProtocolError,
            "is no valid result",
        ),
        (m.Result(msgspec.Raw(EMPTY_TABLE), []), b"", 1, ProtocolError, "is no valid result"),
        (m.Result(msgspec.Raw(EMPTY_TABLE), []), b"no pickle", 0, CodecError, "cannot (be rebuilt|rebuild)"),
        (
            m.Result(msgspec.Raw(msgspec.msgpack.encode(TABLE)), [SegmentInfo("a", 4096, "cpu")]),
            b"\x80\x05K\x00Q.",
            1,
            CodecError,
            "is not within its segment",
        ),
        (m.Result(msgspec.Raw(b"\xc0"), []), b"", 0, CodecError, "table"),
    ],
    ids=[
        "another reply",
        "too few descriptors",
        "too many",
        "a skeleton that is no pickle",
        "a table that does not fit",
        "no table",
    ],
)
def test_a_bad_result(
    impostor: Callable[[Manners], None],
    client: Client,
    message: m.Message,
    payload: bytes,
    fds: int,
    kind: type[Exception],
    text: str,
) -> None:
    """A result that does not fit is refused, and its descriptors are closed."""
    impostor(replying(message, payload, fds))
    with pytest.raises(kind, match=text):
        client.call("anything")


def test_a_lease_on_what_cannot_be_rebuilt_goes_back(impostor: Callable[[Manners], None], client: Client) -> None:
    """The client gives back the lease of a result that its caller never gets."""
    asked: list[m.Message] = []

    def manners(raw: Raw) -> None:
        raw.hear()
        raw.say(m.Result(msgspec.Raw(EMPTY_TABLE), [], object_id="object-1", managed=True), 1, b"no pickle")
        asked.append(raw.hear())
        raw.say(m.Count(1), 2)
        raw.hear_end()

    impostor(greeting(manners))
    with pytest.raises(CodecError):
        client.call("anything")
    eventually(lambda: asked == [m.Release(["object-1"])])
    client.close()


def test_a_reply_that_comes_too_late_is_skipped(impostor: Callable[[Manners], None], client: Client) -> None:
    """Replies to earlier requests are dropped with their descriptors, and the right one is found."""

    def manners(raw: Raw) -> None:
        raw.hear()
        fd = sealed_memory()
        raw.say(m.Pong(), 77, b"", [fd])
        os.close(fd)
        raw.say(m.Pong(), 1)
        raw.hear_end()

    impostor(greeting(manners))
    assert client.ping() < 5
    client.close()


def test_what_is_told_together_with_the_answer(impostor: Callable[[Manners], None], client: Client) -> None:
    """All of it reaches the callback, in order, though it came in one piece."""
    steps = [TaskInfo("t", "endpoint", TaskStatus.RUNNING, float(step)) for step in range(3)]
    end = TaskInfo("t", "endpoint", TaskStatus.COMPLETED, 3.0)

    def manners(raw: Raw) -> None:
        raw.hear()
        raw.send(b"".join(frame_of(m.TaskUpdate(step), 1) for step in steps) + frame_of(m.TaskIs(end), 1))
        raw.hear_end()

    impostor(greeting(manners))
    told: list[TaskInfo] = []
    assert client.watch_task("t", callback=told.append) == end
    assert told == [*steps, end]
    client.close()


def test_a_server_that_is_stuck_keeps_the_session(
    impostor: Callable[[Manners], None], client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection of a call that nobody answered stays open, for the session's sake, until the client has another."""
    stuck, ended = threading.Event(), threading.Event()

    def manners(raw: Raw) -> None:
        raw.hear()
        stuck.set()
        raw.hear_end()
        ended.set()

    impostor(greeting(manners))
    with pytest.raises(DeadlineExceeded, match="is stuck"):
        client.ping()
    assert stuck.is_set()
    assert not ended.is_set()
    client.close()
    eventually(ended.is_set)
