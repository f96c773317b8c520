"""Models of sentence-transformers whose transformer is attached instead of loaded.

``with shared(): model = SentenceTransformer(name)``: it loads its transformer, with nearly all of its weights, by
transformers' ``from_pretrained``. Modules that it reads itself, such as a dense layer, are the process's own.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

from shared_rpc.integrations import transformers
from shared_rpc.integrations.blocks import block
from shared_rpc.integrations.loading import library, release
from shared_rpc.provider.provider import Provider

__all__ = ["release", "shared"]


def shared(provider: Provider | None = None, *, fallback: bool = True) -> AbstractContextManager[None]:
    """Attach instead of loading: ``with shared(): model = SentenceTransformer(name, …)``.

    Like :func:`shared_rpc.integrations.transformers.shared`, with the same parameters.
    """
    library("sentence_transformers")
    return block(provider, fallback, [transformers.LIBRARY])


if __name__ == "__main__":
    from shared_rpc.integrations.app import provider  # noqa: F401  it serves when this ends
