"""Records from outside: admitted ones can be rebuilt by any process, and all others are refused."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import hypothesis
import msgspec
import pytest
from hypothesis import strategies as st

from shared_rpc.codec.tensors import tensors_of
from shared_rpc.errors import CodecError, RecordError
from shared_rpc.memory.chunk_references import ChunkReferences
from shared_rpc.memory.mapping import MAPPINGS, Mapping
from shared_rpc.memory.pool import Pool, PoolOptions
from shared_rpc.protocol.exported import FORMAT, RecordHeader
from shared_rpc.protocol.records import BufferEntry, SegmentInfo, StorageEntry, TensorEntry, TensorTable
from shared_rpc.protocol.specs import EndpointSpec, Parameter
from shared_rpc.server.state.records import (
    accesses,
    called,
    check_table,
    check_versions,
    homes,
    moved,
)

GPU = "GPU-01234567-89ab-cdef-0123-456789abcdef"
OTHER_GPU = "GPU-fedcba98-7654-3210-fedc-ba9876543210"
PAGE = 4096

GOOD = TensorTable(
    ("cpu",),
    (StorageEntry(0, 0, 64), StorageEntry(0, 64, PAGE - 64), StorageEntry(-1, 0, 0)),
    (
        TensorEntry(0, "float32", 0, (4, 4), (4, 1)),
        TensorEntry(0, "float32", 1, (3, 4), (1, 4)),
        TensorEntry(1, "int8", 0, (PAGE - 64,), (1,)),
        TensorEntry(1, "uint8", 0, (1 << 40,), (0,)),
        TensorEntry(2, "bfloat16", 0, (0, 5), (5, 1)),
        TensorEntry(0, "float64", 7, (), ()),
    ),
    (BufferEntry(1, 16, 100),),
)


def header(table: TensorTable = GOOD, **fields: Any) -> RecordHeader:
    """Return a record with a segment for tensors and one for a buffer."""
    whole: dict[str, Any] = {
        "format": FORMAT,
        "endpoint": "load",
        "cache_key": "load(size=3)",
        "generation": 1,
        "fingerprint": "code",
        "python": "3.13",
        "torch": "2.9.0",
        "shared_rpc": "0.1.0",
        "device": "cpu",
        "nbytes": 4096,
        "private_nbytes": 10,
        "skeleton": b"a pickle",
        "segments": (SegmentInfo("1", PAGE, "cpu"), SegmentInfo("2", PAGE, "cpu", "copy")),
        **fields,
    }
    return RecordHeader(table=msgspec.msgpack.encode(table), **whole)


def test_valid_records_are_admitted() -> None:
    """With views, overlapping ones, expanded ones, empty ones and scalars."""
    check_table(header())


def _with(place: str, number: int, **fields: Any) -> TensorTable:
    entries = list(getattr(GOOD, place))
    entries[number] = msgspec.structs.replace(entries[number], **fields)
    return msgspec.structs.replace(GOOD, **{place: tuple(entries)})


@pytest.mark.parametrize(
    ("place", "fields"),
    [
        ("storage", {"nbytes": PAGE - 63}),
        ("storage", {"offset": -4}),
        ("storage", {"segment": 1}),
        ("storage", {"device": 1}),
        ("storage", {"chunk": 3}),
        ("tensor", {"shape": (4, 5)}),
        ("tensor", {"strides": (-4, 1)}),
        ("tensor", {"strides": (1,)}),
        ("tensor", {"shape": (1 << 62, 1 << 62), "strides": (0, 0)}),
        ("tensor", {"dtype": "float64"}),
        ("tensor", {"storage": 3}),
        ("buffer", {"nbytes": PAGE}),
        ("buffer", {"segment": 0}),
    ],
    ids=str,
)
def test_entries_outside_their_memory_are_refused(place: str, fields: dict[str, Any]) -> None:
    """A storage or a buffer outside its segment or in one of the other kind, and a tensor outside its storage."""
    number = 1 if place == "storage" else 0
    table = _with(f"{place}s", number, **fields)
    if place == "storage":
        table = msgspec.structs.replace(table, tensors=())
    with pytest.raises(RecordError, match=rf"{place} {number} .*(leaves its|with tensors)") as caught:
        check_table(header(table))
    assert caught.value.reason == "malformed"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"segments": (SegmentInfo("1", 0, "cpu"), SegmentInfo("2", PAGE, "cpu", "copy"))}, "segment 0 has 0 bytes"),
        ({"segments": (SegmentInfo("1", 1 << 63, "cpu"), SegmentInfo("2", PAGE, "cpu", "copy"))}, "segment 0 has"),
        ({"segments": (SegmentInfo("1", PAGE, "cpu", mechanism="vmm"),)}, "on cpu is of 'vmm' memory"),
        ({"segments": (SegmentInfo("1", PAGE, GPU),)}, "is of 'memfd' memory"),
        ({"segments": (SegmentInfo("1", PAGE, GPU, "copy", "vmm"),)}, "is marked copy-on-write"),
        ({"nbytes": 3 * PAGE}, "announces"),
        ({"private_nbytes": 3 * PAGE}, "announces"),
    ],
)
def test_inconsistent_headers_are_refused(fields: dict[str, Any], message: str) -> None:
    """In segments, sizes, and further facts."""
    with pytest.raises(RecordError, match=message):
        check_table(header(**fields))


def test_undeliverable_records_are_refused() -> None:
    """A table too large for a frame, or more segments than its descriptors, before they are decoded."""
    with pytest.raises(RecordError, match=r"tensor table has 16777216 bytes"):
        check_table(msgspec.structs.replace(header(), table=b"\x94" * (16 << 20)))
    data = header(segments=(SegmentInfo("1", PAGE, "cpu"),) * 1001).to_bytes()
    with pytest.raises(RecordError, match="length <= 1000"):
        RecordHeader.from_bytes(data)


@pytest.mark.parametrize("table", [b"", b"\xc1", b"\x94\x90\x90", b"\x94\x90\x91\x91\xa1a\x90\x90"])
def test_invalid_tables_are_refused(table: bytes) -> None:
    """Bytes of something else."""
    with pytest.raises(RecordError, match="cannot decode the record's tensor table"):
        check_table(msgspec.structs.replace(header(), table=table))


@pytest.fixture(scope="module")
def memory() -> Iterator[list[Mapping]]:
    """Two segments of a page."""
    with MAPPINGS.create(PAGE, "cpu") as one, MAPPINGS.create(PAGE, "cpu") as other:
        yield [one, other]


NUMBERS = st.one_of(
    st.integers(-2, 70), st.sampled_from([PAGE - 1, PAGE, PAGE + 1, (1 << 31) - 1, (1 << 62), (1 << 63) - 1, -(1 << 63)])
)
STORAGES = st.builds(StorageEntry, st.integers(-2, 2), NUMBERS, NUMBERS, st.integers(-1, 1), st.sampled_from([0, 0, 0, 1]))
TENSORS = st.integers(0, 3).flatmap(
    lambda dims: st.builds(
        TensorEntry,
        st.integers(-1, 2),
        st.sampled_from(["float32", "uint8", "complex128", "int4", "bits16", "bool", "quint8", "Tensor"]),
        NUMBERS,
        st.tuples(*[NUMBERS] * dims),
        st.tuples(*[NUMBERS] * dims),
    )
)


@hypothesis.given(st.lists(STORAGES, max_size=2), st.lists(TENSORS, max_size=2))
@hypothesis.settings(suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture])
def test_admitted_tables_stay_within_their_segments(
    memory: list[Mapping], storages: list[StorageEntry], tensors: list[TensorEntry]
) -> None:
    """Checked by torch itself, so that building without its checks is safe."""
    table = TensorTable(("cpu",), tuple(storages), tuple(tensors))
    try:
        check_table(header(table, segments=(SegmentInfo("1", PAGE, "cpu"), SegmentInfo("2", PAGE, "cpu")), nbytes=0))
    except RecordError:
        return
    rebuilt, _ = tensors_of(table, memory, {}, trusted=False)
    for entry, tensor in zip(tensors, rebuilt, strict=True):
        assert tuple(tensor.shape) == entry.shape
        if tensor.numel():
            start = tensor.data_ptr()
            base = memory[storages[entry.storage].segment].address
            assert base <= start < base + PAGE


@pytest.mark.parametrize(("offset", "nbytes"), [(-8, 8), (8, -8), (PAGE - 8, 16), (PAGE + 8, 0), (0, PAGE + 1)])
def test_storages_outside_of_their_segment_are_refused(memory: list[Mapping], offset: int, nbytes: int) -> None:
    """Also where tensors are taken to fit their storages."""
    tables = [TensorTable(("cpu",), (StorageEntry(0, *place),)) for place in ((offset, nbytes), (0, PAGE), (PAGE, 0))]
    with pytest.raises(CodecError, match=f"a storage of {nbytes} bytes at {offset} is not within its segment of {PAGE} bytes"):
        tensors_of(tables[0], memory, {}, trusted=True)
    assert [tensors_of(table, memory, {})[1][0].nbytes() for table in tables[1:]] == [PAGE, 0]


def test_chunks_without_tensors_are_released() -> None:
    """A chunk stays in use while a storage over it lives; one that came with the table and that nothing lies in does not."""
    with closing(Pool(PoolOptions())) as pool:
        chunks = pool.acquire("cpu", [64, 64])
        assert chunks is not None
        (used, spare), references = chunks, ChunkReferences()
        pooled = {used.number: references, spare.number: references}
        mapping = used.arena.mapping
        places = [StorageEntry(0, used.offset + half, 32, chunk=used.number) for half in (0, 32)]
        _, storages = tensors_of(TensorTable(("cpu",), tuple(places)), [mapping], pooled)
        assert (pooled, references.in_use, references.pop_returned()) == ({}, 1, [spare.number])
        for left in ([], [used.number]):
            storages.pop()
            references.poll()
            assert references.pop_returned() == left


# Versions, calls and places.


@pytest.mark.parametrize("field", ["python", "torch", "shared_rpc"])
def test_each_version_is_checked(field: str) -> None:
    """A skeleton is loaded with the versions that pickled it."""
    here = {"python": "3.13", "torch": "2.9.0", "shared_rpc": "0.1.0"}
    check_versions(header(), here)
    with pytest.raises(RecordError, match=r"was made with .* 1\.1, and this server runs") as caught:
        check_versions(header(**{field: "1.1"}), here)
    assert caught.value.reason == "version"


SPEC = EndpointSpec("load", (Parameter("size", 1, required=True),), fingerprint="code")


def test_records_have_the_key_of_their_call() -> None:
    """The given one, or the exported one."""
    assert called(header(), SPEC, None) == "load(size=3)"
    assert called(header(), SPEC, ((7,), {})) == "load(size=7)"
    assert called(header(cache_key="load:model"), SPEC, None) == "load:model"
    other = msgspec.structs.replace(SPEC, name="other", fingerprint="another")
    assert called(header(), other, ((), {"size": 7})) == "other(size=7)"


def test_changed_code_is_refused() -> None:
    """Of the endpoint that built the record, with or without a given call; a stale object's code is unknown."""
    for fingerprint in ("earlier", ""):
        for call in (None, ((3,), {})):
            with pytest.raises(RecordError, match="'load' has changed") as caught:
                called(header(fingerprint=fingerprint), SPEC, call)
            assert caught.value.reason == "code"


@pytest.mark.parametrize("key", [None, "load", "loader(size=3)"])
def test_keys_of_another_endpoint_are_refused(key: str | None) -> None:
    """Headers are untrusted; callers of another endpoint must not find the record."""
    with pytest.raises(RecordError, match="is not one of endpoint 'load'"):
        called(header(cache_key=key), SPEC, None)


def on_gpu(*gpus: str) -> RecordHeader:
    """Return a record on GPUs, with an empty tensor on the first, and a buffer on the host."""
    table = TensorTable((gpus[0], "cpu"), (StorageEntry(0, 0, 8), StorageEntry(-1, 0, 0)), (), (BufferEntry(len(gpus), 0, 8),))
    segments = (*(SegmentInfo(gpu, PAGE, gpu, mechanism="vmm") for gpu in gpus), SegmentInfo("3", PAGE, "cpu", "copy"))
    return header(table, device=gpus[0], segments=segments, skeleton=b"on " + gpus[0].encode() + b", on cpu")


def test_a_gpu_s_record_moves_to_another_gpu() -> None:
    """For a single GPU, in the skeleton and the table. Host memory stays on the host."""
    record = on_gpu(GPU)
    table = check_table(record)
    places = homes(record, table, OTHER_GPU)
    assert places == {"cpu": "cpu", GPU: OTHER_GPU}
    skeleton, encoded = moved(record, table, places)
    assert skeleton == b"on " + OTHER_GPU.encode() + b", on cpu"
    assert msgspec.msgpack.decode(encoded, type=TensorTable).devices == (OTHER_GPU, "cpu")
    places = homes(record, table, GPU)
    assert places == {"cpu": "cpu", GPU: GPU}
    assert moved(record, table, places) == (record.skeleton, record.table)


@pytest.mark.parametrize(("record", "device"), [(header(), GPU), (on_gpu(GPU), "cpu")])
def test_records_for_another_kind_of_device_are_refused(record: RecordHeader, device: str) -> None:
    """Both are named."""
    with pytest.raises(RecordError, match=f"is on {record.device}, and this server has its results on {device}") as caught:
        homes(record, check_table(record), device)
    assert caught.value.reason == "device"


def test_the_stricter_access_applies() -> None:
    """A read-only endpoint shares an adopted record so too; read-only records stay so."""
    segments = tuple(SegmentInfo(access, PAGE, "cpu", access) for access in ("read_write", "read", "private", "copy"))
    record = header(segments=segments)
    assert accesses(record, "read_write") == ["read_write", "read", "private", "copy"]
    assert accesses(record, "read") == ["read", "read", "private", "copy"]
