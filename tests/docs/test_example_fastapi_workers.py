"""The web workers example, and its load client by itself."""

from __future__ import annotations

import asyncio
import importlib
import os
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.kit.processes import PYTHONPATH, ROOT, Child, eventually

for package in ("fastapi", "uvicorn", "httpx"):
    pytest.importorskip(package)

EXAMPLE = ROOT / "examples" / "fastapi_workers"

pytestmark = pytest.mark.timeout(420)

#: A small model with the one method that the app needs, and enough weights to be seen in a process's memory.
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


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_the_example(base_path: str, device: str) -> None:
    """Everything it claims: one object for all workers, no request lost with a killed one, a successor, and less memory."""
    scratch = Path(base_path).parent
    copy = shutil.copytree(EXAMPLE, scratch / "example", ignore=shutil.ignore_patterns("__pycache__"))
    environ = {**os.environ, "PYTHONPATH": PYTHONPATH, "TMPDIR": str(scratch)}
    if device == "cpu":
        environ["CUDA_VISIBLE_DEVICES"] = ""
    else:
        (copy / "model.py").write_text(MODEL)  # a GPU machine may do without the weights

    done = subprocess.run(
        [sys.executable, str(copy / "run.py")],
        env=environ,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )

    assert (done.returncode, "all checks passed" in done.stdout) == (0, True), done.stdout + done.stderr
    assert done.stdout.count("ok  ") == 8
    assert [path.name for path in scratch.iterdir() if path.name.startswith("tmp")] == []


def test_an_interrupted_example_leaves_nothing(base_path: str, children: list[Child]) -> None:
    """Workers of uvicorn that are still starting do not end by themselves, and neither does uvicorn."""
    scratch = Path(base_path).parent
    copy = shutil.copytree(EXAMPLE, scratch / "example", ignore=shutil.ignore_patterns("__pycache__"))
    (copy / "model.py").write_text(MODEL)
    (scratch / "t").mkdir()
    child = Child(str(copy / "run.py"), environ={"CUDA_VISIBLE_DEVICES": "", "TMPDIR": str(scratch / "t")})
    children.append(child)
    child.expect("one model")
    eventually(lambda: len(family(child.pid)) >= 6)  # with the server, uvicorn and its workers
    started = family(child.pid)

    child.process.send_signal(signal.SIGINT)

    code, errors = child.close()
    assert (code, "Traceback" in errors) == (130, False)
    assert not list((scratch / "t").iterdir())
    eventually(lambda: not any(Path(f"/proc/{pid}").exists() for pid in started))


def family(pid: int) -> list[int]:
    """A process, its children, and theirs."""
    found = [pid]
    for one in found:
        with suppress(OSError):
            found += map(int, Path(f"/proc/{one}/task/{one}/children").read_text(encoding="ascii").split())
    return found


# The load client.


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The example's ``load`` module."""
    monkeypatch.syspath_prepend(str(EXAMPLE))
    yield importlib.import_module("load")
    del sys.modules["load"]


def seen(client: ModuleType, answer: Callable[[int, int], bytes]) -> Any:
    """What two users report of a service that gives ``answer(connection, request)``, and hangs up where that is empty."""
    connections = iter(range(1 << 20))
    serving: list[asyncio.Task[None] | None] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        serving.append(asyncio.current_task())
        connection = next(connections)
        # Users hang up when they have had enough.
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            for request in range(1 << 20):
                head = await reader.readuntil(b"\r\n\r\n")
                await reader.readexactly(int(head.lower().partition(b"content-length: ")[2].split()[0]))
                writer.write(answer(connection, request))
                if not answer(connection, request):
                    break
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()

    async def measure() -> Any:
        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            host, port = server.sockets[0].getsockname()
            report = await client.load(f"http://{host}:{port}/embed", 2, 0.5)
            await asyncio.gather(*filter(None, serving))
            return report

    return asyncio.run(measure())


def ok(worker: int) -> bytes:
    """An answer of a worker."""
    return b"HTTP/1.1 200 OK\r\nx-worker: %d\r\ncontent-length: 2\r\n\r\n[]" % worker


def test_all_is_well(client: ModuleType) -> None:
    """Answers are counted by worker, and nothing else is."""
    report = seen(client, lambda connection, request: ok(connection))

    assert report.answers.total() == len(report.latencies) >= 2
    assert set(report.answers) == set(report.connected.values()) == {0, 1}
    assert (report.broken, report.retried, report.lost, report.refused) == (Counter(), 0, 0, Counter())
    assert 0 < report.percentile(50) <= report.percentile(99)


def test_a_connection_that_breaks(client: ModuleType) -> None:
    """The attempt is put down to the worker that it led to, and the request is answered by another one."""
    report = seen(client, lambda connection, request: ok(7 + connection) if connection != 0 or request < 1 else b"")

    assert report.broken == {7: 1}
    assert (report.retried, report.lost) == (1, 0)
    assert 7 not in report.connected.values()


def test_a_service_that_is_gone(client: ModuleType) -> None:
    """A request that no attempt brings an answer for is lost, and told so."""
    report = seen(client, lambda connection, request: b"")

    assert report.lost > 0 and not report.latencies
    assert report.broken == {None: client.ATTEMPTS * report.lost}


def test_an_error_of_the_service(client: ModuleType) -> None:
    """It is no answer, and is not asked for again."""
    report = seen(client, lambda *_: b"HTTP/1.1 500 Oh\r\ncontent-length: 0\r\n\r\n")

    assert report.refused[500] > 0
    assert (report.retried, report.lost, len(report.latencies)) == (0, 0, 0)


def test_the_small_model_is_like_the_real_one() -> None:
    """The stand-in above has the weights that the memory check needs: more than processes differ by otherwise."""
    module: dict[str, Any] = {}
    exec(MODEL.replace("Provider()", "Provider(execution_mode='local')"), module)

    with module["load_model"]() as handle:
        assert sum(parameter.nbytes for parameter in handle.value.parameters()) > 64 << 20
        assert torch.tensor(handle.value.encode(["a", "bb"], show_progress_bar=False).tolist()).shape == (2, 256)
