"""The blocking client, and what all blocking classes have."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TypeVar

from shared_rpc.client.blocking import BlockingDriver
from shared_rpc.client.steps import BlockingMethods
from shared_rpc.handle import Handle, updating
from shared_rpc.operations import Operations
from shared_rpc.operations.binding import Context, bound
from shared_rpc.operations.generations import RefreshIterator

__all__ = ["BlockingOperations", "Client"]

T = TypeVar("T")


class BlockingOperations(Operations, BlockingMethods):
    """All operations, and what is iterated over or entered, as blocking classes have it."""

    def refreshes(self) -> RefreshIterator:
        """Iterate over what :meth:`on_refresh` tells, in this thread; it waits, and ends with :class:`ConnectionClosed`.

        It begins with the first step, or with entering it: ``with client.refreshes() as news:`` misses nothing from there on.
        """
        return RefreshIterator(self._run)

    def update(self, handle: Handle[T], timeout: float | None = None) -> AbstractContextManager[T]:
        """Around what writes to a handle's memory in place: ``with client.update(handle) as value:``.

        :attr:`Handle.revision` is odd during the block, and the next even number after it. Whoever has read that number sees
        all that was written in the block: at its end this process's work on the GPU is waited for, on all streams. There is
        one writer at a time, in whichever process; another one is waited for. If the block raises, or the process is killed in
        it, the revision stays odd, and who waits gets :class:`UpdateInterrupted`, until another update ends.

        Nothing keeps readers from reading meanwhile: see :meth:`Handle.read_consistent`.

        :param timeout: seconds to wait for another writer; None for no limit.
        :raises DeadlineExceeded: then.
        :raises CapabilityError: if the object is shared with ``access="read"``; at the end, if the GPU cannot be waited for,
            because a CUDA graph is being captured.
        :raises StaleHandleError: if the handle was released.
        """
        return updating(handle, timeout)


@bound
class Client(BlockingDriver, BlockingOperations, Context):
    """Calls the endpoints of a server on this host.

    Every thread that waits has a connection of its own, so one call does not hold up another. All connections share
    one session, which ends with :meth:`close`, with the last reference to the client and to its handles, or with the process;
    its leases go back then. After a fork the child
    starts a session of its own. The client connects with its first operation.

    :param base_path: where the sockets are, see :func:`shared_rpc.settings.resolve_base_path`.
    :param device: which server's: ``"auto"``, ``"cpu"``, ``"cuda"``, ``"cuda:<index>"`` or ``"GPU-<uuid>"``.
    :param socket_path: the server's socket itself; base path and device are not looked at then.
    :param timeout: seconds an operation may take; None for no limit.
    :param connect_timeout: seconds to wait for a server that is not there yet.
    :param pool: how much memory arguments may take until the server has done with them.
    """
