"""The weight manager, which lives long: it loads versions of models, and says which one is served::

    WEIGHTS=weights shared-rpc serve manager.py

    python deploy.py llama v2                          # load it, with a bar, while v1 is served; then swap

Loading and serving are two endpoints, because loading takes minutes and may fail, and a swap shall do neither.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch
from models import architecture

from shared_rpc import Provider
from shared_rpc.extras.safetensors import load as load_weights

provider = Provider(device=os.environ.get("DEVICE", "auto"))
WEIGHTS = Path(os.environ.get("WEIGHTS", "weights"))


@provider.share(execution="task", managed=True, access="read")
def load(name: str, version: str) -> torch.nn.Module:
    """One version of a model, loaded once. Who waits is told how far it is, in bytes."""
    folder = WEIGHTS / name / version
    with torch.device("meta"):
        model = architecture(name, json.loads((folder / "config.json").read_text()))
    model.load_state_dict(load_weights(folder, provider.device_id), assign=True)
    return model.eval()


@provider.share(managed=True, access="read", cache_format_key="{name}")
def serving(name: str, version: str = "") -> torch.nn.Module:
    """The version that is served now, whichever: the cache knows one object of a name. A refresh puts another one there."""
    if not version:
        raise LookupError(f"no version of {name!r} is served yet: deploy one")
    return load(name, version).value  # its memory: nothing is copied
