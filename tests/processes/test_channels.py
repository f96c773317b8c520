"""Channels: each message reaches all receivers, and all sides detect the end of each other."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import anyio
import pytest
import torch
from torch import nn

from shared_rpc import AsyncClient, Client, TensorChannel
from shared_rpc.errors import (
    BufferNotFound,
    CapabilityError,
    ChannelClosed,
    ConfigurationError,
    DeadlineExceeded,
    ProtocolError,
)
from shared_rpc.operations import channels
from tests.kit.interpreter import bits
from tests.kit.processes import Child
from tests.kit.world import World

Run = Callable[..., Any]

each_device = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


@pytest.fixture
def device() -> str:
    """The device of the tests that do not run on each kind."""
    return "cpu"


@pytest.fixture
def client(device: str, world: World) -> Client:
    """A client of a running server."""
    world.serve()
    return world.client()


@pytest.fixture
def peer(world: World) -> Callable[[], Child]:
    """``peer()`` starts a process that opens the channel ``c``."""
    return lambda: world.peer("channel = client.open_channel('c')")


def samples(device: str) -> dict[str, torch.Tensor]:
    """Return tensors of many kinds."""
    generator = torch.Generator().manual_seed(1)
    values = {
        "matrix": torch.randn(30, 7, generator=generator),
        "transposed": torch.randn(8, 5, generator=generator).T,
        "rows": torch.randn(20, 4, generator=generator)[::3],
        "half": torch.randn(11, generator=generator).to(torch.bfloat16),
        "eight bits": torch.randn(9, generator=generator).to(torch.float8_e4m3fn),
        "complex": torch.randn(6, 2, generator=generator).view(torch.complex64).conj(),
        "flags": torch.tensor([True, False, True]),
        "count": torch.tensor(3, dtype=torch.int64),
        "nothing": torch.empty(0, 4),
        "parameter": nn.Parameter(torch.randn(3, generator=generator)),
        "larger than a slot": torch.randn(3000, generator=generator),
        "larger than a small message": torch.randn(20_000, generator=generator),
        "larger and transposed": torch.randn(100, 50, generator=generator).T,
        "ä" * 100: torch.zeros(1, dtype=torch.uint16),
    }
    return {name: value.to(device) for name, value in values.items()}


RECEIVED = """
received = []
with client.open_channel("c") as channel:
    for message in channel:
        received.append([message.meta, {name: bits(tensor) for name, tensor in message}])
answer = received
"""


@each_device
@pytest.mark.parametrize("nbytes", [4096, 1 << 20])
def test_tensors_of_every_kind_arrive(device: str, client: Client, world: World, nbytes: int) -> None:
    """Each message whole and in order, in slots smaller than some of its tensors, or larger than all."""
    tensors = samples(device)
    with client.create_channel("c", nbytes) as channel:
        sender = threading.Thread(target=lambda: send_all(channel, tensors))
        sender.start()
        received = world.run(RECEIVED)
        sender.join()
    digests = {name: bits(tensor) for name, tensor in tensors.items()}
    assert received == [[{"step": 0}, digests], [None, {}], [[1, "two"], digests]]


def send_all(channel: TensorChannel, tensors: dict[str, torch.Tensor]) -> None:
    """Send three messages, then close."""
    channel.send(tensors, {"step": 0})
    channel.send({})
    channel.send(tensors, [1, "two"])
    channel.close()


@each_device
def test_messages_can_be_copied_to_existing_tensors(client: Client) -> None:
    """By name, larger ones piece by piece, even if they are not contiguous."""
    values = {"small": torch.arange(6.0).reshape(2, 3), "large": torch.arange(4000.0).reshape(40, 100), "last": torch.ones(2)}
    mine = {"small": torch.zeros(2, 3), "large": torch.zeros(100, 40).T, "last": torch.zeros(2, dtype=torch.float64)}
    with client.create_channel("c", 4096) as channel, client.open_channel("c") as reader:
        for targets in (mine, {name: tensor.contiguous() for name, tensor in mine.items()}):
            sender = threading.Thread(target=channel.send, args=(values,))
            sender.start()
            with reader.receive(timeout=20) as message:
                assert message.copy_to(targets) == ["small", "large", "last"]
            sender.join()
            assert all(torch.equal(targets[name], value.to(targets[name].dtype)) for name, value in values.items())


def test_tensors_in_a_slot_are_valid_in_the_block(client: Client) -> None:
    """After reading a message, its tensors stay valid in the block: the sender cannot refill the slot."""
    with client.create_channel("c", 4096, slots=1) as channel, client.open_channel("c") as reader:
        channel.send({"x": torch.ones(2), "y": torch.ones(2)})
        with reader.receive(timeout=5) as message:
            tensors = dict(message)
            with pytest.raises(DeadlineExceeded):
                channel.send({"x": torch.zeros(2)}, timeout=0)
            assert [tensor.tolist() for tensor in tensors.values()] == [[1, 1], [1, 1]]
        channel.send({"x": torch.zeros(2)}, timeout=0)
        assert [(name, value.tolist()) for name, value in reader.receive(timeout=5)] == [("x", [0, 0])]
        channel.flush(timeout=0)


def test_every_reader_gets_every_message(client: Client) -> None:
    """A slot is refilled when all readers have acknowledged it; a third reader is refused."""
    with client.create_channel("c", 4096, slots=1, readers=2) as channel:
        readers = [client.open_channel("c") for _ in range(3)]
        for number in range(20):
            channel.send({"x": torch.tensor(number)}, timeout=5)
            for reader in readers[:2]:
                with pytest.raises(DeadlineExceeded):
                    channel.send({}, timeout=0)
                with reader.receive(timeout=5) as message:
                    assert [tensor.item() for _, tensor in message] == [number]
        with pytest.raises(ConfigurationError, match="2 readers already"):
            readers[2].receive(timeout=5).__enter__()
        for reader in readers:
            reader.close()


# Ends.


def test_a_killed_reader_is_detected_within_a_second(client: Client, peer: Callable[[], Child]) -> None:
    """A waiting sender gets an error with its pid, and so does every later send."""
    with client.create_channel("c", 4096) as channel:
        reader = peer()
        channel.send({"x": torch.ones(1)})
        reader.ask("with channel.receive(20) as message: print('received', dict(message), flush=True)", "received")
        killed: list[float] = []
        threading.Timer(0.1, lambda: killed.append(time.monotonic()) or reader.process.kill()).start()
        with pytest.raises(ChannelClosed, match=r"reader 1 of channel 'c' .* was killed") as caught:
            for _ in range(3):
                channel.send({"x": torch.ones(1)}, timeout=20)
        assert time.monotonic() - killed[0] < 1
        assert (caught.value.reason, caught.value.pid) == ("ended", reader.pid)
        with client.open_channel("c") as successor, pytest.raises(ChannelClosed) as kept:
            next(iter(successor))
        with pytest.raises(ChannelClosed):  # also while the error of a successor is kept
            channel.send({})
        del kept


def test_a_killed_sender_is_detected_within_a_second(client: Client, peer: Callable[[], Child]) -> None:
    """The reader gets the published slots, and then the error."""
    with client.create_channel("c", 4096) as channel:
        sender = peer()
        sender.ask("channel.send({'x': torch.ones(3)}); print('sent', flush=True)", "sent")
        killed: list[float] = []
        threading.Timer(0.1, lambda: killed.append(time.monotonic()) or sender.process.kill()).start()
        names = []
        with pytest.raises(ChannelClosed, match=r"the sender of channel 'c' .* was killed") as caught:
            for message in channel:
                names += [name for name, _ in message]
        assert time.monotonic() - killed[0] < 1
        assert (names, caught.value.reason, caught.value.pid) == (["x"], "ended", sender.pid)


def test_closing_a_side_is_visible(client: Client) -> None:
    """The sender's end ends the iteration; a reader's is an error in the sender; a closed channel reports that."""
    with client.create_channel("c", 4096) as channel, client.open_channel("c") as reader:
        channel.send({"x": torch.ones(1)})
        with reader.receive(timeout=5) as message:
            assert len(dict(message)) == 1
        reader.close()
        with pytest.raises(ChannelClosed, match="has closed its side") as caught:
            channel.send({"x": torch.ones(1)})
        assert (caught.value.reason, caught.value.pid) == ("closed", os.getpid())
        with pytest.raises(ConfigurationError, match="closed here"), reader.receive():
            pass
        # Another reader has its place.
        with client.open_channel("c") as other:
            with pytest.raises(DeadlineExceeded):
                other.receive(timeout=0).__enter__()
            channel.send({"y": torch.ones(1)})
            channel.close()
            assert [[name for name, _ in message] for message in other] == [["y"]]


def test_waits_time_out(client: Client) -> None:
    """The error names the missing peer; an abandoned message is reported."""
    with client.create_channel("c", 4096) as channel, client.open_channel("c") as reader:
        with pytest.raises(DeadlineExceeded, match="the sender of channel 'c' has not come yet"):
            reader.receive(timeout=0.01).__enter__()
        with pytest.raises(DeadlineExceeded, match=rf"reader 1 .*pid {os.getpid()}"):
            channel.send({"large": torch.zeros(10_000)}, timeout=0.01)
        message = reader.receive(timeout=1).__enter__()
        next_one = threading.Thread(target=channel.send, args=({"x": torch.ones(1)}, 7))
        next_one.start()
        with pytest.raises(ChannelClosed) as caught:
            list(message)
        next_one.join()
        assert caught.value.reason == "abandoned"
        with reader.receive(timeout=5) as following:
            assert (following.meta, [name for name, _ in following]) == (7, ["x"])


# Names, places, kinds.


@each_device
def test_inference_mode_and_parameters_are_supported(device: str, client: Client) -> None:
    """One side may be in inference mode; parameters can be sent and be targets, and received tensors can be computed with."""
    module = torch.nn.Linear(3, 2, device=device)
    with client.create_channel("c", 4096) as channel, client.open_channel("c") as reader:
        with torch.inference_mode():
            channel.send({"weight": torch.ones(2, 3, device=device)})
            with reader.receive(timeout=10) as message:
                assert message.copy_to({"weight": module.weight}) == ["weight"]
        assert module.weight.requires_grad and module.weight.is_leaf
        channel.send(dict(module.named_parameters()))
        with reader.receive(timeout=10) as message:
            got = {name: tensor.clone().requires_grad_() for name, tensor in message}
        got["weight"].sum().backward()
        assert got["weight"].tolist() == [[1.0] * 3] * 2 and got["weight"].grad is not None


@pytest.mark.parametrize("place", [(4096, 8, 0), (-8, 8, 0), (2, 8, 0), (0, 6, 0), (0, 8, 4), (0, 16, 0)])
def test_malformed_headers_are_refused(place: tuple[int, int, int]) -> None:
    """Pieces stay within the slot and its elements, whatever a sender writes."""
    offset, nbytes, start = place
    slot = channels._Slot(torch.zeros(4096, dtype=torch.uint8), 64)
    with pytest.raises(ProtocolError, match=r"a channel's header (places|cuts)"):
        slot.place(channels._Piece("x", "float32", (2,), start, nbytes, offset))


def test_names_are_unique(client: Client) -> None:
    """One channel at a time has a name; a missing one is named in the error."""
    with client.create_channel("c", 100, slots=3) as channel:
        assert (channel.name, channel.nbytes, channel.slots, channel.readers) == ("c", 512, 3, 1)
        with pytest.raises(ConfigurationError, match="'c' already"):
            client.create_channel("c", 100)
        assert len(client.list_objects()) == 2
    with pytest.raises(BufferNotFound, match="there is no channel 'c' at"):
        client.open_channel("c")
    made: list[TensorChannel] = []
    threading.Timer(0.1, lambda: made.append(client.create_channel("c", 100))).start()
    client.open_channel("c", timeout=20).close()
    made[0].close()


def test_there_is_one_sender_at_a_time(client: Client) -> None:
    """A second one is refused, as is a process that receives; a third one is accepted after the first has closed."""
    with client.create_channel("c", 4096) as channel, client.open_channel("c") as other, client.open_channel("c") as third:
        channel.send({"x": torch.zeros(1)})
        with pytest.raises(ConfigurationError, match=f"a sender already, pid {os.getpid()}"):
            other.send({})
        with pytest.raises(ConfigurationError, match="and not both"):
            channel.receive().__enter__()
        channel.close()
        third.send({"y": torch.zeros(1)})
        names = [next(iter(dict(other.receive(timeout=5)))) for _ in range(2)]
    assert names == ["x", "y"]


def test_invalid_messages_are_refused(client: Client) -> None:
    """Before anything is sent, or, if a reader has no tensor for one, when it is read."""
    with client.create_channel("c", 4096, slots=1) as channel, client.open_channel("c") as reader:
        with pytest.raises(CapabilityError, match="'x' is no plain strided tensor"):
            channel.send({"x": torch.eye(2).to_sparse()})
        with pytest.raises(ConfigurationError, match="not plain data"):
            channel.send({}, meta=object())
        for targets, why in (({}, "none of that name"), ({"x": torch.zeros(3)}, "one of shape (3,)")):
            channel.send({"x": torch.zeros(2), "y": torch.zeros(2)})
            with reader.receive(timeout=5) as message, pytest.raises(ConfigurationError, match="'x'") as caught:
                message.copy_to(targets)
            assert why in str(caught.value)
        channel.flush(timeout=5)


@pytest.mark.anyio
@each_device
async def test_coroutines_can_use_channels(device: str, client: Client, base_path: str) -> None:
    """With one side on an event loop."""
    tensors = samples(device)
    digests = {name: bits(tensor) for name, tensor in tensors.items()}
    async with AsyncClient(base_path, device=device) as other:
        async with await other.create_channel("c", 4096) as channel:
            got: list[Any] = []

            async def receive() -> None:
                async with await other.open_channel("c") as reader:
                    async for message in reader:
                        got.append([message.meta, {name: bits(tensor) async for name, tensor in message}])

            async with anyio.create_task_group() as group:
                group.start_soon(receive)
                await channel.send(tensors, 1)
                await channel.flush(timeout=20)
                await channel.close()
        assert got == [[1, digests]]


@pytest.mark.asyncio
@pytest.mark.parametrize("ends", ["its task is cancelled", "its scope has been cancelled"])
async def test_a_slot_is_acknowledged_once(client: Client, base_path: str, monkeypatch: pytest.MonkeyPatch, ends: str) -> None:
    """Also if the coroutine that ends the message is cancelled: the channel stays in step."""
    begun = threading.Event()

    def synchronize(parts: channels.Parts, *, copied: bool) -> None:
        begun.set()
        time.sleep(0.2)

    async def end() -> None:
        async with channel.receive(20) as message:
            await message.close()

    async def end_late() -> None:
        message = await channel.receive(20).__aenter__()
        with anyio.CancelScope() as scope:
            scope.cancel()
            await message.close()

    async with AsyncClient(base_path, device="cpu") as other, await other.create_channel("c", 4096) as channel:
        sender = client.open_channel("c")
        sender.send({"x": torch.zeros(2)}, 1)
        monkeypatch.setattr(channels.Parts, "synchronize", synchronize)
        task = asyncio.create_task(end_late() if "scope" in ends else end())
        await anyio.to_thread.run_sync(begun.wait, 5.0)
        if "task" in ends:
            task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        monkeypatch.undo()
        for number in (2, 3, 4):
            sender.send({"x": torch.zeros(2)}, number, timeout=5)
            async with channel.receive(5) as message:
                assert message.meta == number
        sender.close()


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda"])
@pytest.mark.parametrize("elements", [4, 1 << 20], ids=["small", "large"])
def test_sending_during_a_capture_is_refused(client: Client, elements: int) -> None:
    """The capture is undisturbed, and afterwards the tensor can be sent."""
    value, out = torch.ones(elements, device="cuda"), torch.zeros(elements, device="cuda")
    with client.create_channel("c", 8 << 20) as channel, client.open_channel("c") as reader:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out.copy_(value + 1)
            with pytest.raises(CapabilityError, match="being captured"):
                channel.send({"x": out})
        graph.replay()
        channel.send({"x": out})
        with reader.receive(timeout=20) as message:
            assert [tensor.sum().item() for _, tensor in message] == [2 * elements]
