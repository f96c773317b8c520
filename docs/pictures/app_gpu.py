"""The model of the picture on the front page: the shapes of Llama-3-8B, 16 GB, on a GPU."""

import torch

from benchmarks.workload import SHAPES, Decoder
from shared_rpc import Provider

provider = Provider(device="cuda")


@provider.share(managed=True, access="read")
def load_model(name: str = "llama-3-8b") -> torch.nn.Module:
    """Build the model of all workers."""
    with torch.device("cuda"):
        torch.set_default_dtype(torch.bfloat16)
        return Decoder(SHAPES[name])
