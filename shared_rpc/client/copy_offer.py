"""An offer to make copies for a server: objects of a GPU are evicted and restored by this process, where no worker can."""

from __future__ import annotations

import functools
import logging
import math
import os
import threading
import time
from types import TracebackType
from typing import TYPE_CHECKING

from shared_rpc.client.connection import PROMPT, Connection, Stranger
from shared_rpc.client.steps import Reply, Request, message_of
from shared_rpc.errors import (
    CapabilityError,
    ConnectError,
    ConnectionClosed,
    DeadlineExceeded,
    ProtocolError,
    ServerBusy,
    SharedRPCError,
)
from shared_rpc.forks import fork_safe_lock
from shared_rpc.memory.copies import Steps
from shared_rpc.memory.inventory import devices_of
from shared_rpc.memory.ordered_copies import answered, load_gpu_copies, ordered, refusal
from shared_rpc.protocol import messages as m
from shared_rpc.protocol import tiers as t
from shared_rpc.protocol import worker as w

if TYPE_CHECKING:
    from shared_rpc.memory.gpu_copies import GpuCopies

__all__ = ["CopyOffer"]

_log = logging.getLogger("shared_rpc")

#: Seconds for the server's answers about an order that goes on.
_PATIENCE = 60.0
#: Errors of a server that may be there later: OSErrors are those of a process that has too many files open.
_AWAY = (ConnectError, ConnectionClosed, DeadlineExceeded, ServerBusy, OSError)
#: Seconds between two attempts to reach the next server.
_RETRY = 1.0


class CopyOffer:
    """An offer of this process to make copies for a server: see :meth:`Client.offer_copies`.

    It begins at once, and ends with :meth:`close`, with a ``with`` or ``async with`` block, with its client's ``close()``, or
    with the process. Where the server ends, the offer waits for the next one at the same place.

    :param path: the server's socket.
    :raises CapabilityError: if this process sees no GPU, or the server takes no offer of it.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._devices = [device for device in devices_of("cuda") if device != "cpu"]
        if not self._devices:
            raise CapabilityError("this process sees no GPU to copy with: check CUDA_VISIBLE_DEVICES and the driver")
        self._lock = fork_safe_lock()
        self._closed = threading.Event()
        #: Whether an order is being carried out.
        self._busy = False
        #: Why the offer has ended, None where it was closed or goes on.
        self.error: Exception | None = None
        self._connection = self._offered()
        self._thread = threading.Thread(target=self._run, name="shared-rpc-copies", daemon=True)
        self._thread.start()

    @property
    def active(self) -> bool:
        """Whether the offer goes on, also while the server is away."""
        return self._thread.is_alive() and not self._closed.is_set()

    def close(self) -> None:
        """End the offer, after the order that is being carried out. Closing twice is harmless."""
        with self._lock:
            self._closed.set()
            if not self._busy:
                self._connection.hang_up()
        if self._thread is not threading.current_thread():
            self._thread.join()

    async def aclose(self) -> None:
        """Close as :meth:`close` does; the event loop goes on meanwhile."""
        import anyio.to_thread

        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(self.close)

    def __enter__(self) -> CopyOffer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()

    async def __aenter__(self) -> CopyOffer:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    def _offered(self) -> Connection:
        """Return a connection over which the offer was made, in a session of its own: the offer ends with it."""
        connection = Connection(self._path).open("", PROMPT)
        try:
            _ask(connection, t.OfferCopies(self._devices), "the offer to copy", seconds=PROMPT)
        except BaseException:
            connection.close()
            raise
        return connection

    def _run(self) -> None:
        connection: Connection | None = self._connection
        while connection is not None:
            try:
                self._serve(connection)
            except (SharedRPCError, OSError) as error:
                if not self._closed.is_set():
                    _log.warning("the server at %s orders no copies of pid %d: %s", self._path, os.getpid(), error)
            finally:
                connection.close()
            connection = self._again()

    def _again(self) -> Connection | None:
        """Make the offer to the next server; return None when it has ended."""
        while not self._closed.wait(_RETRY):
            try:
                connection = self._offered()
            except (SharedRPCError, OSError) as error:
                if isinstance(error, _AWAY) and not isinstance(error, Stranger):
                    continue
                self.error = error
                _log.error("the offer to copy for the server at %s has ended: %s", self._path, error)
                return None
            with self._lock:
                self._connection = connection
                if not self._closed.is_set():
                    _log.info("the server at %s has the offer to copy again", self._path)
                    return connection
            connection.close()
        return None

    def _serve(self, connection: Connection) -> None:
        """Carry out orders until the offer is closed, or the connection ends."""
        while True:
            reply = connection.exchange(Request(t.AwaitCopyOrder(), "the wait for an order"), math.inf)
            with self._lock:
                # An order that came too late is given back: the server asks another process when this one hangs up.
                self._busy = not self._closed.is_set()
            try:
                if self._busy:
                    self._carry_out(connection, reply)
            finally:
                reply.frame.close()
                with self._lock:
                    self._busy = False
            if self._closed.is_set():
                connection.say_goodbye()
                return

    def _carry_out(self, connection: Connection, reply: Reply) -> None:
        message = reply.message
        if not isinstance(message, w.CopySegments):
            raise ProtocolError(f"the server answered the wait for an order with {type(message).__name__}")
        done = 0

        def progressed(nbytes: int, total: int) -> None:
            nonlocal done
            done = nbytes

        def cancelled() -> bool:
            return not _ask(connection, w.CopyProgress(done), "the progress of copies").count

        orders = ordered(message, reply.frame.detach_fds())
        answer, new = answered(lambda: self._copies, orders, Steps(0, progressed, cancelled))
        try:
            if not connection.usable:
                raise ConnectionClosed("the progress of an order had no answer")
            try:
                _ask(connection, answer, "the answer to an order", tuple([segment.fileno() for segment in new]))
            except (ConnectionClosed, DeadlineExceeded):
                raise
            except (ProtocolError, OSError) as error:
                problem = CapabilityError(f"cannot send {len(new)} descriptors of copies: {error}")
                _ask(connection, refusal(problem), "the answer to an order")
        finally:
            for segment in new:
                segment.close()
            # Nothing stays mapped: this process is to cost nothing until the next order.
            self._copies.forget([info.id for info in (*message.sources, *message.wanted)])

    @functools.cached_property
    def _copies(self) -> GpuCopies:
        return load_gpu_copies()


def _ask(
    connection: Connection, message: m.Message, what: str, fds: tuple[int, ...] = (), seconds: float = _PATIENCE
) -> m.Count:
    return message_of(connection.exchange(Request(message, what, fds=fds), time.monotonic() + seconds), what, m.Count)
