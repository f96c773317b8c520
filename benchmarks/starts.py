"""A script is started again: how soon it has its model in hand, with ``python`` and with ``shared-rpc run``."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.options import Device, Json, Shape, chosen
from benchmarks.processes import environ
from benchmarks.report import Report, Row
from benchmarks.servers import Servers
from benchmarks.stats import Sample
from benchmarks.targets import GOALS, Goal
from shared_rpc import Client
from shared_rpc.errors import SharedRPCError
from shared_rpc.scripts.listing import live_zygotes, stop_zygotes

__all__ = ["run"]

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
    device = chosen(device)
    shape = shape or ("llama-3-8b" if device == "cuda" else "small")
    report = Report("starts", f"A script is started again ({shape} on {device})", [PYTHON, RUN])
    with Servers(device) as servers:
        # Nobody else calls here: a script may use what the machine has.
        os.sched_setaffinity(0, servers.cores)
        (servers.folder / "app.py").write_text(APP.format(device=device, shape=shape))
        variables = {**environ(), "SHARED_TENSOR_BASE_PATH": servers.base_path}
        try:
            empty = Sample([[_start(["-c", "print('in hand')"], servers.folder, variables)[0] for _ in range(starts)]])
            # The first ones find no server, and no zygote.
            first = {way: _start([*words, "app.py"], servers.folder, variables)[0] for way, words in _WAYS.items()}
            hand: dict[str, list[float]] = {way: [] for way in _WAYS}
            whole: dict[str, list[float]] = {way: [] for way in _WAYS}
            for _ in range(starts):
                for way, words in _WAYS.items():
                    in_hand, ended = _start([*words, "app.py"], servers.folder, variables)
                    hand[way].append(in_hand)
                    whole[way].append(ended)
            samples, ends = ({way: Sample([times]) for way, times in of.items()} for of in (hand, whole))
            _rows(report, empty, first, samples, ends, GOALS["start_gpu" if device == "cuda" else "start"])
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


def _rows(
    report: Report, empty: Sample, first: dict[str, float], samples: dict[str, Sample], ends: dict[str, Sample], goal: Goal
) -> None:
    report.add(Row("python -c 'print()': nothing but the interpreter", {PYTHON: empty.p50}, samples={PYTHON: empty}))
    report.add(Row("the first start, with no server (python) and no zygote (run)", first))
    report.add(
        Row(
            "a start, until the model is in hand",
            {way: sample.p50 for way, sample in samples.items()},
            goal=goal,
            judged=samples[RUN].p50 - empty.p50,
            samples=samples,
        )
    )
    report.add(Row("… python beside run", {RUN: samples[PYTHON].p50 / samples[RUN].p50}, unit="ratio"))
    report.add(Row("… until the process has ended", {way: sample.p50 for way, sample in ends.items()}, samples=ends))


def _memory_rows(report: Report, base_path: str, device: str) -> None:
    """Report the memory of the zygote, and that of the model, which exists once."""
    zygotes = live_zygotes(base_path, lambda reason: None)
    for zygote in zygotes:
        report.add(Row("memory of the zygote (PSS)", {RUN: float(zygote["pss"])}, unit="bytes"))
    if not zygotes:
        report.note("No zygote could be used: both columns are new processes. 'shared-rpc run' has printed why.")
    with Client(base_path, device=device, timeout=_PATIENCE) as client:
        report.add(
            Row("… of the model, which all of them have", {RUN: float(client.get_server_info()["nbytes"])}, unit="bytes")
        )
