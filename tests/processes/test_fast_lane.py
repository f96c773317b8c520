"""Pooled arguments and results live as long as their tensors: none is overwritten or leaked, whichever process dies."""

from __future__ import annotations

import asyncio
import functools
import os
import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch

from shared_rpc import AsyncClient, Client, Provider, Server
from shared_rpc.errors import CapabilityError
from shared_rpc.memory.mapping import MAPPINGS
from shared_rpc.memory.pool import PoolOptions
from shared_rpc.protocol import messages as m
from shared_rpc.protocol.records import SegmentInfo, sent_infos
from tests.kit.processes import eventually, open_fds
from tests.kit.raw import Raw, sealed_memory, tensor_call
from tests.kit.world import World

MIB = 1 << 20
#: Elements of a float32 tensor.
LARGE = MIB // 8
on_the_host = pytest.mark.parametrize("device", ["cpu"], indirect=True)
#: Small enough to be full soon.
SMALL = PoolOptions(initial=MIB, limit=8 * MIB)


@pytest.fixture
def server(device: str, world: World, go: threading.Event, begun: threading.Event) -> Server:
    """Endpoints that take and return memory, with small pools."""
    share = functools.partial(world.share, cache=False)

    @share()
    def full(value: float, size: int = 64) -> torch.Tensor:
        return torch.full((size,), value, device=device)

    @share()
    def doubled(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @share()
    def echo(x: torch.Tensor) -> torch.Tensor:
        return x

    @share()
    def slow(x: torch.Tensor) -> torch.Tensor:
        begun.set()
        assert go.wait(30)
        return x.sum()

    @share()
    def many(count: int, x: torch.Tensor) -> list[torch.Tensor]:
        return [x + 1 for _ in range(count)]

    @share()
    def refuse(x: torch.Tensor) -> torch.Tensor:
        raise ValueError("no")

    @world.share
    def cached() -> torch.Tensor:
        return torch.ones(4)

    return world.serve(pool=SMALL)


@pytest.fixture
def client(server: Server, world: World) -> Client:
    """A client with a small pool."""
    return world.client(pool=SMALL)


def pools(server: Server) -> dict[str, int]:
    """Return the server's state of its pools."""
    facts: dict[str, int] = server.info()["pools"]
    return facts


def test_pool_memory_is_reused(server: Server, client: Client) -> None:
    """After a thousand calls there are as many descriptors, mappings and bytes as after the first few."""
    x = torch.ones(1000, device=client.call("full", 1.0).device)
    for _ in range(100):
        client.call("doubled", x)
    client._return_chunks(client._link.transfer, [])
    before = open_fds(), pools(server)["nbytes"], len(MAPPINGS)
    for _ in range(1000):
        client.call("doubled", x)
    fds, *memory = open_fds(), pools(server)["nbytes"], len(MAPPINGS)
    assert tuple(memory) == before[1:]
    assert fds <= before[0] + 2  # returning chunks in the background may need a separate connection


@on_the_host
@pytest.mark.asyncio
async def test_cancelled_calls_leave_no_chunks(server: Server) -> None:
    """Whenever they are cancelled: while their arguments are written, or even at the reply."""
    x = torch.ones(1000)
    async with AsyncClient(socket_path=server.socket_path, pool=SMALL) as client:
        await client.call("many", 50, x)
        for number in range(60):
            call = asyncio.create_task(client.call("many", 50, x))
            await asyncio.sleep(number * 1e-4)
            call.cancel()
            with suppress(asyncio.CancelledError):
                await call
            del call  # which has a result, if it was too late
        for _ in range(100):
            await client.call("full", 1.0)
            await asyncio.sleep(0.01)
            if pools(server)["chunks"] <= 2 and client._link.transfer.arguments.used <= 1:
                return
        pytest.fail(f"{pools(server)}, {client._link.transfer.arguments.used} chunks of arguments")


def test_a_client_killed_while_its_argument_is_read_leaves_nothing(
    server: Server, world: World, go: threading.Event, begun: threading.Event, device: str
) -> None:
    """The endpoint reads on to the end; then nothing is left of the session."""
    code = f"""
        import torch
        from shared_rpc import Client
        Client(device={device!r}).call("slow", torch.ones(100000, device={device!r}))
    """
    child = world.process(code)
    assert begun.wait(30)
    child.kill()
    go.set()
    eventually(lambda: server.info()["running"] == 0 and server.info()["sessions"] == 0)
    assert pools(server) == {"nbytes": 0, "chunks": 0}


# By hand.


def chunk_call(endpoint: str = "doubled", arena: str = "mine", **fields: Any) -> m.Call:
    """Return a call with four floats in a chunk of an arena."""
    fields = {"segments": [SegmentInfo(arena, 4096, "cpu", arena=True)], **fields}
    return tensor_call(endpoint, storage=(0, 0, 16, 0, 1), **fields)


def returned(raw: Raw, count: int, *answers: m.Message) -> list[int]:
    """Return the chunks that the server returns, with its answers to these calls or to later ones."""
    chunks = [chunk for answer in answers if isinstance(answer, m.Result) for chunk in answer.freed]
    while len(chunks) < count:
        answer = raw.ask(m.Call("full", [1.0], pooled=True))
        assert isinstance(answer, m.Result)
        chunks += answer.freed
    return sorted(chunks)


@pytest.fixture
def arena() -> Iterator[int]:
    """A descriptor of a client's memory for arguments."""
    fd = sealed_memory()
    yield fd
    os.close(fd)


@on_the_host
class TestHostile:
    """Lies harm only the session that sends them."""

    def test_returning_other_chunks_frees_nothing(self, server: Server) -> None:
        """Neither unknown ones nor those of another session, whose numbers are no secret."""
        with Raw(server.socket_path) as victim, Raw(server.socket_path) as raw:
            result = victim.ask(m.Call("full", [1.0], pooled=True))
            assert isinstance(result, m.Result)
            numbers = [*result.chunks, 0, 1 << 62, -5]
            raw.say(m.Free(numbers), 0)
            assert isinstance(raw.ask(m.Free(numbers)), m.Answer)
            assert isinstance(raw.ask(m.Call("full", [1.0], freed=numbers)), m.Result)
            assert pools(server)["chunks"] == 1

    def test_arenas_are_limited(self, server: Server, arena: int) -> None:
        """A client cannot fill the server's table of descriptors with them; their ids are valid only in its session."""
        fds = open_fds()
        with Raw(server.socket_path) as raw:
            calls = [chunk_call(arena=f"arena-{number}", chunks=[number]) for number in range(80)]
            answers = [raw.ask(call, fds=[arena]) for call in calls]
            assert [type(answer) for answer in answers] == [m.Result] * 64 + [m.Error] * 16
            with Raw(server.socket_path) as stranger:
                error = stranger.ask(chunk_call(segments=["arena-0"], chunks=[1]))
                assert isinstance(error, m.Error) and error.code == "segment-not-found"
        eventually(lambda: open_fds() <= fds + 1)

    def test_refused_calls_return_their_chunks(self, server: Server, arena: int) -> None:
        """Whatever the reason."""
        with Raw(server.socket_path) as raw:
            message = chunk_call("nothing_of_that_name", chunks=[41, 42])
            assert isinstance(raw.ask(message, fds=[arena]), m.Error)
            message.args = [["no such tag"]]
            raw.ask(message, fds=[arena])
            assert returned(raw, 4) == [41, 41, 42, 42]

    def test_an_object_cannot_be_claimed_as_a_pool(self, server: Server, client: Client) -> None:
        """The claim is refused, and the object is unaffected."""
        mine = client.call("cached")
        with Raw(server.socket_path) as raw:
            result = raw.ask(m.Call("cached"))
            assert isinstance(result, m.Result)
            error = raw.ask(chunk_call(segments=[info.id for info in sent_infos(result.segments)], chunks=[1]))
            assert isinstance(error, m.Error) and "belongs to no pool" in error.text
        found = MAPPINGS.find(mine.data_ptr())
        assert found is not None
        assert not found[0].pooled


# Streams.


def spin() -> None:
    """Queue some 50 ms of work on the current stream."""
    torch.cuda._sleep(100_000_000)


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda"], indirect=True)
class TestStreamOrder:
    """Earlier work is complete; nothing waits for the whole device, and the loop for no stream."""

    def test_late_arguments_arrive_complete(self, client: Client) -> None:
        """Written on any current stream."""
        stream = torch.cuda.Stream()
        x = torch.zeros(1000, device="cuda")
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            for value in range(5):
                spin()
                x.fill_(value + 1.0)
                assert client.call("doubled", x).unique().tolist() == [2 * (value + 1.0)]

    def test_late_results_arrive_complete(self, server: Server, client: Client) -> None:
        """Written on any current stream of the endpoint's thread."""

        @server._provider.share(cache=False)
        def late(value: float) -> torch.Tensor:
            torch.cuda.set_stream(torch.cuda.Stream())
            result = torch.zeros(1000, device="cuda")
            spin()
            return result.fill_(value)

        reader = torch.cuda.Stream()
        for value in range(5):
            result = client.call("late", float(value))
            with torch.cuda.stream(reader):
                assert result.unique().tolist() == [float(value)]

    def test_a_result_in_use_is_not_overwritten(self, client: Client) -> None:
        """It was dropped in Python, and a stream has still to read it: its bytes stay until then."""
        stream = torch.cuda.Stream()
        copies = []
        for value in range(100):
            result = client.call("full", float(value), MIB // 64)
            target = torch.empty_like(result)
            with torch.cuda.stream(stream):
                if value % 10 == 0:
                    spin()
                copies.append(target.copy_(result, non_blocking=True))
        torch.cuda.synchronize()
        assert [copy.unique().tolist() for copy in copies] == [[float(value)] for value in range(100)]

    def test_captures_in_other_threads_are_undisturbed(self, client: Client) -> None:
        """Chunks are used and returned while a CUDA graph is captured."""
        x = torch.ones(1000, device="cuda")
        client.call("doubled", x)
        torch.cuda.synchronize()
        graph, y = torch.cuda.CUDAGraph(), torch.zeros(10, device="cuda")
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            y += 1
            asking = threading.Thread(target=lambda: [client.call("full", 1.0) for _ in range(200)])
            asking.start()
            asking.join(30)
        graph.replay()
        torch.cuda.synchronize()
        assert y.unique().tolist() == [1.0]

    def test_slow_results_do_not_block_others(self, server: Server, client: Client) -> None:
        """The loop waits for a hundred microseconds, and a thread for the rest."""

        @server._provider.share(cache=False)
        async def late_on_the_loop() -> torch.Tensor:
            result = torch.zeros(10, device="cuda")
            spin()
            return result.fill_(1)

        client.call("late_on_the_loop")
        with Client(socket_path=server.socket_path) as other:
            other.ping()
            call = threading.Thread(target=lambda: [client.call("late_on_the_loop") for _ in range(20)])
            call.start()
            times = [other.ping() for _ in range(200)]
            call.join()
        assert sorted(times)[100] < 0.01

    def test_arguments_read_by_another_stream_are_not_overwritten(self, server: Server, client: Client) -> None:
        """Even if the caller has dropped its result."""
        kept: list[torch.Tensor] = []

        @server._provider.share(cache=False)
        def aside(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                spin()
                y.copy_(x, non_blocking=True)
            kept.append(y)
            return x

        y = torch.zeros(LARGE, device="cuda")
        for value in range(1, 4):
            x = torch.full((LARGE,), float(value), device="cuda")
            client.call("aside", x, y)
            for _ in range(4):
                client.call("echo", torch.zeros_like(x))
        torch.cuda.synchronize()
        assert [y.unique().tolist() for y in kept] == [[1.0], [2.0], [3.0]]
        kept.clear()


# Small results that are kept share segments where nothing counts or moves them one by one.


@pytest.fixture
def shared(device: str, world: World) -> World:
    """Endpoints of small results."""

    def filled(value: int) -> torch.Tensor:
        return torch.full((1024,), float(value), device=device)

    world.share("cached")(filled)
    world.share("managed", managed=True)(filled)
    world.share("pinned", managed=True, pinned=True)(filled)
    world.share("ahead", managed=True, host_copy="at_build")(filled)
    return world


def test_many_cached_results_need_few_descriptors(shared: World) -> None:
    """In the server, and in a process that has all of them."""
    client = shared.client()
    before, mapped = open_fds(), len(MAPPINGS)
    results = [client.call("cached", number) for number in range(600)]
    assert open_fds() - before < 10 and len(MAPPINGS) - mapped < 10
    assert [int(result[-1]) for result in results] == list(range(600))


@pytest.mark.parametrize(
    ("endpoint", "options", "together"),
    [
        ("managed", {}, True),
        ("pinned", {}, False),
        ("ahead", {}, False),
        ("managed", {"quotas": {"cpu": 1 << 30}}, False),
        ("managed", {"host_quota": 1 << 30}, False),
        ("managed", {"spill_dir": "."}, False),
    ],
)
@on_the_host
def test_counted_or_movable_results_have_separate_segments(
    shared: World, endpoint: str, options: dict[str, Any], together: bool
) -> None:
    """So that they can be dropped, or moved to another tier, separately."""
    shared.serve(**options)
    client = shared.client()
    with client.call(endpoint, 1) as one, client.call(endpoint, 2) as other:
        found = [MAPPINGS.find(handle.value.data_ptr()) for handle in (one, other)]
        assert (len({mapping.info.id for mapping, _ in filter(None, found)}) == 1) == together


def test_exports_exclude_other_results_of_a_slab(shared: World, device: str) -> None:
    """And another server adopts the record."""
    other = Provider(f"{shared.base_path}-other", device=device)
    other.share("managed", managed=True)(shared.owner.endpoints["managed"].function)
    client = shared.client()
    client.call("managed", 1).release()
    with Server(other), Client(other.base_path, device=device) as there:
        with client.call("managed", 2) as handle, client.export(handle) as record:
            assert [segment.nbytes for segment in record.segments] == [4096]
            assert record.segments[0].tensor().view(torch.float32).unique().tolist() == [2]
            there.adopt(record)
        with there.call("managed", 2) as adopted:
            assert adopted.value.unique().tolist() == [2]


def test_results_in_a_slab_are_not_evicted(shared: World) -> None:
    """The error gives the remedy."""
    client = shared.client()
    client.call("managed", 1).release()
    with pytest.raises(CapabilityError, match="shares a segment with other small results"):
        client.evict("managed")
