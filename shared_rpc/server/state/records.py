"""Rules for records of other processes: which ones may become objects of this server, and on which devices.

Nothing is unpickled: a skeleton stays opaque. A table is always checked: rebuilding the value relies on it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence

import msgspec

from shared_rpc.errors import ConfigurationError, RecordError
from shared_rpc.execution.endpoints import KEY_LIMIT, key_of
from shared_rpc.protocol.buffers import ITEM_SIZES
from shared_rpc.protocol.exported import RecordHeader, SlabPart
from shared_rpc.protocol.records import Access, BufferEntry, SegmentInfo, StorageEntry, TensorTable
from shared_rpc.protocol.specs import EndpointSpec

#: Bytes per element of tensors without a buffer; an element smaller than a byte takes one.
_SIZES = {
    **ITEM_SIZES,
    **{f"{sign}int{bits}": 1 for sign in ("", "u") for bits in range(1, 8)},
    **dict.fromkeys(("bits8", "bits1x8", "bits2x4", "bits4x2"), 1),
    "bits16": 2,
}
#: In torch sizes, strides and bytes are signed 64-bit integers.
_LARGEST = (1 << 63) - 1
#: Maximum bytes of a table, which is sent in the body of a frame and takes a second to check.
_LARGEST_TABLE = 15 << 20
#: Characters of foreign text in errors.
_SHOWN = 200

_tables = msgspec.msgpack.Decoder(TensorTable)


def check_versions(header: RecordHeader, here: Mapping[str, str]) -> None:
    """Check that processes of this environment can rebuild a record.

    :param here: the versions of this environment, by the header's fields.
    :raises RecordError: if its skeleton was made with other versions.
    """
    names = {"python": "Python", "torch": "torch", "shared_rpc": "shared-rpc"}
    for field, name in names.items():
        theirs, ours = getattr(header, field)[:_SHOWN], here[field]
        if theirs != ours:
            raise RecordError(
                f"the record of {header.endpoint[:_SHOWN]}() was made with {name} {theirs or '(none)'}, and this server runs "
                f"{name} {ours or '(none)'}: its pickle may be incompatible. Use one version, or build the object here",
                reason="version",
            )


def called(header: RecordHeader, spec: EndpointSpec, call: tuple[Sequence[object], dict[str, object]] | None) -> str:
    """Return the cache key for a record.

    :param spec: the endpoint's spec.
    :param call: the arguments of the call; None for the exported call.
    :raises ConfigurationError: if the call is not cached, and so has no key.
    :raises RecordError: if the endpoint is the exported one, and its code differs.
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
            f"the record has the cache key {str(header.cache_key)[:_SHOWN]!r}, which is not one of endpoint {spec.name!r}: "
            f"name the endpoint and the arguments under which it is to be cached",
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
    """Check that a record of an endpoint was built by the code that the endpoint has here.

    :raises RecordError: if the code differs.
    """
    if spec.name == header.endpoint and spec.fingerprint != header.fingerprint:
        raise RecordError(
            f"the code of endpoint {spec.name!r} has changed since the record was built: it had fingerprint "
            f"{header.fingerprint[:_SHOWN] or '(unknown)'}, and has {spec.fingerprint or '(none)'}. Build the object again",
            reason="code",
        )


def homes(header: RecordHeader, table: TensorTable, device: str) -> dict[str, str]:
    """Map each device of a record to the device of this server that replaces it.

    :param table: its decoded table.
    :param device: the id of the server's device.
    :raises RecordError: if the record needs a device of another kind.
    """
    kinds = ["cpu" if name == "cpu" else "gpu" for name in (header.device, device)]
    if kinds[0] != kinds[1]:
        raise RecordError(
            f"the record is on {header.device[:_SHOWN]}, and this server has its results on {device}: build the object for "
            f"each kind of device",
            reason="device",
        )
    gpus = {name for name in (*(info.device for info in header.segments), *table.devices, header.device) if name != "cpu"}
    # The GPUs of one record are distinguished by their ids, which no other host shares.
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


def check_table(header: RecordHeader) -> TensorTable:
    """Check that a table stays within the segments of its record, and each tensor within its storage; return it.

    :raises RecordError: naming the first invalid entry.
    """
    table = _decoded(header)
    segments, sizes = header.segments, [info.nbytes for info in header.segments]
    for number, info in enumerate(segments):
        _require(0 < info.nbytes <= _LARGEST, f"segment {number} has {info.nbytes} bytes")
        host = info.device == "cpu"
        _require(host == (info.mechanism == "memfd"), f"segment {number} on {info.device[:40]} is of {info.mechanism!r} memory")
        _require(host or info.access != "copy", f"segment {number} on {info.device[:40]} is marked copy-on-write")
    _require(
        0 <= header.nbytes <= sum(sizes) and 0 <= header.private_nbytes <= sum(sizes) + len(header.skeleton),
        f"it announces {header.nbytes} shared and {header.private_nbytes} private bytes in segments of {sum(sizes)}",
    )
    # There may be a hundred thousand, most of them alike: only invalid entries are described.
    for number, storage in enumerate(table.storages):
        if not _fits_storage(storage, segments, len(table.devices)):
            _require(False, f"storage {number} ({storage}) leaves its segment")
    reach, spaces = functools.cache(_reach), [storage.nbytes for storage in table.storages]
    for number, tensor in enumerate(table.tensors):
        needed = reach(tensor.dtype, tensor.offset, tensor.shape, tensor.strides)
        if not 0 <= tensor.storage < len(spaces) or not 0 <= needed <= spaces[tensor.storage]:
            _require(False, f"tensor {number} ({str(tensor)[:_SHOWN]}) leaves its storage")
    used = {storage.segment for storage in table.storages}
    for number, buffer in enumerate(table.buffers):
        _require(_fits_buffer(buffer, segments), f"buffer {number} ({buffer}) leaves its segment")
        _require(buffer.segment not in used, f"buffer {number} lies in a segment with tensors, number {buffer.segment}")
    return table


def without_slabs(
    table: bytes | msgspec.Raw, segments: Sequence[SegmentInfo]
) -> tuple[bytes, tuple[SegmentInfo, ...], dict[int, SlabPart]]:
    """Return a record's table and segments with each slab replaced by the used part of it; and these parts, by number.

    A part extends from the first to the last byte that the record uses.
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


def _reach(dtype: str, offset: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> int:
    """Return the bytes from the beginning of a storage to the end of a tensor in it; -1 if there is no such tensor."""
    size = _SIZES.get(dtype)
    if size is None or len(shape) != len(strides):
        return -1
    if min(offset, *shape, *strides, 0) < 0 or max(offset, *strides, 0) > _LARGEST:
        return -1
    if math.prod([max(count, 1) for count in shape]) * size > _LARGEST:
        return -1
    if 0 in shape:
        return 0
    return (offset + sum([(count - 1) * stride for count, stride in zip(shape, strides, strict=True)]) + 1) * size


def _fits_buffer(entry: BufferEntry, segments: Sequence[SegmentInfo]) -> bool:
    return (
        0 <= entry.segment < len(segments)
        and segments[entry.segment].mechanism == "memfd"
        and segments[entry.segment].access in ("copy", "read")
        and entry.nbytes >= 0
        and 0 <= entry.offset <= segments[entry.segment].nbytes - entry.nbytes
    )


def accesses(header: RecordHeader, access: Access) -> list[Access]:
    """Return the access mode of each segment's mapping here.

    :param access: that of the endpoint which adopts the record: a segment is read-only if either side shares it for reading.
    """
    return ["read" if access == "read" and info.access == "read_write" else info.access for info in header.segments]


def moved(header: RecordHeader, table: TensorTable, places: dict[str, str]) -> tuple[bytes, bytes]:
    """Return the skeleton and the table of a record with its devices replaced, see :func:`homes`."""
    skeleton = header.skeleton
    for name, place in places.items():
        # A pickle names a GPU by its id, which has the same length everywhere: the pickle stays well-formed.
        if name != place and len(name) == len(place):
            skeleton = skeleton.replace(name.encode(), place.encode())
    devices = tuple(places.get(name, name) for name in table.devices)
    if devices == table.devices:
        return skeleton, header.table
    return skeleton, msgspec.msgpack.encode(msgspec.structs.replace(table, devices=devices))
