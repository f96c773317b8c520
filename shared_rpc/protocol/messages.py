"""Messages: typed bodies of frames. Adding one means a struct here, a number in the catalogue, and a handler in the server."""

from __future__ import annotations

from typing import Annotated

import msgspec

from shared_rpc.protocol.infos import DeviceInfo, HolderInfo, ListedObjectInfo, ObjectInfo, ReloadInfo, ServerInfo, StopInfo
from shared_rpc.protocol.records import EMPTY_TABLE, NO_ARGS, NO_KWARGS, SegmentInfo
from shared_rpc.protocol.specs import EndpointSpec
from shared_rpc.protocol.tasks import TaskInfo, TaskStatus

__all__ = ["Message"]


#: Lists in requests. Their lengths are checked before anything is built: a frame has room for millions of elements.
Ids = Annotated[list[str], msgspec.Meta(max_length=100_000)]
Chunks = Annotated[list[int], msgspec.Meta(max_length=100_000)]
Segments = Annotated[list[SegmentInfo], msgspec.Meta(max_length=10_000)]
Numbers = Annotated[list[int], msgspec.Meta(max_length=10_000)]


class Message(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """The base of all messages."""


class Hello(Message):
    """The first frame of a connection. ``token`` joins the session of an earlier connection of the same process."""

    token: str = ""


class Welcome(Message):
    """The server takes the connection."""

    server_id: str
    token: str
    pid: int
    device: str


class Ping(Message):
    """Question whether the server is there."""


class Pong(Message):
    """Answer to :class:`Ping`."""


class GetServerInfo(Message):
    """Request for :class:`ServerReply`."""


class ServerReply(Message):
    """The server now."""

    info: ServerInfo


class ListEndpoints(Message):
    """Request for :class:`Endpoints`."""


class Endpoints(Message):
    """All endpoints, in the order they were shared."""

    endpoints: list[EndpointSpec]


class Call(Message):
    """Run an endpoint, or join its run, or take its cached result.

    ``args`` and ``kwargs`` are a list and a dict in the terms of :mod:`shared_rpc.protocol.values`; ``table`` is a tensor table
    over ``segments``, whose descriptors come with the frame, but for those with the numbers ``kept``: the server knows these by
    id. The payload holds skeletons of ``skeletons`` bytes each.

    Segments with the numbers ``arenas`` are of the caller's pool, which the server keeps mapped for the session; the call
    takes its chunks ``chunks``. ``held`` are chunks of the server's pool that the caller has as results, and names here.
    ``freed`` are chunks that it returns. ``pooled``: the result may lie in the server's pool; ``returnable``: or in ``chunks``.

    ``chain``: of a call that an endpoint of the same server makes, see :attr:`shared_rpc.context.RunContext.chain`.
    """

    endpoint: str
    args: msgspec.Raw = NO_ARGS
    kwargs: msgspec.Raw = NO_KWARGS
    table: msgspec.Raw = msgspec.Raw(EMPTY_TABLE)
    segments: Segments = []
    skeletons: Numbers = []
    kept: Numbers = []
    arenas: Numbers = []
    chunks: Chunks = []
    held: Chunks = []
    freed: Chunks = []
    pooled: bool = False
    chain: Annotated[list[str], msgspec.Meta(max_length=1000)] = []
    returnable: bool = False


class RecordBody(Message):
    """A record on its way to its reader, its skeleton as payload, its descriptors with the frame: from a worker to its broker,
    and from a server to a client.

    Segments with the numbers ``arenas`` are of the endpoints' pool for this session; the descriptors of those that are
    ``kept`` too came before on this connection. The result takes the pool's chunks ``chunks``; ``freed`` are chunks of the
    client's pool that come back.

    Chunks ``own`` are of those that the call took: the result lies in them, and nothing else. The server gives them back like
    any other, when its GPU has done with them.
    """

    table: msgspec.Raw
    segments: list[SegmentInfo]
    kept: list[int] = []
    arenas: list[int] = []
    chunks: list[int] = []
    own: list[int] = []
    freed: list[int] = []


class Result(RecordBody):
    """The result of a call. ``managed``: the session has a lease on the object.

    ``owner`` is the id of the server where that keeps the memory and knows it by the segments' ids, else ``""``.
    """

    object_id: str = ""
    generation: int = 1
    managed: bool = False
    owner: str = ""


class Cancel(Message):
    """The asker of the request with this frame's id no longer waits. The request is answered all the same."""


class Release(Message):
    """Return of one lease for each id, as often as it is named."""

    object_ids: Ids


class Count(Message):
    """Number of released leases, or of invalidated entries."""

    count: int


class Hold(Message):
    """Request for one more lease for each id, as often as it is named: those of an earlier session of the same client, whose
    connections broke or whose server was restarted.

    New leases on ``suspended`` objects are inactive. ``mapped`` are the ids of the segments that the client has mapped of
    others: while the earlier session was lost, they could be evicted.
    """

    object_ids: Ids
    suspended: Ids = []
    mapped: Annotated[dict[str, Annotated[list[str], msgspec.Meta(max_length=10_000)]], msgspec.Meta(max_length=100_000)] = {}


class Held(Message):
    """The ids of :class:`Hold` that the session has a lease on now; objects of the others were dropped.

    New leases on ``outdated`` objects are inactive: the memory that the client has mapped is not theirs any more.
    """

    object_ids: list[str]
    outdated: list[str] = []


class GetObjectInfo(Message):
    """Request for :class:`ObjectReply`."""

    object_id: str


class ObjectReply(Message):
    """An object now."""

    info: ObjectInfo


class ListHolders(Message):
    """Request for :class:`HoldersReply`."""

    object_id: str


class HoldersReply(Message):
    """The sessions that hold an object."""

    infos: list[HolderInfo]


class ListObjects(Message):
    """Request for :class:`ObjectsReply`: objects that came after that of number ``after``."""

    after: int = 0
    limit: int = 1000


class ObjectsReply(Message):
    """Objects in the order in which they came, with the sessions that hold them. ``after`` is for the next request, None at the
    end.
    """

    infos: list[ListedObjectInfo]
    after: int | None


class InvalidateCall(Message):
    """Drop the cached result of one call."""

    endpoint: str
    args: msgspec.Raw = NO_ARGS
    kwargs: msgspec.Raw = NO_KWARGS


class InvalidateEndpoint(Message):
    """Drop all cached results of an endpoint."""

    endpoint: str


class Submit(Call):
    """A call to be made a task; the answer is :class:`TaskIs`."""


class GetTask(Message):
    """Request for :class:`TaskIs`."""

    task_id: str


class TaskIs(Message):
    """A task now."""

    info: TaskInfo


class TaskUpdate(Message):
    """A task that is waited for has changed. As :class:`OutOfPoolMemory`, it is not the last answer to its request."""

    info: TaskInfo


class WaitTask(Message):
    """Request for the :class:`Result` of a task, when it has ended.

    ``events``: report every change before. ``poll``: do not wait; a task that has not ended is an error. ``look``: answer with
    :class:`TaskIs`, the last event, and leave the result; with ``claim`` the session holds it from then on, for a
    :class:`FetchTask` with ``claimed``.
    """

    task_id: str
    events: bool = False
    poll: bool = False
    look: bool = False
    claim: bool = False


class FetchTask(Message):
    """Request for the :class:`Result` of a task that has ended; any other is an error.

    ``claimed``: the id of the object that the session claimed by its wait, and gives up the claim on.
    """

    task_id: str
    claimed: str = ""


class CancelTask(Message):
    """Cancel a task, or ask it to stop; :class:`Count` is 0 if it had ended."""

    task_id: str


class ListTasks(Message):
    """Request for a :class:`TaskPage`: tasks of one status, or of all, that were made after that of number ``after``."""

    status: TaskStatus | None = None
    after: int = 0
    limit: int = 1000


class TaskPage(Message):
    """Tasks in the order they were made. ``after`` is for the next request, None at the end."""

    infos: list[TaskInfo]
    after: int | None


class Free(Message):
    """Return of chunks of the other side's pool. From a client with request id 0 nothing answers, else :class:`Count`."""

    chunks: Chunks


class AwaitFree(Message):
    """Request for :class:`Free`, when the server has chunks of the client's pool to return, or has returned some otherwise."""


class OutOfPoolMemory(Message):
    """A call's result waits for room in the server's pool: the client may give chunks back. Its answer is still to come."""

    text: str


class CreateBuffer(Message):
    """Request for the :class:`Result` of a new buffer: one tensor, in a segment of its own.

    ``shape``: one, or a number of bytes. ``device``: its id, ``""`` for the server's own. ``zero``: the asker relies on zeros.
    ``ttl``: seconds for which others may get it, ``max_accesses``: how often; None for no such limit. ``keep``: it is there
    without holders too, as with a ``ttl``. ``room``: for a record, whose memory is sealed when it is adopted.
    """

    shape: int | Annotated[list[int], msgspec.Meta(max_length=1000)]
    dtype: str = "uint8"
    device: str = ""
    zero: bool = False
    ttl: float | None = None
    max_accesses: int | None = None
    keep: bool = False
    room: bool = False


class KeepSegments(Message):
    """Request for the :class:`Result` of a new buffer over memory that the server has: a list with a flat tensor of the bytes
    of each segment, in the order of the ids.

    ``linger``: seconds for which it can be got after its last holder has ended.
    """

    segment_ids: Annotated[list[str], msgspec.Meta(max_length=10_000)]
    linger: float = 0.0


class GetBuffer(Message):
    """Request for the :class:`Result` of a buffer that is there."""

    object_id: str


class FreeBuffer(Message):
    """End of a buffer for all processes; :class:`Count` is 0 if it had ended. ``release``: release a lease on it as well."""

    object_id: str
    release: bool = False


class ListDevices(Message):
    """Request for :class:`DevicesReply`."""


class DevicesReply(Message):
    """The devices that the server has memory on."""

    infos: list[DeviceInfo]


class Reload(Message):
    """Request to read the app's code anew; :class:`ReloadReply` when it serves.

    ``objects``: cached objects to drop, those whose endpoint has ``"changed"``, ``"all"`` or ``"none"``.
    """

    objects: str = "changed"


class ReloadReply(Message):
    """Changes of a reload."""

    info: ReloadInfo


class StopServer(Message):
    """Request to end; :class:`StopReply` comes first. ``if_idle``: refuse where others hold something or wait for it."""

    if_idle: bool = False


class StopReply(Message):
    """Holdings of a server that ends now."""

    info: StopInfo


class Goodbye(Message):
    """The client ends its session on purpose: its remaining leases are not those of a crashed client. Nothing answers."""


class Error(Message):
    """The request failed. ``endpoint_raised``: the payload is the pickled exception, for the caller alone to load."""

    code: str
    text: str
    detail: dict[str, str] = {}
    endpoint_raised: bool = False
