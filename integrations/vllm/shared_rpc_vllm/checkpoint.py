"""Identity of a checkpoint: what tells its weights from others without reading them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

__all__ = ["checkpoint_identity", "commit_of"]

#: Files that decide about weights: these themselves, what the model is made from, and code that comes with it.
_SUFFIXES = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".json", ".py"}


def checkpoint_identity(model: str, commit: str | None) -> list[Any]:
    """Return what identifies a checkpoint, as plain data; equal in all processes of the host, and different after a change.

    For a file or a folder these are the names, sizes, times and inodes of its files, links followed. Hidden folders, and those
    that a training writes beside a model, ``checkpoint-…``, are left out. For a name on a hub it is the commit.
    """
    path = Path(model)
    if path.is_file():
        return [_file(path, path.name)]
    if path.is_dir():
        return sorted(_file(file, str(file.relative_to(path))) for file in _files(path))
    return [model, commit]


def _files(folder: Path) -> Iterator[Path]:
    for directory, folders, names in os.walk(folder, followlinks=True):
        folders[:] = [name for name in folders if not name.startswith((".", "checkpoint-"))]
        yield from (Path(directory, name) for name in names if Path(name).suffix in _SUFFIXES)


def _file(path: Path, name: str) -> list[Any]:
    status = path.stat()
    return [name, status.st_size, status.st_mtime_ns, status.st_ino]


def commit_of(model: str, revision: str | None) -> str | None:
    """Return the commit that a revision of a model on the Hugging Face hub stands for; the revision where it is not cached.

    An engine has read the model's configuration before it loads weights, so that it is in the cache.
    """
    if os.path.exists(model):
        return revision
    from huggingface_hub import try_to_load_from_cache

    for name in ("config.json", "params.json"):
        found = try_to_load_from_cache(model, name, revision=revision)
        if isinstance(found, str):  # …/snapshots/<commit>/config.json
            return Path(found).parent.name
    return revision
