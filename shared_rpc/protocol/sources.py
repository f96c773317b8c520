"""Sources of records: the misses that a server puts to one, and the messages between both.

Their numbers are in :mod:`shared_rpc.protocol.catalogue`.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from shared_rpc.protocol.exported import MOST_SEGMENTS
from shared_rpc.protocol.infos import ClusterStatus
from shared_rpc.protocol.messages import Message


class Miss(msgspec.Struct, frozen=True, gc=False):
    """A call that its server has no object for.

    ``id`` is its number on this server, from 1. ``cache_key`` is the call's key, and begins with the name of the ``endpoint``,
    whose ``fingerprint`` changes with its code. ``device`` is where the object has to be: ``"cpu"``, or a GPU's UUID.
    """

    id: int
    endpoint: str
    cache_key: str
    fingerprint: str
    device: str


class AttachSource(Message):
    """Request to be the source of records; the answer is :class:`SourceAttached`.

    ``token`` proves that the server started the process, which has it in its environment.
    """

    token: str = ""


class SourceAttached(Message):
    """The number by which the source names itself from here on: each attachment has its own."""

    source: int
    server_id: str


class AwaitMisses(Message):
    """Request for :class:`Misses` with ids above ``after``, when there are any."""

    again = True
    source: int
    after: int = 0


class Misses(Message):
    """Misses without an answer, in the order of their ids; none once the source was detached."""

    misses: list[Miss]


class BuildMiss(Message):
    """Build the object of a miss here. The answer is a result without a value, with a lease on the object."""

    source: int
    miss: int


class AdoptMiss(Message):
    """Answer a miss with a record, whose header is the payload; the reply is as that to :class:`BuildMiss`.

    The bytes of its segments are in ``buffers``, as in :class:`~shared_rpc.protocol.exported.Adopt`.
    """

    source: int
    miss: int
    buffers: Annotated[list[str], msgspec.Meta(max_length=MOST_SEGMENTS)]


class FailMiss(Message):
    """Answer a miss with an error, in the parts that :func:`shared_rpc.errors.to_wire` makes.

    ``pickled`` is the endpoint's own exception, for the callers alone to load, where another server's endpoint raised it.
    """

    source: int
    miss: int
    code: str
    text: str
    detail: dict[str, str]
    pickled: bytes


class ReportStatus(Message):
    """Status of the source, for people and for metrics, in place of an earlier one."""

    source: int
    status: ClusterStatus


class DetachSource(Message):
    """End of being the source of records. Misses without an answer wait for the next one."""

    source: int
