"""Identity of a checkpoint: what tells its weights from others without reading them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from shared_rpc.integrations.files import files_of

__all__ = ["checkpoint_identity", "commit_of"]


def checkpoint_identity(model: str, commit: str | None) -> list[Any]:
    """Return what identifies a checkpoint, as plain data; equal in all processes of the host, and different after a change.

    For a file or a folder these are facts about its files; for a name on a hub it is the commit.
    """
    return files_of(model) if os.path.exists(model) else [model, commit]


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
