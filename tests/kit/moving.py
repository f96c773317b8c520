"""A broker's buffer that moves to lower tiers and back, observed by raw sessions; the test maps none of it."""

from __future__ import annotations

import os
from typing import TypeVar

from shared_rpc.protocol import messages as m
from shared_rpc.protocol import tiers as t
from tests.kit.brokers import BrokerApp, memory_of
from tests.kit.processes import eventually
from tests.kit.raw import HoldingSession

T = TypeVar("T")

#: The app of a broker whose GPUs are :data:`tests.kit.fake_driver.GPUS`; ``watching`` is code of its workers.
APP = """
from tests.kit import fake_driver
fake_driver.install()
{watching}
from shared_rpc import Provider

cpu, gpu = Provider(device="cpu"), Provider(device=fake_driver.GPUS[0])

@cpu.share
def of_cpu():
    return "cpu"

@gpu.share
def of_gpu():
    return "gpu"
"""


class MovedBuffer:
    """A buffer of a broker, on the host or on a GPU, without holders.

    :param device: an id.
    """

    def __init__(self, app: BrokerApp, device: str, nbytes: int = 64 << 10) -> None:
        self._path = f"{app.base_path}-{device.removeprefix('GPU-')[:8]}.sock"
        self.pid = 0
        self._bytes = os.urandom(nbytes)
        with self.session() as session:
            before = memory_of(self.pid)
            with session.result(m.CreateBuffer(len(self._bytes), device=device, keep=True)) as (made, [fd]):
                self.object_id = made.object_id
                assert os.pwrite(fd, self._bytes, 0) == len(self._bytes)
        eventually(lambda: memory_of(self.pid) <= before + 1)  # others may have been evicted

    def session(self) -> HoldingSession:
        """Begin a session with its broker."""
        session = HoldingSession(self._path)
        self.pid = session.query(m.GetServerInfo())["pid"]
        return session

    def query(self, message: m.Query[T]) -> T:
        """Send a query in a new session."""
        with self.session() as session:
            return session.query(message)

    def move(self, move: str) -> HoldingSession:
        """Begin a move, in a session that receives the answer."""
        session = self.session()
        session.say(t.Evict(self.object_id, to_of(move)) if move.startswith("evicting") else t.Restore(self.object_id))
        return session

    def prepare(self, move: str) -> None:
        """Move it to the origin of a move."""
        if move.startswith("restoring"):
            assert self.moved(back_of(move)) == to_of(move)
        elif move.endswith("again"):
            assert self.moved(back_of(move)) == to_of(move)
            assert self.moved("restoring") == "device"

    def moved(self, move: str) -> str:
        """Make a move; return the resulting tier."""
        with self.move(move) as session:
            reply = session.hear()
            assert isinstance(reply, m.Answer), reply
        return self.tier

    @property
    def tier(self) -> str:
        """The current tier."""
        return str(self.query(m.GetObjectInfo(self.object_id))["tier"])

    @property
    def is_copied(self) -> bool:
        """True if the broker counts a copy of it in a lower tier: it has no other objects."""
        return bool(self.query(m.GetServerInfo())["copies"])

    def write(self) -> None:
        """Write other bytes to it, like a process that maps it."""
        self._bytes = os.urandom(len(self._bytes))
        with self.session() as session, session.result(m.GetBuffer(self.object_id)) as (_, [fd]):
            assert os.pwrite(fd, self._bytes, 0) == len(self._bytes)

    def has_its_bytes(self) -> bool:
        """Return whether a client that acquires it gets the written bytes."""
        with self.session() as session, session.result(m.GetBuffer(self.object_id)) as (_, fds):
            return [os.pread(fd, len(self._bytes) + 1, 0) for fd in fds] == [self._bytes]

    def workers(self) -> list[int]:
        """Return the process ids of the workers that are ready."""
        return [worker["pid"] for worker in self.query(m.GetServerInfo())["workers"] if worker["state"] == "ready"]


def to_of(move: str) -> str:
    """Return the tier to which, or from which, a move goes."""
    return "file" if move.endswith("file") else "host"


def back_of(move: str) -> str:
    """Return the move that must precede this one."""
    return f"evicting to {'a file' if to_of(move) == 'file' else 'the host'}"
