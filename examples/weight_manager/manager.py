"""The weight manager: it loads versions of models, and serves one version of each. All commands::

    python make_weights.py weights
    shared-rpc serve --result-ttl 10 manager.py &
    python deploy.py resnet18 v1
    python worker.py resnet18                     # in any number of terminals; type a number and Enter
    python deploy.py resnet18 v2 --release v1     # while workers answer

Loading and serving are two endpoints, because loading takes minutes and may fail, and a swap must do neither.
"""

import json
import os
from pathlib import Path

import torch
from model import ResNet

from shared_rpc import Provider
from shared_rpc.extras.safetensors import load as load_weights

provider = Provider()
WEIGHTS = Path(os.environ.get("WEIGHTS", "weights"))


@provider.share(execution="task", managed=True, access="read")
def load(name: str, version: str) -> torch.nn.Module:
    """Load one version of a model, once; callers see the progress in bytes."""
    folder = WEIGHTS / name / version
    with torch.device("meta"):
        model = ResNet(**json.loads((folder / "config.json").read_text()))
    model.load_state_dict(load_weights(folder, provider.device_id), assign=True)
    return model.eval()


@provider.share(managed=True, access="read", cache_format_key="{name}")
def serving(name: str, version: str = "") -> torch.nn.Module:
    """Return the served version: the cache has one object for each name, and a refresh replaces it."""
    if not version:
        raise LookupError(f"no version of {name!r} is served yet: deploy one")
    return load(name, version).value  # its memory: nothing is copied
