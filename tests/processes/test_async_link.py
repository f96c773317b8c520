"""The connection of an async client, and its common behaviour with that of a blocking one."""

from __future__ import annotations

import inspect
import socket
from collections.abc import Callable

import anyio
import anyio.lowlevel
import msgspec
import pytest

from shared_rpc import AsyncHandle, Handle
from shared_rpc.client.async_link import AsyncLink
from shared_rpc.client.results import result_of
from shared_rpc.client.steps import Request
from shared_rpc.client.transfer import ClientTransfer
from shared_rpc.memory.backends.host import HOST
from shared_rpc.memory.pool import PoolOptions
from shared_rpc.protocol import messages as m
from shared_rpc.protocol.records import EMPTY_TABLE
from shared_rpc.protocol.socket import FrameSocket
from tests.kit.processes import eventually


async def until(condition: Callable[[], bool]) -> None:
    """Wait for another thread while the loop runs."""
    await anyio.to_thread.run_sync(eventually, condition)


def surface(kind: type) -> dict[str, str]:
    """Return the public methods of a class with their signatures, without coroutines and with one class of handles."""
    found = {}
    for name, member in inspect.getmembers(kind):
        if not name.startswith("_") and (inspect.isfunction(member) or isinstance(member, property)):
            text = "property" if isinstance(member, property) else str(inspect.signature(member))
            for word in ("AsyncHandle", "AsyncClient", "AsyncRefreshIterator", "AbstractAsyncContextManager"):
                text = text.replace(word, word.replace("Async", ""))
            found[name] = text
    return found


def test_both_handles_have_one_surface() -> None:
    """Every public name, parameter, default and annotation; a coroutine returns the same as the function."""
    assert surface(AsyncHandle) == surface(Handle)


@pytest.mark.anyio
async def test_arenas_arrive_before_later_replies_are_taken() -> None:
    """Coroutines take replies in any order; descriptors arrived with the reply sent first."""
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    channel, server, transfer = (
        AsyncLink("here", ours),
        FrameSocket(theirs),
        ClientTransfer(PoolOptions(), lambda numbers: None),
    )
    taken: list[int] = []

    async def ask(number: int) -> None:
        reply = await channel.exchange(Request(m.Ping(), "echo()", transfer=transfer))
        with result_of("echo()", reply, transfer) as result:
            assert not result.segments[0].closed
        taken.append(number)

    with HOST.create(4096) as segment:
        async with anyio.create_task_group() as group:
            group.start_soon(ask, 1)
            await until(lambda: channel._reader)
            group.start_soon(ask, 2)
            await until(lambda: len(channel._exchanges.pending) == 2)
            # The one who reads asked first, and is answered last.
            answer = m.Result(msgspec.Raw(EMPTY_TABLE), [msgspec.structs.replace(segment.info, arena=True)], owner="server")
            server.queue(answer, 2, fds=[segment.fileno()])
            server.queue(msgspec.structs.replace(answer, kept=[0]), 1)
            server.flush()
    assert sorted(taken) == [1, 2]
    transfer.close()
    channel.close()
    server.close()
