"""The example with more models than memory, on the host and on a GPU."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.kit.examples import Example
from tests.kit.processes import eventually

pytestmark = pytest.mark.timeout(150)

#: A process with private weights: the digest for each pair of a model and a seed.
ALONE = """
import functools, json, sys, torch
from worker import answer
from zoo import make

torch.set_num_threads(1)
build = functools.cache(make)
for line in sys.stdin:
    model, seed = json.loads(line)
    print(answer(build(model), seed), flush=True)
"""


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def example(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Example]:
    """The example with models of 2 MiB on the host, and of 64 MiB on a GPU."""
    with Example("model_zoo", tmp_path, request.param) as example:
        example.environ["ZOO_MEGABYTES"] = "2" if request.param == "cpu" else "64"
        yield example


def serve(example: Example, room: float) -> int:
    """Start the server with a quota of this many models; return the quota in bytes."""
    quota = int(room * int(example.environ["ZOO_MEGABYTES"]) * 2**20)
    budget = ("--quota", f"{example.device}={quota}", "--when-full", "evict", "--spill-dir", str(example.folder))
    example.serve("zoo.py", *budget)
    return quota


def answers(example: Example, workers: int) -> tuple[list[dict[str, Any]], int]:
    """Let workers answer 20 requests each; return the answers, and the peak of the server's memory."""
    started = [example.start("worker.py", "--requests", "20", "--seed", str(seed)) for seed in range(workers)]
    most = 0
    with example.client() as client:

        def ended() -> bool:
            nonlocal most
            most = max(most, *(device["used"] for device in client.list_devices() if device["limit"] is not None))
            return all(worker.process.poll() is not None for worker in started)

        eventually(ended, 120.0, every=0.05)
    lines = [line for worker in started for line in worker.process.stdout or ()]
    ends = [worker.close() for worker in started]
    assert {code for code, _ in ends} == {0}, ends
    return [json.loads(line) for line in lines], most


def test_all_models_are_served_with_memory_for_three(example: Example) -> None:
    """Every answer has the bits of a process with its own weights, the quota is kept, and models are evicted and restored."""
    quota = serve(example, room=3.1)
    alone = example.start("-c", ALONE)

    found, most = answers(example, workers=4)

    assert len(found) == 80
    for answer in found:
        alone.tell(json.dumps([answer["model"], answer["seed"]]))
        assert alone.expect("") == answer["digest"]
    assert 0 < most <= quota
    assert {"host", "file"} & {answer["tier"] for answer in found}
    with example.client() as client:
        assert len(client.list_objects()) == len({answer["model"] for answer in found}) == 10
