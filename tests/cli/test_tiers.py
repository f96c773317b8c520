"""The commands that move objects between tiers, and the tiers in the output of other commands."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from shared_rpc import Client
from shared_rpc.cli import discovery
from shared_rpc.memory.spill import SpillDirectory
from tests.kit.commands import cli
from tests.kit.world import World


@pytest.fixture
def client(world: World, tmp_path: Path) -> Client:
    """A client of a server that has a directory as the lower tier of host memory."""

    @world.share(managed=True, access="read")
    def load(number: int) -> torch.Tensor:
        return torch.full((1 << 18,), float(number))

    @world.share(managed=True, pinned=True)
    def stays() -> torch.Tensor:
        return torch.zeros(8)

    world.serve(spill_dir=tmp_path)
    return world.client()


def tiers(client: Client) -> list[str]:
    """Return the tiers of all objects."""
    return sorted(item["tier"] for item in client.list_objects())


def test_evicting_and_restoring_an_object(client: Client) -> None:
    """By its id, with what that freed and took; the second eviction finds the copy."""
    object_id = client.call("load", 1).object_id
    header, row = cli("objects", "evict", object_id).rows
    assert header == ["object", "of", "tier", "freed", "copied", "took"]
    assert row[:5] == [object_id, "load(number=1)", "file", "1.0 MiB", "1.0 MiB"]
    assert tiers(client) == ["file"]
    header, row = cli("objects", "restore", object_id).rows
    assert header[3] == "taken"
    assert row[:5] == [object_id, "load(number=1)", "device", "1.0 MiB", "1.0 MiB"]
    assert cli("objects", "evict", object_id).rows[1][3:5] == ["1.0 MiB", "0 B"]


def test_objects_are_named_by_their_key_or_endpoint(client: Client) -> None:
    """As ``objects`` shows them; nothing is left to move the second time."""
    client.call("load", 1).release(), client.call("load", 2).release()
    (moved,) = cli("objects", "evict", "load(number=2)", "--to", "file", "--json").data
    assert (moved["cache_key"], moved["tier"], tiers(client)) == ("load(number=2)", "file", ["device", "file"])
    assert len(cli("objects", "evict", "load", "--json").data) == 1
    assert len(cli("objects", "evict", "load").rows) == 1


def test_a_slow_disk_delays_the_command(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server must answer soon only where commands look for it: a large object takes its time."""
    create = SpillDirectory.create
    monkeypatch.setattr(discovery, "PATIENCE", 1.0)
    monkeypatch.setattr(SpillDirectory, "create", lambda *given: time.sleep(1.2) or create(*given))
    client.call("load", 1).release()
    assert len(cli("objects", "evict", "load", "--json").data) == 1


def test_objects_and_devices_show_copies(client: Client) -> None:
    """In a column of its own, where there are any."""
    client.call("load", 1).release()
    assert "copies" not in cli("devices").rows[0] and "copies" not in cli("objects").rows[0]
    cli("objects", "evict", "load")
    found = dict(zip(*cli("objects").rows, strict=True))
    assert (found["tier"], found["copies"], found["active"]) == ("file", "1.0 MiB file", "0")
    header, row = cli("devices").rows
    assert (header[-1], row[-1]) == ("copies", "1.0 MiB file")
