"""Fixtures: checkpoints, servers, and engines in processes of their own, which begin as forks of one that has imported vLLM."""

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

#: What vLLM's CPU build wants to know where there are few cores, and what keeps its engine in the process that asks for it.
ENVIRON = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
    "HF_HUB_OFFLINE": "1",
}
REPORT = pytest.StashKey[list[str]]()

#: An engine that is small, and reads no tokenizer.
SMALL: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "enforce_eager": True,
    "max_model_len": 128,
    "max_num_seqs": 2,
    "disable_log_stats": True,
}
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cuda":
    # Several start at once: vLLM would look at how much memory is free while the others take theirs.
    SMALL |= {"gpu_memory_utilization": 0.05, "kv_cache_memory_bytes": 256 << 20}


class Engine:
    """An engine in a process of its own. It is there at once; :meth:`ready` waits until it has its model.

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
        """The process id."""
        assert self.process.pid is not None
        return self.process.pid

    def ready(self) -> Engine:
        """Wait until the model is loaded."""
        if not self._is_ready:
            self._answer()
            self._is_ready = True
        return self

    def ask(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function of :mod:`engine` there, with the engine and these arguments; return what it does."""
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
        """Return what the process has written so far."""
        return self.log.read_text(errors="replace")

    def attached(self) -> tuple[str, float, float]:
        """Return the label of what it is attached to, and the milliseconds to attach and to make the model."""
        found = re.search(r"attached to '(.+)' in ([\d.]+) ms, made the model in ([\d.]+) ms", self.ready().written())
        assert found is not None, self.written()
        return found[1], float(found[2]), float(found[3])

    def kill(self) -> None:
        """End the process as the kernel does when there is no memory left."""
        os.kill(self.pid, signal.SIGKILL)
        self.process.join()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the process, with its engine, and wait for that."""
        self._pipe.close()
        self.process.join(60)
        self.process.kill()
        self.process.join()


class Failed(Exception):
    """An error in an engine's process, with what the process has written."""


class Ended(Exception):
    """The end of an engine's process that was to answer."""


class Place:
    """A base path, with the engines of a test, and the server that the first of them starts."""

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
        """Return what the server and its workers have written."""
        return Path(f"{self.base_path}-{device_tag(device_id(DEVICE))}.sock.log").read_text(errors="replace")

    def loaded(self) -> int:
        """Return how often the server has loaded weights."""
        return self.server_log().count("Loading weights took")

    def pids(self) -> list[int]:
        """Return the processes of the server: the broker, and its workers."""
        with self.client() as client:
            info = client.get_server_info()
        return [info["pid"], *(worker["pid"] for worker in info["workers"])]

    def stop(self) -> None:
        """End the engines, and the server."""
        for started in self._engines:
            started.close()
        command = [sys.executable, "-m", "shared_rpc.cli", "stop", "--base-path", self.base_path]
        subprocess.run(command, capture_output=True, check=False)


def run(action: str, model: Path, place: Place, cwd: Path | None = None) -> str:
    """Run ``shared-rpc-vllm`` with the options that engines have here; return the last line that it prints."""
    options = ["--load-format", "shared_rpc", "--model-loader-extra-config", json.dumps({"base_path": place.base_path})]
    options += ["--max-model-len", str(SMALL["max_model_len"])]
    command = [sys.executable, "-m", "shared_rpc_vllm", action, str(model), *options]
    environ = {**os.environ, **ENVIRON}
    done = subprocess.run(command, env=environ, cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


@contextmanager
def serving(*words: str) -> Iterator[None]:
    """Run a server of ``shared-rpc``, from when it serves."""
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
    """A checkpoint of each family. They are read alone: a test that changes one writes its own."""
    folder = tmp_path_factory.mktemp("models")
    return {family: checkpoints.write(folder / family, family) for family in checkpoints.FAMILIES}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """A base path, and nothing there."""
    with ExitStack() as stack:
        made = Place(tmp_path_factory.mktemp("place"))
        stack.callback(made.stop)
        yield made


@pytest.fixture
def own_place(tmp_path: Path) -> Iterator[Place]:
    """The same, for one test."""
    made = Place(tmp_path)
    try:
        yield made
    finally:
        made.stop()


@pytest.fixture(scope="session")
def ordinary(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path], list[int]]:
    """A function that returns the tokens of an engine with vLLM's own loader."""
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
    """A function that takes a line for the end of the tests' output."""
    return pytestconfig.stash.setdefault(REPORT, []).append


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Write what tests have reported: figures, which none of them asserts."""
    for line in config.stash.get(REPORT, []):
        terminalreporter.write_line(line)
