"""Messages: typed bodies of frames. Adding one means a struct here and a handler in the server."""

from __future__ import annotations

import functools
from typing import Annotated, Any, ClassVar, Generic, TypeVar, cast, get_args

import msgspec

from shared_rpc.protocol.infos import (
    DeviceInfo,
    EndpointStatistics,
    HolderInfo,
    ListedObjectInfo,
    ObjectInfo,
    ReloadInfo,
    RunInfo,
    ServerInfo,
    SessionInfo,
    StopInfo,
)
from shared_rpc.protocol.records import EMPTY_TABLE, NO_ARGS, NO_KWARGS, SegmentRef
from shared_rpc.protocol.specs import EndpointSpec
from shared_rpc.protocol.tasks import TaskInfo, TaskStatus

R = TypeVar("R")

#: Lists in requests. Their lengths are checked before anything is built: a frame can hold millions of elements.
Ids = Annotated[list[str], msgspec.Meta(max_length=100_000)]
Chunks = Annotated[list[int], msgspec.Meta(max_length=100_000)]
Segments = Annotated[list[SegmentRef], msgspec.Meta(max_length=10_000)]
Numbers = Annotated[list[int], msgspec.Meta(max_length=10_000)]


class Message(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """The base of all messages."""

    #: True for a request that changes nothing, which can be repeated if its delivery is uncertain.
    again: ClassVar[bool] = False


class Answer(Message):
    """The answer to a ``Query``: a value of the query's type."""

    value: msgspec.Raw

    @classmethod
    def of(cls, value: Any) -> Answer:
        """Return the answer with a value."""
        return _NOTHING if value is None else cls(msgspec.Raw(_encode(value)))


class Query(Message, Generic[R]):
    """A request that is answered with a value of one type."""

    again = True

    @classmethod
    def read(cls, answer: Answer) -> R:
        """Return the value of an answer.

        :raises msgspec.DecodeError: if it is of another type.
        """
        return cast("R", _decoder(cls).decode(answer.value))


_encode = msgspec.msgpack.Encoder().encode
#: The answer to a ping, which is encoded once.
_NOTHING = Answer(msgspec.Raw(_encode(None)))


@functools.cache
def _decoder(query: type[Query[Any]]) -> msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(get_args(query.__orig_bases__[0])[0])  # type: ignore[attr-defined]


class Hello(Message):
    """The first frame of a connection, which begins a session."""


class Welcome(Message):
    """Acceptance of the connection."""

    server_id: str
    device: str


class Ping(Query[None]):
    """Query for the server's liveness."""


class GetServerInfo(Query[ServerInfo]):
    """Request for the server's description of itself."""


class ListEndpoints(Query[list[EndpointSpec]]):
    """Request for all endpoints, in the order they were shared."""


class Call(Message):
    """Call of an endpoint: the server runs it, joins its run, or returns the cached result.

    ``args`` and ``kwargs`` are a list and a dict in the encoding of :mod:`shared_rpc.protocol.values`. ``table`` is a tensor
    table over ``segments``: new ones, arenas that were sent before, and those of the server's own objects. The payload has one
    skeleton of each size in ``skeletons``.

    The call uses the chunks ``chunks`` of the caller's pool, whose arenas the server keeps mapped for the session. ``freed``
    are chunks of the server's pool that it returns. ``pooled`` allows the result in that pool.

    ``chain`` is set if an endpoint of the same server makes the call, see :attr:`shared_rpc.context.RunContext.chain`.
    """

    endpoint: str
    args: msgspec.Raw = NO_ARGS
    kwargs: msgspec.Raw = NO_KWARGS
    table: msgspec.Raw = msgspec.Raw(EMPTY_TABLE)
    segments: Segments = []
    skeletons: Numbers = []
    chunks: Chunks = []
    freed: Chunks = []
    pooled: bool = False
    chain: Annotated[list[str], msgspec.Meta(max_length=1000)] = []


class RecordBody(Message):
    """Record sent from a worker to its broker, or from a server to a client. The payload is its skeleton.

    Arenas and slabs among the ``segments`` are sent once. The result uses the chunks ``chunks`` of the session's pool of
    results. ``freed`` are returned chunks of the client's pool.
    """

    table: msgspec.Raw = msgspec.Raw(EMPTY_TABLE)
    segments: list[SegmentRef] = []
    chunks: list[int] = []
    freed: list[int] = []


class Result(RecordBody):
    """The result of a call. If ``managed``, the session has a lease on the object.

    ``owner`` is the id of the server if it keeps the memory under the segments' ids, else ``""``.
    """

    object_id: str = ""
    generation: int = 1
    managed: bool = False
    owner: str = ""


class Cancel(Message):
    """Notice that the requester no longer waits for the request with this frame's id. The server still answers the
    request.
    """


class Release(Query[int]):
    """Release of one lease for each id, which may occur several times; the answer is the number of those that were held."""

    again = False
    object_ids: Ids


class Hold(Message):
    """Request for one more lease for each id, after a client's connections broke or its server was restarted; an id may
    occur several times. The answer is :class:`Held`.

    New leases on ``suspended`` objects are inactive. ``mapped`` has the ids of the client's mapped segments of each other
    object, because objects may have been evicted in the meantime.
    """

    object_ids: Ids
    suspended: Ids = []
    mapped: Annotated[dict[str, Annotated[list[str], msgspec.Meta(max_length=10_000)]], msgspec.Meta(max_length=100_000)] = {}


class Held(Message):
    """The ids of :class:`Hold` on which the session has a lease now; the other objects were dropped.

    New leases on ``outdated`` objects are inactive: the client has mapped earlier memory of them.
    """

    object_ids: list[str]
    outdated: list[str] = []


class GetObjectInfo(Query[ObjectInfo]):
    """Request for the current state of an object."""

    object_id: str


class ListHolders(Query[list[HolderInfo]]):
    """Request for the sessions that hold an object."""

    object_id: str


class ListObjects(Query[tuple[list[ListedObjectInfo], int | None]]):
    """Request for objects with a number above ``after``, in order of publication, with the sessions that hold them; and for the
    ``after`` of the next request, None at the end.
    """

    after: int = 0


class InvalidateCall(Query[int]):
    """Drop the cached result of one call. The answer is 0 if there is none."""

    again = False
    endpoint: str
    args: msgspec.Raw = NO_ARGS
    kwargs: msgspec.Raw = NO_KWARGS


class InvalidateEndpoint(Query[int]):
    """Drop all cached results of an endpoint; the answer is their number."""

    again = False
    endpoint: str


class Submit(Call):
    """Call as a task; the answer is :class:`TaskIs`."""


class GetTask(Query[TaskInfo]):
    """Request for the current state of a task."""

    task_id: str


class TaskIs(Message):
    """The current state of a task."""

    info: TaskInfo


class TaskUpdate(Message):
    """Change of a task for which a client waits. It precedes the answer to the request."""

    info: TaskInfo


class WaitTask(Message):
    """Request for the :class:`Result` of a task once it has finished.

    ``events``: report every change before that, including the end. ``poll``: do not wait; an unfinished task is an error.
    ``look``: answer with :class:`TaskIs`, and leave the result.
    """

    task_id: str
    events: bool = False
    poll: bool = False
    look: bool = False


class FetchTask(Message):
    """Request for the :class:`Result` of a finished task; an unfinished one is an error."""

    task_id: str


class CancelTask(Query[bool]):
    """Request to cancel a task or to stop its run; the answer is False if it had finished."""

    again = False
    task_id: str


class ListTasks(Query[tuple[list[TaskInfo], int | None]]):
    """Request for tasks of one status, or of all, with a number above ``after``, in order of submission; and for the ``after``
    of the next request, None at the end.
    """

    status: TaskStatus | None = None
    after: int = 0


class Free(Query[int]):
    """Return of chunks of the peer's pool; the answer to a client is their number."""

    again = False
    chunks: Chunks


class CreateBuffer(Message):
    """Request for the :class:`Result` of a new buffer: one tensor in a separate segment.

    ``shape`` is a shape or a number of bytes. ``device`` is an id, ``""`` for the server's own device. ``zero``: the memory
    must be zeroed. ``ttl`` is the time in seconds during which other processes may get the buffer; None for no limit. ``keep``
    keeps it without holders, like a ``ttl``. ``for_record``: the buffer is for a record, and sealed when that is adopted.
    ``name`` is one by which other processes can get the buffer while it is listed, ``""`` for none.
    """

    shape: int | Annotated[list[int], msgspec.Meta(max_length=1000)]
    dtype: str = "uint8"
    device: str = ""
    zero: bool = False
    ttl: float | None = None
    keep: bool = False
    for_record: bool = False
    name: Annotated[str, msgspec.Meta(max_length=1000)] = ""


class KeepSegments(Message):
    """Request for the :class:`Result` of a new buffer over the server's memory: a list of flat byte tensors, one for each
    segment, in the order of the ids.

    ``linger`` is the time in seconds that it outlives its last holder.
    """

    segment_ids: Annotated[list[str], msgspec.Meta(max_length=10_000)]
    linger: float = 0.0


class GetBuffer(Message):
    """Request for the :class:`Result` of an existing buffer, by its id or its name."""

    object_id: str
    name: str = ""


class FreeBuffer(Query[bool]):
    """Request to free a buffer for all processes; the answer is False if it was freed before. ``release`` also releases a lease
    on it.
    """

    again = False
    object_id: str
    release: bool = False


class ListDevices(Query[list[DeviceInfo]]):
    """Request for the devices that hold memory of the server."""


class Reload(Query[ReloadInfo]):
    """Request to restart the workers with the app's new code; the answer follows when it is served.

    ``objects`` selects the cached objects to drop: those of ``"changed"`` endpoints, ``"all"`` or ``"none"``.
    """

    again = False
    objects: str = "changed"


class StopServer(Query[StopInfo]):
    """Request to stop; the answer, with the server's holdings, is sent first. ``if_idle``: refuse if other clients hold or
    wait for something.
    """

    again = False
    if_idle: bool = False


class ListSessions(Query[list[SessionInfo]]):
    """Request for all sessions, with their processes."""


class ListRuns(Query[list[RunInfo]]):
    """Request for at most ``limit`` active runs of endpoints, the oldest first."""

    limit: int = 1000


class GetStatistics(Query[dict[str, EndpointStatistics]]):
    """Request for the counts of each endpoint since the server's start, by name."""


class InvalidateObject(Query[int]):
    """Drop one cached result by the object's id; the answer is 0 if the cache did not list it."""

    again = False
    object_id: str


class Goodbye(Message):
    """Regular end of a client's session: its remaining leases do not count as reclaimed. There is no answer."""


class Error(Message):
    """Failure of a request. With ``endpoint_raised``, the payload is the pickled exception, which only the caller unpickles."""

    code: str
    text: str
    detail: dict[str, str] = {}
    endpoint_raised: bool = False
