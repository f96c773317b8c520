"""Identity of a checkpoint: what tells its weights from others without reading them."""

from __future__ import annotations

import os
from pathlib import Path

from shared_rpc.integrations.keys import Checkpoint, Unshareable, source_of
from shared_rpc_vllm.errors import NotShareable

__all__ = ["checkpoint_identity", "commit_of"]


def checkpoint_identity(model: str, commit: str | None) -> Checkpoint:
    """Return what identifies a checkpoint: the same in all processes of the host, and another one after a change.

    :param commit: that of a name on a hub.
    :raises NotShareable: if a folder's files cannot be read.
    """
    if not os.path.exists(model):
        return Checkpoint(model, str(commit))
    try:
        return source_of(model, {}, "config.json")
    except Unshareable as error:
        raise NotShareable(f"{model}: {error}") from error


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
