"""The identity of a checkpoint's files."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from shared_rpc.integrations.keys import Unshareable, files_of, source_of


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model with a part in a folder of its own, and links, as in the hub's cache."""
    made = tmp_path / "model"
    for name in ("model/1_Dense/model.safetensors", "blob", "elsewhere/config.json", "model/config.json"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
    (made / "model.safetensors").symlink_to(tmp_path / "blob")
    (made / "2_Normalize").symlink_to(tmp_path / "elsewhere")
    return made


def _replace(path: Path) -> None:
    """Replace a file by another one of the same size and time."""
    status = path.stat()
    other = path.with_name("other")
    other.write_bytes(bytes(status.st_size))
    os.utime(other, ns=(status.st_atime_ns, status.st_mtime_ns))
    other.replace(path)


def _touch(path: Path) -> None:
    status = path.stat()
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))


@pytest.mark.parametrize(
    "change",
    [
        lambda folder: (folder / "config.json").write_text("{ }"),
        lambda folder: _replace((folder / "model.safetensors").resolve()),
        lambda folder: _touch((folder / "model.safetensors").resolve()),
        lambda folder: (folder / "model-2.safetensors").write_bytes(b""),
        lambda folder: _replace(folder / "2_Normalize" / "config.json"),
    ],
    ids=["size", "inode of a link's file", "time", "one more", "in a linked folder"],
)
def test_changed_files_are_another_checkpoint(folder: Path, change: Callable[[Path], object]) -> None:
    """By name, size, time or inode."""
    before = files_of(str(folder))
    change(folder)
    assert files_of(str(folder)) != before


@pytest.mark.parametrize("name", ["README.md", ".cache/huggingface/model.safetensors", "checkpoint-500/model.safetensors"])
def test_files_without_weights_are_ignored(folder: Path, name: str) -> None:
    """Such as those of an active training in the folder."""
    before = files_of(str(folder))
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(b"x")
    assert files_of(str(folder)) == before


def test_a_single_file_is_a_checkpoint(tmp_path: Path) -> None:
    """A GGUF file is a whole model."""
    path = tmp_path / "model.gguf"
    path.write_bytes(b"weights")
    before = files_of(str(path))
    _replace(path)
    assert files_of(str(path)) != before


def test_cyclic_links_are_followed_once(folder: Path) -> None:
    """Two of them would double the paths at each of forty steps."""
    before = files_of(str(folder))
    for name in ("back", "again"):
        (folder / "1_Dense" / name).symlink_to(folder)
    assert files_of(str(folder)) == before


def test_missing_files_have_no_key(folder: Path) -> None:
    """Nor has a file that is only a name."""
    with pytest.raises(Unshareable, match="its files cannot be listed"):
        source_of(folder, {"subfolder": "missing"}, "config.json")
    os.symlink("nowhere", folder / "other.bin")
    with pytest.raises(Unshareable, match="its files cannot be listed"):
        source_of(folder, {}, "config.json")
