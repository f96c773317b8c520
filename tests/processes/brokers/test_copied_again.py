"""Reused host copies: an object that was evicted once is evicted faster from then on."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from shared_rpc.protocol import messages as m
from tests.kit.brokers import BrokerApp
from tests.kit.fake_driver import GPUS
from tests.kit.moving import APP, MovedBuffer
from tests.kit.processes import eventually

NBYTES = 64 << 10


#: The app of a broker with one provider: quotas are of its devices.
@pytest.fixture
def app(broker_app: BrokerApp) -> BrokerApp:
    """The app of a broker whose workers see GPUs made of host memory."""
    broker_app.file.write_text(APP.format(watching=""))
    return broker_app


#: Starts the broker.
Start = Callable[[], object]


@pytest.fixture
def start(app: BrokerApp) -> Start:
    """Starts a broker on a host with much memory."""
    return lambda: app.start_program(app.program(HOST))


def memory_of(pid: int) -> set[int]:
    """Return the inodes of the memory that a process has descriptors of."""
    found = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):
            if os.readlink(link).startswith("/memfd:"):
                found.add(link.stat().st_ino)
    return found


def has(buffer: MovedBuffer, memory: set[int]) -> None:
    """Wait until a broker has exactly this memory."""
    eventually(lambda: memory_of(buffer.pid) == memory, what=f"{memory}")


def copied_once(buffer: MovedBuffer) -> int:
    """Evict and restore a buffer; return the inode of the host memory that it keeps."""
    others = memory_of(buffer.pid) - {buffer.inode}
    assert buffer.moved("evicting to the host") == "host"
    eventually(lambda: len(memory_of(buffer.pid) - others) == 1)
    [copy] = memory_of(buffer.pid) - others
    assert buffer.moved("restoring from the host") == "device"
    return copy


def test_copies_reuse_their_memory(start: Start, app: BrokerApp) -> None:
    """The next eviction copies the writes since; while the object is in use the memory is no valid copy."""
    start()
    buffer = MovedBuffer(app, GPUS[0])
    copy = copied_once(buffer)
    for _ in range(3):
        buffer.write()
        info = buffer.ask(m.GetObjectInfo(buffer.object_id))
        assert isinstance(info, m.Answer) and m.GetObjectInfo.read(info)["copies"] == {}
        assert buffer.is_copied
        assert buffer.moved("evicting to the host") == "host"
        has(buffer, {copy})
        assert buffer.has_its_bytes()
    assert buffer.tier == "device"
    buffer.ask(m.FreeBuffer(buffer.object_id))
    has(buffer, set())


@pytest.fixture
def held(app: BrokerApp, tmp_path: Path) -> Iterator[Path]:
    """A file that keeps workers from reporting completed copies."""
    path = tmp_path / "held"
    yield path
    path.unlink(missing_ok=True)


def test_reused_memory_is_invalid_while_it_is_written(start: Start, app: BrokerApp, held: Path) -> None:
    """Even if it was a good copy before: here the eviction was refused after the bytes were copied."""
    app.file.write_text(APP.format(watching=HELD.format(held=str(held))))
    start()
    buffer = MovedBuffer(app, GPUS[0])

    def copies() -> dict[str, int]:
        reply = buffer.ask(m.GetObjectInfo(buffer.object_id))
        assert isinstance(reply, m.Answer)
        return dict(m.GetObjectInfo.read(reply)["copies"])

    def copying() -> None:
        eventually(Path(f"{held}-reached").exists, 50.0)
        Path(f"{held}-reached").unlink()

    with buffer.session() as user:
        user.say(m.GetBuffer(buffer.object_id))
        found = user.heard()
        assert isinstance(found, m.Result)
        user.suspend(buffer.object_id)
        held.touch()
        with buffer.move("evicting to the host") as session:
            copying()
            # Another object, in use, over the same memory.
            other = user.ask(m.KeepSegments([found.segments[0].id]))
            assert isinstance(other, m.Result)
            held.unlink()
            assert isinstance(session.heard(), m.Error)
        assert copies() == {"host": NBYTES}
        assert user.ask(m.Release([other.object_id])) == m.Count(1)
    buffer.write()
    held.touch()
    with buffer.move("evicting to the host") as session:
        copying()
        assert copies() == {}
        held.unlink()
        assert isinstance(session.heard(), m.Answer)
    assert buffer.has_its_bytes()


def test_reused_memory_is_freed_with_a_move_to_a_file(app: BrokerApp, tmp_path: Path) -> None:
    """Host memory is scarce then."""
    app.start_program(app.program(HOST, spill_dir=str(tmp_path)))
    buffer = MovedBuffer(app, GPUS[0])
    copied_once(buffer)
    buffer.write()
    assert buffer.moved("evicting to a file") == "file"
    has(buffer, set())
    assert buffer.has_its_bytes()
    assert not buffer.is_copied


def test_a_failed_copy_frees_the_memory(start: Start, app: BrokerApp) -> None:
    """A pending writer may still write to it: the memory is freed, and the object stays in place."""
    app.file.write_text(APP.format(watching=FAILING))
    start()
    buffer = MovedBuffer(app, GPUS[0])
    copied_once(buffer)
    buffer.write()
    with buffer.move("evicting to the host") as session:
        reply = session.heard()
    assert isinstance(reply, m.Error) and "the third copy fails" in reply.text, reply
    eventually(lambda: len(memory_of(buffer.pid)) == 1)
    assert buffer.tier == "device" and not buffer.is_copied
    assert buffer.moved("evicting to the host") == "host"
    assert buffer.has_its_bytes()


#: Code of a worker that has copied, and does not report it while a file exists.
HELD = """
import os, time
from shared_rpc.memory.gpu_copies import GpuCopies
copy = GpuCopies.copy
def holding(*arguments):
    made = copy(*arguments)
    if os.path.exists({held!r}):
        open({held!r} + "-reached", "w").close()
    while os.path.exists({held!r}):
        time.sleep(0.01)
    return made
GpuCopies.copy = holding
"""
#: Code of a broker whose host has much free memory, except while a file exists.
#: Code of a broker whose host has much free memory.
HOST = """
from shared_rpc.execution import device_memory
device_memory.free_bytes = lambda device: 1 << 50
"""
#: Code of a worker whose third copy fails: the first one makes the memory, the second one restores.
FAILING = """
from shared_rpc.errors import CapabilityError
from shared_rpc.memory.gpu_copies import GpuCopies
copy, numbers = GpuCopies.copy, iter(range(9))
def failing(*arguments):
    made = copy(*arguments)
    if next(numbers) == 2:
        for one in made:
            one.segment.close()
        raise CapabilityError("the third copy fails")
    return made
GpuCopies.copy = failing
"""
