"""Publishing moves memory: the maker's object and what clients map are one, the originals are freed, nothing moves twice."""

from __future__ import annotations

import functools
import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from typing import Any

import pytest
import torch
from torch import nn

from shared_rpc.codec import placement
from shared_rpc.codec.arguments import decode_arguments, encode_arguments
from shared_rpc.codec.results import decode_result, publish
from shared_rpc.codec.tensors import read_table
from shared_rpc.errors import CapabilityError
from shared_rpc.memory import mapping as mapping_module
from shared_rpc.memory.backends.host import HOST, MemfdBackend
from shared_rpc.memory.chunk_references import ChunkReferences
from shared_rpc.memory.layout import pack
from shared_rpc.memory.mapping import MAPPINGS
from shared_rpc.memory.pool import Pool, PoolOptions
from shared_rpc.memory.records import Record
from shared_rpc.memory.segments import Segment
from tests.kit.models import Everything, Tied
from tests.kit.processes import python
from tests.kit.world import at_once

Rebuilt = Callable[..., Any]
Published = Callable[..., Record]

GIB = 1 << 30


@pytest.fixture
def small_segments(monkeypatch: pytest.MonkeyPatch) -> int:
    """Segments of 4 KiB at most, so that few bytes need many."""
    monkeypatch.setattr(placement, "pack", functools.partial(pack, limit=4096))
    return 4096


def ids(record: Record) -> list[str]:
    """Return the segments of a record."""
    return [segment.info.id for segment in record.segments]


# One memory.


def test_inference_tensors_are_shared(device: str, rebuilt: Rebuilt) -> None:
    """Like any others; clients have ordinary ones, outside of that mode."""
    with torch.inference_mode():
        base = torch.zeros(4, device=device)
        value = [base, base[1:]]
        theirs = rebuilt(value)
    assert not theirs[0].is_inference()
    theirs[0].add_(5)
    assert all(tensor.is_inference() for tensor in value)
    assert [tensor.tolist() for tensor in value] == [[5, 5, 5, 5], [5, 5, 5]]


# The originals.


@pytest.mark.parametrize("make", [Everything, Tied, lambda device: torch.eye(4, device=device).to_sparse()])
def test_originals_are_freed(device: str, published: Published, make: Callable[[str], Any]) -> None:
    """Neither the value nor the record nor the codec keeps the copied memory."""
    value = make(device)
    tensors = [value._values(), value._indices()] if isinstance(value, torch.Tensor) else _state(value)
    gone = [weakref.ref(tensor.untyped_storage()) for tensor in tensors]
    del tensors
    record = published(value)
    gc.collect()
    assert record.nbytes > 0
    assert [reference() for reference in gone] == [None] * len(gone)


def _state(module: nn.Module) -> list[torch.Tensor]:
    return [*module.parameters(), *module.buffers()]


def test_originals_are_freed_before_the_next_segment(
    no_leaks: None, small_segments: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The extra memory is one segment."""
    value = [torch.ones(1000) for _ in range(3)]
    originals = [weakref.ref(tensor.untyped_storage()) for tensor in value]
    alive: list[int] = []

    class Watching(MemfdBackend):
        def create(self, nbytes: int) -> Segment:
            alive.append(sum(original() is not None for original in originals))
            return super().create(nbytes)

    watching = Watching()
    monkeypatch.setattr(mapping_module, "backend_for", lambda device, mechanism=None: watching)
    publish(value, "cpu", "read_write", "endpoint").close()
    assert alive == [3, 2, 1]


# Values in segments already.


def test_a_part_of_a_published_value_is_not_copied(device: str, published: Published) -> None:
    """An endpoint that returns a submodule of another one's result shares the same segment."""
    model = nn.Sequential(nn.Linear(2, 2, device=device), Tied(device))
    whole, part, view = published(model), published(model[1]), published(model[0].weight.detach()[1:])
    assert len(ids(whole)) == 1
    assert ids(part) == ids(view) == ids(whole)
    assert part.nbytes == 7 * 4 * 4


def test_a_returned_argument_is_not_copied(device: str, no_leaks: None) -> None:
    """The caller's segment is returned."""
    with closing(encode_arguments([torch.ones(3, device=device)], {}, device)) as arguments:
        ([received], _), sent = decode_arguments(arguments), arguments.segments[0].info.id
    with closing(publish(received, device, "read_write", "echo")) as record:
        assert ids(record) == [sent]


@pytest.mark.parametrize("alone", [True, False], ids=["one tensor", "several"])
def test_short_lived_results_are_copied_as_arguments(no_leaks: None, alone: bool) -> None:
    """Also for the server whose pool they lie in."""
    references, options = ChunkReferences(), PoolOptions()
    with closing(Pool(options)) as theirs, closing(Pool(options)) as mine:
        with closing(publish(torch.ones(3), "cpu", "read_write", "f", theirs)) as record:
            pooled = dict.fromkeys(record.chunks, references)
            result = decode_result(record.skeleton, record.table, record.segments, "server", pooled)
        with closing(encode_arguments([result] if alone else [result, result[1:]], {}, "cpu", "server", mine)) as arguments:
            assert len(arguments.chunks) == mine.used == 1
            assert [segment.info.id for segment in arguments.segments] != ids(record)
        references.close()


def test_a_sparse_tensor_alone_is_passed_in_a_pool(no_leaks: None) -> None:
    """As an argument and as a result: its indices and values, because it has no bytes of its own."""
    sparse = torch.eye(2).to_sparse()
    with closing(Pool(PoolOptions())) as pool:
        with closing(encode_arguments([sparse], {}, "cpu", "server", pool)) as arguments:
            ([received], _) = decode_arguments(arguments)
        assert received.to_dense().tolist() == [[1, 0], [0, 1]]
        with closing(publish(sparse, "cpu", "read_write", "f", pool)) as record:
            assert record.nbytes > 0


@pytest.fixture
def full_pool() -> Iterator[Pool]:
    """A pool without free memory."""
    with closing(Pool(PoolOptions(initial=4096, limit=4096))) as pool:
        for _ in range(4):
            assert pool.acquire("cpu", [1024]) is not None
        yield pool


@pytest.mark.parametrize("alone", [True, False], ids=["one tensor", "several"])
def test_results_that_a_full_pool_does_not_hold_are_copied_into_segments(no_leaks: None, full_pool: Pool, alone: bool) -> None:
    """The maker's tensor stays its own, as with a result in the pool."""
    tensor = torch.arange(3.0)
    with closing(publish(tensor if alone else [tensor], "cpu", "read_write", "f", full_pool)) as record:
        result = decode_result(record.skeleton, record.table, record.segments)
    assert record.chunks == []
    tensor.zero_()
    assert (result if alone else result[0]).tolist() == [0, 1, 2]


@pytest.mark.parametrize("count", [1, 2])
def test_arguments_that_a_full_pool_does_not_hold_are_copied_into_segments(no_leaks: None, full_pool: Pool, count: int) -> None:
    """The endpoint has them, and writes to none of the caller's."""
    tensor = torch.arange(3.0)
    with closing(encode_arguments([tensor, tensor[1:]][:count], {}, "cpu", "server", full_pool)) as arguments:
        received, _ = decode_arguments(arguments)
    assert (arguments.chunks, len(received)) == ([], count)
    received[0].zero_()
    assert tensor.tolist() == [0, 1, 2]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float64])
def test_arguments_take_their_part_of_a_storage_along(device: str, no_leaks: None, dtype: torch.dtype) -> None:
    """Views of one part are views of one copy, which has few more bytes."""
    base = torch.arange(200, device=device).to(dtype)
    with closing(encode_arguments([base[100:104], base[101:110:2]], {}, device)) as arguments:
        (storage,) = read_table(arguments.table).storages
        one, other = decode_arguments(arguments)[0]
    assert (one.tolist(), other.tolist()) == ([100, 101, 102, 103], [101, 103, 105, 107, 109])
    assert storage.nbytes <= 10 * base.itemsize + 8
    one[1] = 7
    assert other[0] == 7 and base[101] == 101


def test_moved_tensors_keep_their_bits(device: str, published: Published) -> None:
    """The maker's own, after publication: offsets, strides, and what is conjugated or negated when it is read."""
    base = torch.arange(12.0, device=device)
    pairs = torch.view_as_complex(base.view(6, 2))
    value = {"conj": pairs.conj()[1:], "neg": pairs.conj().imag, "strides": base.view(3, 4).t()[1:]}
    before = {name: (tensor.clone(), tensor.stride(), tensor.storage_offset()) for name, tensor in value.items()}
    published(value)
    for name, (expected, *layout) in before.items():
        assert torch.equal(value[name], expected) and [value[name].stride(), value[name].storage_offset()] == layout, name
    assert (value["conj"].is_conj(), value["neg"].is_neg()) == (True, True)
    base.zero_()
    value["strides"].fill_(3)
    assert value["neg"].count_nonzero() > 0


def test_publishing_from_many_threads_moves_once(device: str, published: Published) -> None:
    """Endpoints that return the same module at the same time share the same memory, the module's own."""
    model = nn.Sequential(*(nn.Linear(4, 4, device=device) for _ in range(100)))
    start = threading.Barrier(4)

    def work() -> Record:
        start.wait()
        return publish(model, device, "read_write", "endpoint")

    with ExitStack() as stack:
        records = [stack.enter_context(closing(record)) for record in at_once(*[work] * 4)]
        assert len({tuple(ids(record)) for record in records}) == 1
        theirs = decode_result(records[0].skeleton, records[0].table, records[0].segments)
        assert [p.data_ptr() for p in theirs.parameters()] == [p.data_ptr() for p in model.parameters()]


# Access.


def test_read_access_cannot_be_widened(no_leaks: None) -> None:
    """Host memory that was published read-only stays so, for other endpoints and consumers."""
    value = torch.ones(2)
    with closing(publish(value, "cpu", "read", "a")), closing(publish(value, "cpu", "read_write", "b")) as record:
        assert [segment.info.access for segment in record.segments] == ["read"]
        with pytest.raises(CapabilityError, match="map it with access='read'"):
            HOST.map(record.segments[0].fileno(), record.segments[0].info.nbytes, "read_write")


# Many segments.


@pytest.fixture
def full_device(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Segment]]:
    """A host with memory for only two segments."""
    made: list[Segment] = []

    class Full(MemfdBackend):
        def create(self, nbytes: int) -> Segment:
            if len(made) == 2:
                raise CapabilityError(f"cannot allocate {nbytes} bytes: the device is full")
            made.append(super().create(nbytes))
            return made[-1]

    full = Full()
    monkeypatch.setattr(mapping_module, "backend_for", lambda device, mechanism=None: full)
    yield made


def test_a_device_that_fills_up_leaves_the_value_intact(
    no_leaks: None, warm: None, small_segments: int, full_device: list[Segment], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error has the needed amount; the value keeps every element. The next attempt leaves in place what was moved."""
    value = [torch.full((1000,), number, dtype=torch.float32) for number in range(4)]
    with pytest.raises(CapabilityError, match="cannot allocate 4000 bytes: the device is full"):
        publish(value, "cpu", "read_write", "endpoint")
    assert [tensor.unique().tolist() for tensor in value] == [[0], [1], [2], [3]]
    moved = [segment.info.id for segment in full_device]
    made = full_device[:]
    full_device.clear()
    with closing(publish(value, "cpu", "read_write", "endpoint")) as record:
        assert ids(record)[:2] == moved
        theirs = decode_result(record.skeleton, record.table, record.segments)
    assert [tensor.unique().tolist() for tensor in theirs] == [[0], [1], [2], [3]]
    del theirs
    value.clear()
    gc.collect()
    MAPPINGS.drain()
    assert all(segment.closed for segment in made)


# On a GPU.


#: Publishes 4 GiB in a process with no other allocations; prints free bytes before, at least, then, at last.
PUBLISHING = """
import threading
from contextlib import closing

import torch
from torch import nn

from shared_rpc.codec.results import publish
from shared_rpc.memory.layout import SEGMENT_LIMIT
from shared_rpc.memory.mapping import MAPPINGS
from shared_rpc.memory.pool import Pool, PoolOptions


def linear():
    return nn.Linear(8192, 8192, bias=False, device="cuda", dtype=torch.bfloat16)


def free():
    return torch.cuda.mem_get_info()[0]


publish(linear(), "cuda", "read_write", "endpoint").close()  # what the context loads with the first one
MAPPINGS.drain()
model = nn.Sequential(*(linear() for _ in range(32)))
torch.cuda.synchronize()
torch.cuda.empty_cache()
least = before = free()
done = threading.Event()


def watch():
    global least
    while not done.is_set():
        least = min(least, free())


watcher = threading.Thread(target=watch)
watcher.start()
try:
    record = publish(model, "cuda", "read_write", "endpoint")
finally:
    done.set()
    watcher.join()
with closing(record):
    torch.cuda.empty_cache()
    then = free()
    assert all(segment.info.nbytes <= SEGMENT_LIMIT for segment in record.segments)
del model
MAPPINGS.drain()
print("free", before, least, then, free())
"""


@pytest.mark.whole_gpu
@pytest.mark.gpu
def test_peak_memory_of_publishing_is_bounded() -> None:
    """Publishing 4 GiB needs less than 3 GiB of extra memory at any time, and none in the end."""
    child = python(PUBLISHING)
    before, least, then, last = (int(word) for word in child.expect("free").split()[1:])
    assert before - least < 3 * GIB + 8192 * 8192 * 2
    assert before - then < GIB // 16
    assert last - before > 4 * GIB - GIB // 16
    assert child.close() == (0, "")


@pytest.mark.gpu
def test_publishing_waits_for_other_streams() -> None:
    """A kernel that still runs on another stream when an endpoint returns is waited for."""
    value = torch.zeros(1 << 20, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(500_000_000)  # cycles: some tenths of a second
        value.fill_(7)
    with closing(publish(value, "cuda", "read_write", "endpoint")) as record:
        theirs = decode_result(record.skeleton, record.table, record.segments)
    assert theirs.unique().tolist() == [7]
