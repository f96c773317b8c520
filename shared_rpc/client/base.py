"""The base of both clients: where the server is, the values and leases of this process, and its end."""

from __future__ import annotations

import functools
import importlib
import os
import sys
import weakref
from abc import abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, ClassVar, Self

from shared_rpc.client.connection import Connection
from shared_rpc.client.exchange import PROMPT
from shared_rpc.client.handle import Lease
from shared_rpc.client.sending import send
from shared_rpc.client.session import ClientSession, LeaseBook
from shared_rpc.client.steps import Driver, Lend, Operation, Reply, Request, Step, Work, drive
from shared_rpc.client.subscriptions import ConnectionSource, Subscriptions
from shared_rpc.client.suspension import Suspensions, lease_ended
from shared_rpc.client.transfer import ClientTransfer, TransferClosed
from shared_rpc.errors import ConnectionClosed, SharedRPCError
from shared_rpc.forks import after_fork
from shared_rpc.lifecycle.finalizer import FINALIZER, Job, weakly
from shared_rpc.memory.devices import device_id, device_tag
from shared_rpc.memory.pool import PoolOptions
from shared_rpc.protocol import messages as m
from shared_rpc.protocol.ticket import Ticket, read_ticket
from shared_rpc.settings import resolve_base_path, socket_path

#: A timeout that stands for the client's own.
OWN_TIMEOUT = -1.0
#: Seconds until the finaliser thread tries again to return leases to a server that is stuck.
_LATER = 2.0


def preload_codec() -> None:
    """Load the codec, where torch is loaded already: a process that only lists or releases never needs it."""
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "cuda"):  # not imported, or being imported
        return
    importlib.import_module("shared_rpc.codec.arguments")
    importlib.import_module("shared_rpc.codec.results")
    if torch.version.cuda is not None:
        with suppress(ImportError):  # reported when a GPU is used
            importlib.import_module("shared_rpc.memory.backends.vmm")


class Address:
    """The path of a server's socket, resolved when it is first asked for: a GPU's name takes the driver."""

    def __init__(
        self, base_path: str | os.PathLike[str] | None, device: str, socket_path: str | os.PathLike[str] | None
    ) -> None:
        self._base_path = base_path
        self._device = device
        self._path = os.path.abspath(socket_path) if socket_path is not None else None

    def path(self) -> str:
        """Return the path."""
        if self._path is None:
            self._path = socket_path(resolve_base_path(self._base_path), device_tag(device_id(self._device)))
        return self._path


class BaseClient(Driver):
    """The base of a client. For the parameters see :class:`shared_rpc.Client`.

    None of its parts refers to it, so that it ends with the last of its users: see :meth:`__del__`.
    """

    _lets_go: ClassVar[bool] = False

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
        self._address = Address(base_path, device, socket_path)
        self._timeout = timeout
        self._connect_timeout = connect_timeout
        self._pool_options = pool or PoolOptions()
        #: Values that live in this process, by object id: an object is rebuilt once, as it is built once in the server.
        self._values: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()
        self._leases = LeaseBook()
        self._suspensions = Suspensions(self._leases)
        self._watch = Subscriptions(weakly(self._news_source))
        self._begin()
        preload_codec()
        after_fork(self._after_fork)

    @classmethod
    def from_ticket(cls, ticket: Ticket | str | os.PathLike[str], **options: Any) -> Self:
        """Return a client of the server that a ticket names; it is not connected yet, and the ticket not opened.

        :param ticket: a ticket, or the path of its file.
        :param options: those of the client, but for where the server is.
        :raises TicketError: if the ticket cannot be read.
        """
        return cls(socket_path=read_ticket(ticket).socket_path, **options)

    @abstractmethod
    def _begin(self) -> None:
        """Get ready to connect."""

    @abstractmethod
    def _has_lease(self, handle: Lease[Any]) -> bool:
        """Return whether a handle's lease is in the session that this client has."""

    def _transfers(self) -> Callable[[], ClientTransfer]:
        """Return a function that makes the pools of a new session."""
        options, flush = self._pool_options, weakly(self._return_chunks)

        def new_transfer() -> ClientTransfer:
            FINALIZER.start()  # the thread ends the session of a collected client
            return ClientTransfer(options, flush)

        return new_transfer

    @abstractmethod
    def _return_chunks(self, transfer: ClientTransfer, chunks: list[int]) -> None:
        """Return chunks of the server's pool, in their session; from another thread.

        :raises TransferClosed, SharedRPCError, OSError: if the message was not sent.
        """

    def _after_fork(self) -> None:
        """Begin anew in a forked child: the session is the parent's.

        The copies of connections are closed here. Those that another thread was just making are closed by their modules.
        """
        self._values = weakref.WeakValueDictionary()
        self._watch = Subscriptions(weakly(self._news_source))
        self._leases = LeaseBook()
        self._suspensions = Suspensions(self._leases)

    @abstractmethod
    def _end_job(self) -> Job | None:
        """Return a job that ends the session and does not refer to the client; None if there is no session.

        Called in a finaliser: it may neither wait nor lock.
        """

    def __del__(self) -> None:
        """End the session of a client that was collected without being closed."""
        job = self._end_job()
        if job is None or sys.is_finalizing():
            return  # the kernel closes the connections when the process ends
        FINALIZER.submit(job)
        FINALIZER.submit(self._watch.close)

    @property
    def socket_path(self) -> str:
        """The path of the server's socket."""
        return self._address.path()

    @abstractmethod
    def _known(self) -> ClientSession | None:
        """Return the session, if there is one."""

    def _lend(self, step: Lend, session: ClientSession | None) -> Lease[Any]:
        """Return the handle of a value that came in a session, which is None once the client was closed."""
        if session is None:
            raise ConnectionClosed("this client was closed, which has ended the lease")
        handle = self._handle(step.message, step.value, session.server_id, session)
        self._leases.add(handle)
        if session.ended and handle.in_session(session) and handle._forgo():
            what = f"the lease on object {step.message.object_id}"
            raise ConnectionClosed(
                f"the session with the server at {self.socket_path} has ended, and {what} with it: call again"
            )
        return handle

    @abstractmethod
    def _exchange_apart(self, session: ClientSession, request: Request) -> Reply:
        """Send a request in a session, for the finaliser thread: wait for a second or so, and begin no operation.

        :raises TransferClosed, SharedRPCError: if there is no reply.
        """

    def _end_lease_soon(self, object_id: str, session: object) -> None:
        if isinstance(session, ClientSession):
            session.dropped.append(object_id)
            if len(session.dropped) == 1:  # no other attempt is queued
                self._release_dropped(session)

    def _release_dropped(self, session: ClientSession) -> None:
        """Return the leases of collected handles. If the server takes no request now, try again later."""
        if session is not self._known():
            return  # its leases have ended, or end without these handles
        request = Request(m.Release(session.dropped), "release", transfer=session.transfer)
        try:
            self._exchange_apart(session, request).frame.close()
            drive(lease_ended(self, session.dropped), functools.partial(self._perform_apart, session))
        except (TransferClosed, SharedRPCError, OSError):
            if not request.sent and session is self._known():
                again = weakly(self._release_dropped)
                FINALIZER.submit(functools.partial(again, session), after=_LATER)
                return
        session.dropped = []

    def _perform_apart(self, session: ClientSession, step: Step) -> Any:
        """Do what an operation asks for that ends no lease, in the finaliser thread."""
        match step:
            case Request():
                return self._exchange_apart(session, step)
            case Work():
                return step.function()
        return None

    def _sent(
        self, kind: type[m.Call], endpoint: str, args: Sequence[Any], kwargs: dict[str, Any], what: str, *, pooled: bool = False
    ) -> Operation[tuple[Reply, ClientTransfer | None]]:
        return send(self._known, kind, endpoint, args, kwargs, what, pooled=pooled)

    def _watch_in(self, server: ClientSession) -> Subscriptions:
        """Return the subscriptions, whose connection is in this session."""
        self._watched = server
        return self._watch

    def _news_source(self) -> ConnectionSource:
        """Open a connection for news, whose positions mean something to one server.

        :raises ConnectionClosed: if another server has the place of the watched one.
        """
        watched, timeout = self._watched, min(PROMPT, self._timeout or PROMPT)
        connection = Connection(self.socket_path).open(watched.token, timeout)
        if connection.welcome.server_id != watched.server_id:
            connection.close()
            raise ConnectionClosed(
                f"the server {watched.server_id} has ended, and {connection.welcome.server_id} has its place"
            )
        return ConnectionSource(connection)

    def _unwatch(self) -> None:
        self._watch.close()
