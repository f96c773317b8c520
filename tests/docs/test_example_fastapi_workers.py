"""The web workers example: one object for all workers, and a killed worker."""

from __future__ import annotations

import os
import re
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from shared_rpc import Client
from tests.kit.examples import Example
from tests.kit.processes import eventually

for package in ("fastapi", "uvicorn"):
    pytest.importorskip(package)
httpx = pytest.importorskip("httpx")

pytestmark = pytest.mark.timeout(420)

WORKERS = 2
TEXTS = ["The waggle dance tells other bees where the flowers are."]
#: The example's app, which also reports the answering worker.
INSTRUMENTED = """
import os
from app import app

@app.middleware("http")
async def name_worker(request, call_next):
    response = await call_next(request)
    response.headers["x-worker"] = str(os.getpid())
    return response
"""


class Service:
    """A server with the model, and uvicorn with the example's app, whose workers attach."""

    def __init__(self, example: Example, client: Client) -> None:
        # Port 0: the kernel chooses a free one. A worker has 20 s to import torch before uvicorn kills it.
        words = ("--workers", str(WORKERS), "--port", "0", "--no-access-log", "--timeout-worker-healthcheck", "20")
        uvicorn = example.start("-m", "uvicorn", "instrumented:app", *words, SHARED_TENSOR_ROLE="client")
        found = re.search(r"running on (http://\S+)", uvicorn.expect_error("running on"))
        assert found is not None
        self._url, self._client = found[1], client
        for _ in range(WORKERS):
            uvicorn.expect_error("Application startup complete")

    def ask(self) -> int:
        """Return the worker that answers over a new connection."""
        answer = httpx.post(f"{self._url}/embed", json={"texts": TEXTS}, timeout=30).raise_for_status()
        assert len(answer.json()) == len(TEXTS)
        return int(answer.headers["x-worker"])

    def workers(self) -> set[int]:
        """Ask until all workers have answered."""
        found: set[int] = set()
        eventually(lambda: found.add(self.ask()) or len(found) == WORKERS, 120.0, "an answer of every worker")
        return found

    def holders(self) -> set[int]:
        """The processes that hold the model, the only object."""
        (model,) = self._client.list_objects()
        assert model["generation"] == 1
        return {holder["pid"] for holder in model["holders"]}


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    """The example itself on the host."""
    with Example("fastapi_workers", tmp_path) as example:
        example.source = shutil.copytree(example.source, tmp_path / "example", ignore=shutil.ignore_patterns("__pycache__"))
        (example.source / "instrumented.py").write_text(INSTRUMENTED)
        example.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        example.serve("model.py")
        with example.client() as client:
            yield Service(example, client)


def test_the_successor_of_a_killed_worker_attaches_to_the_same_object(service: Service) -> None:
    """Requests are answered by another worker."""
    before = service.workers()
    assert service.holders() == before
    victim = min(before)
    os.kill(victim, signal.SIGKILL)
    assert service.ask() != victim
    eventually(lambda: victim not in service.holders() and len(service.holders()) == WORKERS, 120.0, "a new worker", every=0.05)
    assert service.holders() & before == before - {victim}
