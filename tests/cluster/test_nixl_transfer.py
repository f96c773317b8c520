"""One transfer by NIXL between two processes, without Ray: what becomes of it, and what is left of it."""

from __future__ import annotations

import itertools
import os
import pickle
import signal
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("nixl")

from shared_rpc import Client, Handle, Provider, Server
from shared_rpc.client.exported import ExportedRecord
from shared_rpc.cluster import nixl_mover
from shared_rpc.cluster.movers import DamagedPart, MoverFailed, Part
from shared_rpc.cluster.nixl_mover import NixlMover
from tests.kit.processes import Child, eventually, python, sigstop

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # NIXL's own
    pytest.mark.timeout(120),
]

#: Bytes of the record: an odd number of them, in more than one region of those of the tests.
NBYTES = (3 << 20) + 5
WHOLE = Part(0, 0, NBYTES)

#: A process that has an export of a buffer, gives a ticket for a part of it, and closes its end when it is told to.
SOURCE = """
    import pickle, sys
    from shared_rpc import Client
    from shared_rpc.cluster import nixl_mover
    from shared_rpc.cluster.movers import Part
    nixl_mover._REGION = 1 << 20
    client = Client(socket_path={socket!r})
    with client.export({buffer!r}) as record:
        mover = nixl_mover.NixlMover()
        print("ticket", pickle.dumps(mover.give(record, Part(*{part!r}))).hex(), flush=True)
        sys.stdin.readline()
        mover.close()
        print("closed", flush=True)
        sys.stdin.readline()
"""


@pytest.fixture(autouse=True)
def small_regions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regions of 1 MiB, at both ends."""
    monkeypatch.setattr(nixl_mover, "_REGION", 1 << 20)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def client(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Client]:
    """A client of a server of its own."""
    tmp_path.chmod(0o700)
    provider = Provider(str(tmp_path / "s"), device=request.param, execution_mode="server")
    server = Server(provider)
    server.start(blocking=False)
    with Client(str(tmp_path / "s"), device=request.param) as client:
        yield client
    server.stop()


@pytest.fixture
def buffer(client: Client) -> Iterator[Handle[torch.Tensor]]:
    """A buffer with random bits."""
    with client.create_buffer((NBYTES,), "uint8") as buffer:
        buffer.value.copy_(torch.randint(0, 256, (NBYTES,), dtype=torch.uint8))
        yield buffer


@pytest.fixture
def record(client: Client, buffer: Handle[torch.Tensor]) -> Iterator[ExportedRecord]:
    """An export of it."""
    with client.export(buffer) as record:
        yield record


@pytest.fixture
def room(client: Client, record: ExportedRecord) -> Iterator[ExportedRecord]:
    """A room for it."""
    with client.allocate(record.header) as room:
        room.segments[0].tensor().zero_()
        yield room


@pytest.fixture
def mover() -> Iterator[NixlMover]:
    """The receiver's end."""
    mover = NixlMover()
    yield mover
    mover.close()


def bits(record: ExportedRecord) -> torch.Tensor:
    """The bytes of its only segment."""
    return record.segments[0].tensor()[:NBYTES].cpu()


def parts() -> list[Part]:
    """Parts that end within regions, and one that has three of them."""
    cuts = [0, 17, (1 << 20) - 1, (3 << 20) + 1, NBYTES]
    return [Part(0, begin, end - begin) for begin, end in itertools.pairwise(cuts)]


def test_parts_are_read_to_their_places(record: ExportedRecord, room: ExportedRecord, mover: NixlMover) -> None:
    """Every one of them, wherever its regions end, and nothing else is written."""
    source = NixlMover()
    try:
        for part in reversed(parts()):
            mover.take(source.give(record, part), room, part)
            rest = bits(room)[: part.offset]
            assert not rest.any()
    finally:
        source.close()
    assert torch.equal(bits(room), bits(record))


def test_a_part_with_another_digest_is_damaged(record: ExportedRecord, room: ExportedRecord, mover: NixlMover) -> None:
    """Its place is named."""
    source = NixlMover()
    try:
        [part, *_] = parts()
        with pytest.raises(DamagedPart, match=r"17 bytes at 0 of segment 0"):
            mover.take(source.give(record, part)._replace(digest=bytes(16)), room, part)
    finally:
        source.close()


def test_nothing_of_a_transfer_is_left(record: ExportedRecord, room: ExportedRecord) -> None:
    """Neither threads nor descriptors, at either end; a closed mover begins nothing new."""
    found = []
    for _ in range(3):
        source, target = NixlMover(), NixlMover()
        for part in parts():
            target.take(source.give(record, part), room, part)
        source.close()
        target.close()
        with pytest.raises(MoverFailed, match="has ended"):
            source.give(record, WHOLE)
        with pytest.raises(MoverFailed, match="has ended"):
            target.take(None, room, WHOLE)
        found.append([len(os.listdir(f"/proc/self/{what}")) for what in ("task", "fd")])
    assert found[2] == found[1]


def test_memory_stays_until_the_transfer_ends(
    client: Client, buffer: Handle[torch.Tensor], record: ExportedRecord, room: ExportedRecord, mover: NixlMover
) -> None:
    """A ticket may name memory of a record that was closed meanwhile, as a room is that has become an object."""
    source = NixlMover()
    export = client.export(buffer)
    ticket = source.give(export, WHOLE)
    export.close()
    try:
        mover.take(ticket, room, WHOLE)
    finally:
        source.close()
    assert torch.equal(bits(room), bits(record))


@pytest.fixture
def other(client: Client, buffer: Handle[torch.Tensor], monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Child, Any]]:
    """A process with an end of its own, and its ticket. Only TCP is between the two, so that either has to take part."""
    monkeypatch.setenv("UCX_TLS", "tcp,cuda_copy" if buffer.value.is_cuda else "tcp")
    code = SOURCE.format(socket=client.socket_path, buffer=buffer.object_id, part=tuple(WHOLE))
    child = python(code, fresh=True)
    yield child, pickle.loads(bytes.fromhex(child.expect("ticket ").removeprefix("ticket ")))
    child.kill()


def test_another_process_is_read_from(
    other: tuple[Child, Any], record: ExportedRecord, room: ExportedRecord, mover: NixlMover
) -> None:
    """By its ticket alone."""
    mover.take(other[1], room, WHOLE)
    assert torch.equal(bits(room), bits(record))


@pytest.mark.parametrize("end", ["killed", "closed"])
def test_a_source_that_has_ended_is_an_error(
    other: tuple[Child, Any], room: ExportedRecord, mover: NixlMover, end: str
) -> None:
    """Before it was asked for the part; another one is read from afterwards, by the same end."""
    child, ticket = other
    if end == "killed":
        child.process.kill()
        child.process.wait()
    else:
        child.tell("")
        child.expect("closed")
    with pytest.raises(MoverFailed, match="NIXL did not read"):
        mover.take(ticket, room, WHOLE)


def test_a_source_that_is_killed_in_a_transfer_is_an_error(
    other: tuple[Child, Any], room: ExportedRecord, mover: NixlMover, threads: ThreadPoolExecutor
) -> None:
    """It was stopped, and the transfer does not go on; when its connection ends, so does the transfer."""
    child, ticket = other
    sigstop(child.pid)
    taking = threads.submit(mover.take, ticket, room, WHOLE)
    eventually(lambda: is_reading(mover), 20.0, "it reads")
    assert not taking.done()
    child.process.kill()
    with pytest.raises(MoverFailed):
        taking.result(30)


def test_a_transfer_ends_when_its_mover_is_closed(
    other: tuple[Child, Any], room: ExportedRecord, mover: NixlMover, threads: ThreadPoolExecutor
) -> None:
    """The source does not answer, and nobody waits for that; nothing is written once the mover is closed."""
    child, ticket = other
    sigstop(child.pid)
    taking = threads.submit(mover.take, ticket, room, WHOLE)
    eventually(lambda: is_reading(mover), 20.0, "it reads")
    [agent] = (weakref.ref(end._agent.agent) for end in mover._ends.values())
    mover.close()
    with pytest.raises(MoverFailed, match="was ended"):
        taking.result(1)
    assert agent() is None, "what reads ends with NIXL's agent, whoever keeps the exception"
    before = bits(room).clone()
    os.kill(child.pid, signal.SIGCONT)
    child.tell("")
    child.expect("closed")
    assert torch.equal(bits(room), before)


def test_a_part_that_does_not_arrive_in_time_is_an_error(
    other: tuple[Child, Any], room: ExportedRecord, mover: NixlMover, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A source that is stopped does not end by itself."""
    monkeypatch.setattr(nixl_mover, "_PATIENCE", 0.2)
    child, ticket = other
    sigstop(child.pid)
    with pytest.raises(MoverFailed, match=r"did not arrive in 0\.2 s"):
        mover.take(ticket, room, WHOLE)


def is_reading(mover: NixlMover) -> bool:
    """Whether a mover has begun to read."""
    return any(end._using.locked() for end in mover._ends.values())
