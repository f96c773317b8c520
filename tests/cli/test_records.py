"""``shared-rpc objects export`` and ``import``: an object on disk, and its import by a server."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
import torch

from shared_rpc import Client
from tests.kit.commands import cli
from tests.kit.world import World

KEY = "load(size=8, name='base')"


@pytest.fixture
def world(world: World) -> World:
    """A server whose results are filled with the number of their build."""
    builds = iter(range(1, 100))

    @world.share(managed=True)
    def load(size: int = 4, name: str = "base") -> torch.nn.Module:
        layer = torch.nn.Linear(size, size, bias=False).requires_grad_(False)
        layer.weight.fill_(next(builds))
        return layer

    @world.share(managed=True)
    def other(size: int = 4) -> torch.nn.Module:
        raise AssertionError("this is never built")

    world.serve()
    return world


@pytest.fixture
def exported(client: Client, tmp_path: Path) -> Path:
    """A file with the first generation of :data:`KEY`, which the server has in its cache."""
    path = tmp_path / "load.record"
    client.call("load", 8).release()
    assert cli("objects", "export", KEY, str(path)).code == 0
    return path


def test_exporting_and_importing(client: Client, tmp_path: Path) -> None:
    """By id; the file is private, and the imported object is the next generation of its call."""
    path = tmp_path / "load.record"
    handle = client.call("load", 8)
    output = cli("objects", "export", handle.object_id, str(path)).succeeded
    assert output.startswith(f"{KEY} (256 B) written to {path} in ")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    client.refresh("load", 8)
    assert cli("objects", "import", str(path)).succeeded.startswith(f"{KEY} (256 B) is generation 3, read in ")
    assert (client.call("load", 8).value.weight == 1).all()


def test_an_object_becomes_the_result_of_another_call(client: Client, tmp_path: Path) -> None:
    """Named by ``--endpoint`` and arguments. Scripts, which have no ids, export by key; the output may be JSON."""
    path = tmp_path / "load.record"
    object_id = client.call("load", 8).object_id
    facts = {"nbytes": 256, "endpoint": "load", "cache_key": KEY, "generation": 1}
    assert cli("objects", "export", KEY, str(path), "--json").data == {"object_id": object_id, "file": str(path), **facts}
    data = cli("objects", "import", str(path), "--json", "--endpoint", "other", "size=5").data
    assert data == facts | {"object_id": data["object_id"], "endpoint": "other", "cache_key": "other(size=5)"}
    assert client.call("other", 5).object_id == data["object_id"]


def test_errors_are_one_line(client: Client, exported: Path, tmp_path: Path) -> None:
    """They name the missing file, or the file and the fault; nothing changes."""
    assert "has no object load(size=9)" in cli("objects", "export", "load(size=9)", str(tmp_path / "other")).complaint
    assert not (tmp_path / "other").exists()
    assert "cannot read the record" in cli("objects", "import", str(tmp_path / "none")).complaint
    path = str(exported)
    assert "no endpoint 'lod': did you mean" in cli("objects", "import", path, "--endpoint", "lod").complaint
    exported.write_bytes(exported.read_bytes()[:-1])
    assert f"the record {path} is damaged: " in cli("objects", "import", path).complaint
    assert [info["generation"] for info in client.list_objects()] == [1]
