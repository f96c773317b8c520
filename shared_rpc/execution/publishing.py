"""Loading of an endpoint's arguments, and publication of its result."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from shared_rpc.errors import SharedRPCError
from shared_rpc.execution.endpoints import Endpoint
from shared_rpc.execution.outcomes import Completed, Failure
from shared_rpc.execution.run import Run
from shared_rpc.execution.transfer import ServerTransfer, Transfers
from shared_rpc.memory.devices import device_kind
from shared_rpc.memory.mapping import MAPPINGS
from shared_rpc.memory.records import Arguments, Record
from shared_rpc.memory.slabs import Slabs
from shared_rpc.protocol.records import EMPTY_TABLE

if TYPE_CHECKING:
    from shared_rpc.codec.single import Copied


#: Results that take longer than this to copy, in seconds, are copied in a thread instead of on the loop.
_PATIENCE = 100e-6
#: Maximum bytes of a table whose tensors are few enough to be rebuilt on the loop.
_FEW = 1024


class Publisher:
    """Makes the records of endpoints' results.

    :param device: the id of the device of results.
    :param shares: True to move results into shared memory.
    """

    def __init__(self, device: str, transfers: Transfers[ServerTransfer], *, shares: bool) -> None:
        self._device = device
        self._kind = device_kind(device)
        self._transfers = transfers
        self._shares = shares
        #: Hold the small results of all sessions.
        self.slabs = Slabs()

    def publish(self, endpoint: Endpoint, run: Run[Any], only: list[Any]) -> Completed:
        """Return the outcome of a run. Called in a thread of the run.

        :param only: the value, in a list that holds the library's only reference to it.
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
            return Completed(publish(only[0], self._device, spec.access, spec.name, transfer.results, spec.tensors), None)
        finally:
            only.clear()

    def elsewhere(self, work: Callable[[], Completed]) -> Callable[[], Completed]:
        """Wrap ``work`` for another thread so that it uses this one's current stream, which has the endpoint's queued work."""
        if self._kind == "cpu":
            return work
        import torch

        stream = torch.cuda.current_stream()

        def on_stream() -> Completed:
            with torch.cuda.stream(stream):
                return work()

        return on_stream

    def publish_soon(self, endpoint: Endpoint, run: Run[Any], value: list[Any]) -> Completed | Failure | Copied | None:
        """Return the outcome if it needs no thread, the work that a thread must wait for, or None to publish in a thread."""
        transfer = self._transfers.find(run.session) if run.pooled and self._shares else None
        if transfer is None or endpoint.spec.access != "read_write" or "shared_rpc.codec.results" not in sys.modules:
            return None
        from shared_rpc.codec.results import publish_soon
        from shared_rpc.codec.single import Copied

        try:
            soon = publish_soon(value[0], self._device, transfer.results, _PATIENCE)
            if isinstance(soon, Copied) and soon.wait(_PATIENCE):
                soon = soon.record()
            return Completed(soon, None) if isinstance(soon, Record) else soon
        except Exception as error:
            return failure(error)


def release_arguments(run: Run[Any], outcome: Completed | Failure) -> None:
    """Release a failed run's arguments: a caller in another process gets a traceback as text, and its memory back at once."""
    if isinstance(outcome, Failure) and isinstance(run.arguments, Arguments):
        outcome.clear_frames()


def loads_soon(run: Run[Any]) -> bool:
    """Return True if loading the arguments takes microseconds: nothing to map or to unpickle."""
    arguments = run.arguments
    return isinstance(arguments, tuple) or (
        "shared_rpc.codec.arguments" in sys.modules  # torch is loaded with it
        and not arguments.skeletons
        and len(arguments.table) < _FEW
        and all(MAPPINGS.knows(segment.info) for segment in arguments.segments)
    )


def load(run: Run[Any]) -> tuple[Any, Any]:
    """Load the arguments of a run and return them as ``(args, kwargs)``."""
    if isinstance(run.arguments, tuple):
        return run.arguments
    from shared_rpc.codec.arguments import decode_arguments

    try:
        return decode_arguments(run.arguments)
    finally:
        run.arguments.close()


def guarded(work: Callable[[], Completed]) -> Completed | Failure:
    """Return any exception of ``work``, including SystemExit, as a failure, so that waiters always get an outcome."""
    try:
        return work()
    except BaseException as error:
        return failure(error)


def failure(error: BaseException) -> Failure:
    """Return the failure for an error of the library or of an endpoint."""
    return Failure.of(error) if isinstance(error, SharedRPCError) else Failure.raised(error)
