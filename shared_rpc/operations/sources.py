"""The source of records: a session that answers the misses of its server."""

from __future__ import annotations

from collections import deque
from typing import Any, cast

from shared_rpc.client.exported import ExportedRecord
from shared_rpc.client.steps import Lend, Operation, Request, Tell, Within, query
from shared_rpc.errors import ClusterError, ConnectError, ConnectionClosed, ProtocolError, SharedRPCError, to_wire
from shared_rpc.operations.binding import BlockingIterator, CoroutineIterator, Leased, Part, Steps, bound, operation
from shared_rpc.operations.handles import lending
from shared_rpc.operations.records import send_record
from shared_rpc.protocol import exported as x
from shared_rpc.protocol import messages as m
from shared_rpc.protocol import sources as s
from shared_rpc.protocol.infos import ClusterStatus
from shared_rpc.protocol.sources import Miss
from shared_rpc.settings import source_token


class _SourceMethods(Part):
    """The methods and state of a source: its number, and the misses not yet returned."""

    def __init__(self, driver: Any) -> None:
        super().__init__(driver)
        #: 0 before it was attached.
        self._number = 0
        self._closed = False
        self._server_id = ""
        self._after = 0
        self._misses: deque[Miss] = deque()

    @property
    def server_id(self) -> str:
        """The id of the server, ``""`` before the source was attached."""
        return self._server_id

    def _enter(self) -> Operation[None]:
        self._closed = False
        yield from self._attach()

    def _attach(self) -> Operation[None]:
        self._number, self._server_id = yield from query(s.AttachSource(source_token()), "the attachment of a source")
        self._after = 0
        self._misses.clear()

    def _leave(self) -> Operation[None]:
        self._closed = True
        number, self._number = self._number, 0
        if number:
            yield Tell(s.DetachSource(number))

    def _next(self) -> Operation[Miss | None]:
        """Return the next miss, None when the source was closed."""
        if self._closed:
            return None
        yield Within(None)
        if not self._number:
            yield from self._attach()
            if self._closed:  # by a thread that did not know the number
                yield from self._leave()
                return None
        while not self._misses:
            number = self._number
            try:
                misses = yield from query(s.AwaitMisses(number, self._after), "the wait for misses")
            except ConnectError as error:
                raise ConnectionClosed(f"no further misses come: {error}") from error
            except ClusterError:
                if self._closed or self._number != number:
                    return None
                raise
            self._after = misses[-1].id
            self._misses.extend(misses)
        return self._misses.popleft()

    @lending
    def build(self, miss: Miss) -> Steps[Leased[None]]:
        """Build the object of a miss in this server, as without a source; return a handle when the cache lists it.

        The handle holds the object, and has no value: nothing is rebuilt, and no code of the endpoint runs in this process.

        :raises RemoteError: for any exception of the endpoint; :meth:`fail` takes the error for other servers' misses, whose
            callers get the endpoint's own exception.
        :raises SharedRPCError: the callers' other errors: a crash of the worker, or a result that cannot be shared.
        :raises ClusterError: if the miss was answered, or this is no longer the source; see its ``reason``.
        """
        message = s.BuildMiss(self._number, miss.id)
        return cast("Leased[None]", (yield from _leased(message, f"the build of {miss.cache_key}")))

    @lending
    def adopt(self, miss: Miss, record: ExportedRecord) -> Steps[Leased[None]]:
        """Answer a miss with a record, as if the server had built it; return a handle like :meth:`build`.

        :param record: one that this client has allocated, which is taken over without a copy and closed, or an exported one,
            which is copied first and stays open; see :meth:`Client.adopt`.
        :raises RecordError: if it cannot be adopted here; ``reason`` says why. The miss is still open then.
        :raises BufferNotFound, ServerBusy: like :meth:`Client.adopt`.
        :raises ClusterError: like :meth:`build`.
        """

        def send(buffers: list[str]) -> Operation[Any]:
            message = s.AdoptMiss(self._number, miss.id, buffers)
            return (yield from _leased(message, f"the adoption of {miss.cache_key}", record.header.to_bytes()))

        return cast("Leased[None]", (yield from send_record(self._driver, record, x.CheckRecord(), send)))

    @operation
    def fail(self, miss: Miss, error: SharedRPCError | str) -> Steps[None]:
        """Answer a miss with an error, for all its callers. The next identical call is a miss again.

        :param error: an error of this library; a text becomes a :class:`ClusterError`.
        :raises ClusterError: like :meth:`build`.
        """
        problem = ClusterError(error) if isinstance(error, str) else error
        message = s.FailMiss(self._number, miss.id, *to_wire(problem), getattr(problem, "pickled", b""))
        yield from query(message, f"the failure of {miss.cache_key}")

    @operation
    def report(self, status: ClusterStatus) -> Steps[None]:
        """Publish the source's status, replacing an earlier one; see :class:`ClusterStatus`.

        :raises ClusterError: if this is no longer the source.
        """
        yield from query(s.ReportStatus(self._number, status), "the report of a source")

    @operation
    def close(self) -> Steps[None]:
        """Detach the source. An iteration, even in another thread, ends; another ``with`` block attaches the source again.

        Open misses wait for the next source.
        """
        yield from self._leave()


def _leased(message: m.Message, what: str, payload: bytes = b"") -> Operation[Any]:
    """Send an answer to a miss, and return the handle of its object, which has no value."""
    yield Within(None)
    reply = yield Request(message, what, payload)
    reply.frame.close()
    result = reply.message
    if not isinstance(result, m.Result) or not result.managed:
        raise ProtocolError(f"the server answered {what} with {type(result).__name__}, not with a lease")
    return (yield Lend(result, None))


@bound
class Source(_SourceMethods, BlockingIterator[Miss]):
    """The source of records that :meth:`Client.source` returns: an iterator of misses, and a context manager.

    It is attached at the beginning of the ``with`` block, or with the first step of the iteration. One thread iterates; the
    answers may be given from any thread, each of which waits for its own.
    """


@bound
class AsyncSource(_SourceMethods, CoroutineIterator[Miss]):
    """The source of records that :meth:`AsyncClient.source` returns: :class:`Source` for coroutines."""
