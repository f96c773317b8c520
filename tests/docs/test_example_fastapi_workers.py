"""The web workers example: one object for all workers, a killed worker, and the memory of a worker."""

from __future__ import annotations

import os
import re
import shutil
import signal
from collections.abc import Iterator
from typing import NamedTuple

import pytest

from shared_rpc import Client
from tests.kit.examples import Example, private_bytes
from tests.kit.processes import eventually

for package in ("fastapi", "uvicorn"):
    pytest.importorskip(package)
httpx = pytest.importorskip("httpx")

pytestmark = pytest.mark.timeout(420)

WORKERS = 2
TEXTS = [
    "The waggle dance tells other bees where the flowers are.",
    "Lightning heats the air to five times the temperature of the sun's surface.",
]
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
    """uvicorn with the example's app."""

    def __init__(self, example: Example, role: str) -> None:
        # Port 0: the kernel chooses a free one. A worker has 20 s to import torch before uvicorn kills it.
        words = ("--workers", str(WORKERS), "--port", "0", "--no-access-log", "--timeout-worker-healthcheck", "20")
        self._uvicorn = example.start("-m", "uvicorn", "instrumented:app", *words, SHARED_TENSOR_ROLE=role)

    def wait(self) -> None:
        """Wait until all workers serve."""
        found = re.search(r"running on (http://\S+)", self._uvicorn.expect_error("running on"))
        assert found is not None
        self.url = found[1]
        for _ in range(WORKERS):
            self._uvicorn.expect_error("Application startup complete")

    def ask(self) -> tuple[int, list[float]]:
        """Return the worker that answers over a new connection, and the embeddings of the texts in one list."""
        answer = httpx.post(f"{self.url}/embed", json={"texts": TEXTS}, timeout=30).raise_for_status()
        return int(answer.headers["x-worker"]), [number for vector in answer.json() for number in vector]

    def workers(self) -> set[int]:
        """Ask until all workers have answered."""
        found: set[int] = set()
        eventually(lambda: found.add(self.ask()[0]) or len(found) == WORKERS, 120.0, "an answer of every worker")
        return found


class Site(NamedTuple):
    """A server with the model, uvicorn with workers that attach, and uvicorn with workers that load the model themselves."""

    client: Client
    attached: Service
    alone: Service

    def holders(self) -> set[int]:
        """The processes that hold the model, the only object."""
        (model,) = self.client.list_objects()
        return {holder["pid"] for holder in model["holders"]}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """The example itself on the host."""
    folder = tmp_path_factory.mktemp("workers")
    with Example("fastapi_workers", folder) as example:
        example.source = shutil.copytree(example.source, folder / "example", ignore=shutil.ignore_patterns("__pycache__"))
        (example.source / "instrumented.py").write_text(INSTRUMENTED)
        example.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        example.serve("model.py")
        attached, alone = Service(example, "client"), Service(example, "")
        attached.wait()
        alone.wait()
        with example.client() as client:
            yield Site(client, attached, alone)


def test_a_worker_that_attaches_has_no_copy_of_the_model(site: Site) -> None:
    """It computes the same vectors as a worker that has loaded the model, and uses a model's memory less."""
    (model,) = site.client.list_objects()
    services = site.attached, site.alone
    attached, alone = (service.ask()[1] for service in services)
    assert attached == pytest.approx(alone, abs=1e-3)
    # The smallest worker of each kind: one that has answered more has more buffers of its own.
    own = [min(map(private_bytes, service.workers())) for service in services]
    assert own[0] < own[1] - model["nbytes"] / 2


def test_the_successor_of_a_killed_worker_attaches_to_the_same_object(site: Site) -> None:
    """Requests are answered by another worker."""
    before = site.attached.workers()
    assert site.holders() == before
    victim = min(before)
    os.kill(victim, signal.SIGKILL)
    assert site.attached.ask()[0] != victim
    eventually(lambda: victim not in site.holders() and len(site.holders()) == WORKERS, 120.0, "a new worker", every=0.05)
    assert site.holders() & before == before - {victim}
    (model,) = site.client.list_objects()
    assert model["generation"] == 1
