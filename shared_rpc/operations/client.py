"""The blocking client, and the operations of all blocking classes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from shared_rpc.client.blocking import BlockingDriver
from shared_rpc.client.steps import BlockingMethods
from shared_rpc.operations import Operations
from shared_rpc.operations.binding import bound
from shared_rpc.operations.generations import RefreshIterator
from shared_rpc.operations.handles import Handle, until_of
from shared_rpc.operations.sources import Source

T = TypeVar("T")


class BlockingOperations(Operations, BlockingMethods):
    """All operations, with blocking iterators and context managers."""

    def _operating(self) -> Any:
        """Return the driver of this object's operations."""
        return self

    def refreshes(self) -> RefreshIterator:
        """Iterate over the generations of cached calls that become current on the server.

        These are the generations built by a refresh, or again after an invalidation or an eviction, but not the first one of a
        call. Of several simultaneous ones of a call, only the latest is reported.

        Each step waits for the next one. The iterator begins with its first step, or as a context manager: ``with
        client.refreshes() as news:`` misses nothing from there on. Closing the client, from any thread, ends it.

        :raises ConnectError: at its beginning, if no server listens within the client's ``connect_timeout``.
        :raises DeadlineExceeded: at its beginning, if the server does not answer within the client's timeout.
        :raises ConnectionClosed: at the end of the server, and of the client.
        """
        return RefreshIterator(self._operating())

    def source(self) -> Source:
        """Return a source of records, which answers the misses of the server: ``with client.source() as source:``.

        A miss is a call of a managed and cached endpoint that finds nothing in the cache. From the beginning of the block on,
        such a call waits until the source answers it, as do later identical calls::

            with client.source() as source:
                for miss in source:
                    source.build(miss)      # or source.adopt(miss, record), or source.fail(miss, "why")

        The server must have started this process, by ``--cluster`` or ``Provider(cluster=…)``: callers unpickle the
        answers of a source.

        A server has one source: a new one replaces it. Misses that a source leaves open wait for the next one during the
        server's ``source_grace``, and are then built by the server. Refreshes are not offered to it.
        """
        return Source(self._operating())

    @contextmanager
    def update(self, handle: Handle[T], timeout: float | None = None) -> Iterator[T]:
        """Write to a handle's memory in place: ``with client.update(handle) as value:``.

        :attr:`Handle.revision` is odd during the block, and the next even number after it. A reader of that number sees all
        writes of the block: at its end this process waits for its work on the GPU, on all streams. One process writes at a
        time, and others wait for it. If the block raises, or the process is killed in it, the revision stays odd, and waiters
        get :class:`UpdateInterrupted`, until another update ends.

        Readers can read during the update: see :meth:`Handle.read_consistent`.

        :param timeout: seconds to wait for another writer; None for no limit.
        :raises DeadlineExceeded: if another writer has not ended after ``timeout`` seconds.
        :raises CapabilityError: if the object is shared with ``access="read"``; at the end, if the GPU cannot be waited for,
            because a CUDA graph is being captured.
        :raises StaleHandleError: if the handle was released.
        """
        value = handle.value
        with handle._need_page().update(until_of(timeout)):
            yield value


@bound
class Client(BlockingDriver, BlockingOperations):
    """Calls the endpoints of a server on this host.

    All threads share one connection, and no call blocks another; only a reply of tens of megabytes may delay those to other
    threads. The connection is a session, which ends, and its leases with it, by :meth:`close`, with the last reference to the
    client and its handles, or with the process. A forked child begins a new session. The client connects with its first
    operation.

    :param base_path: the prefix of the socket's path, see :func:`shared_rpc.settings.resolve_base_path`.
    :param device: the server's device: ``"auto"``, ``"cpu"``, ``"cuda"``, ``"cuda:<index>"`` or ``"GPU-<uuid>"``.
    :param socket_path: the server's socket itself, instead of base path and device.
    :param timeout: maximum seconds of an operation, and one more if the server is stuck; None for no limit.
    :param connect_timeout: seconds to wait until a server listens.
    :param pool: options of the memory for arguments that are still in use by the server.
    """
