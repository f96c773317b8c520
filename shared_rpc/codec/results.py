"""Results: published by the process that built them, rebuilt by the requesting process."""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import msgspec
import torch

from shared_rpc.codec.blocks import spans
from shared_rpc.codec.buffers import buffers_of
from shared_rpc.codec.modes import keep_untraced, without_modes
from shared_rpc.codec.payload import dump_result
from shared_rpc.codec.placement import Placement, copy, move
from shared_rpc.codec.single import Copied, copy_single, rebuild_single
from shared_rpc.codec.skeleton import Scan, load
from shared_rpc.codec.storages import refuse_capture
from shared_rpc.codec.tensors import read_table, tensors_of
from shared_rpc.errors import CodecError, raised_by_handler
from shared_rpc.forks import fork_safe_lock
from shared_rpc.lifecycle import collector
from shared_rpc.memory.backends.choice import backend_for
from shared_rpc.memory.chunk_references import ChunkReferences
from shared_rpc.memory.devices import device_kind, torch_device
from shared_rpc.memory.layout import aligned
from shared_rpc.memory.mapping import MAPPINGS
from shared_rpc.memory.pool import Pool
from shared_rpc.memory.records import Record
from shared_rpc.memory.segments import Segment
from shared_rpc.memory.slabs import Slabs
from shared_rpc.protocol.records import EMPTY_TABLE, ONE_TENSOR, Access, Tensors

#: The skeleton of None.
_NONE = pickle.dumps(None, pickle.HIGHEST_PROTOCOL)

#: The largest tensor, in bytes, that :func:`publish_soon` copies.
_SMALL = 1 << 20

#: Size, in bytes, of table and skeleton below which the garbage collector is not paused: they rebuild few objects.
_FEW = 4096

#: Two threads that publish one object must not both move it: clients of the first would keep a copy.
_publishing = fork_safe_lock()


@without_modes
def publish(
    value: Any,
    device: str,
    access: Access,
    endpoint: str,
    pool: Pool | None = None,
    tensors: Tensors = "all",
    slabs: Slabs | None = None,
) -> Record:
    """Encode a result as a record whose memory is in segments.

    A small result for a single reader is copied into the reader's pool, or into segments while the pool is full. In any other
    result, every tensor to be shared is rebound to its new memory, so that the endpoint's own object and the clients' mappings
    are the same memory.

    :param device: the id of the server's device; all tensors must be on a device of its kind.
    :param access: the access with which clients map the memory.
    :param pool: the pool of the single reader; None if there may be more readers.
    :param tensors: the tensors to share; the others are unchanged, and each client gets a copy.
    :param slabs: segments that a small result may share with others; None to give it its own.
    :returns: a record that owns its segments' descriptors.
    :raises CapabilityError: if the value, or a part of it, cannot be shared.
    """
    if value is None:
        _is_done(device)
        return Record(_NONE, EMPTY_TABLE, (), 0, device)
    kind = device_kind(device)
    if pool is not None and access == "read_write" and type(value) is torch.Tensor:
        copied = copy_single(value, kind, pool)
        if copied is not None:
            copied.wait()
            return copied.record()
    scan: Scan | None = None
    try:
        if pool is not None and access == "read_write":
            skeleton, scan = dump_result(value, endpoint, kind)
            used = spans(scan, exact=True)
            small = sum(aligned(span.nbytes) for span in used) <= pool.largest
            # A pool's memory is never mapped copy-on-write, as arrays must be.
            if small and (scan.buffers is None or not scan.buffers.views):
                return _record(skeleton, copy(scan, used, pool, tensors=tensors), device)
            del used
            scan = None
        MAPPINGS.drain()
        with _publishing, collector.paused():
            skeleton, scan = dump_result(value, endpoint, kind)
            return _record(skeleton, move(scan, access, tensors, slabs), device)
    finally:
        # A kept error of the value's own code may keep this frame.
        del value, scan


@without_modes
def publish_soon(value: Any, device: str, pool: Pool, seconds: float) -> Record | Copied | None:
    """Publish into a pool if that takes microseconds; return None otherwise. For threads that must not block.

    :param seconds: maximum wait for the GPU work of an endpoint that returns None.
    """
    if value is None:
        return Record(_NONE, EMPTY_TABLE, (), 0, device) if _is_done(device, seconds) else None
    if type(value) is not torch.Tensor:
        return None
    return copy_single(value, device_kind(device), pool, limit=_SMALL)


def _is_done(device: str, seconds: float | None = None) -> bool:
    """Wait for the endpoint's work on the current stream, which may write to memory of its caller.

    :param seconds: the timeout; None for no limit.
    :returns: True if the work completed in time.
    """
    initialized: bool = torch.cuda.is_initialized()
    if device == "cpu" or not initialized or torch.cuda.is_current_stream_capturing():
        return True
    stream = torch.cuda.current_stream(torch_device(device)).cuda_stream
    return backend_for(device).wait(stream, seconds)


def _record(skeleton: bytes, placed: Placement, device: str) -> Record:
    # Buffers and host tensors are on the host for every device.
    devices = [segment.info.device for segment in placed.segments]
    where = next((name for name in devices if device_kind(name) == device_kind(device)), device)
    private = len(skeleton) + placed.private_nbytes
    return Record(
        skeleton,
        placed.table(),
        placed.segments,
        placed.nbytes,
        where,
        placed.chunks,
        private_nbytes=private,
    )


@without_modes
def decode_result(
    skeleton: bytes,
    table: bytes | msgspec.Raw,
    segments: Sequence[Segment],
    owner: str = "",
    pooled: dict[int, ChunkReferences] | None = None,
    label: str = "",
    object_id: str = "",
) -> Any:
    """Rebuild a result around its segments. They are mapped here; the caller closes their descriptors.

    :param owner: the id of the server that keeps the result, if any: its memory is not sent to that server again.
    :param pooled: the result's chunks of the server's pool, with the references that release them; emptied unless mapping
        fails.
    :param label: a description of the result, for messages.
    :param object_id: the id under which the server keeps the result, so that it can be suspended; ``""`` if it is not kept.
    :raises CapabilityError: if the memory cannot be mapped, memory for a required copy is missing, or a graph is captured.
    :raises CodecError: if the skeleton needs something that is missing here, such as a class's module.
    """
    if not segments and bytes(table) == EMPTY_TABLE:
        return _load(skeleton, [], [], []) if skeleton != _NONE else None
    if skeleton == ONE_TENSOR and segments and (pooled or segments[0].info.slab):
        single = rebuild_single(table, segments, pooled or {}, owner, trusted=True, label=label, object_id=object_id)
        if single is not None:
            _drain()
            return single
    refuse_capture(segment.info for segment in segments)
    quick = len(table) + len(skeleton) < _FEW
    found = read_table(table)
    hidden = {entry.segment for entry in found.buffers}
    attached = MAPPINGS.attach(segments, owner=owner, hidden=hidden, label=label)
    with attached as mappings, nullcontext() if quick else collector.paused():
        chunks = pooled if pooled is not None else {}
        tensors, storages = tensors_of(found, mappings, chunks, trusted=True, object_id=object_id)
        # In a list that is emptied: a kept error of the object's own code may keep this frame.
        value = [_load(skeleton, tensors, storages, buffers_of(found, mappings, object_id))]
    _drain()
    return value.pop()


def _drain() -> None:
    """Unmap segments of earlier results. Called after a new result is mapped, which may use the same segments."""
    if MAPPINGS.has_unused:
        MAPPINGS.drain()


def _load(skeleton: bytes, tensors: list[torch.Tensor], storages: list[torch.UntypedStorage], buffers: list[memoryview]) -> Any:
    """Rebuild the object around the contents of the lists; empty them."""
    try:
        return load(skeleton, tensors, storages, buffers)
    except BaseException as error:
        if raised_by_handler(error):
            raise
        # The incomplete object must not be kept by the traceback.
        traceback.clear_frames(error.__traceback__)
        raise CodecError(
            f"cannot rebuild the object in this process ({type(error).__name__}: {error}): the modules of its classes must be "
            f"importable here, in compatible versions"
        ) from error
    finally:
        tensors.clear()
        storages.clear()
        buffers.clear()


keep_untraced()
