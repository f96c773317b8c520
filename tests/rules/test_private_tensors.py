"""The part of a result that is shared where only parameters are, and the copies of the rest."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import numpy
import pytest
import torch
from torch import nn

from shared_rpc.codec import storages
from shared_rpc.codec.payload import check_result
from shared_rpc.codec.results import decode_result, publish
from shared_rpc.codec.tensors import read_table
from shared_rpc.errors import CapabilityError, CodecError
from shared_rpc.memory.backends.host import HOST
from shared_rpc.memory.records import Record
from shared_rpc.protocol.records import StorageEntry
from tests.kit.interpreter import bits
from tests.kit.models import Everything, Scaled, State, Tied

Published = Callable[..., Record]
#: The tensors of a value, by the names of their places.
Tensors = dict[str, torch.Tensor]


def attach(record: Record) -> Any:
    """Return the value as another process would get it."""
    return decode_result(record.skeleton, record.table, record.segments)


def digests(tensors: Tensors) -> dict[str, str]:
    """Return the digest of each tensor's bits."""
    return {place: bits(tensor) for place, tensor in tensors.items()}


def everything(device: str) -> tuple[Any, Callable[[Any], Tensors], set[str]]:
    """A value with tensors in every place, one of them a parameter."""
    return Everything(device), Everything.tensors, {"parameter"}


def tied(device: str) -> tuple[Any, Callable[[Any], Tensors], set[str]]:
    """A weight in two places, a view of it as a buffer, and another buffer."""
    model = Tied(device)
    model.register_buffer("row", model.embed.weight.detach()[2])
    model.register_buffer("mean", torch.ones(4, device=device))
    return (
        model,
        lambda one: {"embed": one.embed.weight, "head": one.head.weight, "row": one.row, "mean": one.mean},
        {"embed", "head", "row"},
    )


def wrappers(device: str) -> tuple[Any, Callable[[Any], Tensors], set[str]]:
    """Wrapper subclasses like those of quantisation libraries, as a parameter and as a buffer, one nested in the other."""

    def scaled(value: float) -> Scaled:
        return Scaled(torch.full((3,), value, device=device), torch.ones(3, device=device))

    model = nn.Module()
    model.weight = nn.Parameter(scaled(1), requires_grad=False)
    model.nested = nn.Parameter(Scaled(scaled(2), torch.ones(3, device=device)), requires_grad=False)
    model.register_buffer("scale", scaled(3))
    return (
        model,
        lambda one: {
            "values": one.weight.values_,
            "scale": one.weight.scale,
            "nested": one.nested.values_.values_,
            "buffer values": one.scale.values_,
            "buffer scale": one.scale.scale,
        },
        {"values", "scale", "nested"},
    )


def overlapping(device: str) -> tuple[Any, Callable[[Any], Tensors], set[str]]:
    """Overlapping storages: one without a byte of a parameter is private, and two share one copy."""
    if device == "cpu":
        first, second = torch.from_numpy(numpy.zeros(64, numpy.float32)), torch.from_numpy(numpy.ones(64, numpy.float32))
        ones, twos = (torch.from_numpy(tensor.numpy()[3:40]) for tensor in (first, second))
    else:
        first, second = torch.zeros(64, device=device), torch.ones(64, device=device)
        ones, twos = first[3:40], second[3:40]
    value = [nn.Parameter(first), ones, second, twos]
    return (
        value,
        lambda one: {"parameter": one[0], "over it": one[1], "tensor": one[2], "over that": one[3]},
        {"parameter", "over it"},
    )


CASES = [everything, tied, wrappers, overlapping]


@pytest.mark.parametrize("case", CASES)
def test_parameters_are_shared_and_other_tensors_are_copied(
    device: str, published: Published, case: Callable[..., Any]
) -> None:
    """The memory of parameters is at one address for all; everything else has one more copy, with the same bits."""
    value, tensors_of, shared = case(device)
    before = digests(tensors_of(value))
    record = published(value, tensors="parameters")
    own, (one, other) = tensors_of(value), (tensors_of(attach(record)) for _ in range(2))
    assert before == digests(own) == digests(one) == digests(other)
    lies = {place: len({tensors[place].data_ptr() for tensors in (own, one, other)}) for place in own}
    assert lies == {place: 1 if place in shared else 3 for place in own}


@pytest.mark.parametrize("case", CASES)
def test_writes_to_private_tensors_are_private(device: str, published: Published, case: Callable[..., Any]) -> None:
    """Neither the endpoint's own object nor present or later attached ones see them."""
    value, tensors_of, shared = case(device)
    before = digests(tensors_of(value))
    record = published(value, "read", tensors="parameters")
    one, other = attach(record), attach(record)
    distinct = {tensor.untyped_storage()._cdata: tensor for place, tensor in tensors_of(one).items() if place not in shared}
    for tensor in distinct.values():
        torch.empty(0, dtype=torch.uint8, device=device).set_(tensor.untyped_storage()).fill_(0x11)
    later = attach(record)
    after = digests(tensors_of(one))
    assert {place for place in after if after[place] == before[place]} == shared
    assert before == digests(tensors_of(value)) == digests(tensors_of(other)) == digests(tensors_of(later))


# Memory.


@pytest.mark.parametrize("access", ["read_write", "read"])
@pytest.mark.parametrize("device", ["cpu"], indirect=True)
def test_the_segment_of_private_tensors_is_sealed(published: Published, access: str) -> None:
    """On the host, whatever the others' access."""
    record = published(nn.BatchNorm1d(4), access, tensors="parameters")
    shared, own = record.segments
    assert (shared.info.access, own.info.access) == (access, "private")
    with pytest.raises(CapabilityError, match="shared read-only"):
        HOST.map(own.fileno(), own.info.nbytes, "read_write")


def test_sizes_distinguish_shared_and_private_bytes(device: str, published: Published) -> None:
    """``nbytes`` is shared by all, ``private_nbytes`` copied by each process, as in the local role."""
    model = nn.Sequential(nn.Linear(64, 64, device=device), nn.BatchNorm1d(64, device=device))
    shared = sum(part.nbytes for part in model.parameters())
    private_ = sum(part.nbytes for part in model.buffers())
    assert check_result(model, "endpoint", device, "parameters") == shared
    assert check_result(State(1, dict(model.state_dict(keep_vars=True))), "endpoint", device, "parameters") == shared
    record = published(model, tensors="parameters")
    assert (record.nbytes, record.private_nbytes) == (shared, len(record.skeleton) + private_)
    assert record.device == record.segments[0].info.device


# Failures.


def test_a_lack_of_memory_for_private_tensors_is_reported(
    device: str, published: Published, no_leaks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the size and the device; nothing stays mapped."""
    record = published(torch.ones(1000, device=device), tensors="parameters")

    def full(nbytes: int, device: torch.device) -> Any:
        raise RuntimeError("the allocator has no more")

    monkeypatch.setattr(storages.torch, "UntypedStorage", full)
    with pytest.raises(CapabilityError, match=r"cannot allocate 4000 bytes on .* for private tensors of pid \d+.*has no more"):
        attach(record)


@pytest.mark.parametrize(
    "entry", [StorageEntry(0, (1 << 21) - 6, 16), StorageEntry(0, -16, 16), StorageEntry(0, 16, -16), StorageEntry(7, 0, 16)]
)
def test_private_storages_outside_their_segment_are_refused(device: str, published: Published, entry: StorageEntry) -> None:
    """Before anything is copied."""
    record = published(torch.ones(4, device=device), tensors="parameters")
    table = msgspec.structs.replace(read_table(record.table), storages=(entry,))
    with pytest.raises(CodecError, match=r"is not within its segment|does not fit"):
        decode_result(record.skeleton, msgspec.msgpack.encode(table), record.segments)


@pytest.mark.gpu
def test_attaching_during_a_capture_is_refused() -> None:
    """The copy would be part of the graph, at each replay; the capture continues."""
    record = publish(nn.BatchNorm1d(4, device="cuda"), "cuda", "read", "endpoint", tensors="parameters")
    x = torch.ones(4, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        with pytest.raises(CapabilityError, match=r"cannot be captured into a CUDA graph: attach the object before"):
            attach(record)
        doubled = x * 2
    graph.replay()
    assert doubled.tolist() == [2] * 4
    record.close()
