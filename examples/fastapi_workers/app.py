"""A web service for embeddings, whose worker processes share one model. The commands::

shared-rpc serve model.py &
SHARED_TENSOR_ROLE=client uvicorn app:app --workers 4     # attach to it
SHARED_TENSOR_ROLE=spawn uvicorn app:app --workers 4      # the same in one command: the first worker starts the server
uvicorn app:app --workers 4                               # every worker loads its own model

curl localhost:8000/embed -H 'content-type: application/json' -d '{"texts": ["Sourdough rises because of wild yeast."]}'
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import torch
from anyio import CapacityLimiter, to_thread
from fastapi import FastAPI, Request
from model import load_model
from pydantic import BaseModel

torch.set_num_threads(1)  # the workers share the cores


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    """Attach when the worker starts, and release the model when it ends. A killed worker's lease is released too."""
    with await to_thread.run_sync(load_model) as handle:
        app.state.model = handle.value
        app.state.turns = CapacityLimiter(1)  # two threads cannot use a fast tokeniser at once
        yield


app = FastAPI(lifespan=lifespan)


class Texts(BaseModel):
    texts: list[str]


@app.post("/embed")
async def embed(body: Texts, request: Request) -> list[list[float]]:
    """Return a vector for each text. The request is idempotent, so a client may retry it if a worker dies."""
    return await to_thread.run_sync(_encode, request.app.state.model, body.texts, limiter=request.app.state.turns)


def _encode(model: Any, texts: list[str]) -> list[list[float]]:
    vectors: list[list[float]] = model.encode(texts, show_progress_bar=False).tolist()
    return vectors
