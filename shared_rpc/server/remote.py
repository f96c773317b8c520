"""Clients in other processes: their connections, and the callers of their requests."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Callable
from typing import ClassVar

import msgspec

from shared_rpc.errors import CapabilityError, DeadlineExceeded, ProtocolError, ServerBusy, SharedRPCError
from shared_rpc.execution.arguments import read_arguments
from shared_rpc.execution.outcomes import Failure
from shared_rpc.execution.run import CallArguments
from shared_rpc.execution.stream import FramedStream
from shared_rpc.lifecycle.collector import paused
from shared_rpc.memory.segments import Descriptor, KnownSegments
from shared_rpc.observability.events import HOOKS, RequestFailed
from shared_rpc.protocol import exported as x
from shared_rpc.protocol import messages as m
from shared_rpc.protocol import sources as s
from shared_rpc.protocol.catalogue import NUMBERS, decode_message
from shared_rpc.protocol.frames import CLIENT, HELLO, Frame
from shared_rpc.protocol.peers import Peer
from shared_rpc.protocol.records import sent_infos
from shared_rpc.protocol.socket import FdOwner
from shared_rpc.server.core import Core
from shared_rpc.server.sessions import Session
from shared_rpc.server.state.descriptors import STALLED
from shared_rpc.server.waiting import Delivery, Waiter

_log = logging.getLogger("shared_rpc.server")

#: Seconds for the first frame of a new connection.
_HANDSHAKE_TIMEOUT = 10.0
#: Bytes of replies a client may leave unread before the server stops reading its requests.
_BACKPRESSURE = 1 << 20
#: Maximum number of active requests of one connection; each costs the server some kilobytes.
_MAX_CALLS = 10_000
#: Bytes of a request's body: above the first limit the garbage collector is paused while it is decoded; above the second it
#: is refused, unless it carries arguments or a table.
_LONG, _MOST = 64 << 10, 8 << 20
_LARGE = frozenset(
    NUMBERS[kind] for kind in NUMBERS if issubclass(kind, (m.Call, m.InvalidateCall, x.CheckRecord, x.Adopt, s.FailMiss))
)
#: Characters of an error's text in events.
_SHOWN = 500


class RemoteClient:
    """One connection of a client.

    :param on_close: called once, at the end.
    """

    def __init__(
        self,
        sock: socket.socket,
        peer: Peer,
        core: Core,
        on_close: Callable[[RemoteClient], None],
    ) -> None:
        self.core = core
        self.peer = peer
        self._may_send_code = core.sessions.admit_code(sock)
        self.session: Session | None = None
        self._intake = core.objects.descriptors.intake
        self.stream = FramedStream(
            sock,
            self._handle,
            self._end,
            backpressure=_BACKPRESSURE,
            fd_backpressure=core.objects.descriptors.share,
            on_held=self._holds,
            limits=HELLO,
            before_write=core.before_replies,
        )
        #: Pending requests, by number.
        self.waiting: dict[int, RemoteCaller] = {}
        #: The segments whose descriptors the client has.
        self.known = KnownSegments[bool]()
        self._on_close = on_close
        self._silence: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Serve until the peer disconnects or breaks the protocol.

        :raises OSError: if the kernel cannot watch the socket.
        """
        self._silence = asyncio.get_running_loop().call_later(_HANDSHAKE_TIMEOUT, self._handshake_timed_out)
        self._intake.connections[self.stream] = self._exhausts
        self.stream.start()

    def close(self) -> None:
        """End the connection now: its calls are abandoned, and no further notices are sent."""
        if self.stream.closed:
            return
        self.stream.close()
        self._intake.leave(self.stream)
        if self._silence is not None:
            self._silence.cancel()
        callers = tuple(self.waiting.values())
        self.waiting.clear()
        for caller in callers:
            caller.leave()
        if self.session is not None:
            self.core.sessions.end(self.session)
        self._on_close(self)

    def refuse(self, error: SharedRPCError) -> None:
        """Send the reason for the refusal, and end."""
        self.send(m.Error(error.code, str(error)), 0)
        self.close()

    def _exhausts(self, why: str) -> None:
        """End the connection soon, because it exhausts shared resources."""
        self.stream.stop_reading()
        asyncio.get_running_loop().call_soon(self._end_now, why)

    def _end_now(self, why: str) -> None:
        if not self.stream.closed:
            _log.warning("closed the connection of pid %d: %s", self.peer.pid, why)
            self.refuse(ServerBusy(f"the server (pid {os.getpid()}) closed the connection: {why}"))

    def send(self, message: m.Message, number: int, payload: bytes = b"", owners: tuple[FdOwner, ...] = ()) -> bool:
        """Send a message. Never blocks or raises; return False if an error was sent instead, or the connection has ended."""
        if self.stream.closed:
            return False
        try:
            self.stream.send(message, number, payload, owners=owners)
            if owners and self.stream.congested:
                self._intake.check(max(owner.number for owner in owners))
            return True
        except (OSError, ProtocolError) as error:
            # As text: the error's traceback would keep the descriptors for as long as a log keeps the record.
            _log.error("cannot send a reply to pid %d: %s", self.peer.pid, str(error))
            self.stream.send(m.Error(CapabilityError.code, f"the server cannot send the reply: {error}"), number)
            return False

    def _holds(self, nbytes: int) -> None:
        self._intake.note(self.stream, nbytes, self.core.now())
        if nbytes:
            self.core.wake_within(STALLED)
        if self.stream.newest_fd >= 0:
            self._intake.check(self.stream.newest_fd)

    def _handle(self, frame: Frame) -> None:
        if frame.fds:
            self._intake.check(max(frame.fds))
        if self.session is None:
            self._welcome(frame)
            return
        caller = RemoteCaller(self.core, self.session.session_id, self, frame.request_id, frame)
        if len(frame.body) <= _LONG:
            _answer(caller, frame)
        else:
            with paused():  # thousands of objects are made at once
                _answer(caller, frame)

    def _welcome(self, frame: Frame) -> None:
        hello = decode_message(frame)
        if not isinstance(hello, m.Hello):
            raise ProtocolError(f"the first message of the connection is {type(hello).__name__}, not Hello")
        self.session = self.core.sessions.begin(self.peer, self._may_send_code)
        self.stream.limit_frames(CLIENT)
        self.send(m.Welcome(self.core.server_id, self.core.device), frame.request_id)

    def _end(self, error: Exception | None) -> None:
        if isinstance(error, ProtocolError):
            _log.warning("protocol error of pid %d: %s", self.peer.pid, error)
            self.refuse(error)
            return
        if error is not None:
            _log.error("closed the connection of pid %d: %s", self.peer.pid, error, exc_info=error)
        self.close()

    def _handshake_timed_out(self) -> None:
        if self.session is None:
            _log.warning("pid %d connected and sent no Hello for %g s", self.peer.pid, _HANDSHAKE_TIMEOUT)
            self.close()


def _answer(caller: RemoteCaller, frame: Frame) -> None:
    try:
        if len(frame.body) > _MOST and frame.kind not in _LARGE:
            raise ProtocolError(f"a request with a body of {len(frame.body)} bytes; the limit for its kind is {_MOST}")
        message = decode_message(frame)
    except ProtocolError as error:
        caller.fail(Failure.of(error))
    else:
        caller.core.requests.answer(caller, message)


class RemoteCaller(msgspec.Struct, eq=False):
    """The caller of one request of a connection: a :class:`shared_rpc.server.requests.Caller`."""

    core: Core
    session: str
    _client: RemoteClient
    _number: int
    #: The request's frame, until the request waits.
    _frame: Frame | None
    _waiter: Waiter | None = None
    local: ClassVar[bool] = False

    @property
    def name(self) -> str:
        """The request's name, unique among all servers, which identifies a client's error in the server's log."""
        return f"{self.session[:8]}-{self._number}"

    @property
    def waiter(self) -> Waiter:
        """The waiter of a pending request."""
        assert self._waiter is not None, "only a waiting request has a waiter"
        return self._waiter

    @property
    def payload(self) -> bytes:
        """The payload of the request's frame."""
        assert self._frame is not None, "a waiting request has no frame any more"
        return self._frame.payload

    def arguments(self, message: m.Call) -> tuple[None, CallArguments]:
        """Take the arguments as they were sent. They are decoded only on demand."""
        assert self._frame is not None, "a waiting request has no frame any more"
        arguments = read_arguments(self._frame, message, self.session, self.core.transfers, self.core.objects.segment)
        if message.skeletons:
            try:
                self.core.sessions.check_code(self.session, "an argument that is a module, or no plain tensor,")
            except BaseException:
                arguments.close()
                raise
        return None, arguments

    def wait(self) -> Waiter:
        waiting = self._client.waiting
        if self._number in waiting:
            raise ProtocolError(f"request id {self._number} is in use already")
        if len(waiting) >= _MAX_CALLS:
            raise ServerBusy(f"{_MAX_CALLS} calls of this connection are under way: wait for some of them to end")
        waiting[self._number] = self
        self._frame = None
        self._waiter = Waiter(self.session, self.deliver, request_id=self.name)
        return self._waiter

    def leave(self) -> None:
        """Stop waiting, on the caller's own initiative."""
        assert self._waiter is not None, "only a waiting request is discarded"
        self.core.leave(self._waiter)

    def cancel(self) -> None:
        """Cancel an earlier request. An unknown one was already answered."""
        caller = self._client.waiting.get(self._number)
        if caller is not None:
            assert caller._waiter is not None, "only a waiting request is cancelled"
            busy = self.core.state.waits_for(caller._waiter)
            caller.leave()
            text = "the caller has cancelled the call"
            caller.reply(m.Error(ServerBusy.code, busy) if busy else m.Error(DeadlineExceeded.code, text))

    def notify(self, message: m.Message) -> None:
        if self._client.waiting.get(self._number) is self and not self._client.stream.full:
            self._client.send(message, self._number)

    def reply(self, message: m.Message, payload: bytes = b"", owners: tuple[Descriptor, ...] = ()) -> bool:
        if self._waiter is not None:
            waiting = self._client.waiting
            if waiting.get(self._number) is not self:
                return False
            del waiting[self._number]
        if not self._number and not isinstance(message, m.Error):
            return True  # no caller waits for the answer, see Free
        return self._client.send(message, self._number, payload, owners)

    def fail(self, failure: Failure) -> None:
        if self._waiter is not None and self._client.waiting.get(self._number) is not self:
            return
        if HOOKS.registered:
            HOOKS.emit(
                RequestFailed(
                    server_id=self.core.server_id,
                    request_id=self.name,
                    session=self.session,
                    pid=self._client.peer.pid,
                    code=failure.code,
                    text=failure.text[:_SHOWN],
                )
            )
        detail = {**failure.detail, "request_id": self.name}
        raised = bool(failure.pickled) and not failure.sealed
        self.reply(m.Error(failure.code, failure.text, detail, endpoint_raised=raised), failure.pickled)

    def deliver(self, outcome: Delivery | Failure) -> bool:
        if isinstance(outcome, Failure):
            self.fail(outcome)
            return True
        record, stored = outcome.record, outcome.stored
        assert record is not None, "a result for another process has a record"
        transfer, known = self.core.transfers.find(self.session), self._client.known
        body, owners = record.body(known)
        message = m.Result(
            **body,
            freed=transfer.returned() if transfer is not None and self._waiter is not None and self._waiter.pooled else [],
            object_id=stored.object_id if stored is not None else "",
            generation=stored.generation if stored is not None else 1,
            managed=outcome.managed,
            owner=self.core.server_id if stored is not None else "",
        )
        if self.reply(message, record.skeleton, owners):
            if owners and self._number:  # an answer to number 0 is not sent
                for info in sent_infos(message.segments):
                    if info.arena or info.slab:
                        known.add(info, True)
            return True
        if transfer is not None:
            transfer.release_results(record.chunks)
            transfer.release(message.freed)
        if outcome.managed:
            self.core.release(self.session, [message.object_id])
        return False
