"""The model of the service, loaded once per node, for any number of replicas."""

from __future__ import annotations

import os

import torch

from shared_rpc import Provider

provider = Provider()

#: Number of inputs, and width of the layers.
INPUTS = 1024
WIDTH = int(os.environ.get("RAY_SERVE_WIDTH", "2048"))


@provider.share(managed=True, access="read")
def load_model() -> torch.nn.Module:
    """Build a stand-in for a large model, with equal weights in every process."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(INPUTS, WIDTH), torch.nn.ReLU(), torch.nn.Linear(WIDTH, INPUTS))
    return model.to("cpu" if provider.device_id == "cpu" else "cuda").requires_grad_(False)
