"""Results: published by the process that made them, rebuilt by those that asked."""

from __future__ import annotations

import os
import pickle
import threading
from collections.abc import Sequence
from typing import Any

import msgspec
import torch

from shared_rpc.codec import collector
from shared_rpc.codec.payload import check_result
from shared_rpc.codec.placement import place
from shared_rpc.codec.skeleton import Scan, SkeletonUnpickler, dump
from shared_rpc.codec.tensors import read_table, tensors_of
from shared_rpc.errors import CodecError
from shared_rpc.memory.devices import device_kind
from shared_rpc.memory.mapping import MAPPINGS
from shared_rpc.memory.segments import Access, Segment
from shared_rpc.records import EMPTY_TABLE, Record

__all__ = ["decode_result", "publish"]

#: The skeleton of no result.
_NONE = pickle.dumps(None, pickle.HIGHEST_PROTOCOL)

#: Two threads that publish one object must not both move it: clients of the first would be left with a copy.
_publishing = threading.RLock()


def _after_fork() -> None:
    global _publishing  # noqa: PLW0603  another thread of the parent may have held it
    _publishing = threading.RLock()


os.register_at_fork(after_in_child=_after_fork)


def publish(value: Any, device: str, access: Access, endpoint: str) -> Record:
    """Take a result apart and move its memory into segments.

    Every tensor reachable from ``value`` is rebound to its new place, so that the caller's own object and what
    clients map are the same memory.

    :param device: the id of the server's device; all tensors must be on one of its kind.
    :param access: how clients are to map it.
    :returns: a record that owns its segments' descriptors.
    :raises CapabilityError: if the value, or a part of it, cannot be shared.
    """
    if value is None:
        return Record(_NONE, EMPTY_TABLE, (), 0, device)
    kind = device_kind(device)
    check_result(value, endpoint, kind)
    scan = Scan(kind)
    MAPPINGS.drain()
    with _publishing, collector.paused():
        skeleton = dump(value, scan, f"endpoint {endpoint!r}: result")
        placement = place(scan, access, rebind=True)
    where = placement.segments[0].info.device if placement.segments else device
    return Record(skeleton, msgspec.msgpack.encode(placement.table(scan)), placement.segments, placement.nbytes, where)


def decode_result(skeleton: bytes, table: bytes | msgspec.Raw, segments: Sequence[Segment], owner: str = "") -> Any:
    """Rebuild a result around its segments, which are mapped and stay the caller's to close.

    :param owner: the id of the server that keeps the result, if one does: what lies in it is not sent to that server again.
    :raises CapabilityError: if this process cannot map the memory.
    :raises CodecError: if the skeleton needs something that is not here, such as a class's module.
    """
    if not segments and bytes(table) == EMPTY_TABLE:
        return _load(skeleton, [], [])
    MAPPINGS.drain()  # a safe point: what earlier results left behind makes room for this one
    with MAPPINGS.attach(segments, owner=owner) as mappings, collector.paused():
        tensors, storages = tensors_of(read_table(table), mappings, trusted=True)
        return _load(skeleton, tensors, storages)


def _load(skeleton: bytes, tensors: list[torch.Tensor], storages: list[torch.UntypedStorage]) -> Any:
    try:
        return SkeletonUnpickler(skeleton, tensors, storages).load()
    except Exception as error:
        raise CodecError(
            f"the object cannot be rebuilt in this process ({type(error).__name__}: {error}): the modules its "
            f"classes come from must be importable here, in compatible versions"
        ) from error
