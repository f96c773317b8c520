"""The base of both clients: the server's address, the values and leases of this process, and the session's end."""

from __future__ import annotations

import functools
import importlib
import math
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NoReturn, Self

import msgspec

from shared_rpc.client.exchange import release_for
from shared_rpc.client.handle import Lease
from shared_rpc.client.link import Link
from shared_rpc.client.session import LeaseBook, connect
from shared_rpc.client.steps import Lend, Operation, Reply, Request, Step, Tell, Work, drive
from shared_rpc.client.suspension import Context, release_leases
from shared_rpc.client.transfer import ClientTransfer, TransferClosed
from shared_rpc.errors import CapabilityError, ConnectError, ConnectionClosed, SharedRPCError
from shared_rpc.forks import after_fork
from shared_rpc.lifecycle import collector
from shared_rpc.lifecycle.finalizer import FINALIZER, weakly
from shared_rpc.memory.devices import device_id, device_tag
from shared_rpc.memory.pool import PoolOptions
from shared_rpc.protocol import messages as m
from shared_rpc.settings import resolve_base_path, socket_path

if TYPE_CHECKING:
    from shared_rpc.protocol.ticket import Ticket

#: Stands for the client's own timeout.
OWN_TIMEOUT = -1.0


class OperationState(msgspec.Struct, eq=False):
    """The state of one operation of a client. It owns the resources of replies until they are returned to the caller."""

    #: Seconds to wait for a server to appear; and the deadline, on the clock of the driver.
    patience: float = 0.0
    deadline: float = math.inf
    #: The latest request, its session, and its reply, unless a handle has the lease of that.
    request: Request | None = None
    link: Any = None
    reply: Reply | None = None
    #: The handles so far, each with the message that it came with, None for a lease by id, and the request.
    lent: list[tuple[Lease[Any], m.Message | None, Request | None]] = msgspec.field(default_factory=list)

    def lend(self, make: Callable[[], Lease[Any]]) -> Lease[Any]:
        """Move the lease of the reply to a new handle, and return that: from the beginning on, only the handle releases it."""
        reply, self.reply = self.reply, None
        handle = make()
        self.lent.append((handle, reply.message if reply is not None else None, self.request))
        return handle

    def owed(self) -> list[tuple[m.Message, object]]:
        """Drop the resources of a failed operation; return the messages that release them, each with its session."""
        owed: list[tuple[m.Message | None, object]] = []
        if self.reply is not None:
            owed.append((release_for(self.reply.message, self.request), self.link))
        for handle, message, request in self.lent:
            if handle._drop():
                release = release_for(message, request) if message is not None else m.Release([handle.object_id])
                owed.append((release, handle._session))
        self.reply, self.lent = None, []
        return [(message, session) for message, session in owed if message is not None]


def preload_codec() -> None:
    """Load the codec if torch is already loaded: a process that only lists or releases never needs it."""
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "cuda"):  # not imported, or being imported
        return
    with collector.paused():
        importlib.import_module("shared_rpc.codec.arguments")
        importlib.import_module("shared_rpc.codec.results")
        if torch.version.cuda is not None:
            with suppress(ImportError):  # reported when a GPU is used
                importlib.import_module("shared_rpc.memory.backends.vmm")


class BaseClient(Context):
    """The base of a client. For the parameters see :class:`shared_rpc.Client`.

    No part of it has a strong reference to it, so that it ends with its last user: see :meth:`__del__`.
    """

    def __init__(
        self,
        base_path: str | os.PathLike[str] | None = None,
        *,
        device: str = "auto",
        socket_path: str | os.PathLike[str] | None = None,
        timeout: float | None = 600.0,
        connect_timeout: float = 5.0,
        pool: PoolOptions | None = None,
    ) -> None:
        self._base_path, self._device = base_path, device
        self._socket_path = os.path.abspath(socket_path) if socket_path is not None else ""
        self._timeout = timeout
        self._connect_timeout = connect_timeout
        self._pool_options = pool or PoolOptions()
        self._values: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()
        self._leases = LeaseBook()
        self._closed = False
        self._disconnected()
        preload_codec()
        after_fork(self._after_fork)

    @classmethod
    def from_ticket(cls, ticket: Ticket | str | os.PathLike[str], **options: Any) -> Self:
        """Return a client of the ticket's server; it is not connected yet, and the ticket not opened.

        :param ticket: a ticket, or the path of its file.
        :param options: those of the client, except the server's address.
        :raises TicketError: if the ticket cannot be read.
        """
        from shared_rpc.protocol.ticket import read_ticket

        return cls(socket_path=read_ticket(ticket).socket_path, **options)

    #: Starts a server if none listens: called with the socket's path, the seconds for the start, and the deadline.
    _summon: Callable[[str, float, float], None] | None = None

    def _disconnected(self) -> None:
        """Begin without a session."""
        self._lock = threading.RLock()
        self._link: Any = None

    def _ready_link(self) -> Any:
        """Return the link; None if a new one is needed."""
        link = self._link
        return link if link is not None and link.ready and not self._closed else None

    def _new_transfer(self) -> ClientTransfer:
        """Create the pools of a new session."""
        FINALIZER.start()  # the thread ends the session of a collected client
        return ClientTransfer(self._pool_options, weakly(self._return_chunks))

    def _return_chunks(self, transfer: ClientTransfer, chunks: list[int]) -> None:
        """Return chunks of the server's pool, in their session; from another thread.

        :raises TransferClosed, SharedRPCError, OSError: if the message was not sent.
        """
        link = self._link
        if link is None or link.transfer is not transfer:
            raise TransferClosed
        link.post(m.Free(chunks))

    def _after_fork(self) -> None:
        """Reset the client in a forked child: the session is the parent's, and the links close their copies of descriptors."""
        self._values = weakref.WeakValueDictionary()
        self._leases = LeaseBook()
        self._disconnected()

    def __del__(self) -> None:
        """End the session of a client that was collected without being closed."""
        link = getattr(self, "_link", None)  # a client whose constructor failed has none
        if link is None or sys.is_finalizing():
            return  # the kernel closes the connections when the process ends
        FINALIZER.submit(functools.partial(end, link))  # the job must not refer to the client

    def __reduce__(self) -> NoReturn:
        raise CapabilityError("cannot pickle or copy a client, because its session is this process's: make one in each process")

    @property
    def socket_path(self) -> str:
        """The path of the server's socket."""
        if not self._socket_path:  # resolved on first use: resolving a GPU's name needs the driver
            self._socket_path = socket_path(resolve_base_path(self._base_path), device_tag(device_id(self._device)))
        return self._socket_path

    def _check_open(self) -> None:
        if self._closed:
            raise ConnectionClosed("this client is closed")

    def _new_session(self, patience: float, seconds: float) -> Operation[list[Lease[Any]]]:
        """Wait for a server, and begin a session, which takes over the leases of the previous one.

        :param patience: seconds to wait for a server to listen; ``seconds``: those until the operation's deadline.
        :returns: the active handles whose memory the server has replaced.
        """
        self._check_open()
        if self._ready_link() is not None:
            return []
        earlier, deadline = self._link, time.monotonic() + seconds
        found = connect(self.socket_path, patience, deadline, self._leases, earlier, self._summon)
        link, renewal = yield from found
        try:
            with self._lock:
                if self._closed or self._link is not earlier:
                    link.close()
                    return []
                link.transfer = self._new_transfer()
                self._link = link
                if renewal is not None:
                    renewal.move(link)
            for message in renewal.corrections() if renewal is not None else ():
                with suppress(SharedRPCError):
                    link.post(message)
            if earlier is not None:
                earlier.close("another connection has replaced this one")
                yield Work(earlier.transfer.close)  # for a GPU this waits for the device
            return renewal.outdated() if renewal is not None else []
        except BaseException:
            link.close()
            raise

    def _lend(self, step: Lend, state: OperationState) -> Lease[Any]:
        """Return the handle of a value that arrived with a lease."""
        session = state.link
        if session is None or self._closed:
            raise ConnectionClosed("this client was closed, which has ended the lease")
        handle = state.lend(lambda: self._handle(step.message, step.value, session.server_id, session))
        self._leases.add(handle)
        if session.ended and handle._in_session(session) and handle._drop():
            what = f"the lease on object {step.message.object_id}"
            raise ConnectionClosed(
                f"the session with the server at {self.socket_path} has ended, and {what} with it: call again"
            )
        return handle

    @staticmethod
    def _post(message: m.Message, session: Any) -> None:
        """Send a message whose answer is not needed, unless its session has ended."""
        if session is not None and not session.ended:
            with suppress(SharedRPCError, OSError):  # the connection has ended, and the session's leases with it
                session.post(message)

    def _undo(self, state: OperationState) -> None:
        """Release the resources of a failed operation."""
        for message, session in state.owed():
            self._post(message, session)

    def _end_lease_soon(self, object_id: str, session: object) -> None:
        if session is self._link:  # else its leases have ended
            drive(release_leases(self, [object_id], [session], waits=False), functools.partial(self._perform_apart, session))

    def _perform_apart(self, session: object, step: Step) -> Any:
        """Perform a step that needs no answer, in the finaliser thread."""
        match step:
            case Tell():
                self._post(step.message, session)
            case Work():
                return step.function()
        return None

    # Requests: a driver sends them, and reaches the server, and has these rules.

    @staticmethod
    def _begin(request: Request, state: OperationState) -> None:
        """Begin a request of an operation."""
        state.request, state.reply = request, None
        if request.sessions and None not in request.sessions:
            state.patience = 0.0  # the leases end with their sessions

    @staticmethod
    def _address(request: Request, state: OperationState, link: Link) -> None:
        """Prepare a request for a session.

        :raises TransferClosed: if it refers to the memory of another one.
        """
        if request.transfer is not None and request.transfer is not link.transfer:
            raise TransferClosed
        state.link = link
        if request.sessions:
            request.keep_to(link)

    def _repeats(self, request: Request, link: Link, error: SharedRPCError) -> bool:
        """Return True if a failed request is repeated with the next server.

        :raises ConnectionClosed: if it failed because this client was closed.
        """
        hung_up = isinstance(error, ConnectionClosed)
        if self._closed and hung_up:
            raise ConnectionClosed(f"this client was closed during {request.what}") from error
        return request.repeatable and (hung_up or (request.unwritten and not link.usable))

    def _connected_link(self, late: bool = False) -> Any:
        """Return the link after an attempt to connect, which may have lost it again.

        :param late: True if the attempt was ended by its deadline.
        :raises ConnectionClosed: if the client is closed.
        :raises ConnectError: if it was ended without a link.
        """
        link = self._link
        self._check_open()
        if late and (link is None or not link.ready):
            raise ConnectError(f"cannot connect to {self.socket_path} in time")
        return link


def end(link: Any) -> None:
    """End a session."""
    link.ended = True
    link.close()
    if link.transfer is not None:
        link.transfer.close()
