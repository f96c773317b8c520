"""Copies of a GPU's memory that workers make for a broker, by CUDA's driver and by one made of host memory."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from pathlib import Path

import anyio
import pytest

from shared_rpc.broker import memory as broker_memory
from shared_rpc.broker import supervisor
from shared_rpc.broker.broker import Broker
from shared_rpc.broker.worker import BARE, WorkerCommand
from shared_rpc.errors import WorkerCrashed
from shared_rpc.memory.backends.choice import backend_for
from shared_rpc.memory.segments import Segment
from shared_rpc.memory.spill import SpillDirectory
from shared_rpc.protocol.options import ServeOptions
from tests.kit import fake_driver
from tests.kit.blocking_memory import BlockingMemory
from tests.kit.brokers import BrokerApp, is_running
from tests.kit.gpu_memory import bytes_of, write
from tests.kit.processes import eventually, links_of, sigstop

Filled = Callable[..., Segment]

MIB = 1 << 20

#: An app that needs no torch, in workers that see GPUs as if it used them.
APP = """
from shared_rpc import Provider
from shared_rpc.memory.devices import devices_of
from shared_rpc.worker import host
host.devices_of = lambda device: devices_of("cuda:0")
provider = Provider(device="cpu")

@provider.share
def nothing():
    pass
"""

#: A worker whose driver is made of host memory, and copies nothing while a file exists.
FAKE = """
import os, time
from tests.kit import fake_driver
fake_driver.install()
from cuda.bindings import driver
copy = driver.cuMemcpyAsync

def cuMemcpyAsync(*arguments):
    while os.path.exists({held!r}):
        time.sleep(0.005)
    return copy(*arguments)

driver.cuMemcpyAsync = cuMemcpyAsync
"""


class Copier:
    """A broker in this process, its workers, and the memory that they manage for it."""

    def __init__(self, broker: Broker) -> None:
        self.broker = broker
        [service] = broker._services.values()
        self.memory = BlockingMemory(service.core.state.memory, broker._loop)

    @property
    def workers(self) -> list[int]:
        """The process ids of the workers that are ready."""
        return [worker.pid for worker in self.broker._supervisor.workers if worker.state == "ready"]

    @property
    def bare(self) -> int | None:
        """The process id of the worker without the app."""
        worker = self.broker._supervisor._bare
        return worker.pid if worker is not None else None

    @property
    def asked(self) -> list[int]:
        """The process ids of the workers with unanswered requests."""
        return [worker.pid for worker in self.broker._supervisor.all if len(worker.requests)]


@pytest.fixture(params=["fake", pytest.param("cuda", marks=pytest.mark.gpu)])
def driver(request: pytest.FixtureRequest) -> Iterator[str]:
    """The driver of this process and of the workers."""
    if request.param == "cuda":
        yield "cuda"
        return
    with fake_driver.installed():
        yield "fake"


@pytest.fixture
def held(tmp_path: Path) -> Path:
    """A file that keeps workers with a driver of host memory from copying."""
    return tmp_path / "held"


class _Begins(WorkerCommand):
    """The command line of a bare worker with a driver that is made of host memory."""

    def __init__(self, options: ServeOptions, held: Path) -> None:
        super().__init__(BARE, options)
        code = FAKE.format(held=str(held)) + "from shared_rpc.worker.__main__ import main\nmain()"
        object.__setattr__(self, "code", code)

    def program(self, number: int, fd: int) -> list[str]:
        """Like every worker's, after the code."""
        return [sys.executable, "-c", vars(self)["code"], *self.words(number, fd)]


@pytest.fixture
def serve(
    driver: str, broker_app: BrokerApp, held: Path, spill: SpillDirectory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Copier]]:
    """``serve(workers)`` starts a broker with this many workers."""
    if driver == "fake":
        monkeypatch.setattr(WorkerCommand, "bare", property(lambda command: _Begins(command.options, held)))
    broker_app.file.write_text((FAKE.format(held=str(held)) if driver == "fake" else "") + APP)
    with ExitStack() as stack:

        def serve(workers: int = 1) -> Copier:
            options = ServeOptions(base_path=broker_app.base_path, workers=workers)
            broker = Broker(WorkerCommand(str(broker_app.file), options))
            stack.callback(broker.stop)
            broker.start()
            copier = Copier(broker)
            eventually(lambda: len(copier.workers) == workers, 60.0, "all workers")
            return copier

        yield serve


@pytest.fixture
def copier(serve: Callable[..., Copier]) -> Copier:
    """A broker with one worker."""
    return serve()


@pytest.fixture
def spill(tmp_path: Path) -> SpillDirectory:
    """A directory for files."""
    (tmp_path / "spill").mkdir()
    return SpillDirectory(str(tmp_path / "spill"))


@pytest.fixture
def filled(driver: str) -> Iterator[Callable[..., Segment]]:
    """``filled(nbytes)`` makes memory of the first GPU with unique bytes."""
    from shared_rpc.memory.backends.cuda import visible_gpus

    with ExitStack() as stack:

        def filled(nbytes: int = 2 * MIB) -> Segment:
            segment = backend_for(visible_gpus()[0], "vmm").create(nbytes)
            stack.callback(segment.close)
            write(segment, os.urandom(nbytes))
            return segment

        yield filled


def descriptors() -> int:
    """Count descriptors of memory and of nameless files in this process. A broker may open others at any time."""
    return sum(link.startswith(("/memfd:", "/dev/nvidia")) or "/spill/" in link for link in links_of())


def settled(before: int) -> None:
    """Wait until this process has its former descriptors: the loop closes those that were sent."""
    gc.collect()
    eventually(lambda: descriptors() <= before, what=f"{before} descriptors")


def check_round_trip(copier: Copier, segments: list[Segment], to: str, spill: SpillDirectory) -> None:
    """Copy segments and back; nothing is left in the broker."""
    expected, total = [bytes_of(segment) for segment in segments], sum(segment.info.nbytes for segment in segments)
    before = descriptors()
    progress: list[tuple[int, int]] = []
    copies = copier.memory.lower(segments, to, spill, lambda *news: progress.append(news))
    assert progress[-1] == (total, total)
    for segment in segments:
        write(segment, b"changed")
    again = copier.memory.raise_(copies, [segment.info.incarnation(1) for segment in segments])
    assert [bytes_of(one) for one in again] == expected
    for one in (*copies, *again):
        one.close()
    settled(before)


@pytest.mark.parametrize("to", ["host", "file"])
def test_copies_round_trip(
    copier: Copier, filled: Filled, spill: SpillDirectory, monkeypatch: pytest.MonkeyPatch, to: str
) -> None:
    """By a worker, in several requests: a frame has a limited number of descriptors."""
    monkeypatch.setattr(broker_memory, "_SEGMENTS", 2)
    check_round_trip(copier, [filled(2 * MIB), filled(6 * MIB), filled(4 * MIB)], to, spill)


def test_a_copy_outlives_its_worker(copier: Copier, filled: Filled) -> None:
    """A broker without CUDA keeps the host memory by its descriptor; the next worker makes a segment of it."""
    segment = filled()
    [copy] = copier.memory.lower([segment], "host")
    [first] = copier.workers
    os.kill(first, signal.SIGKILL)
    eventually(lambda: copier.workers not in ([], [first]), 60.0, "another worker")
    [again] = copier.memory.raise_([copy], [segment.info.incarnation(1)])
    with closing(again):
        assert bytes_of(again) == bytes_of(segment)
    copy.close()


def test_a_closed_copy_is_unmapped(driver: str, copier: Copier, filled: Filled) -> None:
    """In the worker, so that the memory is returned to the host."""
    if driver != "fake":
        pytest.skip("the kernel does not list mappings of CUDA's by their memory")
    with closing(filled()) as segment:
        [copy] = copier.memory.lower([segment], "host")
    inode = os.fstat(copy.segment.fileno()).st_ino
    [worker] = copier.workers

    def mappings() -> int:
        with open(f"/proc/{worker}/maps", encoding="utf-8") as maps:
            return sum(f" {inode} " in line for line in maps)

    assert mappings() == 1
    copy.close()
    eventually(lambda: mappings() == 0, what="no mapping of the copy")


def test_memory_of_a_failed_attempt_is_not_reused(
    serve: Callable[..., Copier],
    filled: Filled,
    monkeypatch: pytest.MonkeyPatch,
    threads: ThreadPoolExecutor,
) -> None:
    """The failed worker may still write to it, so the second attempt uses new memory."""
    copier = serve(workers=2)
    segment = filled()
    [earlier] = copier.memory.lower([segment], "host")
    write(segment, b"changed")
    monkeypatch.setattr(broker_memory, "_STEP_PATIENCE", 15.0)
    for worker in copier.workers:
        sigstop(worker)
    answer = threads.submit(copier.memory.lower, [segment], "host", into={segment.info.id: earlier.segment})
    eventually(lambda: len(copier.asked) == 1, what="an order")
    [stopped] = copier.asked
    [other] = set(copier.workers) - {stopped}
    os.kill(other, signal.SIGCONT)
    [copy] = answer.result(60)
    written = bytes_of(earlier.segment)
    os.kill(stopped, signal.SIGCONT)
    [again] = copier.memory.raise_([copy], [segment.info.incarnation(1)])
    with closing(again), closing(copy), closing(earlier):
        assert copy.segment.info.id != earlier.segment.info.id
        assert bytes_of(again) == bytes_of(segment) != written


def test_a_cancelled_copy_stops_its_worker(copier: Copier, filled: Filled, held: Path) -> None:
    """The worker closes and unmaps its memory, and copies as before."""
    segments = [filled() for _ in range(4)]
    before = descriptors()
    held.touch()
    answer = asyncio.run_coroutine_threadsafe(copier.memory.memory.lower(segments, "host"), copier.broker._loop)
    eventually(lambda: copier.asked == copier.workers, what="an order")
    answer.cancel()
    held.unlink()
    eventually(lambda: copier.asked == [], what="the worker's answer")
    settled(before)
    for copy in copier.memory.lower(segments, "host"):
        copy.close()


# Copies and allocations by a worker without the app.


@pytest.fixture
def bare(copier: Copier, monkeypatch: pytest.MonkeyPatch) -> Copier:
    """A broker without any worker that accepts requests."""
    monkeypatch.setattr(copier.memory.memory, "_choose", lambda *_: None)
    return copier


def test_a_bare_worker_copies_and_allocates(bare: Copier, filled: Filled, spill: SpillDirectory) -> None:
    """Like any worker, but it does not serve the app. The broker itself copies segments that are not on the GPU."""
    serving = bare.workers
    with closing(backend_for("cpu").create(4096)) as on_host:
        write(on_host, b"host")
        check_round_trip(bare, [filled(2 * MIB), on_host, filled(6 * MIB)], "file", spill)
    device = filled().info.device
    with bare.memory.allocate(device, 2 * MIB) as segment:
        assert (segment.info.device, bytes_of(segment)) == (device, bytes(2 * MIB))
    assert bare.bare not in (None, *serving)
    assert bare.workers == serving
    [service] = bare.broker._services.values()
    assert [worker["pid"] for worker in service.executor.info()["workers"]] == serving


def test_a_stuck_bare_worker_is_replaced(bare: Copier, filled: Filled, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is killed when it makes no progress: later requests get another one."""
    segment = filled()
    bare.memory.lower([segment], "host")[0].close()
    stuck = bare.bare
    assert stuck is not None
    sigstop(stuck)
    with monkeypatch.context() as hasty, suppress(WorkerCrashed):  # or the next one answers in that time
        hasty.setattr(broker_memory, "_STEP_PATIENCE", 0.3)
        bare.memory.lower([segment], "host")[0].close()
    bare.memory.lower([segment], "host")[0].close()
    assert bare.bare not in (None, stuck)


def test_an_idle_bare_worker_ends(bare: Copier, filled: Filled, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next order starts another one."""
    monkeypatch.setattr(supervisor, "_UNUSED", 0.2)
    bare.memory.lower([filled()], "host")[0].close()
    first = bare.bare
    eventually(lambda: bare.bare is None and first is not None and not is_running(first), what="its end")
    bare.memory.lower([filled()], "host")[0].close()
    assert first != bare.bare is not None


def test_a_bare_worker_in_use_does_not_end(
    bare: Copier,
    filled: Filled,
    held: Path,
    driver: str,
    monkeypatch: pytest.MonkeyPatch,
    threads: ThreadPoolExecutor,
) -> None:
    """However long its copy takes."""
    if driver != "fake":
        pytest.skip("a GPU copies")
    monkeypatch.setattr(supervisor, "_UNUSED", 0.05)
    held.touch()
    answer = threads.submit(bare.memory.lower, [filled()], "host")
    eventually(lambda: bare.bare is not None, what="a bare worker")
    begun = bare.bare
    looks: list[float] = []
    sleep = anyio.sleep
    monkeypatch.setattr(anyio, "sleep", lambda seconds: looks.append(seconds) or sleep(seconds))
    eventually(lambda: len(looks) > 10, what="looks whether it is used")
    assert bare.bare == begun
    held.unlink()
    answer.result(30)[0].close()
