"""``shared-rpc objects export`` and ``import``: an object on disk, and a server that has it again."""

from __future__ import annotations

import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from shared_rpc import Client, Provider, Server
from tests.kit.commands import cli
from tests.kit.processes import Child, eventually


@pytest.fixture
def served(provider: Provider, serve: Callable[..., Server]) -> Server:
    """A server with an endpoint whose builds are told by its results."""
    builds = iter(range(1, 100))

    @provider.share(managed=True)
    def load(size: int = 4, name: str = "base") -> torch.nn.Module:
        """Build a layer."""
        layer = torch.nn.Linear(size, size, bias=False).requires_grad_(False)
        layer.weight.fill_(next(builds))
        return layer

    @provider.share(managed=True)
    def other(size: int = 4) -> torch.nn.Module:
        """Build nothing."""
        raise AssertionError("this is never built")

    @provider.share(managed=True, cache_format_key="{title}")
    def titled(title: str) -> torch.nn.Module:
        """Build a layer with a key of the client's."""
        return torch.nn.Linear(2, 2)

    return serve()


@pytest.fixture
def client(served: Server, connect: Callable[..., Client]) -> Iterator[Client]:
    """A client of it."""
    yield connect()


def test_an_object_goes_to_disk_and_back(client: Client, tmp_path: Path) -> None:
    """By its id; it becomes the next generation of what is cached, or the first one."""
    path = tmp_path / "load.record"
    handle = client.call("load", 8)
    ran = cli("objects", "export", handle.object_id, str(path))
    assert (ran.code, ran.errors) == (0, "")
    assert ran.output.startswith(f"load(size=8, name='base') (256 B) written to {path} in ")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    client.refresh("load", 8)
    ran = cli("objects", "import", str(path))
    assert (ran.code, ran.errors) == (0, "")
    assert ran.output.startswith("load(size=8, name='base') (256 B) is generation 3, read in ")
    assert (client.call("load", 8).value.weight == 1).all()


def test_a_key_cannot_move_the_cursor(client: Client, tmp_path: Path) -> None:
    """A client chose its text, which is printed without control characters."""
    path = tmp_path / "titled.record"
    handle = client.call("titled", "a\x1b]0;title\x07b")
    for ran in (cli("objects", "export", handle.object_id, str(path)), cli("objects", "import", str(path))):
        assert ran.code == 0
        assert ran.output.rstrip("\n").isprintable()


def test_an_object_is_named_by_its_key(client: Client, tmp_path: Path) -> None:
    """As ``objects`` shows it: a script knows no ids. Machines get JSON."""
    path = tmp_path / "load.record"
    handle = client.call("load", 8)
    data = cli("objects", "export", "load(size=8, name='base')", str(path), "--json").data
    assert data == {
        "object_id": handle.object_id,
        "file": str(path),
        "nbytes": 256,
        "endpoint": "load",
        "cache_key": "load(size=8, name='base')",
        "generation": 1,
    }
    data = cli("objects", "import", str(path), "--json", "--endpoint", "other", "size=5").data
    assert (data["endpoint"], data["cache_key"], data["generation"], data["nbytes"]) == ("other", "other(size=5)", 1, 256)
    assert client.call("other", 5).object_id == data["object_id"]


def test_an_unknown_object(client: Client, tmp_path: Path) -> None:
    """One line says that the server has none; no file is made."""
    ran = cli("objects", "export", "load(size=9)", str(tmp_path / "load.record"))
    assert (ran.code, ran.output) == (1, "")
    assert "has no object load(size=9)" in ran.errors and len(ran.errors.splitlines()) == 1
    assert not (tmp_path / "load.record").exists()


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--endpoint", "lod"), "no endpoint 'lod': did you mean 'load'?"),
        (("--endpoint", "load", "width=5"), "load(): got an unexpected keyword argument 'width'"),
    ],
)
def test_a_wrong_call(client: Client, tmp_path: Path, arguments: tuple[str, ...], told: str) -> None:
    """An error of one line, and nothing has changed."""
    path = tmp_path / "load.record"
    with client.call("load", 8) as handle:
        assert cli("objects", "export", handle.object_id, str(path)).code == 0
    ran = cli("objects", "import", str(path), *arguments)
    assert (ran.code, ran.output) == (1, "")
    assert told in ran.errors and len(ran.errors.splitlines()) == 1
    assert [info["generation"] for info in client.list_objects()] == [1]


def test_a_damaged_file(client: Client, tmp_path: Path) -> None:
    """Exit code 1, and a line that names the file and what is wrong with it."""
    path = tmp_path / "load.record"
    with client.call("load", 8) as handle:
        assert cli("objects", "export", handle.object_id, str(path)).code == 0
    data = path.read_bytes()
    path.write_bytes(data[:-1])
    ran = cli("objects", "import", str(path))
    assert (ran.code, ran.errors.count("\n")) == (1, 1)
    assert f"the record {path} is damaged: it has {len(data) - 1} bytes, and {len(data)} were written" in ran.errors
    path.write_bytes(data)
    path.chmod(0o666)
    assert "has mode 0666, so other users may have written it" in cli("objects", "import", str(path)).errors
    assert "cannot read the record" in cli("objects", "import", str(tmp_path / "none")).errors
    path.write_text("a text")
    path.chmod(0o600)
    assert "is no record" in cli("objects", "import", str(path)).errors
    assert "Is a directory" in cli("objects", "export", "load(size=8, name='base')", str(tmp_path)).errors


def test_an_export_that_is_killed_leaves_nothing(
    served: Server, client: Client, tmp_path: Path, children: list[Child], base_path: str
) -> None:
    """Wherever it was: neither a part of a file nor a lease; and an earlier file is whole."""
    path = tmp_path / "load.record"
    with client.call("load", 8) as handle:
        assert cli("objects", "export", handle.object_id, str(path)).code == 0
        before = path.read_bytes()
        code = f"""
import os
from shared_rpc import Client
from shared_rpc.extras import record_file

def stuck(fd):
    print("written", flush=True)
    input()

os.fsync = stuck
with Client({base_path!r}, device="cpu") as client:
    record_file.save(client, {handle.object_id!r}, {str(path)!r})
"""
        child = Child("-c", code)
        children.append(child)
        child.expect("written")
        child.kill()
    assert (path.read_bytes(), [one.name for one in tmp_path.glob("load*")]) == (before, ["load.record"])
    eventually(lambda: client.get_server_info()["leases"] == 0)


def test_an_import_that_is_interrupted_leaves_nothing(
    served: Server, client: Client, tmp_path: Path, children: list[Child], base_path: str
) -> None:
    """Ctrl-C, or a kill, while the file is read: the room goes with the process."""
    path = tmp_path / "load.record"
    with client.call("load", 256) as handle:
        assert cli("objects", "export", handle.object_id, str(path)).code == 0
    client.invalidate_endpoint_cache("load")
    code = f"""
import os, time
from shared_rpc.extras import record_file  # before the next, so that the head of the file is read as ever
from shared_rpc.memory import file_reader

def slowly(*_):
    if not begun:
        begun.append(print("reading", flush=True))
    time.sleep(0.2)

begun = []
file_reader.read_exactly = slowly
file_reader.STEP = 4096
from shared_rpc.cli.app import main
import sys
sys.argv = ["shared-rpc", "objects", "import", {str(path)!r}]
main()
"""
    for end in ("kill", "interrupt"):
        child = Child("-c", code)
        children.append(child)
        child.expect("reading")
        eventually(lambda: client.get_server_info()["buffers"] == 1)
        if end == "kill":
            child.kill()
        else:
            child.process.send_signal(2)
            child.close()
        eventually(lambda: client.list_objects() == [])
