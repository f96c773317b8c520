"""Rules for records of other processes: which may become an object of this server, and where its memory is to be.

Nothing is unpickled: a skeleton stays opaque. A table is always checked: those who rebuild the value rely on it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from shared_rpc.errors import ConfigurationError, RecordError
from shared_rpc.execution.endpoints import KEY_LIMIT, key_of
from shared_rpc.protocol.buffers import ITEM_SIZES
from shared_rpc.protocol.exported import RecordHeader, SlabPart
from shared_rpc.protocol.records import Access, BufferEntry, SegmentInfo, StorageEntry, TensorEntry, TensorTable
from shared_rpc.protocol.specs import EndpointSpec

#: Bytes of an element of a tensor that no buffer has: what is smaller than a byte takes one.
_SIZES = {
    **ITEM_SIZES,
    **{f"{sign}int{bits}": 1 for sign in ("", "u") for bits in range(1, 8)},
    **dict.fromkeys(("bits8", "bits1x8", "bits2x4", "bits4x2"), 1),
    "bits16": 2,
}
#: In torch sizes, strides and bytes are signed 64-bit integers.
_LARGEST = (1 << 63) - 1
#: Bytes of a table, which is in the body of a frame when the object is delivered; it takes a second to check.
_LARGEST_TABLE = 15 << 20
#: Characters of foreign text in errors.
_SHOWN = 200

_tables = msgspec.msgpack.Decoder(TensorTable)


class Versions(NamedTuple):
    """Versions that a skeleton is bound to: Python's minor one, as code that travels by value is, torch's and ours."""

    python: str
    torch: str
    shared_rpc: str


def check_versions(header: RecordHeader, here: Versions) -> None:
    """Check that processes of this environment can rebuild a record.

    :raises RecordError: if its skeleton was made with other versions.
    """
    names = {"python": "Python", "torch": "torch", "shared_rpc": "shared-rpc"}
    for field, name in names.items():
        theirs, ours = getattr(header, field)[:_SHOWN], getattr(here, field)
        if theirs != ours:
            raise RecordError(
                f"the record of {header.endpoint[:_SHOWN]}() was made with {name} {theirs or '(none)'}, and this server runs "
                f"{name} {ours or '(none)'}: its pickle may not be good here. Use one version, or build the object here",
                reason="version",
            )


def called(header: RecordHeader, spec: EndpointSpec, call: tuple[Sequence[object], dict[str, object]] | None) -> str:
    """Return the cache key that a record is to stand under.

    :param spec: the endpoint's.
    :param call: the arguments of the call; None for the call that it was exported as.
    :raises ConfigurationError: if the call is not cached, and so has no key.
    :raises RecordError: if the endpoint is the exported one, and its code is another.
    """
    if not spec.cache:
        raise ConfigurationError(f"results of endpoint {spec.name!r} are not cached: share it with cache=True to adopt one")
    check_code(header, spec)
    if call is not None:
        key = key_of(spec, *call)
        if key is None:
            raise ConfigurationError(
                f"a call of {spec.name!r} with a tensor or a module among its arguments is not cached: give the endpoint a "
                f"cache_format_key"
            )
        return key
    if header.cache_key is None or not header.cache_key.startswith((f"{spec.name}(", f"{spec.name}:")):
        raise RecordError(
            f"the record has the cache key {str(header.cache_key)[:_SHOWN]!r}, which is none of endpoint {spec.name!r}: name "
            f"the endpoint and the arguments under which it is to be cached",
            reason="endpoint",
        )
    if len(header.cache_key) > len(spec.name) + KEY_LIMIT:
        raise RecordError(
            f"the record has a cache key of {len(header.cache_key)} characters, and those of endpoint {spec.name!r} have at "
            f"most {len(spec.name) + KEY_LIMIT}: {header.cache_key[:_SHOWN]!r}",
            reason="endpoint",
        )
    return header.cache_key


def check_code(header: RecordHeader, spec: EndpointSpec) -> None:
    """Check that a record was built by the code that an endpoint has here, if it is one of that endpoint.

    :raises RecordError: if the code is another.
    """
    if spec.name == header.endpoint and spec.fingerprint != header.fingerprint:
        raise RecordError(
            f"the code of endpoint {spec.name!r} has changed since the record was built: it had fingerprint "
            f"{header.fingerprint[:_SHOWN] or '(unknown)'}, and has {spec.fingerprint or '(none)'}. Build the object again",
            reason="code",
        )


def homes(header: RecordHeader, device: str) -> dict[str, str]:
    """Return for each device of a record the one of this server that takes its place.

    :param device: the id of the server's device.
    :raises RecordError: if it is for a device of another kind.
    """
    kinds = ["cpu" if name == "cpu" else "gpu" for name in (header.device, device)]
    if kinds[0] != kinds[1]:
        raise RecordError(
            f"the record is on {header.device[:_SHOWN]}, and this server has its results on {device}: build the object for "
            f"each kind of device",
            reason="device",
        )
    table = _decoded(header)
    gpus = {name for name in (*(info.device for info in header.segments), *table.devices, header.device) if name != "cpu"}
    # The GPUs of one record are told apart by their ids, and no other host has the same.
    return {"cpu": "cpu", **({name: name for name in gpus} if len(gpus) > 1 else dict.fromkeys(gpus, device))}


def _decoded(header: RecordHeader) -> TensorTable:
    if len(header.table) > _LARGEST_TABLE:
        raise RecordError(
            f"the record's tensor table has {len(header.table)} bytes, and may have {_LARGEST_TABLE}", reason="malformed"
        )
    try:
        return _tables.decode(header.table)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RecordError(f"cannot decode the record's tensor table: {error}", reason="malformed") from error


def check_table(header: RecordHeader) -> None:
    """Check that a table stays within the segments of its record, and a tensor within its storage.

    :raises RecordError: naming the first entry that does not.
    """
    table = _decoded(header)
    segments, sizes = header.segments, [info.nbytes for info in header.segments]
    for number, info in enumerate(segments):
        _require(0 < info.nbytes <= _LARGEST, f"segment {number} has {info.nbytes} bytes")
        host = info.device == "cpu"
        _require(host == (info.mechanism == "memfd"), f"segment {number} on {info.device[:40]} is of {info.mechanism!r} memory")
        _require(host or info.access != "copy", f"segment {number} on {info.device[:40]} is to be mapped copy-on-write")
    _require(
        0 <= header.nbytes <= sum(sizes) and 0 <= header.private_nbytes <= sum(sizes) + len(header.skeleton),
        f"it announces {header.nbytes} shared and {header.private_nbytes} private bytes in segments of {sum(sizes)}",
    )
    _require(
        header.access == access_of(segments) and header.tensors == tensors_of(segments),
        f"it is shared as {header.access!r} with tensors={header.tensors!r}, and its segments are not",
    )
    # There may be a hundred thousand: texts are made of what is wrong alone.
    for number, storage in enumerate(table.storages):
        if not _fits_storage(storage, segments, len(table.devices)):
            _require(False, f"storage {number} ({storage}) leaves its segment")
    for number, tensor in enumerate(table.tensors):
        if not _fits_tensor(tensor, table.storages):
            _require(False, f"tensor {number} ({str(tensor)[:_SHOWN]}) leaves its storage")
    used = {storage.segment for storage in table.storages}
    for number, buffer in enumerate(table.buffers):
        _require(_fits_buffer(buffer, segments), f"buffer {number} ({buffer}) leaves its segment")
        _require(buffer.segment not in used, f"buffer {number} lies in a segment with tensors, number {buffer.segment}")


def without_slabs(
    table: bytes | msgspec.Raw, segments: Sequence[SegmentInfo]
) -> tuple[bytes, tuple[SegmentInfo, ...], dict[int, SlabPart]]:
    """Return a record's table and segments, with parts of slabs in place of slabs; and these parts, by their numbers.

    A part goes from the first byte to the last one that the record uses.
    """
    parts: dict[int, SlabPart] = {}
    if not any(info.slab for info in segments):
        return bytes(table), tuple(segments), parts
    found, infos = _tables.decode(table), list(segments)
    for number, info in enumerate(segments):
        within = [entry for entry in found.storages if entry.segment == number] if info.slab else []
        if within:
            start, end = min(entry.offset for entry in within), max(entry.offset + entry.nbytes for entry in within)
            parts[number] = SlabPart(info, start)
            infos[number] = msgspec.structs.replace(info, id=f"{info.name}-{start}", nbytes=end - start, slab=False)
    storages = tuple(
        msgspec.structs.replace(entry, offset=entry.offset - parts[entry.segment].offset) if entry.segment in parts else entry
        for entry in found.storages
    )
    return msgspec.msgpack.encode(msgspec.structs.replace(found, storages=storages)), tuple(infos), parts


def access_of(segments: Sequence[SegmentInfo]) -> Access:
    """Return how an endpoint shares what lies in these segments."""
    return "read" if any(info.access == "read" for info in segments) else "read_write"


def tensors_of(segments: Sequence[SegmentInfo]) -> str:
    """Return which tensors an endpoint shares whose result lies in these segments."""
    return "parameters" if any(info.access == "private" for info in segments) else "all"


def _require(good: bool, wrong: str) -> None:
    if not good:
        raise RecordError(f"the record's description does not fit its memory: {wrong}", reason="malformed")


def _fits_storage(entry: StorageEntry, segments: Sequence[SegmentInfo], devices: int) -> bool:
    if not 0 <= entry.device < max(devices, 1) or entry.chunk != 0 or entry.nbytes < 0:
        return False
    if entry.segment == -1:
        return entry.nbytes == 0 and devices > 0
    return (
        0 <= entry.segment < len(segments)
        and segments[entry.segment].access != "copy"
        and 0 <= entry.offset <= segments[entry.segment].nbytes - entry.nbytes
    )


def _fits_tensor(entry: TensorEntry, storages: Sequence[StorageEntry]) -> bool:
    size = _SIZES.get(entry.dtype)
    if size is None or not 0 <= entry.storage < len(storages) or len(entry.shape) != len(entry.strides):
        return False
    shape, strides = entry.shape, entry.strides
    if min(entry.offset, *shape, *strides, 0) < 0 or max(entry.offset, *strides, 0) > _LARGEST:
        return False
    if 0 in shape:
        return math.prod([max(count, 1) for count in shape]) * size <= _LARGEST
    if math.prod(shape) * size > _LARGEST:
        return False
    last = entry.offset + sum([(count - 1) * stride for count, stride in zip(shape, strides, strict=True)])
    return (last + 1) * size <= storages[entry.storage].nbytes


def _fits_buffer(entry: BufferEntry, segments: Sequence[SegmentInfo]) -> bool:
    return (
        0 <= entry.segment < len(segments)
        and segments[entry.segment].mechanism == "memfd"
        and segments[entry.segment].access in ("copy", "read")
        and entry.nbytes >= 0
        and 0 <= entry.offset <= segments[entry.segment].nbytes - entry.nbytes
    )


def accesses(header: RecordHeader, access: Access) -> list[Access]:
    """Return how each segment is to be mapped here.

    :param access: that of the endpoint which the record becomes a result of: what either side shares for reading is read-only.
    """
    return ["read" if access == "read" and info.access == "read_write" else info.access for info in header.segments]


def moved(header: RecordHeader, places: dict[str, str]) -> tuple[bytes, bytes]:
    """Return the skeleton and the table of a record whose devices have others in their place, see :func:`homes`."""
    skeleton, table = header.skeleton, _decoded(header)
    for name, place in places.items():
        # A pickle names a GPU by its id, whose length is the same everywhere: the pickle stays well-formed.
        if name != place and len(name) == len(place):
            skeleton = skeleton.replace(name.encode(), place.encode())
    devices = tuple(places.get(name, name) for name in table.devices)
    if devices == table.devices:
        return skeleton, header.table
    return skeleton, msgspec.msgpack.encode(msgspec.structs.replace(table, devices=devices))
