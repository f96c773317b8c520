"""Replies about a server and its state: dicts of plain values, with their keys.

Sizes are in bytes, times in Unix seconds, and durations in seconds. A device is ``"cpu"`` or a GPU's UUID.
"""

# The annotations are evaluated: with postponed ones, Python does not know which keys are required.

from typing import Literal, NotRequired, TypedDict

from shared_rpc.protocol.records import Tier
from shared_rpc.protocol.tasks import Progress


class MechanismInfo(TypedDict):
    """The mechanism that shares a process's device memory, and the ``reason``; ``name`` is None if none works.

    ``mps`` is True if the process uses the GPU through NVIDIA's Multi-Process Service.
    """

    name: str | None
    reason: str
    mps: bool


class DescriptorInfo(TypedDict):
    """File descriptors of a server's process: the open ones, and their limit."""

    used: int
    limit: int


class PoolInfo(TypedDict):
    """Pools for results: their ``nbytes``, and the ``chunks`` of them that clients have not released."""

    nbytes: int
    chunks: int


class WorkerInfo(TypedDict):
    """A worker process of a server.

    ``device`` is its chosen device, if any. ``runs`` is the number of endpoints that it runs now, ``restarts`` that of its
    predecessors that crashed, ``uptime`` its age.
    """

    pid: int
    number: int
    device: str | None
    state: Literal["starting", "ready", "draining", "ended"]
    runs: int
    restarts: int
    uptime: float


class ZygoteInfo(TypedDict):
    """The process from which workers are forked.

    ``why`` is the reason if there is none. One that is ``"ready"`` has a ``pid``, the number of imported ``modules``, its
    resident memory ``rss``, and the packages that it ``dropped``, each with the reason.
    """

    state: Literal["off", "waiting", "starting", "ready"]
    why: NotRequired[str]
    pid: NotRequired[int]
    modules: NotRequired[int]
    rss: NotRequired[int]
    dropped: NotRequired[dict[str, str]]


class ExecutorInfo(TypedDict):
    """The processes that run endpoints: none if the server runs them itself."""

    workers: list[WorkerInfo]
    zygote: NotRequired[ZygoteInfo]


class ServerStatistics(TypedDict):
    """Sums over all endpoints, including calls that reached none. Only ever growing."""

    calls: int
    cache_hits: int
    joined: int
    builds: int
    failures: int


class ClusterStatus(TypedDict, total=False):
    """Status published by a source of records, for display and for metrics; no key is required.

    ``cluster`` and ``node`` are names, ``state`` is a word such as ``"joined"``, and ``nodes`` the number of nodes. ``objects``
    counts those of the cluster. ``bytes_received`` and ``bytes_sent`` only ever grow.
    ``activity`` has a line for each activity of the source.
    """

    cluster: str
    node: str
    state: str
    nodes: int
    objects: int
    bytes_received: int
    bytes_sent: int
    activity: list[str]


class JoinerInfo(TypedDict):
    """The process that joins a server to its cluster.

    ``pid`` is None while none runs, ``starts`` the number of starts so far. ``problem`` is how the previous one ended, ``""``
    if there was none.
    """

    pid: int | None
    starts: int
    problem: str


class SourceInfo(TypedDict):
    """The source of records of a server.

    ``cluster`` is the server's option of that name, ``""`` without one, and ``joiner`` the process that belongs to it.
    ``session`` and ``pid`` are those of the source, None if none is attached, and ``since`` is the time of its attachment.
    ``misses`` is the number of runs that wait for its answer.
    """

    cluster: str
    joiner: JoinerInfo | None
    session: str | None
    pid: int | None
    since: float | None
    misses: int
    status: ClusterStatus


class ServerInfo(ExecutorInfo, ServerStatistics):
    """A server, as ``get_server_info`` returns it.

    ``endpoints`` are names. ``objects`` includes ``buffers``, and ``nbytes`` is their total memory on devices, ``copies`` that
    of their copies by tier, and ``waiting`` the number of requests that wait for capacity. ``leases`` counts pairs of a session
    and an object, ``running`` the active runs, and ``tasks`` those of each status. ``socket_path`` is None in the local role.
    ``source`` is None without the option ``cluster``, until a source of records is attached. ``clients`` counts sessions
    without the asker's and those of the server's own processes and of its source.
    """

    server_id: str
    pid: int
    device: str
    mechanism: MechanismInfo | None
    started_at: float
    endpoints: list[str]
    objects: int
    buffers: int
    nbytes: int
    copies: dict[Tier, int]
    waiting: int
    descriptors: DescriptorInfo
    leases: int
    pools: PoolInfo
    running: int
    tasks: dict[str, int]
    socket_path: str | None
    uptime: float
    clients: int
    sessions: int
    ready: bool
    source: SourceInfo | None


class RuntimeInfo(TypedDict):
    """The role of a process, as ``Provider.get_runtime_info`` returns it.

    ``socket_path`` and ``server`` belong to the roles with a server; in the server role ``server`` is None once it was stopped.
    ``objects`` is the number of objects that the local role keeps; ``log`` is the file of a server that this process may start.
    """

    execution_mode: Literal["local", "server", "client", "spawn"]
    device: str
    mechanism: MechanismInfo
    pid: int
    socket_path: NotRequired[str]
    server: NotRequired[ServerInfo | None]
    objects: NotRequired[int]
    log: NotRequired[str]


class EndpointStatistics(TypedDict):
    """Counts of one endpoint since the server's start. Only ever growing.

    ``calls`` counts calls and submits of it with arguments that fit; of these ``hits`` were answered from the cache, ``misses``
    began a run with a cacheable result, and ``joined`` joined an active run (singleflight). ``adopted`` counts runs that ended
    with a record of the source of records.
    ``builds`` counts started runs, ``build_seconds`` is the time of ended ones, and ``errors`` counts callers
    and tasks that got one.
    """

    calls: int
    hits: int
    misses: int
    joined: int
    adopted: int
    builds: int
    build_seconds: float
    errors: int


class MovingInfo(TypedDict):
    """An active move of an object between tiers: ``done`` of ``total`` bytes are copied."""

    to: Tier
    done: int
    total: int


class MoveInfo(TypedDict):
    """An object that has changed its tier.

    ``tier`` is its current tier. ``nbytes`` is the memory freed or allocated on its device; ``copied`` the bytes copied for it,
    0 if there was a good copy; and ``seconds`` the duration.
    """

    object_id: str
    endpoint: str
    cache_key: str | None
    tier: Tier
    nbytes: int
    copied: int
    seconds: float


class ObjectInfo(TypedDict):
    """An object of a server, as ``get_object_info`` returns it.

    ``nbytes`` are shared by all, ``private_nbytes`` copied by each process that has the object. ``current`` is True if the
    endpoint's next caller gets this object, ``stale`` if the endpoint's code has changed since. ``leases`` is the number of
    sessions that hold it. If the memory ends with the process that made it, ``lifetime`` says so. ``candidate`` is present, and
    True, if it may be promoted.

    ``tier`` is the place of its bytes. ``active`` is the number of sessions that hold it and have not suspended it, ``pinned``
    is True if it is never evicted, ``copies`` the bytes of its good copies in lower tiers. ``moving`` is set during a move.

    Only buffers have ``state``, ``"listed"`` or the reason why clients can no longer get it, and ``expires_at``, None for no
    limit.
    """

    object_id: str
    server_id: str
    endpoint: str
    kind: Literal["result", "buffer"]
    cache_key: str | None
    nbytes: int
    private_nbytes: int
    device: str
    generation: int
    current: bool
    leases: int
    created_at: float
    last_accessed_at: float
    stale: bool
    tier: Tier
    active: int
    pinned: bool
    copies: dict[Tier, int]
    moving: NotRequired[MovingInfo]
    candidate: NotRequired[bool]
    lifetime: NotRequired[str]
    state: NotRequired[str]
    expires_at: NotRequired[float | None]


#: Kinds of holders of an object.
HolderKind = Literal["session", "task"]


class HolderInfo(TypedDict):
    """A session that holds an object, and its process; or with ``kind`` ``"task"`` a task whose result was not fetched, whose
    id is ``session`` then.

    ``leases`` is the number of its unreleased handles; ``since`` is the beginning of the session, None for a task and for the
    session of the server's own calls.
    """

    kind: HolderKind
    session: str
    pid: int
    since: float | None
    leases: int


class ListedObjectInfo(ObjectInfo):
    """An object as ``list_objects`` returns it: with its ``holders``, and True for ``cached`` if the cache lists it."""

    cached: bool
    holders: list[HolderInfo]


class SessionInfo(TypedDict):
    """A client: the number of objects it holds (``leases``), their bytes, and the time of its connection."""

    session: str
    pid: int
    leases: int
    nbytes: int
    since: float


class RunInfo(TypedDict):
    """An active run of an endpoint; one that is ``"asked"`` waits for the source of records.

    ``cache_key`` is None if the result is not cached, ``started_at`` for a run that has not begun, ``progress`` before the
    first report. ``calls`` is the number of calls that wait for it; ``tasks`` are the ids of the tasks that do.
    """

    endpoint: str
    cache_key: str | None
    status: Literal["asked", "pending", "running"]
    created_at: float
    started_at: float | None
    calls: int
    tasks: list[str]
    progress: Progress | None


class DeviceInfo(TypedDict):
    """A device with memory of a server; its ``kind`` is ``"cpu"`` or ``"cuda"``.

    ``free`` is None if unknown; ``used`` by the server's objects and buffers; ``limit`` is the quota, or None.
    ``copies`` has the bytes of copies of its objects in lower tiers.
    """

    id: str
    kind: str
    name: str
    total: int
    free: int | None
    used: int
    limit: int | None
    copies: dict[Tier, int]


class ReloadedServiceInfo(TypedDict):
    """A service after a reload: its ``endpoints``, the ``changed`` ones, and the number of ``dropped`` objects."""

    endpoints: list[str]
    changed: list[str]
    dropped: int


class ReloadInfo(TypedDict):
    """A reload: the process ids of the new ``workers``, and the ``services`` by socket path."""

    workers: list[int]
    services: dict[str, ReloadedServiceInfo]


class StopInfo(TypedDict):
    """A stopped server, and its counts.

    ``clients``, ``leases``, ``tasks`` and ``running`` count the processes, leases, unfinished tasks and runs of others at its
    end.
    """

    pid: int
    socket_paths: list[str]
    objects: int
    nbytes: int
    clients: int
    leases: int
    tasks: int
    running: int
