"""A web service that computes embeddings, in any number of worker processes with one model.

shared-rpc serve model.py &
SHARED_TENSOR_ROLE=client uvicorn app:app --workers 4     # attach to it
SHARED_TENSOR_ROLE=spawn uvicorn app:app --workers 4      # the same in one command: the first worker starts the server
uvicorn app:app --workers 4                               # a model for every worker
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import torch
from anyio import CapacityLimiter, to_thread
from fastapi import FastAPI, Request, Response
from model import load_model, provider
from pydantic import BaseModel

torch.set_num_threads(1)  # it is the workers that share the cores


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    """Attach when the worker starts, and give the lease back when it ends. One that is killed gives it back too."""
    with await to_thread.run_sync(load_model) as handle:
        app.state.model = handle.value
        app.state.allocated = torch.cuda.memory_allocated() if torch.cuda.is_available() else 0
        # A fast tokeniser cannot be used by two threads at once.
        app.state.turns = CapacityLimiter(1)
        yield


app = FastAPI(lifespan=lifespan)


class Texts(BaseModel):
    texts: list[str]


@app.post("/embed")
async def embed(wanted: Texts, request: Request, response: Response) -> list[list[float]]:
    """One vector for each text. Asking twice is harmless, so a client may ask again when a worker dies."""
    response.headers["x-worker"] = str(os.getpid())
    return await to_thread.run_sync(_encode, request.app.state.model, wanted.texts, limiter=request.app.state.turns)


def _encode(model: Any, texts: list[str]) -> list[list[float]]:
    vectors: list[list[float]] = model.encode(texts, show_progress_bar=False).tolist()
    return vectors


@app.get("/worker")
async def worker(request: Request) -> dict[str, Any]:
    """Which worker answers, and how many bytes of the GPU its own torch has allocated for the model."""
    return {"pid": os.getpid(), "device": provider.device_id, "allocated": request.app.state.allocated}
