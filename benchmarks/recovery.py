"""A killed worker of a broker: attaches during the kill, the time to the next worker, and the broker's own memory."""

from __future__ import annotations

import hashlib
import os
import signal
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from benchmarks.processes import Process, ask_all, process_counts
from benchmarks.runner import APP, OURS, Device, Json, Run, Sample, Shape, Times, chosen, wait_for
from shared_rpc import Client


def run(
    device: Device = "auto",
    shape: Shape = None,
    attaches: Annotated[int, typer.Option(help="Attaches during each kill.")] = 1000,
    rate: Annotated[float, typer.Option(help="Attaches per second.")] = 200.0,
    kills: Annotated[int, typer.Option(help="Kills during attaches.")] = 3,
    restarts: Annotated[int, typer.Option(help="Kills to time the restart of a worker.")] = 2,
    pace: Annotated[float, typer.Option(help="Seconds between timed kills: short-lived workers are restarted later.")] = 11.0,
    json: Json = None,
) -> None:
    """Measure a killed worker of a broker: attaches during the kill, the next worker, and the broker's own memory."""
    device, shape = chosen(device, shape)
    title = f"The worker is killed ({shape} on {device})"
    with Run("recovery", title, [OURS], device, json) as run, run.broker(APP) as client:
        config: dict[str, Any] = {"address": client.socket_path, "device": device, "call": ["model", shape]}
        attaching = run.processes(max(1, min(4, len(run.cores) // 2)), Attacher, **config)
        client.call("model", shape).release()
        digest = attaching[0].ask("digest")
        _attach_rows(run, client, attaching, attaches, rate, kills)
        with Process(Attacher, **config) as late:
            differ = late.ask("digest") != digest
        run.row("forward pass of a process that attached after the kills: differing bits", differ, "number", 0)
        with run.broker(APP, "--no-preload", name="plain") as plain:
            _restart_rows(run, client, plain, restarts, pace)
        for number in range(99):
            client.call("small", number)
        info = client.get_server_info()
        resident = process_counts(info["pid"])["resident"]
        run.row(f"memory of the broker with {info['objects']} objects", resident, "bytes", 40 << 20)
        maps = Path(f"/proc/{info['pid']}/maps").read_text()
        traces = sum(name in maps for name in ("libcuda", "libtorch", "/dev/nvidia"))
        run.row("… mapped libraries of CUDA or torch, and devices", traces, "number", 0)


def _kill(client: Client) -> int:
    """Kill the only worker of a broker by SIGKILL, and return its pid."""
    pid: int = client.get_server_info()["workers"][0]["pid"]
    os.kill(pid, signal.SIGKILL)
    return pid


def _wait_for_another(client: Client, killed: int) -> None:
    """Wait until another worker than the killed one is ready."""

    def came(info: Any) -> bool:
        return any(worker["state"] == "ready" and worker["pid"] != killed for worker in info["workers"])

    wait_for(client.get_server_info, came, 1e-3)


def _attach_rows(run: Run, client: Client, attaching: list[Process], attaches: int, rate: float, kills: int) -> None:
    """Measure attaches from several processes while the worker is killed halfway, in several rounds."""
    before, after, failed = Sample(), Sample(), 0
    ask_all(attaching, "attach", count=10, rate=50)  # one-time costs
    for _ in range(kills):
        for process in attaching:
            process.tell("attach", count=attaches // len(attaching), rate=rate / len(attaching))
        time.sleep(attaches / rate / 2)
        moment = time.monotonic()
        killed = _kill(client)
        for process in attaching:
            times, errors = process.read()
            before += [seconds for begin, seconds in times if begin < moment]
            after += [seconds for begin, seconds in times if begin >= moment]
            failed += len(errors)
            run.note(next(iter(errors), None))
        _wait_for_another(client, killed)
    name = f"{attaches:,} attaches at {rate:g} per second, worker killed halfway, {kills} times: failed"
    run.row(name, failed, "number", 0)
    run.row("… p50 before the kill", before)
    run.row("… p50 from the kill on", after)
    run.row("… p99 before the kill", before.p99)
    run.row("… p99 from the kill on", after.p99)


def _restart_rows(run: Run, forking: Client, plain: Client, restarts: int, pace: float) -> None:
    """Measure the time to the next worker, in turns: of a broker that forks it, and of one that starts a new process."""
    times = Times()
    ways = {"from SIGKILL to a new worker that is ready": forking, "… with --no-preload": plain}
    for _ in range(restarts):
        time.sleep(pace)
        wait_for(forking.get_server_info, lambda info: info["zygote"]["state"] == "ready", 0.1)
        for name, client in ways.items():
            with times.of(name):
                _wait_for_another(client, _kill(client))
    run.rows_of(times)


class Attacher:
    """A client process, which attaches repeatedly at a steady rate, and computes with the model."""

    def __init__(self, address: str, device: str, call: list[Any]) -> None:
        self._address, self._device, self._call = address, device, call
        if device != "cpu":
            torch.zeros(1, device=device)

    def attach(self, count: int, rate: float) -> tuple[list[tuple[float, float]], list[str]]:
        """Attach ``count`` times, each with a new client.

        :return: the start time and the seconds of each attach, and the errors of failed ones.
        """
        start, times, errors = time.monotonic(), [], []
        for number in range(count):
            time.sleep(max(start + number / rate - time.monotonic(), 0))
            begin = time.monotonic()
            try:
                client = Client(socket_path=self._address, timeout=30.0, connect_timeout=0)
                with client, client.call(*self._call) as handle:
                    assert handle.value is not None
                    times.append((begin, time.monotonic() - begin))
            except Exception as error:
                errors.append(f"{type(error).__name__}: {error}")
        return times, errors

    def digest(self) -> str:
        """Attach the model, and hash the bits of a forward pass."""
        with Client(socket_path=self._address) as client, client.call(*self._call) as handle, torch.inference_mode():
            logits = handle.value(torch.arange(64, device=self._device))
            return hashlib.sha256(logits.cpu().view(torch.uint8).numpy().tobytes()).hexdigest()
