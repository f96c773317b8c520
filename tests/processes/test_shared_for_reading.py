"""Memory that is shared with access="read" although a process had write access before."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
import torch

from shared_rpc.codec.storages import whole_tensor
from shared_rpc.errors import CapabilityError
from shared_rpc.memory.backends.host import HOST
from shared_rpc.memory.mapping import MAPPINGS
from shared_rpc.memory.records import Record
from shared_rpc.memory.segments import Segment
from shared_rpc.protocol.records import Access

NBYTES = 8192


@pytest.fixture
def device() -> str:
    """Host memory: a GPU's has no seals."""
    return "cpu"


@pytest.fixture
def received(no_leaks: None) -> Iterator[Callable[..., tuple[Segment, torch.Tensor]]]:
    """``received(access, owner)`` is memory of another process, announced with that access, and a tensor over it here."""
    with ExitStack() as stack:

        def received(access: Access = "read_write", owner: str = "") -> tuple[Segment, torch.Tensor]:
            made = stack.enter_context(HOST.create(NBYTES))
            segment = stack.enter_context(made.duplicate(access))
            with MAPPINGS.attach([segment], keep=True, owner=owner) as [mapping]:
                return segment, whole_tensor(mapping, NBYTES)

        yield received


@pytest.mark.parametrize("access", ["read_write", "read"])
def test_memory_of_a_caller_is_copied(
    received: Callable[..., tuple[Segment, torch.Tensor]], published: Callable[..., Record], access: Access
) -> None:
    """Whatever access the caller announced, it can still write to it: readers get other, sealed memory."""
    segment, tensor = received(access)
    (shared,) = published(tensor, "read").segments
    os.pwrite(segment.fileno(), b"changed", 0)
    assert os.pread(shared.fileno(), 7, 0) == bytes(7)
    with pytest.raises(CapabilityError, match="shared read-only"):
        HOST.map(shared.fileno(), NBYTES, "read_write")


@pytest.mark.parametrize(
    ("access", "owner", "shared_as"), [("read_write", "", "read_write"), ("read", "a server", "read")], ids=["write", "read"]
)
def test_other_memory_is_not_copied(
    received: Callable[..., tuple[Segment, torch.Tensor]],
    published: Callable[..., Record],
    access: Access,
    owner: str,
    shared_as: Access,
) -> None:
    """Memory shared for writing, and memory already sealed by a server, such as another one's result returned by a worker."""
    segment, tensor = received(access, owner)
    (shared,) = published(tensor, shared_as).segments
    assert os.path.samestat(os.fstat(shared.fileno()), os.fstat(segment.fileno()))


def test_clients_cannot_seal_writable_memory(published: Callable[..., Record]) -> None:
    """A seal would keep every later client from mapping the memory as shared."""
    with pytest.raises(PermissionError):
        HOST.seal(published(torch.zeros(NBYTES)).segments[0].fileno())
