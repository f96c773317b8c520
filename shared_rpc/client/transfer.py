"""The short-lived memory of a client's calls, in one session."""

from __future__ import annotations

import time
from collections.abc import Callable

from shared_rpc.errors import SharedRPCError
from shared_rpc.lifecycle.finalizer import FINALIZER, weakly
from shared_rpc.memory.chunk_references import ChunkReferences
from shared_rpc.memory.mapping import MAPPINGS
from shared_rpc.memory.pool import Pool, PoolOptions
from shared_rpc.protocol import messages as m

#: Seconds without a request after which a separate message returns chunks, and between two polls of a GPU that uses some.
_IDLE = 0.05


class TransferClosed(Exception):
    """The error for a request of a session that has ended, to be repeated in the next one."""


class ClientTransfer:
    """The pool for arguments, and the used chunks of the server's pool of results.

    :param flush: returns chunks to the server, in this object's session; from another thread. An error means that the
        server does not have them.
    """

    def __init__(self, options: PoolOptions, flush: Callable[[ClientTransfer, list[int]], object]) -> None:
        self.arguments = Pool(options)
        self.references = ChunkReferences(weakly(self._chunk_dropped))
        self._flush = flush
        #: True if another thread will return chunks soon.
        self._scheduled = False
        #: The time at which a request last returned chunks (time.monotonic()).
        self._last_return = 0.0
        self.closed = False

    def returned(self) -> list[int]:
        """Return the chunks known to be unused by this process, for a request that returns them."""
        self._last_return = time.monotonic()
        self.poll(check_only=True)
        return self.references.pop_returned() if self.references.free else []

    def poll(self, *, check_only: bool = False) -> None:
        """Find the chunks that this process no longer uses: a safe point, best called when there is nothing to do but wait.

        :param check_only: see :meth:`ChunkReferences.poll`.
        """
        references = self.references
        if references.dropped or references.fenced:
            references.poll(check_only=check_only)
            if references.fenced and not self._scheduled:
                FINALIZER.start()
                self._schedule()

    def release(self, result: m.Result) -> None:
        """Release the memory of a result that is not taken, and take back the chunks that it returns."""
        self.arguments.release(result.freed)
        self.references.release(result.chunks)

    def _chunk_dropped(self) -> None:
        # Runs in a finaliser.
        if not self._scheduled and not self.closed:
            self._schedule()

    def _schedule(self) -> None:
        self._scheduled = True
        FINALIZER.submit(self._return_chunks, after=_IDLE)

    def _return_chunks(self) -> None:
        """Return unused chunks, unless the next request is likely to follow at once and to carry them."""
        self._scheduled = False
        if self.closed:
            return
        if time.monotonic() - self._last_return >= _IDLE:
            self.references.poll(background=True)
            numbers = self.references.pop_returned()
            if numbers:
                try:
                    self._flush(self, numbers)
                except (TransferClosed, SharedRPCError, OSError):
                    self.references.requeue(numbers)  # for the next request
            if not self.references.fenced:
                return
        self._schedule()

    def close(self) -> None:
        """End with the session. Memory is freed when neither side has a tensor over it."""
        self.closed = True
        self.references.close()
        self.arguments.close()
        MAPPINGS.release_slabs()
