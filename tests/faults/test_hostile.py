"""Whatever comes in, the server goes on: other clients are served, and nothing of it is left behind."""

from __future__ import annotations

import asyncio
import errno
import gc
import os
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shared_rpc import Client, Provider, Server
from shared_rpc.context import CURRENT_RUN
from shared_rpc.errors import ConnectionClosed
from shared_rpc.execution import coroutines
from shared_rpc.execution.stream import FramedStream
from shared_rpc.protocol import exported as x
from shared_rpc.protocol import generations as g
from shared_rpc.protocol import messages as m
from shared_rpc.protocol import tiers as t
from shared_rpc.protocol.frames import HEADER_SIZE, MAX_FDS, VERSION, Frame, Limits
from shared_rpc.protocol.records import SegmentInfo, StorageEntry, TensorEntry, TensorTable
from shared_rpc.protocol.values import SkeletonRef, TensorRef, encode
from shared_rpc.server import remote as remote_module
from shared_rpc.server.records import installed_versions
from shared_rpc.server.requests import Caller
from tests.kit.processes import Child, eventually, open_fds, python
from tests.kit.raw import F_SEAL_SHRINK, F_SEAL_WRITE, Raw, frame_of, sealed_memory

PING = frame_of(m.Ping())
CROWD = 200


def header(
    kind: int = 3, *, magic: bytes = b"sRPC", version: int = VERSION, fds: int = 0, body: int = 0, payload: int = 0
) -> bytes:
    """A frame's header, with any of it wrong."""
    return struct.pack("!4sBBHIIQ", magic, version, kind, fds, 1, body, payload)


def account(server: Server) -> dict[str, int]:
    """All that a client could leave behind in the server's process."""
    info = server.info()
    held = {name: info[name] for name in ("connections", "sessions", "leases", "running", "objects")}
    return {**held, "fds": open_fds(), "threads": threading.active_count()}


@pytest.fixture
def good(connect: Callable[..., Client]) -> Client:
    """A client that behaves."""
    return connect(timeout=20.0)


@pytest.fixture(params=["asyncio", "uvloop"])
def loop(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both kinds of event loop that a server runs on: they see the end of a connection in ways of their own."""
    if request.param == "uvloop":
        pytest.importorskip("uvloop")
    monkeypatch.setattr(coroutines, "USES_UVLOOP", request.param == "uvloop")


@pytest.fixture
def server(
    no_leaks: None, loop: None, provider: Provider, serve: Callable[..., Server], good: Client, go: threading.Event
) -> Iterator[Server]:
    """A server that, at the end of the test, serves a good client and has nothing more than it had at the start."""

    @provider.share
    def ones(size: int) -> torch.Tensor:
        return torch.ones(size)

    @provider.share(managed=True, cache=False)
    def kept(size: int) -> torch.Tensor:
        return torch.ones(size)

    @provider.share(cache=False)
    def total(x: torch.Tensor) -> torch.Tensor:
        return x.double().sum()

    @provider.share(cache=False)
    def hold() -> None:
        go.wait(30)

    server = serve(max_workers=1)
    good.call("ones", 3)
    before = account(server)
    yield server
    go.set()

    def as_before() -> bool:
        gc.collect()
        now = account(server)
        return all(now[name] <= before[name] for name in before)

    try:
        eventually(as_before, seconds=10)
    except AssertionError:
        pytest.fail(f"the server had {before} and now has {account(server)}")
    assert good.call("ones", 3).sum() == 3


def refused(raw: Raw) -> m.Error:
    """The server's last word to a connection, after which it hangs up."""
    error = raw.hear()
    assert isinstance(error, m.Error), error
    raw.hear_end()
    return error


# Frames that are cut off.


def test_a_hello_cut_off_at_any_byte(server: Server) -> None:
    """A client that dies during the handshake is forgotten."""
    hello = frame_of(m.Hello())
    for end in range(len(hello)):
        with Raw(server.socket_path, hello=False) as raw:
            raw.send(hello[:end])


def test_a_call_cut_off_at_any_byte(server: Server) -> None:
    """A client that dies in the middle of a call is forgotten, with the descriptors it had sent already."""
    fd = sealed_memory()
    call = frame_of(tensor_call(), payload=b"skeleton", fds=1)
    for end in range(1, len(call)):
        with Raw(server.socket_path) as raw:
            raw.send(call[:end], [fd])
    os.close(fd)


def test_frames_that_arrive_byte_by_byte(server: Server) -> None:
    """How the bytes are cut up makes no difference."""
    with Raw(server.socket_path, hello=False) as raw:
        for number in range(len(stream := frame_of(m.Hello()) + PING)):
            raw.send(stream[number : number + 1])
        assert isinstance(raw.hear(), m.Welcome)
        assert isinstance(raw.hear(), m.Pong)


def test_a_client_that_asks_and_hangs_up_at_once(server: Server) -> None:
    """Replies for somebody who is gone are dropped."""
    for _ in range(20):
        with Raw(server.socket_path) as raw:
            raw.say(m.Call("ones", [3]), 1)
            raw.say(m.Call("kept", [3]), 2)
            raw.say(m.Call("kept", [4]), 3)


# Frames that are wrong.


@pytest.mark.parametrize(
    ("frame", "text"),
    [
        pytest.param(b"GET / HTTP/1.1\r\n\r\n" + bytes(20), "not a shared_rpc frame: it begins with b'GET '", id="http"),
        pytest.param(b"\x16\x03", "not a shared_rpc frame", id="two bytes are enough"),
        pytest.param(header(magic=b"sRPD"), "not a shared_rpc frame", id="magic"),
        pytest.param(header(version=VERSION + 1), "use the same release of shared-rpc on both", id="version"),
        pytest.param(header(body=0xFFFFFFFF, payload=1 << 63), "announces 4294967295 + 9223372036854775808", id="sizes"),
    ],
)
@pytest.mark.parametrize("hello", [False, True], ids=["before Hello", "after Hello"])
def test_a_broken_frame_is_told_and_ends_the_connection(server: Server, frame: bytes, text: str, hello: bool) -> None:
    """The error says what is wrong with it, and nothing is waited for that was announced."""
    with Raw(server.socket_path, hello=hello) as raw:
        raw.send(frame)
        error = refused(raw)
    assert error.code == "protocol"
    assert text in error.text


@pytest.mark.parametrize(
    ("frame", "text"),
    [
        pytest.param(header(body=Limits().body + 1), f"the limits are {Limits().body}", id="body"),
        pytest.param(header(payload=Limits().payload + 1), f"the limits are {Limits().body} + ", id="payload"),
        pytest.param(header(fds=MAX_FDS + 1), f"the limit is {MAX_FDS}", id="descriptors"),
        pytest.param(header(fds=3), "0 file descriptors with a frame that announced 3", id="no descriptors"),
    ],
)
def test_a_frame_beyond_the_limits_is_told_and_ends_the_connection(server: Server, frame: bytes, text: str) -> None:
    """The header is enough for that."""
    with Raw(server.socket_path) as raw:
        raw.send(frame)
        assert text in refused(raw).text


@pytest.mark.parametrize(
    ("frame", "text"),
    [
        pytest.param(header(body=(64 << 10) + 1), "announces 65537 + 0 bytes; the limits are 65536 + 0", id="body"),
        pytest.param(header(payload=1), "announces 0 + 1 bytes; the limits are 65536 + 0", id="payload"),
        pytest.param(header(fds=1), "announces 1 file descriptors; the limit is 0", id="descriptors"),
    ],
)
def test_a_large_frame_before_hello(server: Server, frame: bytes, text: str) -> None:
    """A connection that has not introduced itself cannot have the server keep much for it."""
    with Raw(server.socket_path, hello=False) as raw:
        raw.send(frame)
        assert text in refused(raw).text


def test_a_large_frame_right_after_hello(server: Server) -> None:
    """A client need not wait for the welcome."""
    with Raw(server.socket_path, hello=False) as raw:
        raw.send(frame_of(m.Hello(), 1) + frame_of(g.GetObject("x" * (1 << 20)), 2))
        assert isinstance(raw.hear(1), m.Welcome)
        answer = raw.hear(2)
        assert isinstance(answer, m.Error)
        assert answer.code == "stale-handle"


def test_more_descriptors_than_announced(server: Server) -> None:
    """They are closed, and the connection with them."""
    fd = sealed_memory()
    with Raw(server.socket_path) as raw:
        raw.send(PING, [fd, fd])
        assert "2 file descriptors with a frame that announced 0" in refused(raw).text
    os.close(fd)


def test_fewer_descriptors_than_announced(server: Server) -> None:
    """A frame does not wait for descriptors: they come with its bytes, or not at all."""
    fd = sealed_memory()
    with Raw(server.socket_path) as raw:
        raw.send(header(fds=2), [fd])
        assert "1 file descriptors with a frame that announced 2" in refused(raw).text
    os.close(fd)


def test_descriptors_for_a_frame_that_never_comes(server: Server) -> None:
    """One byte of a frame cannot bring more descriptors than frames can have."""
    fd = sealed_memory()
    with Raw(server.socket_path) as raw:
        for byte in header(fds=MAX_FDS)[: 2 * MAX_FDS // 253 + 1]:
            raw.send(bytes([byte]), [fd] * 253)
        assert "file descriptors for a frame of at most" in refused(raw).text
    os.close(fd)


def test_descriptors_of_a_ping(server: Server) -> None:
    """A request that needs none is answered, and they are closed."""
    fd = sealed_memory()
    with Raw(server.socket_path) as raw:
        fds = open_fds()
        assert isinstance(raw.ask(m.Ping(), fds=[fd] * 5), m.Pong)
        eventually(lambda: open_fds() <= fds)
    os.close(fd)


@pytest.mark.parametrize("sent", [b"s", PING], ids=["half a frame", "a frame"])
def test_its_own_connection_as_a_descriptor(server: Server, sent: bytes) -> None:
    """A client cannot have the server hold the client's own end, which would keep the connection open after its death."""
    with Raw(server.socket_path) as raw:
        raw.send(sent, [raw.sock.fileno()])
    eventually(lambda: server.info()["connections"] == 1)


def test_a_socket_that_lingers(server: Server, good: Client) -> None:
    """Closing a descriptor that a client sent never holds up the others."""
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as out:
        out.setblocking(False)
        with pytest.raises(BlockingIOError):
            while True:
                out.send(bytes(1 << 16))
        out.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 5))
        with Raw(server.socket_path) as raw:
            raw.send(PING, [out.fileno()])
            os.close(out.detach())
            answer = raw.hear()
            assert good.ping() < 2
    assert isinstance(answer, m.Error)
    assert "received a socket" in answer.text


@pytest.mark.parametrize("sent", [PING, PING[:-1], header(8, body=1, fds=2)], ids=["a frame", "half a frame", "no frame"])
def test_a_descriptor_whose_close_waits(server: Server, good: Client, monkeypatch: pytest.MonkeyPatch, sent: bytes) -> None:
    """As that of a file system in user space does, for as long as the sender likes: the loop asks nothing of it."""
    close, fstat, go, closed = os.close, os.fstat, threading.Event(), threading.Event()
    reader, writer = os.pipe()
    file = os.stat(reader)

    def wait(fd: int) -> None:
        status = fstat(fd)
        if fd != reader and (status.st_dev, status.st_ino) == (file.st_dev, file.st_ino):
            assert threading.current_thread().name == "shared-rpc-discarder"
            go.wait(20)
            closed.set()
        close(fd)

    def refuse(fd: int) -> os.stat_result:
        assert threading.current_thread().name != "shared-rpc-server"
        return fstat(fd)

    with monkeypatch.context() as patch:
        patch.setattr(os, "close", wait)
        patch.setattr(os, "fstat", refuse)
        with Raw(server.socket_path) as raw:
            raw.send(sent, [reader])
        eventually(lambda: server.info()["connections"] == 1)
        good.ping()
        assert not closed.is_set()
        go.set()
        assert closed.wait(20)
    os.close(reader)
    os.close(writer)


def test_garbage_after_a_good_frame(server: Server) -> None:
    """The good frame is answered, the rest is told."""
    with Raw(server.socket_path) as raw:
        raw.send(PING + b"garbage")
        assert isinstance(raw.hear(), m.Pong)
        assert "not a shared_rpc frame" in refused(raw).text


@pytest.mark.parametrize(
    "message", [m.Ping(), m.Call("ones", [1]), m.Welcome("", ""), m.Goodbye(), g.GetObject("0" * 24), m.ListSessions()]
)
def test_a_request_before_hello(server: Server, message: m.Message) -> None:
    """A connection begins with Hello."""
    with Raw(server.socket_path, hello=False) as raw:
        raw.say(message)
        assert f"the first message of the connection is {type(message).__name__}, not Hello" in refused(raw).text


@pytest.mark.parametrize("kind", [0, 2, 4, 7, 9, 12, 15, 16, 19, 99, 255])
def test_a_kind_that_is_no_request(server: Server, kind: int) -> None:
    """Unknown kinds, and those that only a server sends, are refused; the connection goes on."""
    with Raw(server.socket_path) as raw:
        raw.send(header(kind))
        error = raw.hear()
        assert isinstance(error, m.Error)
        assert error.code == "protocol"
        assert isinstance(raw.ask(m.Ping()), m.Pong)


def test_a_second_hello(server: Server) -> None:
    """One connection, one session."""
    with Raw(server.socket_path) as raw:
        answer = raw.ask(m.Hello())
        assert isinstance(answer, m.Error)
        assert "Hello is no message of a client" in answer.text


@pytest.mark.parametrize(
    "body", [b"", b"\xc1", b"\x90", b"\x91", b"\x91" * 5000, b"\xdf\xff\xff\xff\xff", b"\x95" + b"\xc0" * 5]
)
@pytest.mark.parametrize("kind", [8, 11, 13, 17, 18, 90, 102])
def test_a_malformed_body(server: Server, kind: int, body: bytes) -> None:
    """A body that is not what its kind says is refused, with the name of the message; the connection goes on."""
    with Raw(server.socket_path) as raw:
        raw.send(header(kind, body=len(body)) + body)
        error = raw.hear()
        assert isinstance(error, m.Error)
        assert error.code == "protocol"
        assert error.text.startswith("cannot decode a ")
        assert isinstance(raw.ask(m.Ping()), m.Pong)


@pytest.mark.parametrize(
    "value",
    [
        msgspec.msgpack.Ext(99, b""),
        msgspec.msgpack.Ext(-1, bytes(4)),
        msgspec.msgpack.Ext(1, b"\xc1"),
        msgspec.msgpack.Ext(1, b"\x01"),
        msgspec.msgpack.Ext(3, b"\x90"),
        msgspec.msgpack.Ext(4, b"\x91\x05"),
        msgspec.msgpack.Ext(4, b"\x91\xff"),
        msgspec.msgpack.Ext(5, b"\x91\x00"),
        msgspec.msgpack.Ext(6, b"\x91\xa4load"),
        {1: 2},
    ],
    ids=lambda value: repr(value) if isinstance(value, dict) else f"{value.code} {value.data!r}",
)
def test_an_argument_that_no_client_writes(server: Server, value: object) -> None:
    """A value that cannot be read, or refers to memory that did not come, fails its call and nothing else."""
    with Raw(server.socket_path) as raw:
        error = raw.ask(m.Call("ones", [value]))
        assert isinstance(error, m.Error)
        assert error.code in ("protocol", "codec")
        assert isinstance(raw.ask(m.Ping()), m.Pong)


def test_more_values_than_a_call_may_have(server: Server, good: Client) -> None:
    """The server does not spend its time on a list that should be a tensor, and says so."""
    with Raw(server.socket_path) as raw:
        for message in (
            m.Call("ones", [[[None] * 120_000] * 2]),
            m.InvalidateCall("ones", [None] * 200_001),
            m.InvalidateCall("ones", [[[]] * 2_000_000]),
            m.InvalidateCall("ones", [msgspec.msgpack.Ext(1, msgspec.msgpack.encode([[]] * 2_000_000))]),
        ):
            error = raw.ask(message)
            assert isinstance(error, m.Error)
            assert error.code == "protocol"
            assert "more than 200,000 values: pass them as a tensor" in error.text
            assert good.ping() < 2


def test_tuples_that_grow_as_they_are_read(server: Server, good: Client) -> None:
    """Every level of a tuple copies what is inside it; the sum of that is limited."""
    tuples = msgspec.msgpack.Ext(1, msgspec.msgpack.encode([bytes(8 << 20)]))
    for _ in range(40):
        tuples = msgspec.msgpack.Ext(1, msgspec.msgpack.encode([tuples]))
    with Raw(server.socket_path) as raw:
        error = raw.ask(m.Call("ones", [tuples]))
        assert isinstance(error, m.Error)
        assert "tuples with too much data are nested too deeply" in error.text
        assert good.ping() < 2


@pytest.mark.parametrize(
    "message",
    [
        g.GetObject("x" * (7 << 20)),
        g.GetObject("x", "x" * (7 << 20)),
        m.GetObjectInfo("x" * (7 << 20)),
        m.ListHolders("x" * (7 << 20)),
        m.InvalidateObject("x" * (7 << 20)),
    ],
)
def test_an_id_that_fills_a_frame(server: Server, message: m.Message) -> None:
    """No object has it: that is told, and the id is not sent back."""
    with Raw(server.socket_path) as raw:
        answer = raw.ask(message)
        assert isinstance(answer, m.Error)
        assert answer.code == "stale-handle"
        assert len(answer.text) < 1000


@pytest.mark.parametrize(
    "message",
    [
        m.Release([""] * 100_001),
        m.Hold([], [""] * 100_001),
        m.Hold([], [], {str(number): [] for number in range(100_001)}),
        m.Hold([], [], {"": [""] * 10_001}),
        m.Free([0] * 100_001),
        m.Call("ones", segments=[SegmentInfo("", 0, "")] * 10_001),
        m.Call("ones", skeletons=[0] * 10_001),
        m.Call("ones", freed=[0] * 100_001),
        m.CreateBuffer([1] * 1001),
        m.KeepSegments([""] * 10_001),
        t.Suspend([""] * 100_001),
        x.Adopt([""] * 1001),
    ],
    ids=lambda message: type(message).__name__,
)
def test_a_list_with_more_than_there_can_be(server: Server, message: m.Message) -> None:
    """It is refused before any of its elements is made."""
    with Raw(server.socket_path) as raw:
        answer = raw.ask(message)
        assert isinstance(answer, m.Error)
        assert (answer.code, "of length <= " in answer.text) == ("protocol", True)


def test_a_long_request_that_brings_nothing(server: Server) -> None:
    """Only calls and records need large bodies."""
    with Raw(server.socket_path) as raw:
        answer = raw.ask(g.GetObject("x" * (9 << 20)))
        assert isinstance(answer, m.Error)
        assert "the limit for its kind is 8388608" in answer.text


def test_no_garbage_is_collected_while_a_long_request_is_read(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """A collection for each 700 of its values would walk over all that the server has; afterwards they go on."""
    found: list[bool] = []
    decode = remote_module.decode_message

    def watched(frame: Frame) -> m.Message:
        found.append(gc.isenabled())
        return decode(frame)

    monkeypatch.setattr(remote_module, "decode_message", watched)
    with Raw(server.socket_path, hello=False) as raw:
        raw.ask(m.Hello())
        raw.ask(m.InvalidateCall("ones", [[None] * 100_000]))
        raw.ask(m.Release(["x"] * 100_001))
        raw.ask(m.Ping())
    assert found[-4:] == [True, False, False, True]


@pytest.mark.parametrize("limit", [b"\xd3\x80" + bytes(7), b"\xff", b"\x00", b"\x01", b"\xcf" + b"\xff" * 8])
def test_a_page_of_any_size(server: Server, go: threading.Event, limit: bytes) -> None:
    """There is at least one run in it, and no more than there are."""
    with Raw(server.socket_path) as raw:
        raw.say(m.Call("hold"), 7)
        raw.send(header(101, body=len(limit) + 1) + b"\x91" + limit)
        runs = raw.hear(1)
        assert isinstance(runs, m.Answer)
        assert [run["endpoint"] for run in m.ListRuns.read(runs)] == ["hold"]
        go.set()


@pytest.mark.parametrize("limit", [b"\xc0", b"\xa1x", b"\x90", b"\xcb" + b"\xff" * 8, b"\xc3"])
def test_a_page_of_no_size(server: Server, limit: bytes) -> None:
    """What is no number is refused."""
    with Raw(server.socket_path) as raw:
        raw.send(header(101, body=len(limit) + 1) + b"\x91" + limit)
        answer = raw.hear()
        assert isinstance(answer, m.Error)
        assert answer.code == "protocol"


@pytest.mark.parametrize("message", [m.Goodbye(), g.GetObject("x"), m.GetStatistics(), m.InvalidateObject("x")])
def test_descriptors_of_a_request_that_takes_none(server: Server, message: m.Message) -> None:
    """They are closed; what follows is answered."""
    with Raw(server.socket_path) as raw:
        with open(os.devnull, "rb") as file:
            raw.say(message, 1, fds=[file.fileno()] * 3)
        assert isinstance(raw.ask(m.Ping(), 2), m.Pong)


def test_goodbye_in_the_middle(server: Server, go: threading.Event) -> None:
    """Said more than once, with calls under way: nothing answers it, and the session goes on."""
    with Raw(server.socket_path) as raw:
        held = raw.ask(m.Call("kept", [4]))
        assert isinstance(held, m.Result)
        raw.say(m.Call("hold"), 5)
        for number in range(3):
            raw.say(m.Goodbye(), number)
        go.set()
        assert isinstance(raw.hear(5), m.Result)
        released = raw.ask(m.Release([held.object_id]), 6)
        assert isinstance(released, m.Count)
        assert released.count == 1


def test_the_name_of_an_endpoint_that_fills_a_frame(server: Server, good: Client) -> None:
    """It is not compared with what is there, and not sent back."""
    with Raw(server.socket_path) as raw:
        error = raw.ask(m.Call("k" * (8 << 20)))
        assert isinstance(error, m.Error)
        assert error.code == "endpoint-not-found"
        assert len(error.text) < 1000
        assert good.ping() < 2


# Calls whose parts do not fit.


def tensor_call(
    *,
    tensor: TensorEntry | None = None,
    storage: StorageEntry | None = None,
    table: object = ...,
    segments: int = 1,
    nbytes: int = 4096,
    device: str = "cpu",
    skeletons: tuple[int, ...] = (),
) -> m.Call:
    """A call of ``total`` with one tensor."""
    if table is ...:
        storage = storage or StorageEntry(0, 0, 16)
        table = TensorTable(("cpu",), (storage,), (tensor or TensorEntry(0, "float32", 0, (4,), (1,)),))
    return m.Call(
        "total",
        [encode(TensorRef(0))],
        {},
        msgspec.Raw(msgspec.msgpack.encode(table)),
        [SegmentInfo("chosen by the client", nbytes, device)] * segments,
        list(skeletons),
    )


def test_a_call_with_a_tensor(server: Server) -> None:
    """The call that the others are made of by breaking it."""
    fd = sealed_memory()
    os.pwrite(fd, struct.pack("4f", 1, 2, 3, 4), 0)
    with Raw(server.socket_path) as raw:
        assert isinstance(raw.ask(tensor_call(), fds=[fd]), m.Result)
    os.close(fd)


@pytest.mark.parametrize(
    ("call", "fds"),
    [
        (tensor_call(segments=2), 1),
        (tensor_call(segments=0), 1),
        (tensor_call(skeletons=(5,)), 1),
        (tensor_call(skeletons=(-1, 1)), 1),
    ],
    ids=["segment without a descriptor", "descriptor without a segment", "skeleton that is not there", "negative skeleton"],
)
def test_a_call_that_is_not_what_its_message_says(server: Server, call: m.Call, fds: int) -> None:
    """Counts and sizes must agree with what came."""
    fd = sealed_memory()
    with Raw(server.socket_path) as raw:
        error = raw.ask(call, fds=[fd] * fds)
        assert isinstance(error, m.Error)
        assert error.code == "protocol"
        assert "do not match" in error.text
    os.close(fd)


@pytest.mark.parametrize(
    "call",
    [
        tensor_call(storage=StorageEntry(0, 4090, 16)),
        tensor_call(storage=StorageEntry(0, -16, 16)),
        tensor_call(storage=StorageEntry(0, 16, -16)),
        tensor_call(storage=StorageEntry(0, 1 << 62, 1 << 62)),
        tensor_call(storage=StorageEntry(7, 0, 16)),
        tensor_call(storage=StorageEntry(-1, 0, 0, 9)),
        tensor_call(tensor=TensorEntry(9, "float32", 0, (4,), (1,))),
        tensor_call(tensor=TensorEntry(0, "float32", 0, (1 << 20,), (1,))),
        tensor_call(tensor=TensorEntry(0, "float32", 0, (-4,), (1,))),
        tensor_call(tensor=TensorEntry(0, "float32", 3, (4,), (-1,))),
        tensor_call(tensor=TensorEntry(0, "float32", -1, (4,), (1,))),
        tensor_call(tensor=TensorEntry(0, "float32", 1 << 62, (4,), (1,))),
        tensor_call(tensor=TensorEntry(0, "float32", 0, (1 << 62, 1 << 62), (0, 0))),
        tensor_call(tensor=TensorEntry(0, "float32", 0, ((1 << 62) + 1,), (4,))),
        tensor_call(tensor=TensorEntry(0, "float32", 0, (1 << 63,), (1,))),
        tensor_call(tensor=TensorEntry(0, "float32", 0, (4, 4), (1,))),
        tensor_call(tensor=TensorEntry(0, "load", 0, (4,), (1,))),
        tensor_call(tensor=TensorEntry(0, "", 0, (4,), (1,))),
        tensor_call(tensor=TensorEntry(0, "int32", 0, (4,), (1,), requires_grad=True)),
        tensor_call(table=TensorTable()),
        tensor_call(table=None),
        tensor_call(nbytes=0),
        tensor_call(nbytes=-4096),
        tensor_call(nbytes=1 << 63),
        tensor_call(nbytes=8192),
        tensor_call(device="GPU-00000000-0000-0000-0000-000000000000"),
        tensor_call(device="meta"),
        tensor_call(device="\0" * 50),
    ],
    ids=lambda call: repr((bytes(call.table), call.segments[0].nbytes, call.segments[0].device))[:60],
)
def test_a_call_whose_table_does_not_fit_its_memory(server: Server, call: m.Call) -> None:
    """No tensor is made that leaves the memory it came with."""
    fd = sealed_memory()
    with Raw(server.socket_path) as raw:
        error = raw.ask(call, fds=[fd])
        assert isinstance(error, m.Error), error
        assert error.code in ("codec", "capability"), error
        assert not error.endpoint_raised
    os.close(fd)


def _pipe() -> int:
    reader, writer = os.pipe()
    os.close(writer)
    return reader


@pytest.mark.parametrize(
    "make",
    [
        lambda: sealed_memory(seals=0),
        lambda: sealed_memory(2048),
        lambda: sealed_memory(seals=F_SEAL_SHRINK | F_SEAL_WRITE),
        _pipe,
        lambda: os.open("/dev/zero", os.O_RDWR),
    ],
    ids=["not sealed", "too small", "sealed against writing", "pipe", "device"],
)
def test_a_segment_that_is_no_memory_of_ours(server: Server, make: Callable[[], int]) -> None:
    """A descriptor that could end the server with SIGBUS, or cannot be mapped at all, is refused."""
    fd = make()
    with Raw(server.socket_path) as raw:
        error = raw.ask(tensor_call(), fds=[fd])
        assert isinstance(error, m.Error)
        assert error.code == "capability"
    os.close(fd)


@pytest.mark.parametrize("flags", [os.O_RDONLY, os.O_PATH], ids=["directory", "path"])
@pytest.mark.parametrize("complete", [True, False], ids=["a frame", "half a frame"])
def test_a_file_of_a_client(server: Server, good: Client, flags: int, complete: bool) -> None:
    """It ends the connection as it arrives: a process that is just being started would close it too, and wait for its owner."""
    fd = os.open("/", flags)
    with Raw(server.socket_path) as raw:
        raw.send(PING if complete else header(8, body=1, fds=2), [fd])
        answer = raw.hear()
        assert isinstance(answer, m.Error)
        assert "received a file" in answer.text
        good.ping()
    os.close(fd)


def test_a_skeleton_that_is_no_pickle(server: Server) -> None:
    """It fails in the executor, and is told."""
    with Raw(server.socket_path) as raw:
        error = raw.ask(m.Call("total", [encode(SkeletonRef(0))], skeletons=[4]), payload=b"\x80\x05K.")
        assert isinstance(error, m.Error)
        assert error.code == "codec"


# Ids and tokens.


def test_cancelling_what_nobody_asked(server: Server) -> None:
    """A cancellation may cross its reply, so an unknown id is no error."""
    with Raw(server.socket_path) as raw:
        for number in (0, 1, 0xFFFFFFFF):
            raw.say(m.Cancel(), number)
        assert isinstance(raw.ask(m.Ping(), 7), m.Pong)


def test_a_request_id_that_is_in_use(server: Server, go: threading.Event) -> None:
    """The second call is refused; the first one goes on."""
    with Raw(server.socket_path) as raw:
        raw.say(m.Call("hold"), 7)
        error = raw.ask(m.Call("ones", [1]), 7)
        assert isinstance(error, m.Error)
        assert "request id 7 is in use" in error.text
        go.set()
        assert isinstance(raw.hear(7), m.Result)


def test_calls_without_end(server: Server, go: threading.Event, monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection has a limited number of calls under way; the others are refused, and those go on."""
    monkeypatch.setattr(remote_module, "_MAX_CALLS", 10)
    with Raw(server.socket_path) as raw:
        for number in range(1, 11):
            raw.say(m.Call("hold"), number)
        error = raw.ask(m.Call("hold"), 11)
        assert isinstance(error, m.Error)
        assert error.code == "server-busy"
        assert "10 calls of this connection" in error.text
        go.set()
        assert all(isinstance(raw.hear(), m.Result) for _ in range(10))


def test_releasing_what_is_not_held(server: Server) -> None:
    """Neither an unknown object nor another session's lease can be given back."""
    with Raw(server.socket_path) as holder, Raw(server.socket_path) as other:
        held = holder.ask(m.Call("kept", [3]))
        assert isinstance(held, m.Result)
        assert held.managed
        assert other.ask(m.Release([held.object_id, "", "unknown"] * 3)) == m.Count(0)
        assert server.info()["leases"] == 1
        assert holder.ask(m.Release([held.object_id] * 3)) == m.Count(1)


# Many of them.


def crowd(server: Server, stack: ExitStack, hello: bool) -> list[Raw]:
    """Connections that stay until the stack is closed."""
    return [stack.enter_context(Raw(server.socket_path, hello=hello)) for _ in range(CROWD)]


def test_a_crowd_that_says_nothing(server: Server, good: Client) -> None:
    """Those who connect and say nothing hold up nobody."""
    with ExitStack() as stack:
        crowd(server, stack, hello=False)
        eventually(lambda: server.info()["connections"] == CROWD + 1)
        assert good.ping() < 1


def test_saying_nothing_for_too_long(server: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """A connection without a handshake does not stay for ever."""
    monkeypatch.setattr(remote_module, "_HANDSHAKE_TIMEOUT", 0.05)
    with Raw(server.socket_path, hello=False) as raw:
        raw.send(frame_of(m.Hello())[:-1])
        raw.hear_end()
    assert f"pid {os.getpid()} connected and sent no Hello" in caplog.text


def test_a_crowd_that_dies_in_the_middle_of_a_frame(server: Server, good: Client) -> None:
    """Half a frame and its descriptors are dropped with the connection."""
    fd = sealed_memory()
    with ExitStack() as stack:
        for raw in crowd(server, stack, hello=True):
            raw.send(frame_of(tensor_call(), fds=1)[:40], [fd])
        assert good.ping() < 1
    os.close(fd)


def test_more_connections_than_the_server_takes(
    no_leaks: None, provider: Provider, serve: Callable[..., Server], good: Client
) -> None:
    """Those beyond the limit are told, and there is room again when others leave."""
    server = serve(max_connections=3)
    good.ping()
    with Raw(server.socket_path), Raw(server.socket_path), Raw(server.socket_path, hello=False) as raw:
        error = refused(raw)
        assert error.code == "server-busy"
        assert "3 connections (max_connections)" in error.text
    eventually(lambda: server.info()["connections"] == 1)
    with Raw(server.socket_path) as raw:
        assert isinstance(raw.ask(m.Ping()), m.Pong)


def test_a_client_that_never_reads(server: Server, good: Client) -> None:
    """The server stops reading what such a client says, so that its unread replies stay bounded."""
    question = frame_of(m.GetServerInfo())  # a reply is many times as long
    with Raw(server.socket_path) as raw:
        raw.sock.settimeout(0.3)
        taken = 0
        with pytest.raises(TimeoutError):
            while taken < 64 << 20:
                taken += raw.sock.send(question)
        assert taken < 8 << 20
        assert good.ping() < 1


def test_a_client_that_reads_late(server: Server) -> None:
    """What it did not read is not lost."""
    with Raw(server.socket_path) as raw:
        asking = threading.Thread(target=lambda: [raw.say(m.GetServerInfo(), n) for n in range(1, 3001)])
        asking.start()
        asking.join(0.2)  # it is held up by now
        assert asking.is_alive()
        assert [raw.hear_frame().request_id for _ in range(3000)] == list(range(1, 3001))
        asking.join()


FLOODS = {
    "of pings": """
        from shared_rpc.protocol import messages as m
        from tests.kit.raw import Raw, frame_of

        with Raw(PATH) as raw:
            print("flooding")
            while True:
                raw.send(frame_of(m.Ping()) * 1000)
                for _ in range(1000):
                    raw.hear_frame()
        """,
    "of connections": """
        import socket

        print("flooding")
        while True:
            with socket.socket(socket.AF_UNIX) as sock:
                try:
                    sock.connect(PATH)
                except BlockingIOError:
                    continue
        """,
}


@pytest.mark.parametrize("code", FLOODS.values(), ids=FLOODS)
def test_a_flood(server: Server, good: Client, children: list[Child], code: str) -> None:
    """A client that does as much as it can does not keep the others from being served."""
    flood = python(code.replace("PATH", repr(server.socket_path)))
    children.append(flood)
    flood.expect("flooding")
    times = sorted(good.ping() for _ in range(50))
    flood.kill()
    assert times[25] < 0.05
    assert times[-1] < 2


def test_descriptors_run_out(base_path: str, connect: Callable[..., Client], children: list[Child]) -> None:
    """A server at its limit of open files lives, tells who comes why, and serves again when some are free."""
    child = python(
        """
        import logging, resource, sys
        from shared_rpc import Provider, Server

        logging.basicConfig(stream=sys.stdout)
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
        with Server(Provider(device="cpu")):
            print("serving")
            sys.stdin.readline()
        """
    )
    children.append(child)
    child.expect("serving")
    path = connect().socket_path
    fd = sealed_memory()
    with ExitStack() as stack:
        first = stack.enter_context(Raw(path))
        others = [stack.enter_context(Raw(path, hello=False)) for _ in range(100)]
        assert "nearly all of its 64 file descriptors open" in refused(others[-1]).text
        first.say(m.Ping(), fds=[fd] * 30)
        assert "file descriptors were lost: this process" in refused(first).text
    os.close(fd)
    client = connect(connect_timeout=10.0)
    assert client.ping() < 5
    eventually(lambda: client.get_server_info()["connections"] == 1)
    child.tell("")
    assert child.close()[0] == 0


# Garbage by the thousand.

_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.text(max_size=8) | st.binary(max_size=8),
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=12,
)


@st.composite
def _frames(draw: st.DrawFn) -> bytes:
    """A frame with a body of its own making, or one whose header lies."""
    body = draw(st.binary(max_size=40) | _values.map(msgspec.msgpack.encode))
    payload = draw(st.binary(max_size=20))
    lie = draw(st.sampled_from([0, 0, 0, 1, -1, 1000]))
    return (
        header(draw(st.integers(0, 25)), fds=draw(st.integers(0, 2)), body=max(len(body) + lie, 0), payload=len(payload))
        + body
        + payload
    )


_streams = st.lists(
    st.tuples(st.binary(min_size=1, max_size=HEADER_SIZE + 10) | _frames(), st.integers(0, 3)), min_size=1, max_size=6
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(_streams, st.booleans())
def test_any_stream_at_all(server: Server, stream: list[tuple[bytes, int]], hello: bool) -> None:
    """Whatever a client sends and with how many descriptors, when it is done the server hangs up and lives."""
    fd = sealed_memory()
    try:
        with Raw(server.socket_path, hello=hello) as raw:
            for data, fds in stream:
                try:
                    raw.send(data, [fd] * fds)
                except OSError:
                    break
            raw.sock.shutdown(socket.SHUT_WR)
            raw.hear_end()
    finally:
        os.close(fd)
    assert server.running


# What the loop is told, and keeps.


def test_a_connection_goes_with_its_end(server: Server) -> None:
    """Without a collection: a server may run with the collector turned off."""
    gc.collect()
    gc.disable()
    try:
        for _ in range(50):
            with Raw(server.socket_path) as raw:
                raw.ask(m.Ping())
        eventually(lambda: server.info()["connections"] == 1)
        assert len(connections()) == 1
    finally:
        gc.enable()


class _Loop:
    """A loop whose kernel does not watch another descriptor."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loop, name)

    def add_reader(self, *_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    add_writer = add_reader


@pytest.mark.parametrize("when", ["it is made", "it is full", "it has room"])
def test_a_connection_that_cannot_be_watched_is_ended(server: Server, monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    """Nobody would notice its end."""
    made: list[FramedStream] = []
    start = FramedStream.start

    def started(connection: FramedStream) -> None:
        made.append(connection)
        if when == "it is made":
            connection._loop = _Loop(connection._loop)
        start(connection)

    monkeypatch.setattr(FramedStream, "start", started)
    if when == "it is made":
        with Raw(server.socket_path, hello=False) as raw, pytest.raises(ConnectionClosed):
            raw.hear_frame()
        return
    with Raw(server.socket_path) as raw:
        if when == "it is full":
            made[0]._loop = _Loop(made[0]._loop)
        raw.sock.settimeout(0.3)
        with suppress(TimeoutError, BrokenPipeError, ConnectionResetError):
            while True:
                raw.sock.sendall(frame_of(m.GetServerInfo(), 1))
        if when == "it has room":
            made[0]._loop = _Loop(made[0]._loop)
        raw.sock.settimeout(10)
        with pytest.raises(ConnectionClosed):
            while True:
                raw.hear_frame()


def test_a_request_is_not_handled_in_the_context_of_an_endpoint(
    provider: Provider, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reply that does not go out at once has the loop call back; that must not carry on what the endpoint's task had set."""
    seen: list[bool] = []
    answer = server.engine.core.requests.answer

    def watched(caller: Caller, message: m.Message) -> None:
        seen.append(CURRENT_RUN.get() is not None)
        answer(caller, message)

    monkeypatch.setattr(server.engine.core.requests, "answer", watched)

    @provider.share(cache=False)
    async def big() -> torch.nn.Module:
        module = torch.nn.Identity()
        module.text = "x" * 3_000_000
        return module

    with Raw(server.socket_path) as raw:
        raw.say(m.Call("big"), 1)
        eventually(lambda: any(connection.stream.congested for connection in connections()))
        raw.say(m.Ping(), 2)
        assert [raw.hear_frame().request_id for _ in range(2)] == [1, 2]
    assert seen and not any(seen)


def connections() -> list[remote_module.RemoteClient]:
    """Those of all servers of this process."""
    return [thing for thing in gc.get_objects() if type(thing) is remote_module.RemoteClient]


def test_chunks_are_given_back_without_an_answer(server: Server) -> None:
    """A client that gives back what it has done with reads nothing for it."""
    with Raw(server.socket_path) as raw:
        raw.say(m.Free([1]), 0)
        raw.say(m.Free([1]), 7)
        assert raw.hear_frame().request_id == 7


def record_header(**fields: Any) -> bytes:
    """The header of a record of ``ones``, with any of it wrong."""
    table = TensorTable(("cpu",), (StorageEntry(0, 0, 16),), (TensorEntry(0, "float32", 0, (4,), (1,)),))
    here = installed_versions()
    good: dict[str, Any] = {
        "format": 1,
        "endpoint": "ones",
        "cache_key": "ones(size=4)",
        "generation": 1,
        "fingerprint": "",
        **here._asdict(),
        "device": "cpu",
        "access": "read_write",
        "tensors": "all",
        "nbytes": 16,
        "private_nbytes": 0,
        "skeleton": b"\x80\x04K\x00Q.",
        "table": msgspec.msgpack.encode(table),
        "segments": [SegmentInfo("0" * 16, 4096, "cpu")],
    }
    return msgspec.msgpack.encode({**good, **fields})


@pytest.mark.parametrize(
    ("payload", "code"),
    [
        (b"", "record"),
        (b"\xc1", "record"),
        (b"\xde\xff\xff", "record"),
        (record_header()[:-1], "record"),
        (record_header(format=2), "record"),
        (record_header(format="x" * 100_000), "record"),
        (record_header(segments=[["", 1, "cpu"]] * 100_000), "record"),
        (record_header(segments=[["", -1, "cpu"]]), "record"),
        (record_header(segments=[["", 1 << 62, "cpu"]]), "capability"),
        (record_header(table=b"\x94" + b"\xdd\xff\xff\xff\xff" * 4), "record"),
        (record_header(endpoint="x" * 1_000_000, torch="y" * 1_000_000), "record"),
        (record_header(device="z" * 1_000_000), "record"),
        (record_header(nbytes=(1 << 64) - 1), "record"),
    ],
)
def test_a_record_that_is_none(server: Server, payload: bytes, code: str) -> None:
    """It is refused with a short text, for a question as for an adoption, and the connection stays good."""
    with Raw(server.socket_path) as raw:
        for message in (x.CheckRecord(), x.CheckRecord(True), x.Adopt([])):
            raw.say(message, 1, payload)
            answer = raw.hear(1)
            if isinstance(answer, m.Answer):
                assert code == "capability"  # so much memory is refused when it is asked for
                continue
            assert isinstance(answer, m.Error)
            assert answer.code == "record" and len(answer.text) < 3000
        assert isinstance(raw.ask(m.Ping(), 2), m.Pong)


@pytest.mark.parametrize("buffers", [[], ["x"], ["x" * 100_000], ["0" * 24] * 2, ["0" * 24] * 1000])
def test_buffers_that_nobody_holds(server: Server, buffers: list[str]) -> None:
    """They are no room for a record."""
    with Raw(server.socket_path) as raw:
        raw.say(x.Adopt(buffers), 1, record_header(fingerprint=server.engine.core.registry.get("ones").fingerprint))
        answer = raw.hear(1)
        assert isinstance(answer, m.Error)
        assert answer.code in ("record", "buffer-not-found") and len(answer.text) < 1000


@pytest.mark.parametrize("object_id", ["", "x" * (7 << 20), "0" * 24])
def test_a_candidate_that_is_none(server: Server, object_id: str) -> None:
    """A short error says so, and so for an export."""
    with Raw(server.socket_path) as raw:
        for number, (message, code) in enumerate(
            [(x.PromoteCandidate(object_id), "refresh"), (x.ExportObject(object_id), "stale-handle")]
        ):
            answer = raw.ask(message, number + 1)
            assert isinstance(answer, m.Error)
            assert answer.code == code and len(answer.text) < 1000


def test_a_client_that_asks_for_a_record_and_hangs_up(server: Server, good: Client) -> None:
    """Its lease ends with it, whether or not the answer was read."""
    with good.call("kept", 10) as handle:
        for _ in range(20):
            with Raw(server.socket_path) as raw:
                raw.say(x.ExportObject(handle.object_id))
        eventually(lambda: server.info()["leases"] == 1)
