"""One run of an endpoint, as an executor and the server's table of runs have it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from shared_rpc.memory.records import Arguments
from shared_rpc.protocol.specs import EndpointSpec

W = TypeVar("W")

#: The arguments for an executor: lowered, or the live ``(args, kwargs)`` of a caller in this process.
CallArguments = Arguments | tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(eq=False, slots=True)
class Run(Generic[W]):
    """One run of an endpoint, from the call that starts it to its outcome.

    ``key`` is None where its result is not to be cached, or no longer, and then ``former_key`` is the earlier key.
    ``refreshes`` is for a refresh the identity of its arguments, None if they have none. ``number`` is its place in the
    order in which runs were opened, from 1 on; in a worker, its broker's number for it.

    For the executor: ``publish``: whether a record is needed; a caller in this process needs only the value.
    ``chain``: see :class:`shared_rpc.context.RunContext`. ``background``: whether it may take long, and must not hold up calls
    that are waited for. ``session`` is whose call it is, and ``pooled`` whether the result is for this session alone, and may
    lie in its pool. ``request_id`` is that of the call which it was started for, ``cached`` whether the cache would list its
    result: both are for events.

    ``begun_at`` is when its work began, on the caller's clock; ``progress`` is its latest progress.
    """

    spec: EndpointSpec
    key: str | None
    arguments: CallArguments
    #: In the order in which they came; leaving takes constant time.
    waiters: dict[W, None] = field(default_factory=dict)
    refreshes: str | None = None
    publish: bool = True
    chain: frozenset[str] = frozenset()
    background: bool = False
    session: str = ""
    pooled: bool = False
    request_id: str = ""
    cached: bool = False
    number: int = 0
    former_key: str | None = None
    #: Whether it builds a candidate, whose key is ``former_key``, and whether that was invalidated meanwhile.
    prepares: bool = False
    invalidated: bool = False
    #: When the run was opened, in Unix seconds.
    created_at: float = 0.0
    running: bool = False
    #: The number of its miss while it waits for a source of records, else 0; and whether the source was given that.
    miss: int = 0
    offered: bool = False
    #: Whether its record came from a source.
    adopted: bool = False
    begun_at: float = 0.0
    progress: Any = None
    #: Whether its executor has finished with the run.
    over: bool = False
    #: The reservation for its result.
    reservation: Any = None
    #: The executor's own data about the run.
    place: Any = None
