"""The identity of a checkpoint: it changes with the files, and with nothing else."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from shared_rpc_vllm.checkpoint import checkpoint_identity, commit_of


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder like that of a model, with links to its weights, as in the hub's cache."""
    made = tmp_path / "model"
    (made / "1_Dense").mkdir(parents=True)
    (tmp_path / "blob").write_bytes(b"weights")
    (made / "model.safetensors").symlink_to(tmp_path / "blob")
    (made / "config.json").write_text("{}")
    (made / "1_Dense" / "model.safetensors").write_bytes(b"weights")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "config.json").write_text("{}")
    (made / "2_Normalize").symlink_to(tmp_path / "elsewhere")
    return made


def _replace(path: Path) -> None:
    """Put another file of the same size and time in the place of one."""
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
        lambda folder: _replace(folder / "config.json"),
        lambda folder: _replace((folder / "model.safetensors").resolve()),
        lambda folder: _touch((folder / "model.safetensors").resolve()),
        lambda folder: (folder / "model-2.safetensors").write_bytes(b""),
        lambda folder: (folder / "config.json").unlink(),
        lambda folder: (folder / "modeling.py").write_text(""),
        lambda folder: _replace(folder / "1_Dense" / "model.safetensors"),
        lambda folder: _replace(folder / "2_Normalize" / "config.json"),
    ],
    ids=["size", "inode", "inode of a link's file", "time", "one more", "one less", "code", "in a folder", "in a linked one"],
)
def test_another_file_is_another_identity(folder: Path, change: Callable[[Path], object]) -> None:
    """By its name, size, time or inode."""
    before = checkpoint_identity(str(folder), None)
    change(folder)
    assert checkpoint_identity(str(folder), None) != before


@pytest.mark.parametrize("name", ["README.md", ".cache/huggingface/model.safetensors", "checkpoint-500/model.safetensors"])
def test_files_that_vllm_does_not_read_do_not_count(folder: Path, name: str) -> None:
    """A training that goes on beside a model does not make another one of it."""
    before = checkpoint_identity(str(folder), None)
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(b"x")
    assert checkpoint_identity(str(folder), None) == before


def test_a_single_file_counts(tmp_path: Path) -> None:
    """A GGUF file is a whole model."""
    path = tmp_path / "model.gguf"
    path.write_bytes(b"weights")
    before = checkpoint_identity(str(path), None)
    _replace(path)
    assert checkpoint_identity(str(path), None) != before


def test_a_name_on_a_hub_is_identified_by_the_commit() -> None:
    """What it stood for when the engine read its configuration."""
    assert checkpoint_identity("org/model", "abc") != checkpoint_identity("org/model", "def")


def test_a_revision_is_the_commit_that_is_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`main` stands for another one later."""
    hub = pytest.importorskip("huggingface_hub")
    cache = tmp_path / "models--org--model"
    (cache / "refs").mkdir(parents=True)
    (cache / "refs" / "main").write_text("abc")
    (cache / "snapshots" / "abc").mkdir(parents=True)
    (cache / "snapshots" / "abc" / "config.json").write_text("{}")
    found = hub.try_to_load_from_cache
    monkeypatch.setattr(hub, "try_to_load_from_cache", lambda *args, **kwargs: found(*args, cache_dir=tmp_path, **kwargs))
    assert commit_of("org/model", None) == "abc"
    assert commit_of("org/other", "v1") == "v1"
    assert commit_of(str(tmp_path), None) is None
