"""Keys of loaded models: their files and options.

Calls with equal keys get one object, so a key covers everything that changes the result. Options that cannot be compared have
no key.
"""

from __future__ import annotations

import enum
import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch

from shared_rpc.integrations.loading import library

_COMMIT = re.compile(r"[0-9a-f]{40}")
#: Files that determine the weights: these themselves, the model's configuration, and code that comes with it. Others, such as
#: a log, may change.
_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".gguf", ".json", ".py")
#: Folders that are ignored: of caches, and those that a training writes into a model's folder.
_ELSEWHERE = (".", "checkpoint-")


class Unshareable(Exception):
    """The result of a call cannot be shared. The text names the argument and the reason."""


class CheckpointChanged(RuntimeError):
    """The files of a checkpoint changed after the request, or while they were loaded."""


class Checkpoint(NamedTuple):
    """A checkpoint: a folder or a repository, and an identifier of its content.

    :param name: an absolute path, or the name of a repository.
    :param content: a digest of the file system's facts about a folder's files, or a commit.
    """

    name: str
    content: str
    subfolder: str = ""

    @property
    def is_local(self) -> bool:
        """True for a local folder or file."""
        return os.path.isabs(self.name)

    def check(self) -> None:
        """Raise :class:`CheckpointChanged` if the files of a local checkpoint have changed."""
        if self.is_local and _content_of(self.name, self.subfolder) != self.content:
            raise CheckpointChanged(f"files of {os.path.join(self.name, self.subfolder)} have changed while they were loaded")


def source_of(name: Any, options: Mapping[str, Any], config_name: str) -> Checkpoint:
    """Return the checkpoint of a name given to ``from_pretrained``.

    :param options: of ``from_pretrained``.
    :param config_name: the name of the file that every checkpoint has.
    :raises Unshareable: if the name is ambiguous.
    """
    subfolder = options.get("subfolder") or ""
    if not isinstance(name, (str, os.PathLike)):
        raise Unshareable(f"its name is {name!r}")
    if os.path.exists(name):
        path = os.path.realpath(name)
        return Checkpoint(path, _content_of(path, subfolder), subfolder)
    return Checkpoint(str(name), _commit_of(str(name), options, config_name), subfolder)


def _content_of(path: str, subfolder: str) -> str:
    try:
        return digest_of(files=files_of(os.path.join(path, subfolder) if subfolder else path))
    except OSError as error:
        raise Unshareable(f"its files cannot be listed: {error}") from error


def _commit_of(name: str, options: Mapping[str, Any], config_name: str) -> str:
    revision = options.get("revision")
    # The revision resolved by transformers itself, in releases that do so.
    resolved = getattr(revision, "resolved", revision)
    if resolved is None or not _COMMIT.fullmatch(str(resolved)):
        hub = library("huggingface_hub")
        wanted = {key: options[key] for key in ("cache_dir", "token", "local_files_only") if options.get(key) is not None}
        try:
            path = hub.hf_hub_download(
                name, config_name, subfolder=options.get("subfolder") or None, revision=revision and str(revision), **wanted
            )
        except Exception as error:
            raise Unshareable(f"its revision cannot be resolved: {error}") from error
        # The Hub's cache keeps the files of a commit in models--org--name/snapshots/<commit>/config.json.
        resolved = next((part for part in reversed(path.split(os.sep)) if _COMMIT.fullmatch(part)), None)
    if resolved is None:
        raise Unshareable("its revision cannot be resolved")
    return str(resolved)


def files_of(path: str) -> list[list[Any]]:
    """Return name, size (bytes), modification time (nanoseconds) and inode of each file of a checkpoint, as plain data.

    Links are followed. The result is equal in all processes of the host, and differs after a change.

    :param path: a folder, including subfolders, or the file that is the whole checkpoint.
    :raises OSError: if it does not exist, or one of its files cannot be examined.
    """
    if os.path.isfile(path):
        return [_facts(path, os.path.basename(path))]
    os.scandir(path).close()  # the walk ignores a folder that cannot be read
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


def digest_of(**parts: Any) -> str:
    """Return a digest that is equal for equal parts.

    :raises Unshareable: if a part cannot be compared, naming it.
    """
    return hashlib.sha256(
        json.dumps({name: _canonical(part, name) for name, part in parts.items()}, sort_keys=True).encode()
    ).hexdigest()[:16]


def _canonical(value: Any, where: str) -> Any:
    """Return canonical JSON of a value: types are distinguished, the order of a dict is not."""
    if value is None or (isinstance(value, (bool, int, float, str)) and not isinstance(value, enum.Enum)):
        return value
    if isinstance(value, (torch.dtype, torch.device, os.PathLike, enum.Enum)):
        return str(value)
    if isinstance(value, Mapping):
        return {f"{type(key).__name__} {key}": _canonical(item, f"{where}[{key!r}]") for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_canonical(item, f"{where}[{index}]") for index, item in enumerate(value)]
    if isinstance(value, (set, frozenset)):
        return sorted(json.dumps(_canonical(item, where), sort_keys=True) for item in value)
    if isinstance(value, type):
        return f"{value.__module__}.{value.__qualname__}"
    if callable(to_dict := getattr(value, "to_dict", None)):  # configurations, of models, generation and quantisation
        return [_canonical(type(value), where), _canonical(to_dict(), where)]
    raise Unshareable(f"two {where} cannot be compared: {value!r:.200}")
