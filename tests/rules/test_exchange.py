"""The exchanges of a connection, without one: input in any pieces, in any order, cut anywhere.

Descriptors are real: each received one is returned or closed.
"""

from __future__ import annotations

import errno
import itertools
import math
import os
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from random import Random
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared_rpc.client.exchange import Exchange, Exchanges, TooLate
from shared_rpc.client.results import result_of
from shared_rpc.client.session import LeaseBook, connect
from shared_rpc.client.steps import Reply, Request
from shared_rpc.errors import ConnectError, ConnectionClosed, DeadlineExceeded, ProtocolError
from shared_rpc.memory.backends.host import HOST
from shared_rpc.memory.segments import KEPT_SLABS, KnownSegments, refer
from shared_rpc.protocol import exported as x
from shared_rpc.protocol import messages as m
from shared_rpc.protocol.catalogue import decode_message, encode_message
from shared_rpc.protocol.frames import FrameDecoder, encode_frame
from shared_rpc.protocol.generations import Generation
from shared_rpc.protocol.records import EMPTY_TABLE, sent_infos
from shared_rpc.protocol.socket import FrameBuffers
from shared_rpc.protocol.tasks import TaskInfo, TaskStatus
from tests.kit.feeding import feed, new_fd, next_frame, nothing_leaks
from tests.kit.raw import frame_of

pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")


def result(object_id: str, *, managed: bool = False) -> m.Result:
    """Return a result without memory."""
    return m.Result(msgspec.Raw(EMPTY_TABLE), [], object_id=object_id, managed=managed)


def changed(done: int) -> m.TaskUpdate:
    """Return a task's notification."""
    return m.TaskUpdate(TaskInfo("t", "endpoint", TaskStatus.RUNNING, float(done)))


GENERATION = Generation("load", "load()", "an id", 2, "", 0, "cpu", "a server", 0.0)
KNOWN = m.Error(DeadlineExceeded.code, "nobody waits")


class Connection:
    """A driver without I/O: :meth:`sent` returns its output, and the test feeds its input."""

    def __init__(self) -> None:
        self.buffers = FrameBuffers()
        self.exchanges = Exchanges("/run/server.sock", self.buffers)
        self._written = FrameDecoder()

    def write(self, limit: int | None = None) -> None:
        """Take all queued output, or its first bytes."""
        while self.buffers._outbox and (limit is None or limit > 0):
            data, _ = self.buffers._outbox[0]
            part = data[:limit] if limit is not None else data
            limit = limit - len(part) if limit is not None else None
            feed(self._written, part)
            self.buffers._wrote.append(len(part))
            self.buffers._remove_written()

    def sent(self) -> list[tuple[int, m.Message]]:
        """Return the output since the last call, with the requests' numbers."""
        self.write()
        messages = []
        while (frame := next_frame(self._written)) is not None:
            messages.append((frame.request_id, decode_message(frame)))
        return messages

    def come(self, message: m.Message, number: int, fds: int = 0) -> list[Exchange]:
        """Feed a frame."""
        feed(self.buffers, frame_of(message, number, fds=fds), [new_fd() for _ in range(fds)])
        return self.exchanges.deliver()

    def ask(self, message: m.Message | None = None, **options: Any) -> Exchange:
        """Begin an exchange."""
        return self.exchanges.begin(Request(message or m.Ping(), "a question", **options))

    def close(self) -> None:
        """Disconnect."""
        self.buffers.close()


@pytest.fixture
def connection() -> Iterator[Connection]:
    """A connection, which must leave nothing open."""
    with nothing_leaks():
        connection = Connection()
        yield connection
        connection.close()


# Any input, in any pieces.


@dataclass
class Plan:
    """An exchange: its notifications, the memory of its answer, and the arrival after which its caller gives up."""

    early: int
    fds: int
    managed: bool
    withdraws: int | None
    abandons: int | None

    number: int = 0
    frames: list[tuple[bytes, int]] = field(default_factory=list)
    exchange: Exchange | None = None
    heard: list[int] = field(default_factory=list)
    reply: Reply | None = None
    left: bool = False


moments = st.none() | st.integers(0, 8)
plans = st.builds(
    Plan,
    early=st.integers(0, 3),
    fds=st.integers(0, 3),
    managed=st.booleans(),
    withdraws=moments,
    abandons=moments,
)


def begin_all(connection: Connection, chosen: list[Plan]) -> None:
    """Begin all exchanges, and prepare the server's frames."""
    for plan in chosen:
        plan.exchange = connection.ask()
        plan.number = plan.exchange.number
        plan.frames = [(frame_of(changed(done), plan.number), 0) for done in range(plan.early)]
        plan.frames.append(
            (frame_of(result(f"object {plan.number}", managed=plan.managed), plan.number, fds=plan.fds), plan.fds)
        )


def arrivals(data: st.DataObject, chosen: list[Plan], end: int | None = None) -> list[tuple[bytes, list[int]]]:
    """Draw the pieces in which all frames arrive, up to an end: any order between exchanges, any cuts."""
    left = [list(plan.frames) for plan in chosen]
    stream, offsets = b"", []
    while any(left):
        frames = data.draw(st.sampled_from([frames for frames in left if frames]))
        content, count = frames.pop(0)
        offsets += [len(stream)] * count
        stream += content
    stream = stream[:end]
    offsets = [at for at in offsets if at < len(stream)]
    cuts = sorted(data.draw(st.sets(st.integers(0, len(stream)), max_size=10)) | {len(stream)})
    fds = [new_fd() for _ in offsets]
    return [
        (stream[begin:end], [fd for at, fd in zip(offsets, fds, strict=True) if begin <= at < end])
        for begin, end in itertools.pairwise([0, *cuts])
    ]


def go_on(connection: Connection, plan: Plan, moment: int) -> None:
    """Act like the caller after an arrival."""
    exchange = plan.exchange
    assert exchange is not None
    if plan.left or plan.reply is not None:
        return
    plan.heard += [int(info.created_at) for info in exchange.updates]
    exchange.updates.clear()
    if plan.abandons is not None and moment >= plan.abandons:
        connection.exchanges.abandon(exchange)
        plan.left = True
    elif exchange.answer is not None:
        plan.reply = connection.exchanges.reply(exchange)
    elif plan.withdraws is not None and moment >= plan.withdraws:
        assert connection.exchanges.withdraw(exchange)


@given(st.lists(plans, min_size=1, max_size=5), st.none() | st.integers(0, 300), st.data())
def test_any_chunking_order_and_end_is_handled(chosen: list[Plan], end: int | None, data: st.DataObject) -> None:
    """Each request gets its updates in order, and its reply, or an error if the connection ends before; nothing is owed.

    Leases in replies to abandoned requests are released.
    """
    with nothing_leaks():
        connection = Connection()
        begin_all(connection, chosen)
        for moment, (content, fds) in enumerate(arrivals(data, chosen, end)):
            feed(connection.buffers, content, fds)
            connection.exchanges.deliver()
            for plan in chosen:
                go_on(connection, plan, moment)
        if end is not None:
            connection.exchanges.fail(ConnectionClosed("the other side closed the connection"))
        for plan in chosen:
            exchange = plan.exchange
            assert exchange is not None
            assert plan.heard == list(range(len(plan.heard)))
            if plan.left:
                continue
            if plan.reply is None and exchange.answer is None:
                assert end is not None
                with pytest.raises(ConnectionClosed):
                    connection.exchanges.reply(exchange)
                assert not connection.exchanges.withdraw(exchange)
                continue
            assert len(plan.heard) == plan.early or end is not None or plan.withdraws is not None
            reply = plan.reply or connection.exchanges.reply(exchange)
            assert isinstance(reply.message, m.Result)
            assert (reply.message.object_id, len(reply.frame.fds)) == (f"object {plan.number}", plan.fds)
            reply.frame.close()
        if end is None:
            given_back = [message.object_ids for _, message in connection.sent() if isinstance(message, m.Release)]
            assert sorted(given_back) == sorted([f"object {plan.number}"] for plan in chosen if plan.managed and plan.left)
        assert not connection.exchanges.pending and not connection.exchanges.owed
        connection.close()


# The handshake.


def test_the_first_frame_answers_the_handshake(connection: Connection) -> None:
    """Whatever its number; requests have separate numbers."""
    greeting = connection.exchanges.greet()
    assert connection.sent() == [(0, m.Hello())]
    connection.come(m.Welcome("s", "cpu"), 77)
    assert connection.exchanges.welcome(greeting) == m.Welcome("s", "cpu")
    connection.ask()
    assert connection.sent() == [(1, m.Ping())]


@pytest.mark.parametrize(
    ("answer", "text"),
    [(m.Answer.of(None), "it answered Hello with Answer"), (m.Error("protocol", "too many"), "too many")],
)
def test_other_answers_to_the_handshake_are_errors(connection: Connection, answer: m.Message, text: str) -> None:
    """The descriptors of the answer are closed."""
    greeting = connection.exchanges.greet()
    connection.come(answer, 0, fds=1)
    with pytest.raises(ProtocolError, match=text):
        connection.exchanges.welcome(greeting)


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (TooLate(), "did not answer"),
        (ConnectionClosed("reset"), "hung up during the handshake: reset"),
        (ProtocolError("another release"), "failed: another release"),
    ],
    ids=["silence", "end", "release"],
)
def test_a_missing_greeting_is_an_error(connection: Connection, error: Exception, text: str) -> None:
    """It names the server."""
    expected = ProtocolError if isinstance(error, ProtocolError) else ConnectError
    with pytest.raises(expected, match=rf"server at /run/server\.sock .*{text}"), connection.exchanges.greeting():
        raise error


@pytest.mark.parametrize("listens", [True, False])
def test_only_a_missing_server_is_to_be_started(listens: bool) -> None:
    """One that does not answer is there already."""
    error = ConnectError("no answer")
    error.__cause__ = None if listens else ConnectionRefusedError(errno.ECONNREFUSED, "")
    attempt = connect("/run/server.sock", 0, math.inf, LeaseBook())
    next(attempt)
    with pytest.raises(ConnectError, match=r"no answer \(waited") as caught:
        attempt.throw(error)
    assert ("Start a server" in str(caught.value)) is not listens


# Giving up.


def test_withdrawn_requests_time_out(connection: Connection) -> None:
    """The server confirms the cancellation, and the connection stays usable."""
    exchange = connection.ask()
    assert connection.exchanges.withdraw(exchange) and connection.exchanges.withdraw(exchange)
    assert connection.sent() == [(1, m.Ping()), (1, m.Cancel())]
    connection.come(changed(1), 1)
    assert not exchange.updates
    connection.come(KNOWN, 1, fds=1)
    assert not connection.exchanges.withdraw(exchange)
    with pytest.raises(DeadlineExceeded, match="a question took longer than its timeout"):
        connection.exchanges.reply(exchange)
    assert not connection.exchanges.owed


@pytest.mark.parametrize("raised", [True, False], ids=["an endpoint's own", "the server's"])
def test_only_cancellations_are_confirmed_by_their_error(connection: Connection, raised: bool) -> None:
    """An error of the same kind counts as one only for a withdrawn request, and not from an endpoint."""
    exchange = connection.ask()
    if raised:
        connection.exchanges.withdraw(exchange)
    detail = {"type_name": "TimeoutError"} if raised else {}
    connection.come(m.Error(DeadlineExceeded.code, "the oven is slow", detail, raised), 1)
    with pytest.raises(DeadlineExceeded, match="the oven is slow"):
        connection.exchanges.reply(exchange)


def test_late_answers_are_released(connection: Connection) -> None:
    """Of a stuck server: the lease by a message, the memory at once."""
    exchange = connection.ask()
    connection.exchanges.withdraw(exchange)
    with pytest.raises(DeadlineExceeded, match=r"the server at /run/server\.sock is stuck"):
        connection.exchanges.reply(exchange)
    assert list(connection.exchanges.owed) == [1]
    connection.sent()
    assert connection.come(result("late", managed=True), 1, fds=2) == []
    assert not connection.exchanges.owed
    assert connection.sent() == [(2, m.Release(["late"]))]
    connection.come(m.Answer.of(1), 2)


@pytest.mark.parametrize(
    ("request_", "answer", "given_back"),
    [
        (m.CreateBuffer(100), result("an id", managed=True), m.FreeBuffer("an id", release=True)),
        (m.Ping(), x.Exported("an id", 2), m.Release(["an id"])),
        (m.Ping(), x.Candidate(GENERATION), m.Release(["an id"])),
    ],
    ids=["a buffer", "a record", "a candidate"],
)
def test_abandoned_leases_are_given_back(
    connection: Connection, request_: m.Message, answer: m.Message, given_back: m.Message
) -> None:
    """No other process knows them; a buffer is recognised by its request, and freed."""
    exchange = connection.ask(request_)
    connection.exchanges.abandon(exchange)
    connection.sent()
    connection.come(answer, 1, fds=1)
    assert connection.sent() == [(2, given_back)]


# Answers that do not fit.


def test_answers_without_a_request_are_closed(connection: Connection) -> None:
    """The right one is still matched; a lease in it is released."""
    exchange = connection.ask()
    assert connection.come(result("stray", managed=True), 77, fds=1) == []
    assert connection.come(changed(1), 78) == []
    assert connection.come(m.Answer.of(None), 1) == [exchange]
    assert connection.sent()[1:] == [(2, m.Release(["stray"]))]
    connection.come(m.Answer.of(None), 1, fds=2)  # a second answer
    assert connection.exchanges.reply(exchange).message == m.Answer.of(None)


@given(st.lists(st.lists(st.integers(0, 2 * KEPT_SLABS), min_size=1, max_size=3, unique=True), max_size=40), st.randoms())
def test_both_sides_know_the_same_segments(results: list[list[int]], chance: Random) -> None:
    """Arenas and the latest slabs, in the order of the replies, in which order these are taken."""
    with ExitStack() as stack:
        memories = [stack.enter_context(HOST.create(4096)) for _ in range(2 * KEPT_SLABS + 1)]
        for number, memory in enumerate(memories):
            memory.info = msgspec.structs.replace(memory.info, arena=number < 2, slab=number >= 2)
        connection, server, taken = Connection(), KnownSegments[bool](), []
        for numbers in results:
            segments, exchange = [memories[number] for number in numbers], connection.ask()
            refs, owners = refer(segments, server)
            for info in sent_infos(refs):
                server.add(info, True)
            answer = m.Result(msgspec.Raw(EMPTY_TABLE), refs)
            fds = [os.dup(owner.number) for owner in owners]
            feed(connection.buffers, frame_of(answer, exchange.number, fds=len(fds)), fds)
            connection.exchanges.deliver()
            taken.append((segments, exchange))
        chance.shuffle(taken)
        for segments, exchange in taken:
            if chance.random() < 0.3:
                connection.exchanges.abandon(exchange)
                continue
            with result_of("a call", connection.exchanges.reply(exchange)) as result:
                for found, segment in zip(result.segments, segments, strict=True):
                    assert os.path.sameopenfile(found.fileno(), segment.fileno())
        assert {*connection.exchanges.known} == {*server} and len(server) <= KEPT_SLABS + 2
        connection.exchanges.fail(ConnectionClosed("the end"))
        connection.close()


def test_unreadable_answers_are_errors(connection: Connection) -> None:
    """For their request only."""
    exchange, other = connection.ask(), connection.ask()
    feed(connection.buffers, b"".join(encode_frame(encode_message(m.Answer.of(None))[0], 1, b"garbage", b"", 1)), [new_fd()])
    connection.exchanges.deliver()
    with pytest.raises(ProtocolError, match="cannot decode a Answer message"):
        connection.exchanges.reply(exchange)
    connection.come(m.Answer.of(None), 2)
    assert connection.exchanges.reply(other).message == m.Answer.of(None)


def test_garbage_ends_the_connection(connection: Connection) -> None:
    """Earlier complete frames are delivered."""
    exchange = connection.ask()
    feed(connection.buffers, frame_of(m.Answer.of(None), 1) + b"HTTP/1.1 400 Bad Request")
    with pytest.raises(ProtocolError, match="not a shared_rpc frame"):
        connection.exchanges.deliver()
    assert connection.exchanges.reply(exchange).message == m.Answer.of(None)


# The end.


def test_the_servers_reason_reaches_all_requests(connection: Connection) -> None:
    """Each gets its own exception, as do later requests."""
    exchanges = [connection.ask(), connection.ask()]
    connection.come(m.Error("protocol", "the last word"), 0)
    early = []
    for ask in (*(lambda exchange=exchange: connection.exchanges.reply(exchange) for exchange in exchanges), connection.ask):
        with pytest.raises(ProtocolError, match="the last word") as caught:
            ask()
        early.append(caught.value)
    assert len(set(map(id, early))) == 3


@pytest.mark.parametrize(
    ("written", "again", "repeatable"),
    [(0, False, True), (27, False, True), (1000, False, False), (1000, True, True)],
    ids=["not sent", "sent in part", "sent", "sent, and only asks"],
)
def test_requests_are_repeatable_if_unsent_or_read_only(
    connection: Connection, written: int, again: bool, repeatable: bool
) -> None:
    """A request whose last byte was not written was not received; queries can be repeated."""
    exchange = connection.ask(m.GetObjectInfo("a long name") if again else m.Release(["a long name"]))
    connection.write(written)
    connection.exchanges.fail(ConnectionClosed("the other side closed the connection"))
    assert exchange.request.repeatable == repeatable


def test_unsendable_requests_queue_nothing(connection: Connection) -> None:
    """And the connection stays usable."""
    with pytest.raises(ProtocolError, match="cannot encode"):
        connection.ask(m.GetObjectInfo("\udc80"))
    assert not connection.exchanges.pending
    assert connection.buffers.unsent == 0
