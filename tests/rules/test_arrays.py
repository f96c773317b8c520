"""Arrays in results with tensors: they are in shared memory, copied on the first write; copies in each process are counted."""

from __future__ import annotations

import gc
import pickle
from collections.abc import Callable
from contextlib import closing
from typing import Any

import msgspec
import numpy
import pytest
import torch
from torch import nn

from shared_rpc.codec.results import decode_result, publish
from shared_rpc.errors import CapabilityError, CodecError
from shared_rpc.memory.backends.host import HOST
from shared_rpc.memory.mapping import MAPPINGS
from shared_rpc.memory.records import Record
from shared_rpc.protocol.records import BufferEntry, TensorTable
from tests.kit.models import LARGE_ARRAY as LARGE
from tests.kit.models import arrays_of, beside_a_tensor

Rebuilt = Callable[..., Any]


@pytest.mark.parametrize(
    "make",
    [
        lambda: numpy.arange(LARGE, dtype=numpy.float64),
        lambda: numpy.asfortranarray(numpy.arange(LARGE).reshape(512, -1)),
        lambda: numpy.zeros(LARGE // 8, dtype=[("x", "i4"), ("y", "f8")]),
        lambda: numpy.array(["text", "and more"] * 10000),
        lambda: numpy.array([1, "text", None] * 10000, dtype=object),
        lambda: numpy.ma.masked_array(numpy.ones(LARGE), mask=numpy.arange(LARGE) % 2),
        lambda: numpy.ones(3),
    ],
    ids=[
        *("floats", "Fortran order", "records", "text", "objects", "masked", "small"),
    ],
)
def test_arrays_round_trip(device: str, rebuilt: Rebuilt, make: Callable[[], Any]) -> None:
    """Class, dtype, shape, order and elements, and writability, as with pickle."""
    array = make()
    expected = pickle.loads(pickle.dumps(array, protocol=5))
    (result,) = arrays_of(rebuilt(beside_a_tensor(device, array)))
    assert (type(result), result.dtype, result.shape, result.strides) == (
        *(type(expected), expected.dtype, expected.shape, expected.strides),
    )
    assert result.flags.writeable == expected.flags.writeable
    assert (numpy.ma.getmaskarray(result) == numpy.ma.getmaskarray(expected)).all()
    assert (result == expected).all()


def test_each_rebuilt_object_has_its_own_writes(device: str, published: Callable[..., Record]) -> None:
    """Two objects rebuilt from one record in one process do not see each other's writes, like copies."""
    record = published(beside_a_tensor(device, numpy.zeros(LARGE)))
    one, other = (arrays_of(decode_result(record.skeleton, record.table, record.segments))[0] for _ in range(2))
    one[0] = 1
    later = arrays_of(decode_result(record.skeleton, record.table, record.segments))[0]
    assert (one[0], other[0], later[0]) == (1, 0, 0)


def test_read_only_arrays_cannot_be_made_writable(device: str, rebuilt: Rebuilt) -> None:
    """With ``access="read"``."""
    (result,) = arrays_of(rebuilt(beside_a_tensor(device, numpy.arange(LARGE)), "read"))
    assert (result == numpy.arange(LARGE)).all()
    with pytest.raises(ValueError, match="read-only"):
        result[0] = 1
    with pytest.raises(ValueError, match="cannot set WRITEABLE flag"):
        result.setflags(write=True)


@pytest.mark.parametrize("access", ["read_write", "read"])
def test_the_segment_of_arrays_is_sealed(device: str, published: Callable[..., Record], access: str) -> None:
    """The kernel refuses a mapping through which others would see a write."""
    record = published(beside_a_tensor(device, numpy.arange(LARGE)), access)
    segment = record.segments[-1]
    with pytest.raises(CapabilityError, match="shared read-only"):
        HOST.map(segment.fileno(), segment.info.nbytes, "read_write")


def test_memory_lives_as_long_as_an_array_over_it(device: str, published: Callable[..., Record]) -> None:
    """A view of an array keeps the mapping after the ends of the object, the record and the first array."""
    gc.collect()
    MAPPINGS.drain()
    before = len(MAPPINGS)
    record = published(beside_a_tensor(device, numpy.arange(LARGE)))
    view = arrays_of(decode_result(record.skeleton, record.table, record.segments))[0][5:7]
    record.close()
    gc.collect()
    MAPPINGS.drain()
    assert (view.tolist(), len(MAPPINGS)) == ([5, 6], before + 1)
    del view
    MAPPINGS.drain()
    assert len(MAPPINGS) == before


def test_sizes_count_shared_and_copied_bytes(device: str, published: Callable[..., Record]) -> None:
    """``nbytes`` is shared, including arrays; ``private_nbytes`` is copied by each process: small arrays, and objects."""
    alone = published(beside_a_tensor(device))
    array = numpy.arange(LARGE)
    shared = published(beside_a_tensor(device, array))
    assert shared.nbytes == alone.nbytes + array.nbytes
    assert alone.private_nbytes < shared.private_nbytes < alone.private_nbytes + 500
    private = published(beside_a_tensor(device, *(numpy.zeros(100) for _ in range(100)), numpy.array([b"x" * LARGE], object)))
    assert private.nbytes == alone.nbytes
    assert private.private_nbytes > 100 * 800 + LARGE


@pytest.mark.parametrize("entry", [BufferEntry(0, 8192, 1), BufferEntry(0, -1, 5), BufferEntry(3, 0, 5), BufferEntry(-1, 0, 5)])
def test_buffers_outside_their_segment_are_refused(no_leaks: None, entry: BufferEntry) -> None:
    """A table that does not fit its segments is refused."""
    with closing(HOST.create(8192)) as segment:
        table = msgspec.msgpack.encode(TensorTable(buffers=(entry,)))
        with pytest.raises(CodecError, match="is not within its segment"):
            decode_result(pickle.dumps(None), table, [segment])


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")
def test_packed_weights_count_as_copies(no_leaks: None) -> None:
    """Each process packs the weights for its processor again."""
    module = torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(256, 256)), {nn.Linear}, dtype=torch.qint8)
    with closing(publish({"module": module, "tensor": torch.zeros(10)}, "cpu", "read_write", "load")) as record:
        assert record.nbytes == 40
        assert record.private_nbytes > 256 * 256
        result = decode_result(record.skeleton, record.table, record.segments)
    x = torch.randn(2, 256, generator=torch.Generator().manual_seed(0))
    assert torch.equal(result["module"](x), module(x))
