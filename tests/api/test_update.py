"""In-place updates of shared memory: revisions, processes that wait for one, and the state after a writer is killed."""

from __future__ import annotations

import os
import threading
import time
from functools import partial
from typing import Any

import pytest
import torch
from anyio import create_task_group, move_on_after

from shared_rpc import AsyncClient, Client
from shared_rpc.errors import (
    CapabilityError,
    ConfigurationError,
    DeadlineExceeded,
    StaleHandleError,
    UpdateInterrupted,
)
from tests.kit.processes import Child
from tests.kit.world import World, at_once


def run(peer: Child, code: str) -> None:
    """Run several lines in the other process."""
    peer.tell(f"exec({code!r})")


@pytest.fixture
def world(world: World) -> World:
    """A server of writable weights, of 64 MiB on a GPU, and of others that clients may only read."""

    def weights(size: int = 1000 if world.device == "cpu" else 16 << 20) -> torch.Tensor:
        return torch.zeros(size, device=world.device)

    world.share("load", managed=True)(weights)
    world.share("sealed", managed=True, access="read")(weights)
    return world


@pytest.fixture
def peer(world: World) -> Child:
    """Another process with a handle of the weights."""
    return world.peer("handle = client.call('load'); value = handle.value")


def test_an_update_is_the_next_even_revision(world: World, role: str) -> None:
    """It is odd in the block; the value is the writable memory, and all handles of the object see the same number."""
    one, other = world.provider.call("load"), world.provider.call("load")
    assert (one.revision, other.revision) == (0, 0)
    for expected in (1, 3):
        with world.provider.update(one) as value:
            assert (value is one.value, one.revision, other.revision) == (True, expected, expected)
            value.fill_(expected)
        assert (one.revision, other.revision, float(other.value[0])) == (expected + 1, expected + 1, expected)
    world.provider.refresh("load")
    with one.latest() as new, world.provider.update(new):
        assert (one.revision, new.revision, one.wait_revision(4)) == (4, 1, 4)


def test_released_handles_have_no_revision(world: World, role: str) -> None:
    """Even after an earlier access; nothing can be written through them."""
    handle = world.provider.call("load")
    assert handle.revision == 0
    handle.release()
    for look in (lambda: handle.revision, lambda: handle.wait_revision(0), lambda: handle.read_consistent(torch.clone)):
        with pytest.raises(StaleHandleError, match="was released"):
            look()
    with pytest.raises(StaleHandleError, match="was released"), world.provider.update(handle):
        pass


def test_a_failing_block_leaves_the_update_interrupted(world: World, role: str) -> None:
    """Its writes stay, and are reported as such, until another update ends."""
    handle = world.provider.call("load")
    with pytest.raises(ZeroDivisionError), world.provider.update(handle) as value:
        value[0] = 7
        raise ZeroDivisionError
    assert (handle.revision, handle.value[0]) == (1, 7)
    for wait in (lambda: handle.wait_revision(2), lambda: handle.wait_revision(0), lambda: handle.read_consistent(torch.clone)):
        with pytest.raises(UpdateInterrupted, match=f"by pid {os.getpid()} began with revision 1 and did not end") as caught:
            wait()
        assert (caught.value.revision, caught.value.pid) == (1, os.getpid())
    with world.provider.update(handle):
        assert handle.revision == 3
    assert handle.wait_revision(2) == 4


def test_nested_updates_and_waits_are_refused(world: World, role: str) -> None:
    """Within the block they would never end; other objects are unaffected."""
    handle, again, other = world.provider.call("load", 4), world.provider.call("load", 4), world.provider.call("load", 5)
    with world.provider.update(handle):
        with pytest.raises(ConfigurationError, match="this thread is updating object"), world.provider.update(handle):
            pass
        with pytest.raises(ConfigurationError, match="deadlock: this thread is updating"):
            again.wait_revision(2)
        with world.provider.update(other):
            pass
    assert (handle.revision, other.revision) == (2, 2)


def test_writers_take_turns(world: World, role: str) -> None:
    """Threads of one process, each with its own handle."""
    inside = []

    def write() -> None:
        with world.provider.call("load") as handle:
            for _ in range(50):
                with world.provider.update(handle) as value:
                    inside.append(1)
                    assert len(inside) == 1
                    value.add_(1)
                    inside.pop()

    assert at_once(write, write, write) == [None] * 3
    handle = world.provider.call("load")
    assert (handle.revision, handle.value.unique().tolist()) == (300, [150])


def test_waiting_for_another_writer_times_out(world: World, go: threading.Event, begun: threading.Event, role: str) -> None:
    """The error names the writer."""
    one, other = world.provider.call("load"), world.provider.call("load")

    def write() -> None:
        with world.provider.update(one):
            begun.set()
            assert go.wait(30)

    thread = threading.Thread(target=write)
    thread.start()
    assert begun.wait(10)
    with (
        pytest.raises(DeadlineExceeded, match=f"by pid {os.getpid()} did not end in time"),
        world.provider.update(other, timeout=0.05),
    ):
        pass
    with pytest.raises(DeadlineExceeded, match="did not reach revision 2 in time: it is at 1"):
        other.wait_revision(2, timeout=0.05)
    with pytest.raises(DeadlineExceeded):
        other.read_consistent(torch.clone, timeout=0.05)
    threading.Timer(0.05, go.set).start()
    with world.provider.update(other):
        assert other.revision == 3
    thread.join(10)
    assert other.revision == 4


def test_revisions_are_read_without_the_server(world: World, client: Client, peer: Child) -> None:
    """Except the first time: it works after the server's end, between the remaining processes."""
    handle = client.call("load")
    assert handle.revision == 0
    assert peer.ask("print('at', handle.revision, flush=True)", "at") == "0"
    world.server.stop()
    peer.tell("with client.update(handle): value.fill_(4)")
    assert (handle.wait_revision(2, timeout=20), float(handle.value[0])) == (2, 4)
    assert handle.revision == 2
    handle.release()


def test_the_server_updates_objects_shared_for_reading(world: World, client: Client, peer: Child) -> None:
    """Clients read the revisions, and their updates are refused."""
    peer.ask("handle = client.call('sealed'); value = handle.value; print('sealed', handle.revision, flush=True)", "sealed")
    with client.call("sealed") as handle, world.provider.call("sealed") as own:
        with pytest.raises(CapabilityError, match="shared with access='read'"), client.update(handle):
            pass
        with world.provider.update(own) as value:
            assert handle.revision == 1
            run(peer, "try: handle.wait_revision(2, 0.1)\nexcept Exception as e: print('late', type(e).__name__, flush=True)")
            assert peer.expect("late") == "late DeadlineExceeded"
            value.fill_(3)
        assert peer.ask("print('now', handle.wait_revision(2), value.unique().tolist(), flush=True)", "now") == "2 [3.0]"


def test_readers_never_see_half_an_update(client: Client, peer: Child) -> None:
    """While another process writes continuously, each read is of one revision, though most reads overlap with an update."""
    run(peer, "while True:\n  with client.update(handle):\n    for part in value.view(10, 100): part.add_(1)")
    with client.call("load") as handle:
        seen, tries = [], []

        def read(value: torch.Tensor) -> torch.Tensor:
            tries.append(1)
            first = value[:500].clone()
            return torch.cat([first, value[500:]])

        handle.wait_revision(10, timeout=20)
        end = time.monotonic() + 30
        while (len(seen) < 200 or len(tries) == len(seen) or seen[-1] == seen[0]) and time.monotonic() < end:
            (one,) = handle.read_consistent(read, timeout=20).unique().tolist()
            seen.append(one)
        assert seen == sorted(seen) and seen[-1] > seen[0]
        assert len(tries) > len(seen)
    peer.kill()


def test_errors_of_readers_are_retried_after_a_write(client: Client) -> None:
    """Without a concurrent write the error is raised."""
    with client.call("load") as handle, client.call("load") as writer:
        with pytest.raises(ZeroDivisionError):
            handle.read_consistent(lambda value: 1 / int(value[0]))
        calls = []

        def read(value: torch.Tensor) -> float:
            calls.append(1)
            if len(calls) == 1:
                with client.update(writer):
                    value.fill_(2)
                raise ZeroDivisionError
            return float(value[0])

        assert (handle.read_consistent(read), len(calls)) == (2, 2)


def test_a_killed_writer_is_reported(client: Client, peer: Child) -> None:
    """To waiting readers at once, to others by an odd revision; the next writer continues from there."""
    with client.call("load") as handle:
        order = "update = client.update(handle); update.__enter__().fill_(8); print('writing', flush=True)"
        peer.ask(order, "writing")
        assert handle.revision == 1
        with pytest.raises(DeadlineExceeded):
            handle.wait_revision(0, timeout=0.1)
        outcomes: list[Any] = []
        waiting = threading.Thread(target=lambda: outcomes.extend(at_once(lambda: handle.wait_revision(2, timeout=30))))
        waiting.start()
        begin = time.monotonic()
        peer.kill()
        waiting.join(20)
        assert isinstance(outcomes[0], UpdateInterrupted) and time.monotonic() - begin < 5
        assert (outcomes[0].pid, outcomes[0].revision, handle.revision) == (peer.pid, 1, 1)
        with client.update(handle, timeout=5) as value:
            assert (handle.revision, float(value[0])) == (3, 8)
            value.fill_(9)
        assert handle.wait_revision(2) == 4


def test_forked_children_end_only_their_own_updates(client: Client, peer: Child) -> None:
    """The parent's update continues."""
    code = """
import os
with client.update(handle):
    if pid := os.fork():
        os.waitpid(pid, 0)
        print('in the block', handle.revision, flush=True)
        sys.stdin.readline()
pid or os._exit(0)
print('after it', handle.revision, flush=True)
"""
    run(peer, code)
    assert peer.expect("in the block") == "in the block 1"
    with client.call("load") as handle, pytest.raises(DeadlineExceeded), client.update(handle, timeout=0.05):
        pass
    assert peer.ask("go on", "after it") == "2"


@pytest.mark.anyio
async def test_coroutines_can_update(world: World, client: Client) -> None:
    """With the same names; the loop continues while a coroutine waits, and a cancelled one stops waiting."""
    async with AsyncClient(socket_path=world.server.socket_path) as other, await other.call("load") as handle:
        assert await handle.revision == 0
        async with create_task_group() as tasks:
            tasks.start_soon(partial(handle.wait_revision, 1, timeout=20))
            await other.ping()
            async with other.update(handle) as value:
                value.fill_(3)
        assert await handle.read_consistent(lambda value: float(value[0])) == 3
        with client.call("load") as writer, client.update(writer):
            with pytest.raises(DeadlineExceeded):
                async with other.update(handle, timeout=0.05):
                    pass
            for wait in (partial(handle.wait_revision, 4), other.update(handle).__aenter__):
                with move_on_after(0.02) as scope:
                    await wait()
                assert scope.cancelled_caught
        with move_on_after(5) as scope:
            async with other.update(handle):
                scope.cancel()
        assert await handle.wait_revision(0) == 6


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda"])
def test_queued_work_is_complete_at_the_revision(device: str, world: World, peer: Child) -> None:
    """Including a side stream that the writer did not wait for; the reader only waits for the number."""
    provider, handle = world.provider, world.provider.call("load")
    for number in range(1, 21):
        peer.tell(f"r = handle.wait_revision({2 * number - 1}); print('all', int((value == {number}).all()), r, flush=True)")
        with provider.update(handle) as value:
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                torch.cuda._sleep(20_000_000)
                value.fill_(number)
        assert peer.expect("all") == f"all 1 {2 * number}"


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda"])
def test_an_update_cannot_end_in_a_capture(device: str, world: World, peer: Child) -> None:
    """It is refused and left interrupted, without breaking the capture; afterwards it can be repeated."""
    provider, handle = world.provider, world.provider.call("load")
    static = torch.zeros(4, device="cuda")
    with provider.update(handle):
        pass
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        static += 1
        with pytest.raises(CapabilityError, match="a CUDA graph is being captured"), provider.update(handle):
            pass
    graph.replay()
    torch.cuda.synchronize()
    assert static.tolist() == [1.0] * 4
    assert handle.revision % 2 == 1
    with provider.update(handle) as value:
        value.fill_(1)
    assert handle.wait_revision(0) % 2 == 0
