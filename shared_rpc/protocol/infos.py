"""Replies about a server and its state: dicts of plain values, with their keys.

Sizes are in bytes, times in Unix seconds, and durations in seconds. A device is ``"cpu"`` or a GPU's UUID.
"""

# The annotations are evaluated: of postponed ones, Python does not know whether a key is required.

from typing import Any, Literal, NotRequired, TypedDict

from shared_rpc.protocol.records import Access, HostCopy, Tensors, Tier

__all__ = [
    "BufferInfo",
    "ClusterStatus",
    "DescriptorInfo",
    "DeviceInfo",
    "EndpointInfo",
    "EndpointStatistics",
    "ExecutorInfo",
    "HolderInfo",
    "JoinerInfo",
    "ListedObjectInfo",
    "MechanismInfo",
    "MoveInfo",
    "MovingInfo",
    "ObjectInfo",
    "PoolInfo",
    "ProgressInfo",
    "ReloadInfo",
    "ReloadedServiceInfo",
    "RunInfo",
    "RuntimeInfo",
    "ServerInfo",
    "ServerStatistics",
    "SessionInfo",
    "SourceInfo",
    "StopInfo",
    "WorkerInfo",
    "ZygoteInfo",
]


class MechanismInfo(TypedDict):
    """Mechanism by which a process shares its device's memory, and the ``reason``; ``name`` is None where nothing works.

    ``mps`` is whether the process uses the GPU through NVIDIA's Multi-Process Service.
    """

    name: str | None
    reason: str
    mps: bool


class DescriptorInfo(TypedDict):
    """File descriptors: those of objects, and the limits of objects and of the process."""

    used: int
    limit: int
    available: int


class PoolInfo(TypedDict):
    """Pools for results: their ``nbytes``, and the ``chunks`` of them that clients have not released."""

    nbytes: int
    chunks: int


class WorkerInfo(TypedDict):
    """A worker process of a server.

    ``device`` is its chosen device, if any. ``runs`` is the number of endpoints that it runs now, ``restarts`` that of
    the workers before it that ended in a crash, ``uptime`` its age.
    """

    pid: int
    number: int
    device: str | None
    state: Literal["starting", "ready", "draining", "ended"]
    runs: int
    restarts: int
    uptime: float


class ZygoteInfo(TypedDict):
    """The process that workers are forks of.

    ``why`` says why there is none. One that is ``"ready"`` has a ``pid``, the number of ``modules`` that it has imported,
    ``pss`` (its private memory and its share of what workers have in common with it), and the packages that it ``dropped``,
    each with the reason.
    """

    state: Literal["off", "waiting", "starting", "ready"]
    why: NotRequired[str]
    pid: NotRequired[int]
    modules: NotRequired[int]
    pss: NotRequired[int]
    dropped: NotRequired[dict[str, str]]


class ExecutorInfo(TypedDict):
    """The processes that run endpoints: none where the server runs them itself."""

    workers: list[WorkerInfo]
    zygote: NotRequired[ZygoteInfo]


class ServerStatistics(TypedDict):
    """Sums over all endpoints, those of calls included that no endpoint got. Only ever growing."""

    calls: int
    cache_hits: int
    joined: int
    builds: int
    failures: int


class ClusterStatus(TypedDict, total=False):
    """Status that a source of records publishes, for people and for metrics; no key is required.

    ``cluster`` and ``node`` are names, ``state`` is a word such as ``"joined"``, and ``nodes`` the number of nodes. ``objects``
    counts those that the cluster has. ``bytes_received`` and ``bytes_sent`` only ever grow.
    ``activity`` has a line for each thing that the source is doing.
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

    ``pid`` is None while none runs, ``starts`` the number of those that ran. ``problem`` is how the last one before this one
    ended, ``""`` if there was none.
    """

    pid: int | None
    starts: int
    problem: str


class SourceInfo(TypedDict):
    """The source of records of a server.

    ``cluster`` is the server's option of that name, ``""`` without one, and ``joiner`` the process that belongs to it.
    ``session`` and ``pid`` are those of the source, None where none is attached, and it has been ``since`` then. ``misses`` is
    the number of runs that wait for its answer.
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

    ``endpoints`` are names. ``objects`` counts ``buffers`` too, and ``nbytes`` is what they lie in together on their
    devices, ``copies`` what their copies take by tier, and ``waiting`` the number of requests that wait for capacity.
    ``leases`` counts pairs of a session and an object, ``running`` the runs that have not ended, and ``tasks`` those of each
    status. ``socket_path`` is None in the local role. ``source`` is None without the option ``cluster``, until a source of
    records is attached. ``clients`` counts sessions without the asker's and those of the server's own processes and of its
    source.
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
    connections: int
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


class EndpointInfo(TypedDict):
    """The options of an endpoint: those of ``Provider.share``, and what is known of its function.

    ``idle_ttl`` is a duration, None for no limit. ``parameters`` are ``[name, kind, required, default]``, ``kind`` as in
    ``inspect.Parameter``. ``fingerprint`` changes with the function's code.
    """

    name: str
    parameters: list[list[Any]]
    execution: Literal["direct", "task"]
    concurrency: Literal["parallel", "serialized"]
    cache: bool
    cache_format_key: str | None
    managed: bool
    singleflight: bool
    access: Access
    tensors: Tensors
    idle_ttl: float | None
    is_async: bool
    doc: str
    fingerprint: str
    host_copy: HostCopy
    pinned: bool


class EndpointStatistics(TypedDict):
    """Counts of one endpoint since the server began. Only ever growing.

    ``calls`` counts calls and submits that named it with arguments that fit; of these ``hits`` were answered from the cache,
    ``misses`` began a run whose result the cache was to list, and ``joined`` joined a run that went on already (singleflight).
    ``adopted`` counts runs that ended with a record of the source of records.
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


class BufferInfo(TypedDict):
    """Description of a buffer.

    ``state`` is ``"listed"``, or the reason why clients cannot get it any more. It expires at ``expires_at`` and may be got
    ``accesses_left`` times; None for no limit.
    """

    state: str
    expires_at: float | None
    accesses_left: int | None


class MovingInfo(TypedDict):
    """A move of an object between tiers that goes on: ``done`` of ``total`` bytes are copied."""

    to: Tier
    done: int
    total: int


class MoveInfo(TypedDict):
    """An object that has changed its tier.

    ``tier`` is where it is now. ``nbytes`` is what was freed on its device, or taken there; ``copied`` the bytes that were
    copied for it, 0 where a good copy was there; and ``seconds`` the time that it took.
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

    ``nbytes`` are shared by all, ``private_nbytes`` copied by each process that has the object. ``current`` tells whether the
    endpoint's next caller gets this object, ``stale`` whether the endpoint's code has changed since. ``leases`` is the number
    of sessions that hold it. Where the memory ends with the process that made it, ``lifetime`` says so. ``candidate`` is there,
    and true, where it may be promoted.

    ``tier`` is where its bytes are. ``active`` is the number of sessions that hold it and have not suspended it, ``pinned``
    whether it is never evicted, ``copies`` the bytes of its good copies in lower tiers. ``moving`` is there while it is moved.

    A buffer has the keys of :class:`~shared_rpc.protocol.infos.BufferInfo` as well.
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
    accesses_left: NotRequired[int | None]


#: What holds an object.
HolderKind = Literal["session", "task"]


class HolderInfo(TypedDict):
    """A session that holds an object, and the process it belongs to; or a task whose result was not fetched, with ``kind``
    ``"task"``, whose id is ``session`` then.

    ``leases`` is the number of its unreleased handles; ``since`` is the beginning of the session. ``connections`` is 1; a task
    and the session of the server's own calls have none, and ``since`` is None.
    """

    kind: HolderKind
    session: str
    pid: int
    connections: int
    since: float | None
    leases: int


class ListedObjectInfo(ObjectInfo):
    """An object as ``list_objects`` returns it: with its ``holders``, and whether it is ``cached``."""

    cached: bool
    holders: list[HolderInfo]


class SessionInfo(TypedDict):
    """A client: the objects it holds (``leases``), the bytes they lie in, and since when it is there. ``connections`` is 1; a
    process with subscriptions to refreshes has one more session for these.
    """

    session: str
    pid: int
    connections: int
    leases: int
    nbytes: int
    since: float


class ProgressInfo(TypedDict):
    """The last report of an endpoint: ``done`` of ``total``, None where that is not known."""

    done: float
    total: float | None
    message: str


class RunInfo(TypedDict):
    """A run of an endpoint that has not ended; one that is ``"asked"`` waits for the source of records.

    ``cache_key`` is None where the result is not cached, ``started_at`` for a run that has not begun, ``progress`` before the
    first report. ``calls`` is the number of calls that wait for it; ``tasks`` are the ids of the tasks that do.
    """

    endpoint: str
    cache_key: str | None
    status: Literal["asked", "pending", "running"]
    created_at: float
    started_at: float | None
    calls: int
    tasks: list[str]
    progress: ProgressInfo | None


class DeviceInfo(TypedDict):
    """A device that a server has memory on; its ``kind`` is ``"cpu"`` or ``"cuda"``.

    ``free`` is None where it is not known; ``used`` by the server's objects and buffers; ``limit`` is the quota, or None.
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
    """A server that ends, and its counts.

    ``clients``, ``leases``, ``tasks`` and ``running`` are counts of what others had: processes, leases, tasks that had not
    ended, and runs.
    """

    pid: int
    socket_paths: list[str]
    objects: int
    nbytes: int
    clients: int
    leases: int
    tasks: int
    running: int
