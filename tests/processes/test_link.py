"""One connection shared by many threads or coroutines: who reads, wakeups, and the state after callers give up."""

from __future__ import annotations

import inspect
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import anyio
import anyio.lowlevel
import msgspec
import pytest

from shared_rpc import AsyncHandle, Handle
from shared_rpc.client.async_link import AsyncLink
from shared_rpc.client.exchange import BRIEFLY
from shared_rpc.client.link import BlockingLink
from shared_rpc.client.results import rebuild, result_of
from shared_rpc.client.steps import Reply, Request
from shared_rpc.client.transfer import ClientTransfer
from shared_rpc.errors import CodecError, ConnectionClosed, DeadlineExceeded, ProtocolError
from shared_rpc.memory.backends.host import HOST
from shared_rpc.memory.pool import PoolOptions
from shared_rpc.protocol import messages as m
from shared_rpc.protocol.records import EMPTY_TABLE, SegmentInfo, StorageEntry, TensorEntry, TensorTable
from shared_rpc.protocol.socket import FrameSocket
from shared_rpc.protocol.tasks import TaskInfo, TaskStatus
from tests.kit.interrupting import Interrupted, raising_handler
from tests.kit.processes import eventually
from tests.kit.raw import Raw, frame_of, sealed_memory

Ask = Callable[..., Future[Reply]]


@pytest.fixture
def ends() -> Iterator[tuple[BlockingLink, Raw]]:
    """A link, and the server's side of it, which a test plays."""
    ours, theirs = socket.socketpair()
    link = BlockingLink("here", ours)
    link._socket.limit(0.004)
    with Raw(theirs, hello=False) as raw:
        yield link, raw
        link.close()


@pytest.fixture
def link(ends: tuple[BlockingLink, Raw]) -> BlockingLink:
    """The link."""
    return ends[0]


@pytest.fixture
def raw(ends: tuple[BlockingLink, Raw]) -> Raw:
    """The server's side."""
    return ends[1]


@pytest.fixture
def ask(link: BlockingLink) -> Iterator[Callable[..., Future[Reply]]]:
    """``ask(seconds)`` sends a request in another thread, and returns once that waits."""
    with ThreadPoolExecutor(8) as pool:

        def ask(seconds: float = 20.0, **options: Any) -> Future[Reply]:
            before = len(link._exchanges.pending)
            asked = pool.submit(link.exchange, Request(m.Ping(), "ping", **options), time.monotonic() + seconds)
            eventually(lambda: len(link._exchanges.pending) > before)
            eventually(lambda: link._reader is not None and len(link._waiting) == before)
            return asked

        yield ask
        link.close()


@pytest.mark.parametrize("order", [(1, 2, 3), (3, 2, 1)], ids=["the reader first", "the reader last"])
def test_each_thread_gets_its_answer(ask: Ask, raw: Raw, link: BlockingLink, order: tuple[int, ...]) -> None:
    """One thread reads for the others, and passes the reading on when it has its answer; with no thread left, none reads."""
    asked = [ask() for _ in range(3)]
    for number in order:
        raw.say(m.Answer.of(number), number)
        assert asked[number - 1].result(20).message == m.Answer.of(number)
    eventually(lambda: link._reader is None and not link._waiting)


def test_a_reader_that_times_out_passes_the_reading_on(ask: Ask, raw: Raw) -> None:
    """Another thread reads on, and its answer arrives."""
    hurried, patient = ask(0.1), ask()
    with pytest.raises(DeadlineExceeded, match="is stuck"):
        hurried.result(20)
    raw.say(m.Answer.of(None), 2)
    assert patient.result(20).message == m.Answer.of(None)


def test_a_waiting_thread_that_times_out_affects_no_other(ask: Ask, raw: Raw, link: BlockingLink) -> None:
    """The reader continues, and the late answer is discarded."""
    patient, hurried = ask(), ask(0.1)
    with pytest.raises(DeadlineExceeded):
        hurried.result(20)
    raw.say(m.Answer.of(None), 2)
    raw.say(m.Answer.of(None), 1)
    assert patient.result(20).message == m.Answer.of(None)
    assert not link._exchanges.owed


def test_an_interrupted_reader_passes_the_reading_on(ask: Ask, raw: Raw, link: BlockingLink) -> None:
    """Its request is withdrawn, and a waiting thread reads on."""
    waiting: list[Future[Reply]] = []

    def begin_another() -> None:
        eventually(lambda: link._reader is not None)
        waiting.append(ask())
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)

    thread = threading.Thread(target=begin_another)
    with raising_handler(Interrupted):
        thread.start()
        with pytest.raises(Interrupted):
            link.exchange(Request(m.Ping(), "ping"), time.monotonic() + 20)
        thread.join()
    raw.say(m.Answer.of(None), 2)
    assert waiting[0].result(20).message == m.Answer.of(None)
    assert [type(raw.hear()) for _ in range(3)] == [m.Ping, m.Ping, m.Cancel]


def test_a_slow_callback_does_not_block_others(ask: Ask, raw: Raw, go: threading.Event) -> None:
    """Its thread does not read then: the others get their answers in the meantime."""
    slow, other = ask(on_event=lambda info: go.wait(20)), ask()
    raw.say(m.TaskUpdate(TaskInfo("t", "endpoint", TaskStatus.RUNNING, 0.0)), 1)
    raw.say(m.Answer.of(None), 2)
    assert other.result(20).message == m.Answer.of(None)
    go.set()
    raw.say(m.Answer.of(None), 1)
    assert slow.result(20).message == m.Answer.of(None)


def test_half_a_frame_does_not_block(ask: Ask, raw: Raw) -> None:
    """Neither the reader's deadline nor those of others wait for the rest, which the next reader receives."""
    begin = time.monotonic()
    asked = [ask(0.1), ask(0.1)]
    data = frame_of(m.Answer.of(None), 3)
    raw.send(data[:10])
    for each in asked:
        with pytest.raises(DeadlineExceeded):
            each.result(20)
    assert time.monotonic() - begin < 0.1 + 3 * BRIEFLY
    third = ask()
    raw.send(data[10:])
    assert third.result(20).message == m.Answer.of(None)


def test_posts_to_a_slow_server_do_not_block(raw: Raw, link: BlockingLink) -> None:
    """They are sent when the server reads."""
    begin = time.monotonic()
    for _ in range(4):
        link.post(m.Release(["x" * 500_000]))
    assert time.monotonic() - begin < 1 and link._socket.unsent
    assert [len(raw.hear().object_ids[0]) for _ in range(4)] == [500_000] * 4  # type: ignore[attr-defined]
    eventually(lambda: not link._socket.unsent)


@pytest.mark.parametrize("closes", [False, True], ids=["of the server", "by this side"])
def test_the_end_of_the_connection_wakes_all(ask: Ask, raw: Raw, link: BlockingLink, closes: bool) -> None:
    """The reader and all waiting threads. The reader closes the socket."""
    asked = [ask() for _ in range(3)]
    if closes:
        link.close("that was all")
    else:
        raw.close()
    for each in asked:
        with pytest.raises(ConnectionClosed, match="that was all" if closes else None):
            each.result(20)
    assert not closes or link._socket.fileno() == -1


def test_deadlines_hold_while_much_is_sent(raw: Raw, link: BlockingLink) -> None:
    """However slowly the server reads, the sender checks the clock in between."""
    done = threading.Event()

    def trickle() -> None:
        while not done.wait(0.05):
            raw.sock.recv(10_000)

    reading = threading.Thread(target=trickle)
    reading.start()
    begin = time.monotonic()
    with pytest.raises(DeadlineExceeded, match="is stuck"):
        link.exchange(Request(m.Call("take", ["x" * 8_000_000]), "take()"), begin + 0.5)
    assert time.monotonic() - begin < 0.5 + 2 * BRIEFLY
    done.set()
    reading.join()


TABLE = TensorTable(("cpu",), (StorageEntry(0, 4090, 16),), (TensorEntry(0, "float32", 0, (4,), (1,)),))
SEGMENT = SegmentInfo("a", 4096, "cpu")


@pytest.mark.parametrize(
    ("message", "payload", "kind", "text"),
    [
        (m.Welcome("", ""), b"", ProtocolError, "answered call.. with a Welcome"),
        (m.Result(msgspec.Raw(EMPTY_TABLE), [SEGMENT] * 2), b"", ProtocolError, "is no valid result"),
        (m.Result(msgspec.Raw(EMPTY_TABLE), [SEGMENT]), b"no pickle", CodecError, "cannot (be rebuilt|rebuild)"),
        (
            m.Result(msgspec.Raw(msgspec.msgpack.encode(TABLE)), [SEGMENT]),
            b"\x80\x05K\x00Q.",
            CodecError,
            "is not within its segment",
        ),
    ],
    ids=["another reply", "too few descriptors", "no pickle", "a table that does not fit"],
)
def test_malformed_results_are_refused(
    no_leaks: None, ask: Ask, raw: Raw, message: m.Message, payload: bytes, kind: type[Exception], text: str
) -> None:
    """And their descriptors are closed. For a connection's reaction to each kind of answer, see `rules/test_exchange.py`."""
    first = ask()
    raw.say(m.Answer.of(None), 1)  # the sender of the first bytes is checked
    first.result(20)
    asked, memory = ask(), sealed_memory()
    raw.say(message, 2, payload, [memory])
    os.close(memory)
    with pytest.raises(kind, match=text):
        rebuild(result_of("call()", asked.result(20)), {})


async def until(condition: Callable[[], bool]) -> None:
    """Wait for another thread while the loop runs."""
    await anyio.to_thread.run_sync(eventually, condition)


def surface(kind: type) -> dict[str, str]:
    """Return the public methods of a class with their signatures, without coroutines and with one class of handles."""
    found = {}
    for name, member in inspect.getmembers(kind):
        if not name.startswith("_") and (inspect.isfunction(member) or isinstance(member, property)):
            text = "property" if isinstance(member, property) else str(inspect.signature(member))
            for word in ("AsyncHandle", "AsyncClient", "AsyncRefreshIterator", "AsyncIterator", "AbstractAsyncContextManager"):
                text = text.replace(word, word.replace("Async", ""))
            found[name] = text
    return found


def test_both_handles_have_one_surface() -> None:
    """Every public name, parameter, default and annotation; a coroutine returns the same as the function."""
    assert surface(AsyncHandle) == surface(Handle)


@pytest.mark.anyio
async def test_arenas_arrive_before_later_replies_are_taken() -> None:
    """Coroutines take replies in any order; descriptors arrived with the reply sent first."""
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    channel, server, transfer = (
        AsyncLink("here", ours),
        FrameSocket(theirs),
        ClientTransfer(PoolOptions(), lambda numbers: None),
    )
    taken: list[int] = []

    async def ask(number: int) -> None:
        reply = await channel.exchange(Request(m.Ping(), "echo()", transfer=transfer))
        with result_of("echo()", reply, transfer) as result:
            assert not result.segments[0].closed
        taken.append(number)

    with HOST.create(4096) as segment:
        async with anyio.create_task_group() as group:
            group.start_soon(ask, 1)
            await until(lambda: channel._reader)
            group.start_soon(ask, 2)
            await until(lambda: len(channel._exchanges.pending) == 2)
            # The one who reads asked first, and is answered last.
            answer = m.Result(msgspec.Raw(EMPTY_TABLE), [msgspec.structs.replace(segment.info, arena=True)], owner="server")
            server.queue(answer, 2, owners=[segment.owner])
            server.queue(msgspec.structs.replace(answer, segments=[segment.info.id]), 1)
            server.flush()
    assert sorted(taken) == [1, 2]
    transfer.close()
    channel.close()
    server.close()
