"""The work around an endpoint: its arguments are loaded, and its result is published."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from shared_rpc.errors import SharedRPCError
from shared_rpc.execution.endpoints import Endpoint
from shared_rpc.execution.outcomes import AwaitingPool, Completed, Failure
from shared_rpc.execution.run import Run
from shared_rpc.execution.session_transfer import Transfers
from shared_rpc.execution.transfer import ServerTransfer
from shared_rpc.memory.devices import device_kind
from shared_rpc.memory.mapping import MAPPINGS
from shared_rpc.memory.pool import PoolFull
from shared_rpc.memory.records import Arguments, Record
from shared_rpc.memory.slabs import Slabs
from shared_rpc.protocol.records import EMPTY_TABLE

if TYPE_CHECKING:
    from shared_rpc.codec.results import Soon


#: Seconds of copying a result on the loop, above which a thread copies results.
_PATIENCE = 100e-6
#: Bytes of a table of so few tensors that they are rebuilt on the loop.
_FEW = 1024


class Publisher:
    """The maker of records of endpoints' results.

    :param device: the id of the device results must be on.
    :param shares: whether results are moved into shared memory.
    """

    def __init__(self, device: str, transfers: Transfers[ServerTransfer], *, shares: bool) -> None:
        self._device = device
        self._kind = device_kind(device)
        self._transfers = transfers
        self._shares = shares
        #: Small results of all sessions lie in these.
        self.slabs = Slabs()

    def publish(self, endpoint: Endpoint, run: Run[Any], only: list[Any]) -> Completed:
        """Return the outcome of a run, in one of its threads.

        :param only: the value, to which nothing else in the library refers.
        """
        from shared_rpc.codec.payload import check_result
        from shared_rpc.codec.results import publish

        transfer = self._transfers.find(run.session) if run.pooled else None
        # The value stays in its list, which is emptied: code of the value that runs below may keep this frame.
        spec = endpoint.spec
        try:
            if not run.publish or not self._shares:
                nbytes = check_result(only[0], spec.name, self._kind, spec.tensors)
                return Completed(Record(b"", EMPTY_TABLE, (), nbytes, self._device) if run.publish else None, only[0])
            if transfer is None:
                slabs = self.slabs if run.shares_slab else None
                record = publish(only[0], self._device, spec.access, spec.name, tensors=spec.tensors, slabs=slabs)
                return Completed(record, only[0])
            for again in (True, False):
                try:
                    record = publish(only[0], self._device, spec.access, spec.name, transfer.results, spec.tensors)
                    return Completed(record, None)
                except PoolFull as full:
                    if not (again and transfer.reclaim()):
                        return AwaitingPool(None, only[0], str(full), full.frees)
            raise AssertionError("the second attempt returns")
        finally:
            only.clear()

    def elsewhere(self, work: Callable[[], Completed]) -> Callable[[], Completed]:
        """Return ``work`` for another thread, with this one's current stream: the endpoint's queued work is on it."""
        if self._kind == "cpu":
            return work
        import torch

        stream = torch.cuda.current_stream()

        def on_stream() -> Completed:
            with torch.cuda.stream(stream):
                return work()

        return on_stream

    def publish_soon(self, endpoint: Endpoint, run: Run[Any], value: list[Any]) -> Completed | Failure | Soon | None:
        """Return the outcome of a run whose result needs no thread; what a thread is to wait for; or None, to begin in one."""
        transfer = self._transfers.find(run.session) if run.pooled and self._shares else None
        if transfer is None or endpoint.spec.access != "read_write" or "shared_rpc.codec.results" not in sys.modules:
            return None
        from shared_rpc.codec.results import Soon, publish_soon

        try:
            soon = publish_soon(value[0], self._device, endpoint.spec.name, transfer.results, _PATIENCE)
            record = soon.poll(_PATIENCE) if isinstance(soon, Soon) else soon
            if record is None:
                return soon if isinstance(soon, Soon) else None
            return Completed(record, None)
        except PoolFull:
            return None
        except Exception as error:
            return failure(error)


def let_go(run: Run[Any], outcome: Completed | Failure) -> None:
    """Let go of a failed run's arguments: a caller in another process gets a traceback as text, and its memory back at once."""
    if isinstance(outcome, Failure) and isinstance(run.arguments, Arguments):
        outcome.clear_frames()


def loads_soon(run: Run[Any]) -> bool:
    """Return whether loading the arguments takes microseconds: there is nothing to map or to unpickle."""
    arguments = run.arguments
    return isinstance(arguments, tuple) or (
        "shared_rpc.codec.arguments" in sys.modules  # torch is loaded with it
        and not arguments.skeletons
        and len(arguments.table) < _FEW
        and all(MAPPINGS.knows(segment.info) for segment in arguments.segments)
    )


def load(run: Run[Any]) -> tuple[Any, Any]:
    """Return the arguments of a run, for its function."""
    if isinstance(run.arguments, tuple):
        return run.arguments
    from shared_rpc.codec.arguments import decode_arguments

    try:
        return decode_arguments(run.arguments)
    finally:
        run.arguments.close()


def guarded(work: Callable[[], Completed]) -> Completed | Failure:
    """Return whatever ``work`` raises, SystemExit included: nothing may get past the waiters."""
    try:
        return work()
    except BaseException as error:
        return failure(error)


def failure(error: BaseException) -> Failure:
    """Return the failure of an error of the library's own, or of an endpoint's."""
    return Failure.of(error) if isinstance(error, SharedRPCError) else Failure.raised(error)
