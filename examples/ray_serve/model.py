"""The model of the service: loaded once for every node, whatever the number of replicas there."""

from __future__ import annotations

import os

import torch

from shared_rpc import Provider

provider = Provider()

#: Numbers that the model takes, and the width of its layers.
INPUTS = 1024
WIDTH = int(os.environ.get("RAY_SERVE_WIDTH", "2048"))


@provider.share(managed=True, access="read")
def load_model() -> torch.nn.Module:
    """Stand in for a model of many gigabytes: the same weights wherever it is built."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(INPUTS, WIDTH), torch.nn.ReLU(), torch.nn.Linear(WIDTH, INPUTS))
    return model.to("cpu" if provider.device_id == "cpu" else "cuda").requires_grad_(False)
