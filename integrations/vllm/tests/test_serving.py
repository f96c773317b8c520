"""vLLM's API server with shared weights, and with weights of a trainer sent by vLLM's own client."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast
from vllm.distributed.weight_transfer import HTTPVLLMWeightSyncClient, ModuleSource

import checkpoints
import engine
from conftest import DEVICE, ENVIRON, SMALL, Place
from shared_rpc_vllm import app
from shared_rpc_vllm.weight_transfer import SharedRpcTrainer, SharedRpcTrainerInfo
from test_weight_transfer import trained

#: Timeout for a server's start, in seconds: its processes import vLLM one after another.
START = 180.0


class Api:
    """An API server in a separate process; :meth:`ready` waits until it answers."""

    def __init__(self, place: Place, model: Path, *options: str) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.url = f"http://127.0.0.1:{free.getsockname()[1]}"
        self._log = place.folder / f"api-{self.url.rpartition(':')[2]}.log"
        words = [f"--{name.replace('_', '-')}" + ("" if value is True else f"={value}") for name, value in SMALL.items()]
        words.remove("--skip-tokenizer-init")
        extra = json.dumps({"base_path": place.base_path})
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), *words]
        command += ["--load-format", "shared_rpc", "--model-loader-extra-config", extra, "--served-model-name", "m"]
        command += ["--host", "127.0.0.1", "--port", self.url.rpartition(":")[2], *options]
        environ = {**os.environ, **ENVIRON, "VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_SERVER_DEV_MODE": "1"}
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(command, env=environ, stdout=log, stderr=log)

    def ready(self) -> Api:
        """Wait until it serves."""
        until = time.monotonic() + START
        while self.process.poll() is None and time.monotonic() < until:
            try:
                urllib.request.urlopen(f"{self.url}/health").close()
                return self
            except urllib.error.URLError:
                time.sleep(0.2)
        raise AssertionError(self.written()[-3000:])

    def written(self) -> str:
        """Return the output of its processes so far."""
        return self._log.read_text(errors="replace")

    def generate(self) -> list[int]:
        """Return the tokens for the request of :func:`engine.generate`."""
        body = {"model": "m", "prompt": engine.PROMPT, "max_tokens": 12, "temperature": 0.0, "return_token_ids": True}
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{self.url}/v1/completions", json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request) as response:
            answer: dict[str, Any] = json.load(response)
        return list(answer["choices"][0]["token_ids"])


@contextmanager
def serving(place: Place, model: Path, *options: str) -> Iterator[Api]:
    """Run a server."""
    api = Api(place, model, *options)
    try:
        yield api
    finally:
        api.process.terminate()
        api.process.wait(60)


def with_words(model: Path) -> Path:
    """Add a tokenizer with one word per token to a checkpoint."""
    words = {f"w{number}": number for number in range(512)}
    made = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(words, unk_token="w0")), unk_token="w0", eos_token="w2")
    made.save_pretrained(model)
    return model


@pytest.mark.deep
def test_two_servers_share_weights_and_one_receives_those_of_a_trainer(
    place: Place, ordinary: Callable[[Path], list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each answers like an engine with vLLM's own loader; the other server keeps the weights of the file."""
    model = with_words(checkpoints.write(tmp_path / "llama", "llama", seed=3))
    monkeypatch.setattr(app.provider, "base_path", place.base_path)
    backend = '--weight-transfer-config={"backend": "shared_rpc"}'
    with serving(place, model) as one, serving(place, model, backend) as other:
        before = ordinary(model)
        assert one.ready().generate() == other.ready().generate() == before
        assert place.loaded() == 1
        module = trained(model)
        info = SharedRpcTrainerInfo(rank=0, device=DEVICE, nbytes=1 << 18, timeout=60.0)
        trainer = SharedRpcTrainer.trainer_init(info, client=HTTPVLLMWeightSyncClient(other.url), source=ModuleSource(module))
        trainer.send_weights()
        trainer.shutdown()
        module.save_pretrained(tmp_path / "trained")
        assert other.generate() == ordinary(tmp_path / "trained") != before
        assert one.generate() == before
