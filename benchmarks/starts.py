"""Repeated starts of a script: the time until it has its model, with ``python`` and with ``shared-rpc run``."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from typing import Annotated

import typer

from benchmarks.runner import PATIENCE, Device, Json, Run, Sample, Shape, chosen
from shared_rpc import Client
from shared_rpc.errors import SharedRPCError
from shared_rpc.scripts.listing import live_zygotes, stop_zygotes

PYTHON, RUN = "python", "shared-rpc run"
_WAYS: dict[str, list[str]] = {PYTHON: [], RUN: ["-m", "shared_rpc.cli", "run"]}

SCRIPT = """
from benchmarks.workload import Workload
from shared_rpc import Provider

provider = Provider(execution_mode="spawn", device={device!r})
Workload({device!r}).share(provider)

if __name__ == "__main__":
    model = provider.call("model", {shape!r}).value
    next(model.parameters()).sum().item()
    print("ready", flush=True)
"""


def run(
    device: Device = "auto",
    shape: Shape = None,
    starts: Annotated[int, typer.Option(help="Starts of each kind.")] = 6,
    json: Json = None,
) -> None:
    """Measure repeated starts of a script, with python and with 'shared-rpc run', until it has its model."""
    device, shape = chosen(device, shape)
    title = f"Repeated starts of a script ({shape} on {device})"
    with Run("starts", title, [PYTHON, RUN], device, json, base=PYTHON, pinned=False) as run:
        (run.folder / "app.py").write_text(SCRIPT.format(device=device, shape=shape))
        try:
            for words in _WAYS.values():  # the first ones start a server and a zygote
                _start(run, *words)
            turns = [{way: _start(run, *words) for way, words in _WAYS.items()} for _ in range(starts)]
            for number, name in enumerate(("a start, until the script has the model", "… until the process has ended")):
                run.row(name, {way: Sample([turn[way][number] for turn in turns]) for way in _WAYS})
            if not live_zygotes(run.base_path, lambda reason: None):
                run.note("No zygote could be used: both columns are new processes. 'shared-rpc run' has printed the reason.")
        finally:
            stop_zygotes(run.base_path, lambda reason: None)
            with suppress(SharedRPCError), Client(run.base_path, device=device, connect_timeout=0) as client:
                client.stop_server()


def _start(run: Run, *words: str) -> tuple[float, float]:
    """Measure the seconds from the script's start until it reports its model, and until it exits."""
    begin = time.perf_counter()
    with run.python(*words, "app.py", env={**os.environ, "SHARED_TENSOR_BASE_PATH": run.base_path}) as process:
        assert process.stdout is not None, "stdout is a pipe"
        if "ready" not in process.stdout.readline():
            raise RuntimeError(f"python {' '.join(words)} app.py in {run.folder} did not report its model")
        ready = time.perf_counter() - begin
        process.wait(PATIENCE)
        return ready, time.perf_counter() - begin
