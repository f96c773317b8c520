"""Fixtures: checkpoints, servers, and engines in separate processes, which are forks of one that has imported vLLM."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import checkpoints
import engine
from shared_rpc import Client
from shared_rpc.integrations.keys import files_of
from shared_rpc.memory.devices import device_id, device_tag

#: Options of vLLM's CPU build for few cores, and for an engine in the calling process.
ENVIRON = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
    "HF_HUB_OFFLINE": "1",
}
REPORT = pytest.StashKey[list[str]]()

#: A small engine without a tokenizer.
SMALL: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "enforce_eager": True,
    "max_model_len": 128,
    "max_num_seqs": 2,
    "disable_log_stats": True,
}
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cuda":
    # Fixed, because several start concurrently: vLLM would measure free memory while the others allocate theirs.
    SMALL |= {"gpu_memory_utilization": 0.05, "kv_cache_memory_bytes": 256 << 20}


class Engine:
    """An engine in a separate process. The constructor does not wait; :meth:`ready` waits until the model is loaded.

    :param options: of ``vllm.LLM``.
    """

    def __init__(self, folder: Path, options: dict[str, Any], environ: dict[str, str]) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(engine.PRELOAD)
        self.log = folder / f"engine-{len(list(folder.glob('engine-*')))}.log"
        self.log.touch()
        self._pipe, other = context.Pipe()
        self.process = context.Process(target=engine.work, args=(other, self.log, {**ENVIRON, **environ}, {**SMALL, **options}))
        self.process.start()
        other.close()
        self._is_ready = False

    @property
    def pid(self) -> int:
        """Return the process id."""
        assert self.process.pid is not None
        return self.process.pid

    def ready(self) -> Engine:
        """Wait until the model is loaded."""
        if not self._is_ready:
            self._answer()
            self._is_ready = True
        return self

    def ask(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function of :mod:`engine` there, with the engine and these arguments; return its result."""
        self.ready()
        self._pipe.send((function.__name__, arguments))
        return self._answer()

    def _answer(self) -> Any:
        try:
            kind, value = self._pipe.recv()
        except EOFError:
            self.process.join()
            raise Ended(f"exit code {self.process.exitcode}; {self.written()[-3000:]}") from None
        if kind == "failed":
            raise Failed(f"{value}\n{self.written()[-3000:]}")
        return value

    def written(self) -> str:
        """Return the output of the process so far."""
        return self.log.read_text(errors="replace")

    def attached(self) -> tuple[str, float, float]:
        """Return the label of its weights, and the milliseconds to attach and to build the model."""
        found = re.search(r"attached to '(.+)' in ([\d.]+) ms, made the model in ([\d.]+) ms", self.ready().written())
        assert found is not None, self.written()
        return found[1], float(found[2]), float(found[3])

    def kill(self) -> None:
        """Kill the process, like the kernel when memory is exhausted."""
        os.kill(self.pid, signal.SIGKILL)
        self.process.join()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop the process with its engine, and wait for its exit."""
        self._pipe.close()
        self.process.join(60)
        self.process.kill()
        self.process.join()


class Failed(Exception):
    """An error in an engine's process, with the output of the process."""


class Ended(Exception):
    """The exit of an engine's process instead of an answer."""


class Place:
    """A base path with the engines of a test, and the server started by the first of them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.base_path = str(folder / "s")
        self._engines: list[Engine] = []

    def start(
        self, model: Path, environ: dict[str, str] | None = None, extra: dict[str, Any] | None = None, **options: Any
    ) -> Engine:
        """Start an engine with the load format of this plugin."""
        options = {"load_format": "shared_rpc", **options}
        if options["load_format"] == "shared_rpc":
            options["model_loader_extra_config"] = {"base_path": self.base_path, **(extra or {})}
        self._engines.append(Engine(self.folder, {"model": str(model), **options}, environ or {}))
        return self._engines[-1]

    @contextmanager
    def client(self) -> Iterator[Client]:
        """Yield a client of the server."""
        with Client(self.base_path, device=DEVICE, connect_timeout=0) as client:
            yield client

    def server_log(self) -> str:
        """Return the output of the server and its workers."""
        return Path(f"{self.base_path}-{device_tag(device_id(DEVICE))}.sock.log").read_text(errors="replace")

    def loaded(self) -> int:
        """Return the number of loads in the server."""
        return self.server_log().count("Loading weights took")

    def pids(self) -> list[int]:
        """Return the processes of the server: the broker and its workers."""
        with self.client() as client:
            info = client.get_server_info()
        return [info["pid"], *(worker["pid"] for worker in info["workers"])]

    def stop(self) -> None:
        """Stop the engines and the server."""
        for started in self._engines:
            started.close()
        command = [sys.executable, "-m", "shared_rpc.cli", "stop", "--base-path", self.base_path]
        subprocess.run(command, capture_output=True, check=False)


def run(action: str, model: Path, place: Place, cwd: Path | None = None) -> str:
    """Run ``shared-rpc-vllm`` with the options of the engines of tests; return the last line of its output."""
    options = ["--load-format", "shared_rpc", "--model-loader-extra-config", json.dumps({"base_path": place.base_path})]
    options += ["--max-model-len", str(SMALL["max_model_len"])]
    command = [sys.executable, "-m", "shared_rpc_vllm", action, str(model), *options]
    environ = {**os.environ, **ENVIRON}
    done = subprocess.run(command, env=environ, cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


@contextmanager
def serving(*words: str) -> Iterator[None]:
    """Run ``shared-rpc serve``; enter the block when it serves."""
    command = [sys.executable, "-m", "shared_rpc.cli", *words]
    with subprocess.Popen(command, env={**os.environ, **ENVIRON}, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline().startswith("serving")
            yield
        finally:
            process.terminate()


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A checkpoint of each family, for reading only: a test that changes one writes its own."""
    folder = tmp_path_factory.mktemp("models")
    return {family: checkpoints.write(folder / family, family) for family in checkpoints.FAMILIES}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """An empty base path, shared by the tests of a file."""
    with ExitStack() as stack:
        made = Place(tmp_path_factory.mktemp("place"))
        stack.callback(made.stop)
        yield made


@pytest.fixture
def own_place(tmp_path: Path) -> Iterator[Place]:
    """An empty base path for one test."""
    made = Place(tmp_path)
    try:
        yield made
    finally:
        made.stop()


@pytest.fixture(scope="session")
def ordinary(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path], list[int]]:
    """Return a function that returns the tokens of an engine with vLLM's own loader."""
    folder = Place(tmp_path_factory.mktemp("ordinary"))
    known: dict[str, list[int]] = {}

    def tokens(model: Path) -> list[int]:
        key = json.dumps([str(model), files_of(str(model))])
        if key not in known:
            with folder.start(model, load_format="auto") as made:
                known[key] = made.ask(engine.generate)
        return known[key]

    return tokens


@pytest.fixture
def report(pytestconfig: pytest.Config) -> Callable[[str], None]:
    """Return a function that adds a line to the summary of the test run."""
    return pytestconfig.stash.setdefault(REPORT, []).append


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Write the reported figures, which no test asserts."""
    for line in config.stash.get(REPORT, []):
        terminalreporter.write_line(line)
