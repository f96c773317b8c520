"""The example of two engines over one copy of the weights and one cache, on the host and on a GPU."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from tests.kit.examples import Example, private_bytes

pytestmark = pytest.mark.timeout(150)

#: One process with private weights: it prints their size, and the tokens of each request, until the end of its standard input.
ALONE = """
import sys, torch
from model import build, cache_shape, generate
from prefill import prompts
from weights import DEVICE, DTYPE, make

torch.set_num_threads(1)
weights = make()
print(sum(tensor.nbytes for tensor in weights.values()))
model = build(weights)
cache = torch.zeros(cache_shape(8), dtype=DTYPE, device=DEVICE)
for prompt in prompts(4):
    token = model(prompt, 0, cache, list(range(8)))
    print(generate(model, cache, token, len(prompt), 6, list(range(8))))
sys.stdin.read()
"""


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def example(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Example]:
    """The example with a running server."""
    with Example("prefill_decode", tmp_path, request.param) as example:
        example.serve("weights.py")
        yield example


def test_two_engines_share_weights_and_cache(example: Example) -> None:
    """The tokens are those of one process with its own weights, of which the engines have no copy.

    There are blocks for some of the requests only: the others wait for them.
    """
    prefill = example.start("prefill.py", "--requests", "4", "--new", "6", "--blocks", "6")
    decode = example.start("decode.py")
    assert prefill.process.stdout is not None

    def hand_over(lines: Iterable[str]) -> None:
        for line in lines:
            decode.tell(line.strip())

    pipe = threading.Thread(target=hand_over, args=[prefill.process.stdout], daemon=True)
    pipe.start()
    answers = []
    while len(answers) < 4:
        line = decode.expect("tokens")
        answers.append(json.loads(line))
        if len(answers) < 4:
            prefill.tell(line)
    alone = example.start("-c", ALONE)
    weights = int(alone.expect(""))
    answers.sort(key=lambda answer: answer["request"])
    assert [answer["tokens"] for answer in answers] == [json.loads(alone.expect("[")) for _ in answers]
    if example.device == "cpu":
        for engine in (prefill, decode):
            assert private_bytes(engine.pid) < private_bytes(alone.pid) - weights / 2

    prefill.tell(line)  # its last answer, after which it ends
    pipe.join()
    for process in (prefill, decode):
        code, errors = process.close()
        assert code == 0, errors
