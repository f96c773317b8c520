"""A Ray Serve deployment whose replicas call ``load_model()`` like any process: the replicas of a node share one copy.

serve run app:app                                      # every replica loads its own model
SHARED_TENSOR_ROLE=spawn serve run app:app             # one model per node, whose first replica starts the server
curl -d '[1, 2, 3]' http://127.0.0.1:8000/
"""

from __future__ import annotations

import os
from typing import Any

import ray
import torch
from model import INPUTS, load_model, provider
from ray import serve
from starlette.requests import Request

torch.set_num_threads(1)  # the replicas share the cores


@serve.deployment(num_replicas=4, max_replicas_per_node=2, ray_actor_options={"num_cpus": 0.1})
class Model:
    def __init__(self) -> None:
        # Attaches in milliseconds if the node's server has the model. The lease is released when the replica ends.
        self.handle = load_model()

    def predict(self, numbers: list[float]) -> float:
        """Return the sum of the model's outputs."""
        row = torch.zeros(INPUTS, device=next(self.handle.value.parameters()).device)
        row[: len(numbers)] = torch.tensor(numbers[:INPUTS])
        with torch.inference_mode():
            return float(self.handle.value(row).sum())

    def replica(self) -> dict[str, Any]:
        """Identify this replica, and the server and object of its model."""
        return {
            "node": ray.get_runtime_context().get_node_id(),
            "pid": os.getpid(),
            "role": provider.execution_mode,
            "server": self.handle.server_id,
            "object": self.handle.object_id,
            "answer": self.predict([1.0, 2.0, 3.0]),
        }

    async def __call__(self, request: Request) -> float:
        return self.predict(await request.json())


app = Model.bind()
