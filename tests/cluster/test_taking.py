"""What an agent does while a mover writes a part: the source is lost, or the transfer is given up."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import Any, cast

import pytest

pytest.importorskip("ray")

from ray.exceptions import ActorDiedError

from shared_rpc.cluster.agent import NodeAgent, _loss_of
from shared_rpc.cluster.movers import Mover, MoverFailed, Part

pytestmark = [pytest.mark.timeout(60), pytest.mark.asyncio]

PART = Part(0, 0, 1)


class Stuck(Mover):
    """A mover that writes until it is closed, or told to end."""

    def __init__(self) -> None:
        self.begun, self.closed, self.done = threading.Event(), threading.Event(), threading.Event()
        self.writes = True

    def give(self, record: Any, part: Part) -> None:
        """Give nothing."""

    def take(self, given: Any, room: Any, part: Part) -> None:
        """Write for as long as this is open."""
        self.begun.set()
        while not self.done.wait(0.001):
            if self.closed.is_set():
                self.writes = False
                raise MoverFailed("the transfer was ended")
        self.writes = False

    def close(self) -> None:
        """End the writing."""
        self.closed.set()


class Peer:
    """The actor of a source, or of a receiver; ``ended`` is what its answer to the only question is."""

    def __init__(self) -> None:
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.offered = self.receiving = self

    def remote(self, number: int) -> asyncio.Future[None]:
        """Answer when it has ended, or was lost."""
        return self.ended


def taking(mover: Mover, source: Peer) -> tuple[asyncio.Task[None], asyncio.Task[None]]:
    """A part that is being written, and the watch of its source."""
    watch = asyncio.create_task(_loss_of(source, 1))
    take: Any = NodeAgent._take
    return asyncio.create_task(take(cast(Any, None), mover, None, cast(Any, None), PART, watch)), watch


async def begun(mover: Stuck) -> None:
    """Wait until it writes."""
    await asyncio.to_thread(mover.begun.wait, 20)


async def test_a_source_that_is_lost_ends_the_writing() -> None:
    """The loss is what is told, and not what the mover says of it."""
    mover, source = Stuck(), Peer()
    take, _ = taking(mover, source)
    await begun(mover)
    source.ended.set_exception(ActorDiedError())
    with pytest.raises(ActorDiedError):
        await take
    assert not mover.writes


async def test_an_offer_that_ends_does_not_end_the_writing() -> None:
    """What was given is at hand."""
    mover, source = Stuck(), Peer()
    take, watch = taking(mover, source)
    await begun(mover)
    source.ended.set_result(None)
    assert not await asyncio.to_thread(mover.closed.wait, 0.3)
    mover.done.set()
    await take
    watch.cancel()


async def test_a_transfer_that_is_given_up_writes_no_more() -> None:
    """Not even when it is given up twice; it is over when the thread is."""
    mover, source = Stuck(), Peer()
    take, watch = taking(mover, source)
    await begun(mover)
    take.cancel()
    await asyncio.sleep(0)
    take.cancel()
    with pytest.raises(asyncio.CancelledError):
        await take
    assert mover.closed.is_set() and not mover.writes
    watch.cancel()


@pytest.mark.parametrize("error", [None, ActorDiedError()])
async def test_an_offer_ends_with_its_receiver(error: Exception | None) -> None:
    """It has received it, or given up, or was lost."""
    receiver, ended = Peer(), asyncio.Queue[int]()
    source, order = SimpleNamespace(_offers=SimpleNamespace(end=ended.put)), SimpleNamespace(id=1)
    ending = asyncio.create_task(NodeAgent._end_with(cast(Any, source), receiver, cast(Any, order), 7))
    await asyncio.sleep(0)
    assert ended.empty()
    if error is None:
        receiver.ended.set_result(None)
    else:
        receiver.ended.set_exception(error)
    assert await ended.get() == 7
    await ending
