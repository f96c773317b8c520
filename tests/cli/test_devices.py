"""Devices and quotas by the command line."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from shared_rpc import Client, Provider, Server
from shared_rpc.cli.options import quotas_of
from shared_rpc.errors import ServerBusy
from tests.kit.commands import MODULE, Ran, cli
from tests.kit.processes import Child

TOTAL = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


@pytest.fixture
def app(tmp_path: Path) -> None:
    """An app in the directory where the commands run, with nothing in it that needs torch."""
    (tmp_path / "app.py").write_text("from shared_rpc import Provider\n\nprovider = Provider(device='cpu')\n")


@pytest.fixture
def limited(provider: Provider, base_path: str) -> Server:
    """A server of the host with a quota, not started."""
    return Server(provider, quotas={"cpu": 8 << 20})


def test_devices(limited: Server, connect: Callable[..., Client]) -> None:
    """What there is of each, what is used and what may be; a table for people, all of it for machines."""
    with limited:
        connect().create_buffer(3 << 20, ttl=600).release()
        header, row = (re.split(r"\s{2,}", line.strip()) for line in cli("devices").output.splitlines())
        assert header == ["device", "name", "memory", "free", "used", "quota"]
        assert row[:2] == ["cpu", "host memory"] and row[4:] == ["3.0 MiB", "8.0 MiB"]
        (found,) = cli("devices", "--json").data
    assert set(found) == {"id", "kind", "name", "total", "free", "used", "limit", "copies"}
    assert (found["id"], found["total"], found["used"], found["limit"]) == ("cpu", TOTAL, 3 << 20, 8 << 20)


def test_devices_without_a_quota(provider: Provider, serve: Callable[..., Server]) -> None:
    """That is said too."""
    serve()
    assert re.split(r"\s{2,}", cli("devices").output.splitlines()[1].strip())[-1] == "none"


def test_devices_loads_no_torch(provider: Provider, serve: Callable[..., Server]) -> None:
    """As all commands that only ask it starts fast."""
    serve()
    ran = Ran("-X", "importtime", *MODULE, "devices")
    assert ran.code == 0
    assert not {"torch", "shared_rpc.server.server"} & {line.rpartition("|")[2].strip() for line in ran.errors.splitlines()}


def test_serving_with_a_quota(
    app: None, base_path: str, tmp_path: Path, children: list[Child], connect: Callable[..., Client]
) -> None:
    """``--quota`` is the server's own, in bytes as ``--max-bytes`` has them."""
    server = Child(*MODULE, "serve", "app", "--quota", "cpu=8KiB", cwd=tmp_path)
    children.append(server)
    server.expect("serving")
    client = connect()
    assert [entry["limit"] for entry in client.list_devices()] == [8192]
    with client.create_buffer(8192) as buffer, pytest.raises(ServerBusy):
        client.create_buffer(1)
    client.free_buffer(buffer)


def test_serving_with_a_fraction(
    app: None, base_path: str, tmp_path: Path, children: list[Child], connect: Callable[..., Client]
) -> None:
    """Of what the device has."""
    server = Child(*MODULE, "serve", "app", "--quota", "cpu=0.25", cwd=tmp_path)
    children.append(server)
    server.expect("serving")
    assert [entry["limit"] for entry in connect().list_devices()] == [int(TOTAL * 0.25)]


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        ([], {}),
        (["cpu=8GiB"], {"cpu": 8 << 30}),
        (["cuda:0=0.8", "cpu = 1.5 M"], {"cuda:0": 0.8, "cpu": 3 << 19}),
        (["cuda=1.0"], {"cuda": 1.0}),
        (["cuda=.5"], {"cuda": 0.5}),
        (["GPU-0af4=0"], {"GPU-0af4": 0}),
        (["cpu=1"], {"cpu": 1}),
    ],
)
def test_quotas_as_people_write_them(texts: list[str], expected: dict[str, int | float]) -> None:
    """A number with a point and no unit is a fraction; any other is a size."""
    found = quotas_of(texts)
    assert found == expected
    assert [type(amount) for amount in found.values()] == [type(amount) for amount in expected.values()]


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["cpu"], "--quota cpu: write device=amount, as in cuda:0=0.8 or cpu=8GiB"),
        (["=5"], "--quota =5: write device=amount"),
        (["cpu=lots"], "--quota cpu=lots: use a number of bytes, or one with K, M, G or T"),
        (["cpu=-1"], "--quota cpu=-1: use a number of bytes"),
        (["cpu=1.5"], "--quota cpu=1.5: a fraction is more than 0 and at most 1.0; bytes are whole, or have a unit"),
        (["cpu=0.0"], "--quota cpu=0.0: a fraction is more than 0"),
        (["cpu=1G", "cpu=2G"], "--quota cpu=2G: cpu has a quota already"),
        (["cpu=1G", "disk=5"], "--quota disk=5: device='disk': use 'auto', 'cpu', 'cuda'"),
    ],
    ids=str,
)
def test_quotas_that_cannot_be(app: None, base_path: str, tmp_path: Path, options: list[str], complaint: str) -> None:
    """One line with the option and its value; nothing is served then."""
    ran = cli("serve", "app", *(part for option in options for part in ("--quota", option)), cwd=tmp_path)
    assert ran.misuse.startswith(complaint)
    assert not list(tmp_path.glob("*.sock"))


def test_a_quota_of_a_device_that_the_server_lacks(app: None, base_path: str, tmp_path: Path) -> None:
    """Only the app's providers name the device, so that it is an error and no misuse."""
    ran = cli("serve", "app", "--quota", "GPU-1=5", cwd=tmp_path)
    assert ran.complaint.startswith("quota GPU-1=5: use a device of this server: cpu")
    assert not list(tmp_path.glob("*.sock"))


@pytest.mark.parametrize("place", [[], ["--in-process"]], ids=str)
@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--when-full", "evict"], "--when-full evict needs a --quota DEVICE=AMOUNT"),
        (["--host-quota", "lots"], "--host-quota lots: use a number of bytes, or one with K, M, G or T"),
        (["--host-quota", "1.5"], "--host-quota 1.5: a fraction is more than 0 and at most 1.0"),
    ],
    ids=str,
)
def test_policies_that_cannot_be(
    app: None, base_path: str, tmp_path: Path, place: list[str], options: list[str], complaint: str
) -> None:
    """The same of what becomes of a full device."""
    ran = cli("serve", "app", *place, *options, cwd=tmp_path)
    assert ran.misuse.startswith(complaint)
    assert not list(tmp_path.glob("*.sock"))


@pytest.mark.parametrize("place", [[], ["--in-process"]], ids=str)
def test_serving_with_a_policy(
    app: None, base_path: str, tmp_path: Path, children: list[Child], connect: Callable[..., Client], place: list[str]
) -> None:
    """Requests wait where a device is full; the error of their deadline is another one than that of a refusal."""
    options = ["--quota", "cpu=8KiB", "--when-full", "evict", "--host-quota", "0.5", *place]
    server = Child(*MODULE, "serve", "app", *options, cwd=tmp_path)
    children.append(server)
    server.expect("serving")
    client = connect(timeout=2.0)
    with client.create_buffer(8192) as buffer, pytest.raises(ServerBusy, match=f"wait for capacity.*buffer {buffer.object_id}"):
        client.create_buffer(1)
