"""Messages between a broker and its workers, over their own socket pair.

The request id of a frame is the number of a run or of a request for memory, or 0.
"""

from __future__ import annotations

from shared_rpc.protocol.infos import MechanismInfo
from shared_rpc.protocol.messages import Call, Message, RecordBody
from shared_rpc.protocol.records import SegmentInfo
from shared_rpc.protocol.specs import DeviceSpec, EndpointSpec
from shared_rpc.protocol.tasks import Progress

# Messages of workers.


class Serve(Message):
    """A provider of the app to serve. ``key`` identifies it in the app, and is the same in every worker. It is sent again with
    all ``endpoints`` when one is added.

    ``cluster`` is the cluster that its server joins, ``""`` for none.
    """

    key: str
    socket_path: str
    device: str
    endpoints: list[EndpointSpec]
    mechanism: MechanismInfo
    devices: list[DeviceSpec]
    quotas: dict[str, int]
    cluster: str = ""


class Loaded(Message):
    """The app's module has been imported. :class:`~shared_rpc.protocol.messages.Error` with the number 0 instead: the app
    cannot be served, and the worker exits.

    The next worker can start with its imports: ``installed`` are the names of modules in the interpreter's directories for
    packages, and of this library's, in the order in which their imports began; ``own`` are the user's. ``variables`` of the
    environment were set while the app was loaded, None for removed ones.
    """

    installed: list[str]
    own: list[str]
    variables: dict[str, str | None]


class RunStarted(Message):
    """Notice that a thread executes the run."""


class RunProgress(Message):
    """Progress of the endpoint."""

    progress: Progress


class RunFinished(RecordBody):
    """Successful end of a run, with its record."""

    nbytes: int = 0
    device: str = ""
    private_nbytes: int = -1


class RunFailed(Message):
    """Failure of a run. The payload is the endpoint's own exception, pickled, if it raised one."""

    code: str
    text: str
    detail: dict[str, str]
    freed: list[int]


class RunWithdrawn(Message):
    """Notice that the worker has finished with a withdrawn run."""

    freed: list[int]


class Allocated(Message):
    """The requested memory, with its descriptor in the frame; or the free bytes. The answer may be an error instead."""

    segment: SegmentInfo | None = None
    free: int | None = None


class CopyProgress(Message):
    """Bytes of a :class:`CopySegments` copied so far."""

    done: int


class SegmentsCopied(Message):
    """The segments of a :class:`CopySegments`, in order, and the digests of the parts of those that are files.

    The descriptors of the others are in the frame. The answer is an error instead if nothing was copied.
    """

    segments: list[SegmentInfo]
    digests: list[bytes]


# Messages of the broker.


class StartRun(Call):
    """Run of an endpoint. Chunks of pools are given as in a call, memory of objects as descriptors.

    ``shares_slab``, and for logs and hooks ``request_id`` and ``cached``, are as in :class:`shared_rpc.execution.run.Run`.
    """

    key: str = ""
    session: str = ""
    background: bool = False
    shares_slab: bool = False
    request_id: str = ""
    cached: bool = False


class Withdraw(Message):
    """Notice that no caller waits for a run: drop it if it has not begun."""


class Stop(Message):
    """Request to stop a run that has begun, or the work for a request for memory. It is answered nevertheless."""


class ReleaseChunks(Message):
    """Chunks of its pool of results that a client has released."""

    key: str
    session: str
    chunks: list[int]


class SessionEnded(Message):
    """Notice that a session ended: the worker frees everything of it."""

    key: str
    session: str


class Reclaim(Message):
    """Notice that an object was dropped: this is a safe point to unmap its memory."""


class Allocate(Message):
    """Request for memory; the answer is :class:`Allocated`."""

    device: str
    nbytes: int


class FreeBytes(Message):
    """Request for :class:`Allocated` with ``free``: free bytes of a device."""

    device: str


class CopySegments(Message):
    """Request for :class:`SegmentsCopied`: new segments with the bytes of others. :class:`CopyProgress` may precede the
    answer.

    The frame has the descriptors of ``sources``, then those of the ``wanted`` segments that exist, such as files and the host
    memory of an earlier copy; ``targets`` has their numbers. ``digests`` are of the parts of sources that are files. Host
    memory stays mapped until :class:`ForgetCopies`.
    """

    sources: list[SegmentInfo]
    digests: list[bytes]
    wanted: list[SegmentInfo]
    targets: list[int]


class ForgetCopies(Message):
    """Request to unmap the host memory with these ids, which is no longer used by a copy."""

    copies: list[str]
