"""Hostile clients: the server serves the others, and keeps nothing of what was sent."""

from __future__ import annotations

import gc
import os
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing

import msgspec
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.msgpack import Ext

from shared_rpc import Client, Server
from shared_rpc.execution import coroutines
from shared_rpc.protocol import exported as x
from shared_rpc.protocol import generations as g
from shared_rpc.protocol import messages as m
from shared_rpc.protocol.catalogue import NUMBERS, VERSION
from shared_rpc.protocol.frames import HEADER_SIZE, Limits
from shared_rpc.protocol.records import SegmentInfo
from shared_rpc.protocol.values import SkeletonRef, encode
from shared_rpc.server import remote as remote_module
from tests.kit.deep import deep
from tests.kit.processes import eventually, open_fds
from tests.kit.raw import F_SEAL_SHRINK, F_SEAL_WRITE, Raw, frame_of, sealed_memory, tensor_call
from tests.kit.world import World

PING = frame_of(m.Ping())

#: Event loops differ in how they report the end of a connection; other tests run on one of them.
both_loops = pytest.mark.parametrize("loop", ["asyncio", "uvloop"], indirect=True)


def header(kind: int = NUMBERS[m.Ping], *, fds: int = 0, body: int = 0, payload: int = 0) -> bytes:
    """Return a frame's header."""
    return struct.pack("!4sBBHIIQ", b"sRPC", VERSION, kind, fds, 1, body, payload)


def account(server: Server) -> dict[str, int]:
    """Return all that a client could leave behind in the server's process."""
    info = server.info()
    held = {name: info[name] for name in ("sessions", "leases", "running", "objects")}
    return {**held, "fds": open_fds(), "threads": threading.active_count()}


@pytest.fixture
def good(world: World) -> Client:
    """A client that behaves."""
    return world.client(timeout=20.0)


@pytest.fixture(params=["asyncio", *deep("uvloop")])
def loop(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kind of event loop that the server runs on."""
    if request.param == "uvloop":
        pytest.importorskip("uvloop")
    monkeypatch.setattr(coroutines, "USES_UVLOOP", request.param == "uvloop")


@pytest.fixture
def server(loop: None, world: World, good: Client, go: threading.Event) -> Iterator[Server]:
    """A server that, at the end of the test, serves a good client and has nothing more than it had at the start."""

    @world.share
    def ones(size: int) -> torch.Tensor:
        return torch.ones(size)

    @world.share(managed=True, cache=False)
    def kept(size: int) -> torch.Tensor:
        return torch.ones(size)

    @world.share(cache=False)
    def total(x: torch.Tensor) -> torch.Tensor:
        return x.double().sum()

    @world.share(cache=False)
    def hold() -> None:
        go.wait(30)

    server = world.serve(max_workers=1)
    good.call("ones", 3)
    good.create_buffer(1).release()  # starts the thread that makes memory
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


@pytest.fixture
def memory() -> Iterator[int]:
    """A descriptor of memory, as clients send it."""
    fd = sealed_memory()
    yield fd
    os.close(fd)


# Frames that are cut off.


@both_loops
def test_frames_cut_off_at_any_byte_leave_nothing(server: Server, memory: int) -> None:
    """The server closes the descriptors of a client that dies in the handshake or in a call."""
    hello, call = frame_of(m.Hello()), frame_of(tensor_call(), payload=b"skeleton", fds=1)
    for end in range(len(hello)):
        with Raw(server.socket_path, hello=False) as raw:
            raw.send(hello[:end])
    for end in range(1, len(call)):
        with Raw(server.socket_path) as raw:
            raw.send(call[:end], [memory])


@both_loops
def test_clients_that_hang_up_leave_nothing(server: Server, good: Client) -> None:
    """Replies are dropped, and leases end whether or not the replies were read."""
    with good.call("kept", 10) as handle:
        for _ in range(20):
            with Raw(server.socket_path) as raw:
                raw.say(m.Call("ones", [3]), 1)
                raw.say(m.Call("kept", [3]), 2)
                raw.say(m.Call("kept", [4]), 3)
                raw.say(x.ExportObject(handle.object_id), 4)
        eventually(lambda: server.info()["leases"] == 1)


# Frames that end the connection.


def refused(raw: Raw) -> m.Error:
    """Return the server's last message to a connection before it disconnects."""
    while isinstance(error := raw.hear(), m.Answer):
        continue
    assert isinstance(error, m.Error), error
    raw.hear_end()
    return error


#: Whether the handshake was completed, bytes, the number of descriptors sent with them, and the error's text.
#: For all rules of frames see `rules/test_frames.py`.
BROKEN: dict[str, tuple[bool, bytes, int, str]] = {
    "http": (False, b"GET / HTTP/1.1\r\n\r\n" + bytes(20), 0, "not a shared_rpc frame: it begins with b'GET '"),
    "a large hello": (False, header(body=(64 << 10) + 1), 0, "announces 65537 + 0 bytes; the limits are 65536 + 0"),
    "a hello with descriptors": (False, header(fds=1), 0, "announces 1 file descriptors; the limit is 0"),
    "no hello": (False, frame_of(m.Ping()), 0, "the first message of the connection is Ping, not"),
    "a large body": (True, header(body=Limits().body + 1), 0, f"the limits are {Limits().body}"),
    "garbage after a frame": (True, PING + b"garbage", 0, "not a shared_rpc frame"),
}


@pytest.mark.parametrize(("hello", "data", "fds", "text"), BROKEN.values(), ids=BROKEN)
def test_malformed_frames_end_the_connection(
    server: Server, memory: int, hello: bool, data: bytes, fds: int, text: str
) -> None:
    """At once, for any announced size; the error names the fault."""
    with Raw(server.socket_path, hello=hello) as raw:
        raw.send(data, [memory] * fds)
        error = refused(raw)
    assert error.code == "protocol" and text in error.text


# Descriptors.


def test_unused_descriptors_are_closed(server: Server, memory: int) -> None:
    """The request is handled, as are later ones."""
    with Raw(server.socket_path) as raw:
        fds = open_fds()
        raw.say(g.GetObject("x"), 1, fds=[memory] * 5)
        assert isinstance(raw.ask(m.Ping(), 2), m.Answer)
        eventually(lambda: open_fds() <= fds)


@both_loops
def test_sent_connections_are_closed(server: Server) -> None:
    """The server closes a client's own connection: otherwise it would stay open after the client's death."""
    with Raw(server.socket_path) as raw:
        raw.send(b"s", [raw.sock.fileno()])
    eventually(lambda: server.info()["sessions"] == 1)


@pytest.mark.parametrize("sent", [PING, header(NUMBERS[m.Call], body=1, fds=2)], ids=["a frame", "half a frame"])
def test_files_end_the_connection(server: Server, good: Client, sent: bytes) -> None:
    """On arrival: a process that is just being forked would close them too, and may block on that."""
    fd = os.open("/", os.O_RDONLY)
    with Raw(server.socket_path) as raw:
        raw.send(sent, [fd])
        answer = raw.hear()
        assert isinstance(answer, m.Error) and "received a file" in answer.text
        good.ping()
    os.close(fd)


def test_descriptors_with_a_blocking_close_do_not_block(
    server: Server, good: Client, monkeypatch: pytest.MonkeyPatch, go: threading.Event
) -> None:
    """As on a file system in user space: another thread closes them."""
    close, closed = os.close, threading.Event()
    reader, writer = os.pipe()
    file = os.stat(reader)

    def wait(fd: int) -> None:
        if fd != reader and os.path.samestat(os.fstat(fd), file):
            go.wait(20)
            closed.set()
        close(fd)

    with monkeypatch.context() as patch, Raw(server.socket_path) as raw:
        patch.setattr(os, "close", wait)
        raw.send(PING, [reader])
        good.ping()
        assert not closed.is_set()
        go.set()
        assert closed.wait(20)
    os.close(reader)
    os.close(writer)


# Requests that are refused; the connection stays open.


def test_a_valid_call_is_accepted(server: Server, memory: int) -> None:
    """The calls below are this one with one defect each."""
    os.pwrite(memory, struct.pack("4f", 1, 2, 3, 4), 0)
    with Raw(server.socket_path) as raw:
        assert isinstance(raw.ask(tensor_call(), fds=[memory]), m.Result)


#: Tuples in tuples, each level of which copies its content.
NESTED = Ext(1, msgspec.msgpack.encode([bytes(8 << 20)]))
for _ in range(40):
    NESTED = Ext(1, msgspec.msgpack.encode([NESTED]))

SENT = SegmentInfo("sent", 4096, "cpu")

#: Requests that are sent with one descriptor of memory, a part of the error's text, and an encoded value in the frame.
#: For all rules of tables see `rules/test_records.py`.
REFUSED: dict[str, tuple[m.Message | bytes, str, bytes]] = {
    "second hello": (m.Hello(), "Hello is no message of a client", b""),
    "a kind that does not exist": (header(255, fds=1), "", b""),
    "no body": (header(NUMBERS[m.Call], fds=1, body=5) + b"\xdf\xff\xff\xff\xff", "cannot decode a ", b""),
    "a skeleton that was not sent": (tensor_call(args=[Ext(5, b"\x91\x00")]), "", b""),
    "many values": (tensor_call(args=[[[None] * 120_000] * 2]), "more than 200,000 values", b""),
    "nested tuples": (tensor_call(args=[NESTED]), "tuples with too much data are nested too deeply", b""),
    "a long id": (g.GetObject("x", "x" * (7 << 20)), "", b""),
    "a long request": (g.GetObject("x" * (9 << 20)), "the limit for its kind is 8388608", b""),
    "a long list": (m.Release([""] * 100_001), "of length <= ", b""),
    "more segments than memory": (tensor_call(segments=[SENT] * 2), "do not match", b""),
    "a negative size": (tensor_call(skeletons=[-1, 1]), "do not match", b""),
    "a dtype that is none": (tensor_call(dtype="load"), "", b""),
    "no table": (tensor_call(table=msgspec.Raw(b"\xc0")), "", b""),
    "an unknown segment": (tensor_call(segments=[SENT, "unknown"]), "does not have the segments", b""),
    "a storage beyond its segment": (tensor_call(storage=(0, 4090, 16)), "", b""),
    "a segment larger than its memory": (tensor_call(segments=[SegmentInfo("large", 8192, "cpu")]), "", b""),
    "no pickle": (tensor_call(args=[encode(SkeletonRef(0))], skeletons=[4]), "", b"\x80\x05K."),
    "a buffer of any size": (m.CreateBuffer((1 << 63) - 1), "", b""),
    "a record without a table": (x.Adopt(["0" * 24]), "", msgspec.msgpack.encode({"format": 1})),
}


def refusal(server: Server, good: Client, request: m.Message | bytes, fd: int, payload: bytes = b"") -> str:
    """Return the error's text: a short one of the library's own. Neither this connection nor another client is affected."""
    with Raw(server.socket_path) as raw:
        if isinstance(request, bytes):
            raw.send(request, [fd])
        else:
            raw.say(request, 1, payload, [fd])
        error = raw.hear(1)
        assert isinstance(error, m.Error), error
        assert len(error.text) < 3000 and not error.endpoint_raised and error.code not in ("error", "remote")
        assert good.ping() < 2
        assert isinstance(raw.ask(m.Ping(), 2), m.Answer)
    return error.text


@pytest.mark.parametrize(("request_", "text", "payload"), REFUSED.values(), ids=REFUSED)
def test_malformed_requests_are_refused(
    server: Server, good: Client, memory: int, request_: m.Message | bytes, text: str, payload: bytes
) -> None:
    """By an error; the connection stays open."""
    assert text in refusal(server, good, request_, memory, payload)


#: Descriptors that could end the server with SIGBUS, or cannot be mapped at all.
NO_MEMORY: dict[str, Callable[[], int]] = {
    "not sealed": lambda: sealed_memory(seals=0),
    "too small": lambda: sealed_memory(2048),
    "sealed against writing": lambda: sealed_memory(seals=F_SEAL_SHRINK | F_SEAL_WRITE),
    "device": lambda: os.open("/dev/zero", os.O_RDWR),
}


@pytest.mark.parametrize("make", NO_MEMORY.values(), ids=NO_MEMORY)
def test_unusable_memory_is_refused(server: Server, good: Client, make: Callable[[], int]) -> None:
    """Before it is mapped."""
    fd = make()
    refusal(server, good, tensor_call(), fd)
    os.close(fd)


# Requests at odd times, or with odd numbers.


def test_duplicate_request_ids_are_refused(server: Server, go: threading.Event) -> None:
    """The first call continues."""
    with Raw(server.socket_path) as raw:
        raw.say(m.Call("hold"), 7)
        error = raw.ask(m.Call("ones", [1]), 7)
        assert isinstance(error, m.Error)
        assert "request id 7 is in use" in error.text
        go.set()
        assert isinstance(raw.hear(7), m.Result)


def test_the_calls_of_a_connection_are_limited(server: Server, go: threading.Event, monkeypatch: pytest.MonkeyPatch) -> None:
    """Excess calls are refused, and the others continue."""
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


# Many of them.


def test_a_handshake_that_takes_too_long(
    server: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The connection is closed."""
    monkeypatch.setattr(remote_module, "_HANDSHAKE_TIMEOUT", 0.05)
    with Raw(server.socket_path, hello=False) as raw:
        raw.send(frame_of(m.Hello())[:-1])
        raw.hear_end()
    assert f"pid {os.getpid()} connected and sent no Hello" in caplog.text


def test_excess_connections_are_refused(world: World, good: Client) -> None:
    """With the reason, until others leave."""
    server = world.serve(max_connections=3)
    good.ping()
    with Raw(server.socket_path), Raw(server.socket_path), Raw(server.socket_path, hello=False) as raw:
        error = refused(raw)
        assert error.code == "server-busy"
        assert "3 connections (max_connections)" in error.text
    eventually(lambda: server.info()["sessions"] == 1)
    with Raw(server.socket_path) as raw:
        assert isinstance(raw.ask(m.Ping()), m.Answer)


def test_a_server_without_free_descriptors_refuses_connections(world: World, memory: int) -> None:
    """With the reason, and serves again once some are free."""
    world.process(
        """
        import resource, sys
        from shared_rpc import Provider, Server

        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
        with Server(Provider(device="cpu")):
            print("serving")
            sys.stdin.readline()
        """
    ).expect("serving")
    client = world.client(connect_timeout=10.0)
    with ExitStack() as stack:
        first = stack.enter_context(Raw(client.socket_path))
        others = [stack.enter_context(Raw(client.socket_path, hello=False)) for _ in range(100)]
        assert "nearly all of its 64 file descriptors open" in refused(others[-1]).text
        first.say(m.Ping(), fds=[memory] * 30)
        assert "file descriptors were lost: this process" in refused(first).text
    eventually(lambda: client.get_server_info()["sessions"] == 1)


FLOOD = """
    import socket

    print("flooding")
    while True:
        with socket.socket(socket.AF_UNIX) as sock:
            try:
                sock.connect(PATH)
            except BlockingIOError:
                continue
"""


def test_a_flood_of_connections_delays_no_client(server: Server, good: Client, world: World) -> None:
    """Other clients are served in time."""
    flood = world.process(FLOOD.replace("PATH", repr(server.socket_path)))
    flood.expect("flooding")
    times = sorted(good.ping() for _ in range(50))
    flood.kill()
    assert times[25] < 0.05
    assert times[-1] < 2


def test_clients_that_do_not_read_are_not_read(server: Server, good: Client) -> None:
    """The server stops reading, so that unread replies stay bounded; a client that reads late gets every reply."""
    asked = 0
    with Raw(server.socket_path) as raw:
        raw.sock.settimeout(0.3)
        with pytest.raises(TimeoutError):
            while asked < 50_000:
                raw.sock.send(frame_of(m.GetServerInfo(), asked + 1))
                asked += 1
        assert good.ping() < 1
        raw.sock.settimeout(20.0)
        for number in range(asked):
            with closing(raw.hear_frame()) as frame:
                assert frame.request_id == number + 1


# Garbage by the thousand.

_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.text(max_size=8) | st.binary(max_size=8),
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=12,
)


@st.composite
def _frames(draw: st.DrawFn) -> bytes:
    """Frames with arbitrary bodies, and frames whose headers lie."""
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


@both_loops
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(_streams, st.booleans())
def test_any_stream_ends_in_a_hangup(server: Server, memory: int, stream: list[tuple[bytes, int]], hello: bool) -> None:
    """Whatever a client sends, with any descriptors, the server closes the connection and continues."""
    with Raw(server.socket_path, hello=hello) as raw:
        for data, fds in stream:
            try:
                raw.send(data, [memory] * fds)
            except OSError:
                break
        raw.sock.shutdown(socket.SHUT_WR)
        raw.hear_end()
    assert server.running
