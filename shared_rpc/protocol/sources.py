"""Sources of records: the misses offered to one by its server, and the messages between both."""

from __future__ import annotations

from typing import Annotated

import msgspec

from shared_rpc.protocol.exported import MOST_SEGMENTS
from shared_rpc.protocol.infos import ClusterStatus
from shared_rpc.protocol.messages import Message, Query


class Miss(msgspec.Struct, frozen=True, gc=False):
    """A call without an object on its server.

    ``id`` is its number on this server, from 1. ``cache_key`` is the call's key, and begins with the name of the ``endpoint``,
    whose ``fingerprint`` changes with its code. ``device`` is the required device of the object: ``"cpu"``, or a GPU's UUID.
    """

    id: int
    endpoint: str
    cache_key: str
    fingerprint: str
    device: str


class AttachSource(Query[tuple[int, str]]):
    """Request to be the source of records. The answer is its number for later requests and the server's id.

    ``token`` proves that the server started the process, whose environment contains it.
    """

    again = False
    token: str = ""


class AwaitMisses(Query[list[Miss]]):
    """Request for the open misses with ids above ``after``, in their order, when there are any."""

    source: int
    after: int = 0


class BuildMiss(Message):
    """Build the object of a miss here. The answer is a result without a value, with a lease on the object."""

    source: int
    miss: int


class AdoptMiss(Message):
    """Answer a miss with a record, whose header is the payload; the reply is like that to :class:`BuildMiss`.

    The bytes of its segments are in ``buffers``, as in :class:`~shared_rpc.protocol.exported.Adopt`.
    """

    source: int
    miss: int
    buffers: Annotated[list[str], msgspec.Meta(max_length=MOST_SEGMENTS)]


class FailMiss(Query[None]):
    """Answer a miss with an error, in the parts made by :func:`shared_rpc.errors.to_wire`.

    ``pickled`` is the exception of another server's endpoint, which only the callers load.
    """

    again = False
    source: int
    miss: int
    code: str
    text: str
    detail: dict[str, str]
    pickled: bytes


class ReportStatus(Query[None]):
    """Status of the source, for display and for metrics, replacing an earlier one."""

    again = False
    source: int
    status: ClusterStatus


class DetachSource(Message):
    """End of the attachment as source of records. Open misses wait for the next one."""

    source: int
