"""A script is started again: how soon it has its model, with ``python`` and with ``shared-rpc run``."""

from __future__ import annotations

import select
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.runner import Device, Json, Report, Sample, Shape, chosen
from benchmarks.servers import Servers, environ, on_cores
from shared_rpc import Client
from shared_rpc.errors import SharedRPCError
from shared_rpc.scripts.listing import live_zygotes, stop_zygotes

PYTHON, RUN = "python", "shared-rpc run"
_WAYS: dict[str, list[str]] = {PYTHON: [], RUN: ["-m", "shared_rpc.cli", "run"]}
#: Seconds that anything here may take.
_PATIENCE = 300.0

APP = """
import torch
from benchmarks.workload import Workload
from shared_rpc import Provider

provider = Provider(execution_mode="spawn", device={device!r})
provider.share(managed=True)(Workload({device!r}).model)

if __name__ == "__main__":
    model = provider.call("model", {shape!r}).value
    next(model.parameters()).sum().item()
    print("in hand", flush=True)
"""


def run(
    device: Device = "auto",
    shape: Shape = None,
    starts: Annotated[int, typer.Option(help="Starts of each kind.")] = 10,
    json: Json = None,
) -> None:
    """Measure repeated starts of a script, by python and by 'shared-rpc run', until it has its model."""
    device, shape = chosen(device, shape)
    report = Report("starts", f"A script is started again ({shape} on {device})", [PYTHON, RUN])
    with Servers(device) as servers, on_cores(servers.cores):  # a script may use what the machine has
        (servers.folder / "app.py").write_text(APP.format(device=device, shape=shape))
        variables = {**environ(), "SHARED_TENSOR_BASE_PATH": servers.base_path}

        def start(words: Sequence[str]) -> tuple[float, float]:
            return _start(words, servers.folder, variables)

        try:
            empty = Sample([[start(["-c", "print('in hand')"])[0] for _ in range(starts)]])
            report.row("python -c 'print()': nothing but the interpreter", {PYTHON: empty})
            first = {way: start([*words, "app.py"])[0] for way, words in _WAYS.items()}
            report.row("the first start, with no server (python) and no zygote (run)", first)
            turns = [{way: start([*words, "app.py"]) for way, words in _WAYS.items()} for _ in range(starts)]
            hand, end = ({way: Sample([[turn[way][number] for turn in turns]]) for way in _WAYS} for number in (0, 1))
            goal = "start_gpu" if device == "cuda" else "start"
            report.row("a start, until the model is in hand", hand, "s", goal, hand[RUN].p50 - empty.p50)
            report.row("… python beside run", {RUN: hand[PYTHON].p50 / hand[RUN].p50}, "ratio")
            report.row("… until the process has ended", end)
            _memory_rows(report, servers.base_path, device)
        finally:
            stop_zygotes(servers.base_path, lambda reason: None)
            with suppress(SharedRPCError), Client(servers.base_path, device=device, connect_timeout=0) as client:
                client.stop_server()
    report.finish(json)


def _start(words: Sequence[str], folder: Path, variables: dict[str, str]) -> tuple[float, float]:
    """Measure the seconds from a program's start until it reports that it has its model, and until its end."""
    begin = time.perf_counter()
    process = subprocess.Popen([sys.executable, *words], cwd=folder, env=variables, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None, "it is a pipe"
        if not select.select([process.stdout], [], [], _PATIENCE)[0] or b"in hand" not in process.stdout.readline():
            raise RuntimeError(f"python {' '.join(words)} in {folder} has not got its model")
        in_hand = time.perf_counter() - begin
        process.wait(_PATIENCE)
        return in_hand, time.perf_counter() - begin
    finally:
        process.kill()
        process.communicate()


def _memory_rows(report: Report, base_path: str, device: str) -> None:
    """Report the memory of the zygote, and that of the model, which exists once."""
    zygotes = live_zygotes(base_path, lambda reason: None)
    for zygote in zygotes:
        report.row("memory of the zygote (PSS)", {RUN: float(zygote["pss"])}, "bytes")
    if not zygotes:
        report.note("No zygote could be used: both columns are new processes. 'shared-rpc run' has printed why.")
    with Client(base_path, device=device, timeout=_PATIENCE) as client:
        report.row("… of the model, which all of them have", {RUN: float(client.get_server_info()["nbytes"])}, "bytes")
