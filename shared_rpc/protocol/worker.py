"""Messages between a broker and its workers, over a socket pair of their own.

The request id of a frame is the number of a run, 0 where it is about none.
"""

from __future__ import annotations

import msgspec

from shared_rpc.protocol.infos import MechanismInfo
from shared_rpc.protocol.messages import Call, Message, RecordBody
from shared_rpc.protocol.records import SegmentInfo
from shared_rpc.protocol.specs import DeviceSpec, EndpointSpec
from shared_rpc.protocol.tasks import Progress

# Messages of workers.


class Serve(Message):
    """A provider of the app to be served. ``key`` identifies it in the app, and is the same in every worker.

    ``cluster`` is the one that its server joins, ``""`` for none.
    """

    key: str
    socket_path: str
    device: str
    endpoints: list[EndpointSpec]
    mechanism: MechanismInfo
    devices: list[DeviceSpec]
    quotas: dict[str, int]
    cluster: str = ""


class Shared(Message):
    """An endpoint that was shared since."""

    key: str
    endpoint: EndpointSpec


class Imports(msgspec.Struct, frozen=True):
    """Modules that a worker imported with the app, so that the next one can begin with them.

    :param steps: names of modules that lie in the interpreter's directories for packages, and of this library's, in the order
        in which their imports began; between them the variables of the environment that the app set, None where it removed one.
    :param own: names of the modules that are the person's own.
    :param folders: directories of the person's in which Python looks for modules.
    :param first: those that it searches before its own.
    """

    steps: list[str | dict[str, str | None]]
    own: list[str]
    folders: list[str]
    first: list[str]


class Loaded(Message):
    """The app's module has been imported."""

    imports: Imports | None = None


class Refused(Message):
    """The app cannot be served; the worker ends."""

    code: str
    text: str
    detail: dict[str, str]


class RunStarted(Message):
    """A run has a thread."""


class RunProgress(Message):
    """Progress of the endpoint."""

    progress: Progress


class AwaitingMemory(Message):
    """The endpoint has ended, and its result waits for room in the session's pool."""

    why: str


class RunFinished(RecordBody):
    """A run that went well, with its record."""

    nbytes: int = 0
    device: str = ""
    private_nbytes: int = -1


class RunFailed(Message):
    """A run that did not. The payload is the endpoint's own exception, pickled, where it has one."""

    code: str
    text: str
    detail: dict[str, str]
    freed: list[int]


class RunWithdrawn(Message):
    """A run that was withdrawn, or its result dropped, is done with."""

    returned: list[int]


class ChunksReturned(Message):
    """Chunks of a client's pool that the worker has done with."""

    key: str
    session: str
    chunks: list[int]


class Allocated(Message):
    """The requested memory: its descriptor comes with the frame, or ``error`` is the reason."""

    segment: SegmentInfo | None = None
    free: int | None = None
    error: str = ""


class CopyProgress(Message):
    """Bytes of a :class:`CopySegments` that are copied."""

    done: int


class SegmentsCopied(Message):
    """The segments of a :class:`CopySegments`, in their order, and the digests of the parts of those that are files.

    The descriptors of the others come with the frame. If nothing was made, ``error`` is the code of an error, with ``text`` and
    ``detail``, or ``stopped`` is true, because that was asked for.
    """

    segments: list[SegmentInfo]
    digests: list[bytes]
    error: str = ""
    text: str = ""
    detail: dict[str, str] = msgspec.field(default_factory=dict)
    stopped: bool = False


# Messages of the broker.


class StartRun(Call):
    """Run an endpoint. What is of the client's or of the results' pool is told as in a call; the memory of objects comes as
    descriptors. ``request_id`` and ``cached`` are for logs and hooks, see :class:`shared_rpc.execution.run.Run`.
    """

    key: str = ""
    session: str = ""
    background: bool = False
    request_id: str = ""
    cached: bool = False


class Withdraw(Message):
    """Nobody waits for a run: drop it if it has not begun."""


class Stop(Message):
    """Request to stop a run that has begun."""


class Drop(Message):
    """Drop a result that waits for memory."""


class ReleaseChunks(Message):
    """A client has done with chunks of its pool of results."""

    key: str
    session: str
    chunks: list[int]


class AwaitChunks(Message):
    """Request for :class:`ChunksReturned` when there are chunks of the session's to return, waiting for the GPU if need be."""

    key: str
    session: str


class SessionEnded(Message):
    """A session ended: all that it had in the worker goes."""

    key: str
    session: str


class Reclaim(Message):
    """An object was dropped: a safe point to let go of its memory."""


class Allocate(Message):
    """Request for memory; the answer is :class:`Allocated`."""

    device: str
    nbytes: int


class FreeBytes(Message):
    """Request for :class:`Allocated` with ``free``: free bytes of a device."""

    device: str


class CopySegments(Message):
    """Request for :class:`SegmentsCopied`: segments with the bytes of others; a :class:`CopyProgress` may come before.

    Descriptors come with the frame: those of ``sources``, and then of the ``wanted`` that are there already, whose numbers
    ``targets`` has, as files and the host memory of an earlier copy are. ``digests`` are of the parts of sources that are
    files. Host memory stays mapped until :class:`ForgetCopies`.
    """

    sources: list[SegmentInfo]
    digests: list[bytes]
    wanted: list[SegmentInfo]
    targets: list[int]


class StopCopy(Message):
    """A :class:`CopySegments` is not wanted any more; it is answered all the same."""


class ForgetCopies(Message):
    """Host memory with these ids is no copy any more: unmap it."""

    copies: list[str]
