"""The commands that move objects between tiers, as a user's shell runs them."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from shared_rpc import Client, Provider, Server
from shared_rpc.cli.rendering import span
from tests.kit.commands import cli


@pytest.fixture
def client(provider: Provider, tmp_path: Path) -> Iterator[Client]:
    """A client of a server in this process, which has a lower tier for host memory."""

    @provider.share(managed=True, access="read")
    def load(number: int) -> torch.Tensor:
        return torch.full((1 << 18,), float(number))

    @provider.share(managed=True, pinned=True)
    def stays() -> torch.Tensor:
        return torch.zeros(8)

    with Server(provider, spill_dir=tmp_path) as server, Client(socket_path=server.socket_path) as client:
        yield client


def tiers(client: Client) -> list[str]:
    """Where objects are."""
    return sorted(item["tier"] for item in client.list_objects())


def rows(output: str) -> list[list[str]]:
    """The cells of a printed table."""
    return [re.split(r"\s{2,}", line.strip()) for line in output.splitlines()]


def test_an_object_goes_to_a_file_and_back(client: Client) -> None:
    """By its id, with what that freed and took; the second eviction finds the copy."""
    object_id = client.call("load", 1).object_id
    header, out = rows(cli("objects", "evict", object_id).output)
    assert header == ["object", "of", "tier", "freed", "copied", "took"]
    assert out[:5] == [object_id, "load(number=1)", "file", "1.0 MiB", "1.0 MiB"]
    assert tiers(client) == ["file"]
    header, back = rows(cli("objects", "restore", object_id).output)
    assert header[3] == "taken"
    assert back[:5] == [object_id, "load(number=1)", "device", "1.0 MiB", "1.0 MiB"]
    assert rows(cli("objects", "evict", object_id).output)[1][3:5] == ["1.0 MiB", "0 B"]


def test_all_objects_of_an_endpoint_are_moved(client: Client) -> None:
    """And nothing is left to be moved the second time."""
    client.call("load", 1).release(), client.call("load", 2).release()
    assert len(cli("objects", "evict", "load", "--json").data) == 2
    assert tiers(client) == ["file", "file"]
    assert cli("objects", "evict", "load").output == "nothing is to be moved\n"


def test_an_object_is_named_by_its_key(client: Client) -> None:
    """As ``objects`` shows it."""
    client.call("load", 1).release(), client.call("load", 2).release()
    (moved,) = cli("objects", "evict", "load(number=2)", "--to", "file", "--json").data
    assert (moved["cache_key"], moved["tier"]) == ("load(number=2)", "file")
    assert tiers(client) == ["device", "file"]


def test_an_object_in_use_is_left_where_it_is(client: Client) -> None:
    """And the process that has it active is named."""
    with client.call("load", 1) as handle:
        ran = cli("objects", "evict", handle.object_id)
        assert (ran.code, tiers(client)) == (1, ["device"])
        assert str(os.getpid()) in ran.complaint


def test_a_pinned_object_stays(client: Client) -> None:
    """The complaint names the pin."""
    client.call("stays").release()
    ran = cli("objects", "evict", "stays")
    assert ran.code == 1
    assert "pinned" in ran.complaint


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("objects", "evict", "load", "--to", "host"), "host"),
        (("objects", "evict", "nothing"), "nothing"),
        (("objects", "restore", "nothing"), "nothing"),
    ],
    ids=" ".join,
)
def test_what_cannot_be_moved_is_told(client: Client, arguments: tuple[str, ...], words: str) -> None:
    """In one line, with exit code 1."""
    client.call("load", 1).release()
    ran = cli(*arguments)
    assert ran.code == 1
    assert words in ran.complaint
    assert tiers(client) == ["device"]


def test_objects_tells_the_tier_and_the_copies(client: Client) -> None:
    """In columns of their own."""
    client.call("load", 1).release()
    cli("objects", "evict", "load")
    header, row = rows(cli("objects").output)
    found = dict(zip(header, row, strict=True))
    assert (found["tier"], found["copies"], found["active"]) == ("file", "1.0 MiB file", "0")


def test_devices_tells_the_copies(client: Client) -> None:
    """Of what is on the device, and of what was there."""
    assert "copies" not in rows(cli("devices").output)[0]
    client.call("load", 1).release()
    cli("objects", "evict", "load")
    header, row = rows(cli("devices").output)
    assert (header[-1], row[-1]) == ("copies", "1.0 MiB file")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(2.1e-4, "210 µs"), (0.00099999, "1 ms"), (0.0124, "12.4 ms"), (1.5, "1.5 s"), (99.96, "100 s"), (600, "10 min")],
)
def test_durations_have_three_digits(seconds: float, text: str) -> None:
    """In the unit that suits them."""
    assert span(seconds) == text
