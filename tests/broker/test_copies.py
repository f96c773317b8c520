"""Copies of a GPU's memory that workers make for a broker, or clients, by CUDA's driver and by one of host memory."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest

from shared_rpc import AsyncClient, Client, Provider, Server
from shared_rpc.broker import copying
from shared_rpc.broker.broker import Broker
from shared_rpc.broker.command import WorkerCommand
from shared_rpc.broker.memory import RelayedMemory
from shared_rpc.errors import CapabilityError, RecordError, WorkerCrashed
from shared_rpc.memory.backends.choice import backend_for
from shared_rpc.memory.copies import CopyCancelled
from shared_rpc.memory.segments import Segment
from shared_rpc.memory.spill import SpillDirectory
from shared_rpc.protocol import messages as m
from shared_rpc.protocol import tiers as t
from shared_rpc.protocol import worker as w
from shared_rpc.protocol.peers import Peer
from shared_rpc.settings import ServeOptions
from tests.kit import fake_driver
from tests.kit.brokers import BrokerApp
from tests.kit.gpu_memory import bytes_of, write
from tests.kit.offering import Offering, fake_mappings
from tests.kit.processes import Child, eventually, sigstop
from tests.kit.raw import Raw

MIB = 1 << 20

#: An app that needs no torch.
APP = """
import os, time
from shared_rpc import Provider
provider = Provider(device="cpu")

@provider.share
def nothing():
    pass
"""

#: A worker whose driver is made of host memory, and copies nothing while a file is there.
FAKE = """
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
    """A broker in this process, with its workers, and the memory that it relays."""

    def __init__(self, broker: Broker) -> None:
        self.broker = broker
        self.memory = RelayedMemory(broker._memory, ())

    @property
    def workers(self) -> list[int]:
        """The process ids of the workers that are ready."""
        return [worker.pid for worker in self.broker._supervisor.workers if worker.state == "ready"]

    @property
    def path(self) -> str:
        """Where clients connect."""
        [path] = self.broker.served()
        return path

    @property
    def offers(self) -> list[int]:
        """The process ids of clients that offer to copy."""
        return [client.pid for client in self.broker._memory.copies.offers.able(())]

    @property
    def mapped(self) -> dict[str, list[int]]:
        """The workers that have host memory of copies mapped."""
        mapped = self.broker._memory.copies._mapped
        return {copy: [worker.pid for worker in workers] for copy, workers in mapped.items() if workers}


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
    """While it is there, workers with a driver of host memory copy nothing."""
    return tmp_path / "held"


@pytest.fixture
def serve(driver: str, broker_app: BrokerApp, held: Path, spill: SpillDirectory) -> Iterator[Callable[..., Copier]]:
    """``serve(workers)`` starts a broker with so many workers."""
    broker_app.file.write_text(APP + (FAKE.format(held=str(held)) if driver == "fake" else ""))
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
    """``filled(nbytes)`` is memory of the first GPU with bytes that no other has."""
    from shared_rpc.memory.backends.cuda import visible_gpus

    with ExitStack() as stack:

        def filled(nbytes: int = 2 * MIB) -> Segment:
            segment = backend_for(visible_gpus()[0], "vmm").create(nbytes)
            stack.callback(segment.close)
            write(segment, os.urandom(nbytes))
            return segment

        yield filled


def descriptors() -> int:
    """How many this process has of memory and of nameless files. A broker opens others when it likes."""
    links = []
    for number in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):
            links.append(os.readlink(f"/proc/self/fd/{number}"))
    return sum(link.startswith(("/memfd:", "/dev/nvidia")) or "/spill/" in link for link in links)


def settled(before: int) -> None:
    """Wait until this process has the descriptors that it had: what is sent is closed by the loop."""
    gc.collect()
    eventually(lambda: descriptors() <= before, what=f"{before} descriptors")


@pytest.mark.parametrize("to", ["host", "file"])
def test_bytes_come_back(copier: Copier, filled: Callable[..., Segment], spill: SpillDirectory, to: str) -> None:
    """By way of a worker, with progress; nothing is left in the broker."""
    segments = [filled(2 * MIB), filled(6 * MIB), filled(4 * MIB)]
    expected = [bytes_of(segment) for segment in segments]
    before = descriptors()
    told: list[tuple[int, int]] = []
    copies = copier.memory.lower(segments, to, spill, lambda *news: told.append(news))
    assert told[-1] == (12 * MIB, 12 * MIB)
    for segment in segments:
        write(segment, b"changed")
    again = copier.memory.raise_(copies, [segment.info.incarnation(1) for segment in segments])
    assert [bytes_of(one) for one in again] == expected
    for one in (*copies, *again):
        one.close()
    settled(before)


def test_more_segments_than_one_request_takes(
    copier: Copier, filled: Callable[..., Segment], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A frame has a limited number of descriptors."""
    monkeypatch.setattr(copying, "_SEGMENTS", 2)
    segments = [filled() for _ in range(5)]
    copies = copier.memory.lower(segments, "host")
    again = copier.memory.raise_(copies, [segment.info.incarnation(1) for segment in segments])
    assert [bytes_of(one) for one in again] == [bytes_of(segment) for segment in segments]
    for one in (*copies, *again):
        one.close()


def test_host_memory_of_the_object_stays_with_the_broker(
    copier: Copier, filled: Callable[..., Segment], spill: SpillDirectory
) -> None:
    """Only what is on the GPU goes to a worker."""
    with closing(backend_for("cpu").create(4096)) as on_host:
        write(on_host, b"host")
        segments = [on_host, filled()]
        copies = copier.memory.lower(segments, "file", spill)
        again = copier.memory.raise_(copies, [segment.info.incarnation(1) for segment in segments])
        assert [bytes_of(one) for one in again] == [bytes_of(segment) for segment in segments]
        for one in (*copies, *again):
            one.close()


def test_a_copy_outlives_the_worker_that_made_it(copier: Copier, filled: Callable[..., Segment]) -> None:
    """A broker without CUDA keeps the host memory by its descriptor; the next worker makes a segment of it."""
    segment = filled()
    [copy] = copier.memory.lower([segment], "host")
    [first] = copier.workers
    assert copier.mapped == {copy.segment.info.id: [first]}
    os.kill(first, signal.SIGKILL)
    eventually(lambda: copier.workers not in ([], [first]), 60.0, "another worker")
    assert copier.mapped == {}
    [again] = copier.memory.raise_([copy], [segment.info.incarnation(1)])
    with closing(again):
        assert bytes_of(again) == bytes_of(segment)
    assert copier.mapped == {copy.segment.info.id: copier.workers}
    copy.close()


def test_a_closed_copy_is_unmapped(driver: str, copier: Copier, filled: Callable[..., Segment]) -> None:
    """In the worker, so that the host has its memory back."""
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


def test_a_worker_that_is_killed(copier: Copier, filled: Callable[..., Segment], held: Path, driver: str) -> None:
    """Whoever waits is told; nothing is left, and the next worker copies."""
    segments = [filled() for _ in range(4)]
    before = descriptors()
    [worker] = copier.workers
    if driver == "fake":
        held.touch()
    else:
        sigstop(worker)
    with pytest.raises(WorkerCrashed, match=rf"pid {worker}.* while it copied"):
        copier.memory.lower(segments, "host", None, _ignore, _once(lambda: os.kill(worker, signal.SIGKILL)))
    held.unlink(missing_ok=True)
    eventually(lambda: copier.workers not in ([], [worker]), 60.0, "another worker")
    settled(before)
    for copy in copier.memory.lower(segments, "host"):
        copy.close()


def test_another_worker_copies_where_one_ends(serve: Callable[..., Copier], filled: Callable[..., Segment]) -> None:
    """As one does that a reload has replaced."""
    copier = serve(workers=2)
    segment = filled()
    for worker in copier.workers:
        sigstop(worker)

    def kill() -> None:
        [asked] = copier.broker._memory.copies._asked.values()
        [other] = set(copier.workers) - {asked.copier.pid}
        os.kill(asked.copier.pid, signal.SIGKILL)
        os.kill(other, signal.SIGCONT)

    [copy] = copier.memory.lower([segment], "host", None, _ignore, _once(kill))
    [again] = copier.memory.raise_([copy], [segment.info.incarnation(1)])
    with closing(again), closing(copy):
        assert bytes_of(again) == bytes_of(segment)


@pytest.mark.parametrize("by", ["worker", "client"])
def test_host_memory_of_an_earlier_copy_is_written_again(
    copier: Copier, filled: Callable[..., Segment], request: pytest.FixtureRequest, by: str
) -> None:
    """In place of new memory, beside segments that have none; the copy is the same memory, and nothing is left over."""
    if by == "client":
        request.getfixturevalue("offering")
    segments = [filled(2 * MIB), filled(6 * MIB)]
    [earlier] = copier.memory.lower(segments[:1], "host")
    write(segments[0], b"changed")
    before = descriptors()
    copies = copier.memory.lower(segments, "host", into={segments[0].info.id: earlier.segment})
    assert copies[0].segment.info == earlier.segment.info
    assert copies[0].segment.fileno() == earlier.segment.fileno() != copies[1].segment.fileno()
    again = copier.memory.raise_(copies, [segment.info.incarnation(1) for segment in segments])
    assert [bytes_of(one) for one in again] == [bytes_of(segment) for segment in segments]
    for one in (*copies, *again):
        one.close()
    settled(before)
    earlier.close()


def test_memory_that_one_who_was_given_up_may_write_to_is_left_alone(
    serve: Callable[..., Copier], filled: Callable[..., Segment], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second attempt is written to new memory."""
    copier = serve(workers=2)
    segment = filled()
    [earlier] = copier.memory.lower([segment], "host")
    write(segment, b"changed")
    monkeypatch.setattr(copying, "_PATIENCE", 5.0)
    for worker in copier.workers:
        sigstop(worker)
    stopped: list[int] = []

    def go_on() -> bool:
        if not stopped:
            stopped.extend(each.copier.pid for each in copier.broker._memory.copies._asked.values())
            [other] = set(copier.workers) - set(stopped)
            os.kill(other, signal.SIGCONT)
        return False

    [copy] = copier.memory.lower([segment], "host", None, _ignore, go_on, {segment.info.id: earlier.segment})
    written = bytes_of(earlier.segment)
    os.kill(stopped[0], signal.SIGCONT)
    [again] = copier.memory.raise_([copy], [segment.info.incarnation(1)])
    with closing(again), closing(copy), closing(earlier):
        assert copy.segment.info.id != earlier.segment.info.id
        assert bytes_of(again) == bytes_of(segment) != written


def test_a_copy_that_is_not_wanted_any_more(copier: Copier, filled: Callable[..., Segment], held: Path) -> None:
    """The worker stops, and is as good as before."""
    segments = [filled() for _ in range(4)]
    before = descriptors()
    held.touch()

    def stop() -> bool:
        held.unlink()
        return True

    with pytest.raises(CopyCancelled):
        copier.memory.lower(segments, "host", None, _ignore, stop)
    settled(before)
    assert copier.mapped == {}
    for copy in copier.memory.lower(segments, "host"):
        copy.close()


def test_a_worker_that_makes_no_step(
    copier: Copier, filled: Callable[..., Segment], held: Path, monkeypatch: pytest.MonkeyPatch, driver: str
) -> None:
    """Whoever waits is told, and does not wait for ever."""
    if driver != "fake":
        pytest.skip("a GPU copies")
    monkeypatch.setattr(copying, "_PATIENCE", 0.3)
    segment = filled()
    held.touch()
    with pytest.raises(WorkerCrashed, match=r"has copied nothing for 0\.3 s"):
        copier.memory.lower([segment], "host")
    held.unlink()


def test_a_full_gpu_is_told(copier: Copier, filled: Callable[..., Segment]) -> None:
    """The worker's error is the broker's, and the copy stays good."""
    segment = filled()
    [copy] = copier.memory.lower([segment], "host")
    large = msgspec.structs.replace(segment.info, id="0", nbytes=1 << 50)
    with pytest.raises(CapabilityError, match=f"cannot allocate {1 << 50} bytes on GPU {segment.info.device}"):
        copier.memory.raise_([copy], [large])
    [again] = copier.memory.raise_([copy], [segment.info.incarnation(1)])
    with closing(again), closing(copy):
        assert bytes_of(again) == bytes_of(segment)


def test_damage_is_told(copier: Copier, filled: Callable[..., Segment], spill: SpillDirectory) -> None:
    """With its reason, as if the broker had noticed it."""
    segment = filled()
    [copy] = copier.memory.lower([segment], "file", spill)
    found = os.pread(copy.segment.fileno(), 1, 7)
    os.pwrite(copy.segment.fileno(), bytes([found[0] ^ 1]), 7)
    with closing(copy), pytest.raises(RecordError, match="is damaged") as caught:
        copier.memory.raise_([copy], [segment.info.incarnation(1)])
    assert caught.value.reason == "damaged"


def test_no_worker(copier: Copier, filled: Callable[..., Segment], monkeypatch: pytest.MonkeyPatch) -> None:
    """That is told at once."""
    segment = filled()
    monkeypatch.setattr(copier.broker._memory.copies, "_workers", list)
    with pytest.raises(WorkerCrashed, match=r"no worker runs that could copy.*Client\.offer_copies\(\)"):
        copier.memory.lower([segment], "host")


@pytest.fixture
def offering(copier: Copier, driver: str, held: Path, children: list[Child], monkeypatch: pytest.MonkeyPatch) -> Offering:
    """A process that offers to copy for a broker without workers."""
    made = Offering(copier.path, held, children, fake=driver == "fake")
    monkeypatch.setattr(copier.broker._memory.copies, "_workers", list)
    return made


@pytest.mark.parametrize("to", ["host", "file"])
def test_bytes_come_back_by_way_of_a_client(
    copier: Copier,
    offering: Offering,
    filled: Callable[..., Segment],
    spill: SpillDirectory,
    to: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As by way of a worker, also in several orders; the client has nothing mapped afterwards."""
    monkeypatch.setattr(copying, "_SEGMENTS", 2)
    segments = [filled(2 * MIB), filled(6 * MIB), filled(4 * MIB)]
    expected = [bytes_of(segment) for segment in segments]
    before = descriptors()
    told: list[tuple[int, int]] = []
    copies = copier.memory.lower(segments, to, spill, lambda *news: told.append(news))
    assert told[-1] == (12 * MIB, 12 * MIB)
    again = copier.memory.raise_(copies, [segment.info.incarnation(1) for segment in segments])
    assert [bytes_of(one) for one in again] == expected
    assert copier.mapped == {}
    eventually(lambda: fake_mappings(offering.pid) == 0)
    for one in (*copies, *again):
        one.close()
    settled(before)


def test_damage_is_told_by_a_client(
    copier: Copier, offering: Offering, filled: Callable[..., Segment], spill: SpillDirectory
) -> None:
    """It checks the digests that another process has made."""
    segment = filled()
    [copy] = copier.memory.lower([segment], "file", spill)
    found = os.pread(copy.segment.fileno(), 1, 7)
    os.pwrite(copy.segment.fileno(), bytes([found[0] ^ 1]), 7)
    with closing(copy), pytest.raises(RecordError, match="is damaged") as caught:
        copier.memory.raise_([copy], [segment.info.incarnation(1)])
    assert caught.value.reason == "damaged"


def test_a_client_stops_where_a_copy_is_not_wanted_any_more(
    copier: Copier, offering: Offering, filled: Callable[..., Segment], held: Path, driver: str, threads: ThreadPoolExecutor
) -> None:
    """It leaves nothing, and gets the next order."""
    if driver != "fake":
        pytest.skip("a GPU copies")
    segments = [filled() for _ in range(4)]
    before = descriptors()
    held.write_text("cuMemcpyAsync")
    [client] = copier.broker._memory.copies.offers.able(())

    def go_on() -> None:
        eventually(lambda: not client.wanted)
        held.write_text("cuMemCreate")  # of the next segment, which it does not come to

    def stop() -> bool:
        offering.reaches()
        threads.submit(go_on)
        return True

    with pytest.raises(CopyCancelled):
        copier.memory.lower(segments, "host", None, _ignore, stop)
    held.unlink()
    settled(before)
    eventually(lambda: fake_mappings(offering.pid) == 0)
    for copy in copier.memory.lower(segments, "host"):
        copy.close()


def test_an_order_that_waits_for_a_client_is_taken_back(
    copier: Copier, offering: Offering, filled: Callable[..., Segment], held: Path, driver: str, threads: ThreadPoolExecutor
) -> None:
    """At once; the one that it waits for goes on."""
    if driver != "fake":
        pytest.skip("a GPU copies")
    segments = filled(), filled()
    before = descriptors()
    held.write_text("cuMemcpyAsync")
    first = threads.submit(copier.memory.lower, segments[:1], "host")
    offering.reaches()
    with pytest.raises(CopyCancelled):
        copier.memory.lower(segments[1:], "host", None, _ignore, lambda: True)
    assert not first.done()
    held.unlink()
    [copy] = first.result(30)
    copy.close()
    settled(before)


def test_a_client_that_makes_no_step(
    copier: Copier,
    offering: Offering,
    filled: Callable[..., Segment],
    monkeypatch: pytest.MonkeyPatch,
    held: Path,
    driver: str,
    children: list[Child],
) -> None:
    """Its offer ends, and another one is asked; it offers anew when it goes on."""
    monkeypatch.setattr(copying, "_PATIENCE", 1.0)
    segment = filled()
    before = descriptors()
    sigstop(offering.pid)
    with pytest.raises(WorkerCrashed, match=rf"the client \(pid {offering.pid}\).* has copied nothing for 1 s"):
        copier.memory.lower([segment], "host")
    assert copier.offers == []
    settled(before)
    monkeypatch.setattr(copying, "_PATIENCE", 60.0)
    other = Offering(copier.path, held, children, fake=driver == "fake")
    os.kill(offering.pid, signal.SIGCONT)
    eventually(lambda: copier.offers == [other.pid, offering.pid], 20.0)
    [copy] = copier.memory.lower([segment], "host")
    copy.close()


def test_a_client_copies_where_the_worker_makes_no_step(
    copier: Copier,
    filled: Callable[..., Segment],
    held: Path,
    monkeypatch: pytest.MonkeyPatch,
    driver: str,
    children: list[Child],
) -> None:
    """In the second attempt, though the worker is still there."""
    monkeypatch.setattr(copying, "_devices_of", lambda worker: {filled().info.device})
    monkeypatch.setattr(copying, "_PATIENCE", 5.0)  # the client has that long to make a context on a GPU
    segment = filled()
    Offering(copier.path, held, children, fake=driver == "fake")
    [worker] = copier.workers
    sigstop(worker)
    asked: set[int] = set()

    def note() -> bool:
        asked.update(each.copier.pid for each in list(copier.broker._memory.copies._asked.values()))
        return False

    [copy] = copier.memory.lower([segment], "host", None, _ignore, note)
    os.kill(worker, signal.SIGCONT)
    copy.close()
    assert worker in asked


def test_a_digest_of_another_size_is_refused(
    copier: Copier,
    filled: Callable[..., Segment],
    spill: SpillDirectory,
    threads: ThreadPoolExecutor,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The file of a client that answers so is closed."""
    monkeypatch.setattr(copier.broker._memory.copies, "_workers", list)
    segment = filled()
    before = descriptors()
    with Raw(copier.path) as raw:
        assert raw.ask(t.OfferCopies([segment.info.device])) == m.Count(1)
        answer = threads.submit(copier.memory.lower, [segment], "file", spill)
        order = raw.ask(t.AwaitCopyOrder())
        assert isinstance(order, w.CopySegments)
        raw.ask(w.SegmentsCopied(order.wanted, [b"short"]))
        with pytest.raises(WorkerCrashed, match="5 bytes of digests in place of"):
            answer.result(30)
    settled(before)


def test_only_the_servers_own_user_copies(copier: Copier) -> None:
    """Whoever copies can write to what others may only read."""
    with pytest.raises(CapabilityError, match=f"of its own user alone, uid {os.geteuid()}"):
        copier.broker._memory.copies.offers.offer("session", Peer(1, os.geteuid() + 1, 1), [])


@pytest.mark.parametrize("kind", [Client, AsyncClient])
def test_an_offer_ends_with_its_client(copier: Copier, filled: Callable[..., Segment], kind: Any) -> None:
    """By this process itself: while it is open it copies, and no longer."""

    async def offered() -> None:
        async with AsyncClient(socket_path=copier.path) as client, await client.offer_copies() as offer:
            assert offer.active and copier.offers == (await client.get_server_info())["copiers"] == [os.getpid()]
        assert not offer.active
        async with AsyncClient(socket_path=copier.path) as client:
            offer = await client.offer_copies()
        assert not offer.active

    if kind is AsyncClient:
        anyio.run(offered)
    else:
        with Client(socket_path=copier.path) as client, client.offer_copies() as offer:
            assert offer.active and copier.offers == client.get_server_info()["copiers"] == [os.getpid()]
        assert not offer.active
        with Client(socket_path=copier.path) as client:
            offer = client.offer_copies()
        assert not offer.active and offer.error is None
        offer.close()
    eventually(lambda: copier.offers == [])


def test_an_offer_that_is_not_taken(driver: str, provider: Provider) -> None:
    """By a server that makes its copies itself; and the process that is the server needs none."""
    with Server(provider) as server, Client(socket_path=server.socket_path) as client:
        with pytest.raises(CapabilityError, match="makes its copies itself"):
            client.offer_copies()
        with pytest.raises(CapabilityError, match="makes the copies of its objects itself"):
            provider.offer_copies()


def _ignore(done: int, total: int) -> None:
    pass


def _once(call: Callable[[], Any]) -> Callable[[], bool]:
    """A question whether a copy is not wanted any more that does something when it is asked first, and answers No."""
    left = [call]

    def asked() -> bool:
        if left:
            left.pop()()
        return False

    return asked
