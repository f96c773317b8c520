"""The web workers example: one object for all workers, a killed worker under load, and the memory of a worker."""

from __future__ import annotations

import asyncio
import itertools
import os
import re
import shutil
import signal
from collections import Counter
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

WORKERS, USERS = 2, 8
TEXTS = [
    "The waggle dance tells other bees where the flowers are.",
    "Lightning heats the air to five times the temperature of the sun's surface.",
    "Sourdough rises because of wild yeast and lactic acid bacteria.",
]
#: A stand-in for the model, since a machine with a GPU may lack the weights. It has as many bytes as are seen in its memory.
MODEL = """
import torch
from shared_rpc import Provider

provider = Provider()

class Encoder(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1 << 16, 256)

    def encode(self, texts, show_progress_bar):
        device = self.layer.weight.device
        rows = [torch.arange(1 << 16, device=device).mul(len(text)).remainder(7).float() for text in texts]
        with torch.inference_mode():
            return self.layer(torch.stack(rows)).cpu()

@provider.share(managed=True, access="read")
def load_model():
    torch.manual_seed(0)
    return Encoder().to("cpu" if provider.device_id == "cpu" else "cuda").requires_grad_(False)
"""
#: The example's app, which also reports the answering worker, and the GPU memory allocated by its torch.
INSTRUMENTED = """
import os, torch
from app import app

@app.middleware("http")
async def name_worker(request, call_next):
    response = await call_next(request)
    response.headers["x-worker"] = str(os.getpid())
    return response

@app.get("/allocated")
async def allocated() -> int:
    return torch.cuda.memory_allocated() if torch.cuda.is_available() else 0
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

    def allocated(self) -> dict[int, int]:
        """Query all workers, through a new connection for each request."""
        found: dict[int, int] = {}

        def ask() -> bool:
            response = httpx.get(f"{self.url}/allocated", timeout=30)
            found[int(response.headers["x-worker"])] = response.json()
            return len(found) == WORKERS

        eventually(ask, 120.0, "an answer of every worker")
        return found

    def vectors(self) -> list[float]:
        """Return the embeddings of the texts, in one list."""
        answer = httpx.post(f"{self.url}/embed", json={"texts": TEXTS}, timeout=30).raise_for_status()
        return [number for vector in answer.json() for number in vector]


class Site(NamedTuple):
    """A server with the model, uvicorn with workers that attach, and uvicorn with workers that load the model themselves."""

    device: str
    client: Client
    attached: Service
    alone: Service

    def holders(self) -> set[int]:
        """The processes that hold the model, the only object."""
        (model,) = self.client.list_objects()
        return {holder["pid"] for holder in model["holders"]}


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def site(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """The example itself on the host; with a replacement for its model on a GPU."""
    folder = tmp_path_factory.mktemp("workers")
    with Example("fastapi_workers", folder, request.param) as example:
        example.source = shutil.copytree(example.source, folder / "example", ignore=shutil.ignore_patterns("__pycache__"))
        (example.source / "instrumented.py").write_text(INSTRUMENTED)
        if request.param == "cuda":
            (example.source / "model.py").write_text(MODEL)
        example.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        example.serve("model.py")
        attached = Service(example, "client")
        attached.wait()
        alone = Service(example, "")
        alone.wait()
        with example.client() as client:
            yield Site(request.param, client, attached, alone)


class Users:
    """Users of a service, each with one connection. A request whose connection breaks is repeated; other errors raise."""

    def __init__(self, service: Service) -> None:
        self._service = service
        #: Answers, by worker.
        self.answers: Counter[int] = Counter()
        #: Attempts whose connection broke, by the worker that it led to; 0 where that had not answered before.
        self.broken: Counter[int] = Counter()
        #: The worker to which each user is connected, 0 where none has answered yet.
        self.connected = [0] * USERS
        #: Requests that were answered after an attempt that broke.
        self.repeated = 0
        self.ended = False

    async def use(self, number: int) -> None:
        """Send one request after another."""
        async with httpx.AsyncClient(limits=httpx.Limits(max_connections=1), timeout=60) as client:
            for text in itertools.cycle(TEXTS):
                worker = await self._ask(client, number, text)
                self.connected[number] = worker
                self.answers[worker] += 1
                if self.ended:
                    return

    async def _ask(self, client: httpx.AsyncClient, number: int, text: str) -> int:
        for attempt in range(5):
            try:
                response = await client.post(f"{self._service.url}/embed", json={"texts": [text]})
            except httpx.TransportError:
                self.broken[self.connected[number]] += 1
                self.connected[number] = 0
                await asyncio.sleep(0.01 * 2**attempt)
                continue
            self.repeated += attempt > 0
            return int(response.raise_for_status().headers["x-worker"])
        raise AssertionError("a request was lost")

    async def answered(self, count: int) -> None:
        """Wait for this many further answers, and until all users have one."""
        enough = self.answers.total() + count
        while self.answers.total() < enough or not all(self.connected):  # noqa: ASYNC110 - many things change it
            await asyncio.sleep(0.01)


async def load(service: Service, kill: bool = False) -> tuple[Users, int]:
    """Let users send a hundred requests, and a hundred after the kill of a worker; return the responses, and its pid."""
    users, victim = Users(service), 0
    async with asyncio.TaskGroup() as group:
        for number in range(USERS):
            group.create_task(users.use(number))
        await users.answered(100)
        if kill:
            victim = Counter(users.connected).most_common(1)[0][0]
            os.kill(victim, signal.SIGKILL)
            await users.answered(100)
        users.ended = True
    return users, victim


def test_all_workers_hold_one_object(site: Site) -> None:
    """No connection breaks under load."""
    assert site.holders() == set(site.attached.allocated())

    users, _ = asyncio.run(load(site.attached))

    assert not users.broken


def test_a_killed_worker_loses_no_request(site: Site) -> None:
    """Its requests are answered by another worker, and its successor attaches to the same object."""
    before = site.holders()

    users, victim = asyncio.run(load(site.attached, kill=True))

    assert victim in before
    assert set(users.broken) == {victim}
    assert 0 < users.broken[victim] == users.repeated <= USERS
    eventually(lambda: victim not in site.holders() and len(site.holders()) == WORKERS, 120.0, "a new worker", every=0.05)
    assert len(site.holders() & before) == WORKERS - 1
    (model,) = site.client.list_objects()
    assert model["generation"] == 1
    assert site.holders() == set(site.attached.allocated())


def test_a_worker_that_attaches_has_no_copy_of_the_model(site: Site) -> None:
    """It computes the same vectors as a worker that has loaded the model, and uses a model's memory less."""
    (model,) = site.client.list_objects()
    services = site.attached, site.alone
    attached, alone = (service.vectors() for service in services)
    assert attached == pytest.approx(alone, abs=1e-3)

    for service in services:  # so that all workers have read all their weights
        asyncio.run(load(service))

    # The smallest worker of each kind: one that has answered more has more buffers of its own.
    if site.device == "cpu":
        own = [min(map(private_bytes, service.allocated())) for service in services]
    else:
        own = [min(service.allocated().values()) for service in services]
    assert own[0] < own[1] - model["nbytes"] / 2
