"""Tickets: files that lead other processes to an object, and every defect that one can have."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from shared_rpc import AsyncClient, Client, Provider, Server, Ticket
from shared_rpc.errors import (
    BufferNotFound,
    CapabilityError,
    ConnectError,
    SharedRPCError,
    StaleHandleError,
    TicketError,
)
from tests.kit.models import Tied
from tests.kit.processes import eventually
from tests.kit.world import World


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """The path of a ticket."""
    return tmp_path / "model.ticket"


@pytest.fixture
def world(world: World) -> World:
    """A server in this process."""
    world.share("tied", managed=True, access="read")(Tied)
    world.share("made", managed=True)(lambda value=1.0: {"layers": [torch.full((2, 3), value)], "text": "kept"})
    world.share("uncached", managed=True, cache=False)(lambda: torch.arange(3.0))
    return world


def test_clients_are_created_from_tickets(world: World, client: Client, path: Path) -> None:
    """A process with only the file finds the server."""
    handle = client.call("made")
    handle.ticket(path)
    child = world.process(
        f"""
        from shared_rpc import Client
        with Client.from_ticket({str(path)!r}) as client, client.open_ticket({str(path)!r}) as handle:
            handle.value["layers"][0][0, 0] = 7
            print("opened", handle.get_object_info()["leases"])
        """,
        environ={"SHARED_TENSOR_BASE_PATH": "/nowhere/else"},
    )
    assert child.expect("opened") == "opened 2"
    assert child.close() == (0, "")
    assert handle.value["layers"][0][0, 0] == 7


@pytest.mark.anyio
async def test_async_clients_open_tickets(world: World, path: Path) -> None:
    """The same, in coroutines."""
    async with AsyncClient(socket_path=world.server.socket_path) as client:
        handle = await client.call("tied")
        ticket = await handle.ticket(path)
        assert ticket == Ticket.read(path)
        async with AsyncClient.from_ticket(path) as other, await other.open_ticket(path) as opened:
            assert opened.object_id == handle.object_id
            assert torch.equal(opened.value.embed.weight, handle.value.embed.weight)
        with pytest.raises(TicketError):
            await client.open_ticket(path.with_name("another"))


def test_providers_open_tickets(world: World, client: Client, path: Path) -> None:
    """In the client role like a client; in the server's own process with the live object."""
    handle = client.call("tied")
    handle.ticket(path)
    own = world.provider.open_ticket(path)
    assert own.value is world.provider.call("tied").value
    assert own.ticket().object_id == handle.object_id
    far = Provider(world.base_path, execution_mode="client", device="cpu")
    try:
        assert far.open_ticket(path).object_id == handle.object_id
    finally:
        far.close()


def test_the_local_role_has_no_tickets(base_path: str) -> None:
    """No process could open them, and it can open none."""
    local = Provider(base_path, execution_mode="local", device="cpu")
    local.share("tied", managed=True)(Tied)
    with pytest.raises(CapabilityError, match=r"local role.*shared-rpc serve"):
        local.call("tied").ticket()
    local.close()


def test_tickets_keep_nothing_alive(client: Client, path: Path) -> None:
    """An uncached object ends with its last handle, despite any tickets."""
    handle = client.call("uncached")
    handle.ticket(path)
    assert client.open_ticket(path).object_id == handle.object_id
    client.release(handle)
    eventually(lambda: not client.list_objects())
    with pytest.raises(StaleHandleError, match=r"has no object .* any more") as caught:
        client.open_ticket(path)
    assert caught.value.reason == "object_gone"


def test_a_ticket_counts_as_an_access(world: World, client: Client, path: Path) -> None:
    """Also to an object that is not cached. Times in Unix seconds vary by microseconds from one description to the next."""

    def accessed() -> float:
        return float(world.server.engine.ask(lambda core: next(iter(core.objects)).last_accessed_at))

    handle = client.call("uncached")
    handle.ticket(path)
    earlier = accessed()
    with client.open_ticket(path):
        assert accessed() > earlier


def test_superseded_generations_can_be_opened_while_held(client: Client, path: Path) -> None:
    """Later the error names the generation that replaced it."""
    handle = client.call("made")
    handle.ticket(path)
    client.refresh("made")
    opened = client.open_ticket(path)
    assert (opened.generation, opened.is_current()) == (1, False)
    client.release_many([handle, opened])
    with pytest.raises(StaleHandleError, match=r"was dropped, and generation 2 of made\(.*is current") as caught:
        client.open_ticket(path)
    assert caught.value.reason == "superseded"


def test_buffers_have_tickets(client: Client, world: World, path: Path) -> None:
    """Both sides write to one memory; the buffer's own terms apply."""
    buffer = client.create_buffer((2, 4), "float32", zero=True)
    assert buffer.ticket(path).kind == "buffer"
    opened = world.client().open_ticket(path)
    opened.value[1, 3] = 5.0
    assert buffer.value[1, 3] == 5
    client.free_buffer(buffer)
    with pytest.raises(BufferNotFound) as caught:
        client.open_ticket(path)
    assert caught.value.reason == "freed"


def test_tickets_of_another_server_are_refused(client: Client, base_path: str, path: Path) -> None:
    """The error names both sockets, and how to find the right one."""
    client.call("tied").ticket(path)
    elsewhere = Provider(f"{base_path}-other", device="cpu")
    with Server(elsewhere) as other, Client(socket_path=other.socket_path, connect_timeout=0) as stranger:
        with pytest.raises(TicketError, match=r"at .*s-cpu\.sock, but this is .*s-other-cpu\.sock.*from_ticket") as caught:
            stranger.open_ticket(path)
        assert caught.value.reason == "other_server"
        with pytest.raises(TicketError, match="from_ticket"):
            elsewhere.open_ticket(path)


def test_sockets_are_recognised_under_another_path(client: Client, world: World, path: Path, tmp_path: Path) -> None:
    """With a directory mounted elsewhere, as in a container: the server is identified by its id."""
    client.call("tied").ticket(path)
    (tmp_path / "mounted").symlink_to(Path(world.server.socket_path).parent)
    other = tmp_path / "mounted" / Path(world.server.socket_path).name
    with Client(socket_path=other) as mounted:
        assert mounted.open_ticket(path).value.embed.weight.shape == (7, 4)


def test_tickets_of_an_earlier_server_are_stale(world: World, path: Path) -> None:
    """Another id at the same socket, also for clients that were connected to the earlier one."""
    with Client(world.base_path, device="cpu", connect_timeout=5) as client:
        with world.serve():
            client.call("tied").ticket(path)
        with pytest.raises((ConnectError, SharedRPCError)):
            Client(world.base_path, device="cpu", connect_timeout=0).open_ticket(path)
        with world.serve():
            with pytest.raises(StaleHandleError, match=r"ended or is on another host: .* now runs at .*; write") as caught:
                client.open_ticket(path)
            assert caught.value.reason == "server_changed"
            client.call("tied").ticket(path)
            assert client.open_ticket(path).value.embed.weight.shape == (7, 4)
