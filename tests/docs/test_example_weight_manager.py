"""The example of a weight manager: one copy for all workers, versions swapped under load, and a manager that is killed."""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.kit.examples import Example
from tests.kit.processes import Child, eventually

pytest.importorskip("safetensors")
#: Seconds. Each starts several processes with torch, on a machine that may be busy.
pytestmark = pytest.mark.timeout(150)

#: The images that users request.
SEEDS = range(4)
#: One process with private weights, loaded as usual: the digests for the images, by model and version.
ALONE = """
import json, torch
from pathlib import Path
from make_weights import MODELS, VERSIONS
from manager import WEIGHTS
from model import ResNet
from safetensors.torch import load_file
from worker import answer

torch.set_num_threads(1)
device = "cuda" if torch.cuda.is_available() else "cpu"
for name in MODELS:
    for version in VERSIONS:
        folder = WEIGHTS / name / version
        model = ResNet(**json.loads((folder / "config.json").read_text())).eval().to(device)
        model.load_state_dict(load_file(folder / "model.safetensors"))
        print(json.dumps([name, version, [answer(model, seed) for seed in range(4)]]), flush=True)
"""


class Answer(NamedTuple):
    """A worker's answer."""

    seed: int
    digest: str
    generation: int
    #: When the request was sent, in terms of time.monotonic().
    sent: float


class Site:
    """The example, with weights for two models, a manager that serves v1 of both, and workers."""

    def __init__(self, example: Example) -> None:
        self.example = example
        self.weights = example.folder / "weights"
        example.environ["WEIGHTS"] = str(self.weights)
        width = "16" if example.device == "cpu" else "256"
        assert example.start("make_weights.py", str(self.weights), "--width", width).close()[0] == 0
        self.manager = example.serve("manager.py", "--result-ttl", "10")
        self.alone = example.start("-c", ALONE)
        for name in ("resnet18", "resnet34"):
            self.deploy(name, "v1")
        self.digests: dict[tuple[str, str], list[str]] = {}
        for _ in range(4):
            name, version, digests = json.loads(self.alone.expect("["))
            self.digests[name, version] = digests

    def deploy(self, *words: str) -> None:
        """Run ``deploy.py``."""
        code, errors = self.example.start("deploy.py", *words).close()
        assert code == 0, errors

    def worker(self, name: str) -> Child:
        """Start a worker, and wait until it serves."""
        worker = self.example.start("worker.py", name)
        worker.expect_error("serving")
        return worker

    def version(self, name: str, answer: Answer) -> str:
        """Return the version whose result equals an answer bit for bit."""
        (version,) = (version for version in ("v1", "v2") if self.digests[name, version][answer.seed] == answer.digest)
        return version


def ask(worker: Child, seed: int) -> Answer:
    """Send a request to a worker."""
    sent = time.monotonic()
    worker.tell(str(seed))
    return Answer(seed, sent=sent, **json.loads(worker.expect("{")))


class Load:
    """Users, one for each worker, that send requests until the block ends."""

    def __init__(self, *workers: Child) -> None:
        self.answers: list[Answer] = []
        self._workers = workers
        self._ended = threading.Event()

    def __enter__(self) -> Load:
        self._threads = ThreadPoolExecutor(len(self._workers))
        self._users: list[Future[None]] = [self._threads.submit(self._use, worker) for worker in self._workers]
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._threads.shutdown()
        for user in self._users:
            user.result()

    def _use(self, worker: Child) -> None:
        for seed in itertools.cycle(SEEDS):
            if self._ended.is_set():
                return
            self.answers.append(ask(worker, seed))

    def more(self) -> None:
        """Wait for another twenty answers."""
        enough = len(self.answers) + 20
        eventually(lambda: len(self.answers) >= enough or any(user.done() for user in self._users), 60.0)


@pytest.fixture(
    params=["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.whole_gpu])],
)
def site(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Site]:
    """The example on each kind of device."""
    with Example("weight_manager", tmp_path, request.param) as example:
        yield Site(example)


def test_a_version_is_swapped_under_load(site: Site) -> None:
    """Every answer is bit for bit v1's or v2's, later requests get v2's, and v1's memory is freed."""
    workers = [site.worker("resnet18"), site.worker("resnet18"), site.worker("resnet34")]
    with site.example.client() as client:
        serving = [info for info in client.list_objects() if info["endpoint"] == "serving"]
        assert sorted(info["leases"] for info in serving) == [1, 2]
        for worker in workers:  # to include everything that libraries load at the first request
            ask(worker, 0)
        before = used(client)

        with Load(*workers[:2]) as load:
            load.more()
            site.deploy("resnet18", "v2")
            swapped = time.monotonic()
            load.more()
            both = used(client)
            site.deploy("resnet18", "v2", "--release", "v1")
            eventually(lambda: used(client) == before, 20.0, "v1 is gone")
            load.more()

        assert {site.version("resnet18", answer) for answer in load.answers} == {"v1", "v2"}
        assert {site.version("resnet18", answer) for answer in load.answers if answer.sent > swapped} == {"v2"}
        assert site.version("resnet34", ask(workers[2], 0)) == "v1"
        assert both > before


def used(client: Any) -> int:
    """Return the bytes of objects on the server's device."""
    device = client.get_server_info()["device"]
    return next(int(facts["used"]) for facts in client.list_devices() if facts["id"] == device)


def test_workers_continue_without_the_manager(site: Site) -> None:
    """When another one serves a version, they follow it automatically."""
    worker = site.worker("resnet18")
    ask(worker, 0)

    site.manager.kill()
    with Load(worker) as load:
        load.more()
    assert {site.version("resnet18", answer) for answer in load.answers} == {"v1"}

    site.example.serve("manager.py", "--result-ttl", "10")
    site.deploy("resnet18", "v2")
    eventually(lambda: site.version("resnet18", ask(worker, 0)) == "v2", 20.0)
