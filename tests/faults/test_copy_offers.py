"""Clients that copy for a broker whose workers cannot, and that are killed at any step: objects keep their bytes."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest

from shared_rpc.errors import CapabilityError, ServerBusy, WorkerCrashed
from shared_rpc.protocol import messages as m
from shared_rpc.protocol import tiers as t
from shared_rpc.protocol import worker as w
from shared_rpc.protocol.catalogue import decode_message
from shared_rpc.protocol.frames import Frame
from shared_rpc.protocol.records import SegmentInfo
from tests.kit import fake_driver
from tests.kit.brokers import BrokerApp, another_worker, memory_of, worker_pids
from tests.kit.offering import STEPS, Offering, fake_mappings
from tests.kit.processes import Child, eventually, sigstop
from tests.kit.raw import Raw, sealed_memory

#: An app of a GPU that is made of host memory.
APP = """
from tests.kit import fake_driver
fake_driver.install()
from shared_rpc import Provider
provider = Provider(device=fake_driver.GPUS[0])

@provider.share
def nothing():
    pass
"""
GPU = fake_driver.GPUS[0]
MIB = 1 << 20
NO_COPIER = r"no worker runs that could copy GPU memory.*Client\.offer_copies\(\)"


class Served:
    """A broker of a GPU, its objects, and processes that offer to copy them."""

    def __init__(self, app: BrokerApp, children: list[Child], folder: Path) -> None:
        self._app = app
        self._children = children
        self._folder = folder
        self.path = str(folder / "socket")
        self.held = folder / "held"
        self.start()

    def start(self) -> None:
        """Begin to serve, with a worker."""
        self._app.file.write_text(APP)
        (self._folder / "spill").mkdir(exist_ok=True)
        self.broker = self._app.start("--socket", self.path, "--spill-dir", str(self._folder / "spill"))
        self.client = self._app.connect(socket_path=self.path)

    def lose_workers(self) -> None:
        """Break the app and kill its worker: no other one can start."""
        [worker] = worker_pids(self.client)
        self._app.file.write_text("raise RuntimeError('this app is broken')\n")
        os.kill(worker, signal.SIGKILL)
        eventually(lambda: worker not in worker_pids(self.client), 30.0, "no worker")

    def offering(self) -> Offering:
        """A process that offers to copy."""
        return Offering(self.path, self.held, self._children)

    def hold(self, step: str) -> None:
        """Have copies wait before a step."""
        self.held.write_text(step)

    def go(self) -> None:
        """Have them go on."""
        self.held.unlink()

    def made(self, nbytes: int = 2 * MIB) -> tuple[str, bytes]:
        """An object of the GPU that nobody holds: its id and its bytes."""
        with Raw(self.path) as raw:
            raw.say(m.CreateBuffer(nbytes, device=GPU, keep=True))
            with closing(raw.hear_frame()) as frame:
                result = decode_message(frame)
                assert isinstance(result, m.Result), result
                data = os.urandom(nbytes)
                os.pwrite(frame.fds[0], data, 0)  # a fake GPU's memory is a memfd
        object_id = result.object_id
        eventually(lambda: self.client.get_object_info(object_id)["leases"] == 0)
        return object_id, data

    def bytes_of(self, object_id: str) -> bytes:
        """The bytes of an object that is on the GPU, or is restored for that."""
        with Raw(self.path) as raw:
            raw.say(m.GetBuffer(object_id))
            with closing(raw.hear_frame()) as frame:
                result = decode_message(frame)
                assert isinstance(result, m.Result), result
                data = os.pread(frame.fds[0], result.segments[0].nbytes, 0)
        eventually(lambda: self.client.get_object_info(object_id)["leases"] == 0)
        return data

    def tier(self, object_id: str) -> str:
        """Where the bytes are."""
        return self.client.get_object_info(object_id)["tier"]

    def fds(self) -> int:
        """How many descriptors of memory and files the broker has."""
        links = []
        for number in os.listdir(f"/proc/{self.broker.pid}/fd"):
            try:
                links.append(os.readlink(f"/proc/{self.broker.pid}/fd/{number}"))
            except FileNotFoundError:
                continue
        return sum("/memfd:" in link or "/spill/" in link for link in links)


@pytest.fixture
def served(broker_app: BrokerApp, children: list[Child], tmp_path: Path) -> Served:
    """A broker with one worker."""
    return Served(broker_app, children, tmp_path)


@pytest.mark.parametrize("to", ["host", "file"])
def test_a_client_copies_where_no_worker_can(served: Served, to: Any) -> None:
    """The error without it names the way out; afterwards nothing is left in the client."""
    object_id, data = served.made()
    served.lose_workers()
    with pytest.raises(WorkerCrashed, match=NO_COPIER):
        served.client.evict(object_id, to)
    offering = served.offering()
    before = memory_of(offering.pid)
    assert [(move["tier"], move["copied"]) for move in served.client.evict(object_id, to)] == [(to, 2 * MIB)]
    assert served.bytes_of(object_id) == data
    eventually(lambda: (fake_mappings(offering.pid), memory_of(offering.pid)) == (0, before), what="nothing left in the client")


def test_a_worker_that_can_is_asked_first(served: Served) -> None:
    """The client is asked for nothing, and would not answer."""
    object_id, data = served.made()
    served.offering()
    served.hold("cuStreamCreate")
    served.client.evict(object_id, "host")
    assert served.bytes_of(object_id) == data


def test_several_orders_wait_for_one_client(served: Served, threads: ThreadPoolExecutor) -> None:
    """Each is carried out, one after the other."""
    made = [served.made() for _ in range(4)]
    served.lose_workers()
    offering = served.offering()
    served.hold("cuMemcpyAsync")
    moves = [threads.submit(served.client.evict, object_id, "host") for object_id, _ in made]
    offering.reaches()
    eventually(lambda: all("moving" in served.client.get_object_info(object_id) for object_id, _ in made))
    served.go()
    assert [[move["tier"] for move in each.result(30)] for each in moves] == [["host"]] * 4
    assert [served.bytes_of(object_id) for object_id, _ in made] == [data for _, data in made]


class Move:
    """A move of an object that the only client is about to make."""

    def __init__(self, served: Served, threads: ThreadPoolExecutor, way: str) -> None:
        self.object_id, self.data = served.made()
        self.before = "device"
        served.lose_workers()
        if way == "restore":
            helper = served.offering()
            served.client.evict(self.object_id, "host")
            helper.close()
            self.before = "host"
        self.begin: Callable[[], Future[Any]] = lambda: threads.submit(getattr(served.client, way), self.object_id)


@pytest.fixture(params=["evict", "restore"])
def move(request: pytest.FixtureRequest, served: Served, threads: ThreadPoolExecutor) -> Iterator[Move]:
    """The move, which has not begun. The copies of clients go on at the end."""
    yield Move(served, threads, request.param)
    served.held.unlink(missing_ok=True)


@pytest.mark.parametrize("step", STEPS)
def test_a_client_that_is_killed_at_a_step(served: Served, move: Move, step: str) -> None:
    """The move fails, the object is where it was, the broker has nothing more; the next order goes to another client."""
    fds = served.fds()
    offering = served.offering()
    served.hold(step)
    answer = move.begin()
    offering.reaches()
    offering.child.kill()
    with pytest.raises(WorkerCrashed, match=rf"the client \(pid {offering.pid}\) that offers to copy ended while it copied"):
        answer.result(30)
    served.go()
    assert served.tier(move.object_id) == move.before
    eventually(lambda: served.fds() == fds, what=f"{fds} descriptors")
    with pytest.raises(WorkerCrashed, match=NO_COPIER):
        move.begin().result(30)
    served.offering()
    assert len(move.begin().result(30)) == 1
    assert served.bytes_of(move.object_id) == move.data


def test_a_client_that_is_killed_and_leaves_a_child(served: Served, move: Move) -> None:
    """The child has the copies of its sockets no more, and the offer ends with the parent."""
    offering = served.offering()
    offering.child.tell("fork")
    offering.child.expect("forked")
    served.hold("cuMemcpyAsync")
    answer = move.begin()
    offering.reaches()
    os.kill(offering.pid, signal.SIGKILL)
    with pytest.raises(WorkerCrashed, match="ended while it copied"):
        answer.result(30)
    assert served.tier(move.object_id) == move.before


def test_a_stopped_client_that_is_killed_before_it_reads_its_order(served: Served, move: Move) -> None:
    """As one that has begun."""
    offering = served.offering()
    sigstop(offering.pid)
    answer = move.begin()
    eventually(lambda: "moving" in served.client.get_object_info(move.object_id))
    offering.child.kill()
    with pytest.raises(WorkerCrashed):
        answer.result(30)
    assert served.tier(move.object_id) == move.before


def test_an_order_of_a_killed_client_goes_to_another_one(served: Served, move: Move) -> None:
    """Whoever waits notices nothing."""
    first, second = served.offering(), served.offering()
    served.hold("cuMemcpyAsync")
    answer = move.begin()
    first.reaches()
    first.child.kill()
    second.reaches()
    served.go()
    assert len(answer.result(30)) == 1
    assert served.bytes_of(move.object_id) == move.data


def test_a_copy_outlives_the_client_that_made_it(served: Served) -> None:
    """The broker has its descriptor."""
    object_id, data = served.made()
    served.lose_workers()
    offering = served.offering()
    served.client.evict(object_id, "host")
    offering.child.kill()
    served.offering()
    assert served.bytes_of(object_id) == data


def test_a_closed_offer_finishes_its_order(served: Served, move: Move) -> None:
    """And gets no other one."""
    offering = served.offering()
    served.hold("cuMemcpyAsync")
    answer = move.begin()
    offering.reaches()
    offering.child.tell("close")
    served.go()
    assert len(answer.result(30)) == 1
    offering.child.expect("closed False")
    back = served.client.restore if move.before == "device" else served.client.evict
    with pytest.raises(WorkerCrashed, match=NO_COPIER):
        back(move.object_id)


def test_an_idle_offer_is_closed(served: Served) -> None:
    """At once, and the broker knows."""
    object_id, _ = served.made()
    served.lose_workers()
    served.offering().close()
    with pytest.raises(WorkerCrashed, match=NO_COPIER):
        served.client.evict(object_id, "host")


def test_an_object_that_is_asked_for_while_a_client_copies_it(served: Served, threads: ThreadPoolExecutor) -> None:
    """It is given out at once and not evicted; the client is as good as before."""
    object_id, data = served.made()
    served.lose_workers()
    offering = served.offering()
    served.hold("cuMemcpyAsync")
    answer = threads.submit(served.client.evict, object_id, "host")
    offering.reaches()
    assert served.bytes_of(object_id) == data
    served.go()
    with pytest.raises(ServerBusy, match="others have asked for it meanwhile"):
        answer.result(30)
    assert [move["tier"] for move in served.client.evict(object_id, "host")] == ["host"]


def test_an_offer_outlives_its_broker(served: Served) -> None:
    """The next broker at the same socket has it."""
    offering = served.offering()
    served.broker.kill()
    served.start()
    offering.child.expect_error("orders no copies")
    object_id, data = served.made()
    served.lose_workers()

    def evicted() -> bool:
        try:
            return bool(served.client.evict(object_id, "host"))
        except WorkerCrashed:
            return False

    eventually(evicted, 20.0, "the offer", every=0.1)
    assert served.bytes_of(object_id) == data
    offering.close()


def test_an_offer_ends_where_the_next_server_takes_none(served: Served) -> None:
    """With the reason in the log, and the offer can be closed."""
    offering = served.offering()
    served.broker.kill()
    served._app.start("--socket", served.path, "--in-process")
    assert "makes its copies itself" in offering.child.expect_error("has ended")
    offering.close()


def test_a_worker_that_is_back_copies_again(served: Served) -> None:
    """What a client has copied is a copy as any."""
    object_id, data = served.made()
    served.lose_workers()
    offering = served.offering()
    served.client.evict(object_id, "host")
    served._app.file.write_text(APP)
    another_worker(served.client, 0)
    offering.child.kill()
    assert served.bytes_of(object_id) == data


class Liar:
    """The wire spoken by hand, by a client that offers."""

    def __init__(self, raw: Raw) -> None:
        self.raw = raw
        assert raw.ask(t.OfferCopies([GPU])) == m.Count(1)
        raw.say(t.AwaitCopyOrder(), 2)

    def order(self) -> tuple[w.CopySegments, Frame]:
        """The order that it gets."""
        frame = self.raw.hear_frame()
        order = decode_message(frame)
        assert isinstance(order, w.CopySegments), order
        return order, frame


def _changed(**changes: Any) -> Callable[[SegmentInfo], SegmentInfo]:
    return lambda info: msgspec.structs.replace(info, **changes)


#: What may be said of the segment that was ordered: how its description is changed, its digest, and its descriptors.
NONSENSE: dict[str, tuple[Callable[[SegmentInfo], SegmentInfo] | None, bytes, list[Callable[[], int]]]] = {
    "no segment": (None, b"", []),
    "a descriptor of no segment": (None, b"", [sealed_memory]),
    "no descriptor": (_changed(), b"", []),
    "two descriptors": (_changed(), b"", [sealed_memory, sealed_memory]),
    "another id": (_changed(id="0123456789abcdef"), b"", [sealed_memory]),
    "another size": (_changed(nbytes=MIB), b"", [sealed_memory]),
    "another device": (_changed(device=fake_driver.GPUS[1]), b"", [sealed_memory]),
    "another mechanism": (_changed(mechanism="ipc"), b"", [sealed_memory]),
    "a digest of no file": (_changed(), b"0" * 16, [sealed_memory]),
    "too little memory": (_changed(device="cpu", mechanism="memfd"), b"", [sealed_memory]),
    "memory that may shrink": (_changed(device="cpu", mechanism="memfd"), b"", [lambda: sealed_memory(2 * MIB, 0)]),
}


@pytest.mark.parametrize("nonsense", NONSENSE)
def test_a_client_that_answers_nonsense(served: Served, threads: ThreadPoolExecutor, nonsense: str) -> None:
    """The move fails as with a dead worker, and its offer has ended; the next order goes to another client."""
    object_id, data = served.made()
    served.lose_workers()
    fds = served.fds()
    changed, digest, makers = NONSENSE[nonsense]
    with Raw(served.path) as raw:
        liar = Liar(raw)
        answer = threads.submit(served.client.evict, object_id, "host")
        order, frame = liar.order()
        frame.close()
        made = [maker() for maker in makers]
        segments = [changed(order.wanted[0])] if changed is not None else []
        assert raw.ask(w.SegmentsCopied(segments, [digest] * len(segments)), 3, fds=made) == m.Count(1)
        for fd in made:
            os.close(fd)
        with pytest.raises(WorkerCrashed, match=rf"client \(pid {os.getpid()}\).* did not make the copies that were ordered"):
            answer.result(30)
        refused = raw.ask(t.AwaitCopyOrder(), 4)
        assert isinstance(refused, m.Error) and refused.code == CapabilityError.code and "did not keep to it" in refused.text
        assert served.tier(object_id) == "device"
        eventually(lambda: served.fds() == fds, what=f"{fds} descriptors")
        served.offering()
        assert [move["tier"] for move in served.client.evict(object_id, "host")] == ["host"]
    assert served.bytes_of(object_id) == data


def test_a_client_that_hangs_up(served: Served, threads: ThreadPoolExecutor) -> None:
    """With an order that it has not answered; its process lives on."""
    object_id, _ = served.made()
    served.lose_workers()
    fds = served.fds()
    with Raw(served.path) as raw:
        liar = Liar(raw)
        answer = threads.submit(served.client.evict, object_id, "host")
        liar.order()[1].close()
    with pytest.raises(WorkerCrashed, match=rf"client \(pid {os.getpid()}\).* ended while it copied"):
        answer.result(30)
    assert served.tier(object_id) == "device"
    eventually(lambda: served.fds() == fds, what=f"{fds} descriptors")


def test_a_client_that_asks_for_orders_without_an_answer(served: Served, threads: ThreadPoolExecutor) -> None:
    """Its order fails, and the broker goes on; so with answers to no order."""
    object_id, _ = served.made()
    served.lose_workers()
    with Raw(served.path) as raw:
        for message in (t.AwaitCopyOrder(), w.CopyProgress(1), w.SegmentsCopied([], [])):
            refused = raw.ask(message)
            assert isinstance(refused, m.Error) and "has no offer to copy" in refused.text
        liar = Liar(raw)
        for message in (t.OfferCopies([GPU]), t.AwaitCopyOrder(), w.SegmentsCopied([], [])):
            refused = raw.ask(message, 3)
            assert isinstance(refused, m.Error), message
        answer = threads.submit(served.client.evict, object_id, "host")
        _, frame = liar.order()
        frame.close()
        refused = raw.ask(t.AwaitCopyOrder(), 4)
        assert isinstance(refused, m.Error) and "has no answer yet" in refused.text
        with pytest.raises(WorkerCrashed, match="ended while it copied"):
            answer.result(30)
    assert served.tier(object_id) == "device"


def test_another_gpu_is_another_matter(served: Served) -> None:
    """A client that does not see the GPU is not asked."""
    object_id, _ = served.made()
    served.lose_workers()
    with Raw(served.path) as raw:
        assert raw.ask(t.OfferCopies(["GPU-0"])) == m.Count(1)
        with pytest.raises(WorkerCrashed, match=NO_COPIER):
            served.client.evict(object_id, "host")
