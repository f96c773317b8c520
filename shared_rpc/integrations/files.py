"""Files of a checkpoint: what tells its weights from others without reading them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

__all__ = ["files_of"]

#: Files that decide about weights: these themselves, what the model is made from, and code that comes with it. Others, as a
#: log, may change.
_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".gguf", ".json", ".py")
#: Folders that decide about none: of caches, and those that a training writes beside a model.
_ELSEWHERE = (".", "checkpoint-")


def files_of(path: str) -> list[list[Any]]:
    """Return the names, sizes in bytes, times in nanoseconds and inodes of a checkpoint's files, links followed, as plain data.

    Equal in all processes of the host, and different after a change.

    :param path: a folder, with those in it, or the file that is the whole checkpoint.
    :raises OSError: if there is none, or one of its files cannot be told.
    """
    if os.path.isfile(path):
        return [_facts(path, os.path.basename(path))]
    os.scandir(path).close()  # the walk is silent about a folder that cannot be read
    return sorted(_facts(file, os.path.relpath(file, path)) for file in _files(path))


def _files(folder: str) -> Iterator[str]:
    seen = set()
    for directory, folders, names in os.walk(folder, followlinks=True):
        status = os.stat(directory)
        if (status.st_dev, status.st_ino) in seen:  # links may lead back
            folders.clear()
            continue
        seen.add((status.st_dev, status.st_ino))
        folders[:] = sorted(name for name in folders if not name.startswith(_ELSEWHERE))
        yield from (os.path.join(directory, name) for name in names if name.endswith(_SUFFIXES))


def _facts(path: str, name: str) -> list[Any]:
    status = os.stat(path)
    return [name, status.st_size, status.st_mtime_ns, status.st_ino]
