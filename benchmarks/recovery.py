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
from benchmarks.runner import APP, OURS, Device, Goal, Json, Run, Sample, Shape, Times, chosen, wait_for
from shared_rpc import Client

#: Multiple of the pace before a timed restart: the broker delays a restart after a worker that lived for less than 10 s.
_LONG = 1.75


def run(
    device: Device = "auto",
    shape: Shape = None,
    attaches: Annotated[int, typer.Option(help="Attaches during each kill.")] = 1000,
    rate: Annotated[float, typer.Option(help="Attaches per second.")] = 200.0,
    kills: Annotated[int, typer.Option(help="Kills during attaches.")] = 3,
    restarts: Annotated[int, typer.Option(help="Kills to time the restart of a worker.")] = 3,
    pace: Annotated[float, typer.Option(help="Seconds between kills, so that the broker sees no crash loop.")] = 8.0,
    json: Json = None,
) -> None:
    """Measure a killed worker of a broker: attaches during the kill, the next worker, and the broker's own memory."""
    device, shape = chosen(device, shape)
    title = f"The worker is killed ({shape} on {device})"
    with Run("recovery", title, [OURS], device, json) as run, run.broker(APP) as client:
        config: dict[str, Any] = {"address": client.socket_path, "device": device, "call": ["model", shape]}
        attaching = run.processes(max(1, min(4, len(run.cores) // 2)), Attacher, **config)
        client.call("model", shape).release()
        broker = _Broker(client, pace)
        _kill_rows(run, broker, attaching, attaches, rate, kills)
        _digest_row(run, broker, config, attaching[0])
        with run.broker(APP, "--no-preload", name="plain") as other:
            _ready_rows(run, broker, _Broker(other, pace), restarts)
        _broker_rows(run, client)


class _Broker:
    """A broker with one worker, which is killed.

    :param pace: seconds from one kill to the next.
    """

    def __init__(self, client: Client, pace: float) -> None:
        self._client = client
        self._pace = pace
        self._killed = 0
        self._last = 0.0

    def pause(self, times: float = 1.0) -> None:
        """Wait until ``times`` paces have passed since the last kill."""
        time.sleep(max(self._last + times * self._pace - time.monotonic(), 0))

    def kill(self) -> float:
        """Kill the ready worker by SIGKILL, and return the time."""
        self._killed = self._client.get_server_info()["workers"][0]["pid"]
        self._last = time.monotonic()
        os.kill(self._killed, signal.SIGKILL)
        return self._last

    def wait_for_another(self) -> None:
        """Wait until another worker than the killed one is ready."""

        def came(info: Any) -> bool:
            return any(worker["state"] == "ready" and worker["pid"] != self._killed for worker in info["workers"])

        wait_for(self._client.get_server_info, came, 1e-3)

    def wait_for_zygote(self) -> None:
        """Wait until the next worker is a fork."""

        def begun(info: Any) -> bool:
            if info["zygote"]["state"] == "off":
                raise RuntimeError(f"the broker has no zygote: {info['zygote']}")
            return bool(info["zygote"]["state"] == "ready")

        wait_for(self._client.get_server_info, begun, 0.1)


def _kill_rows(run: Run, broker: _Broker, attaching: list[Process], attaches: int, rate: float, kills: int) -> None:
    """Measure attaches from several processes while the worker is killed halfway, in several rounds."""
    ask_all(attaching, "attach", count=10, rate=50)  # one-time costs
    turns = [_attach_across_a_kill(broker, attaching, attaches, rate) for _ in range(kills)]
    before, after = Sample(*(before for before, _, _ in turns)), Sample(*(after for _, after, _ in turns))
    errors = [error for _, _, errors in turns for error in errors]
    name = f"{attaches:,} attaches at {rate:g} per second, worker killed halfway, {kills} times: failed"
    run.row(name, len(errors), "number", Goal("≤", 0))
    for error in errors[:10]:
        run.note(error)
    run.row("… p50 before the kill", before)
    run.row("… p50 from the kill on", after)
    run.row("… p99 before the kill", before.p99)
    run.row("… p99 from the kill on", after.p99, "s", Goal("≤", 2, "before", "ratio"), measured=after.p99 / before.p99)


def _attach_across_a_kill(
    broker: _Broker, attaching: list[Process], attaches: int, rate: float
) -> tuple[list[float], list[float], list[str]]:
    """Return the seconds of attaches before and after the kill, and the errors."""
    broker.pause()
    for process in attaching:
        process.tell("attach", count=attaches // len(attaching), rate=rate / len(attaching))
    time.sleep(attaches / rate / 2)
    killed = broker.kill()
    answers = [process.read() for process in attaching]
    broker.wait_for_another()
    times = [(begin < killed, seconds) for taken, _ in answers for begin, seconds in taken]
    errors = [error for _, errors in answers for error in errors]
    return [seconds for before, seconds in times if before], [seconds for before, seconds in times if not before], errors


def _digest_row(run: Run, broker: _Broker, config: dict[str, Any], attached: Process) -> None:
    """Check that the object of a killed worker computes the same bits in a process that attaches later."""
    first = attached.ask("digest")
    broker.pause()
    broker.kill()
    with Process(Attacher, **config) as late:
        differ = late.ask("digest") != first
    run.row("forward pass of a process that attached after the kill: differing bits", differ, "number", Goal("≤", 0))
    broker.wait_for_another()


#: Prints the seconds for importing the app's own modules, after all imports from packages.
_OWN_IMPORTS = """
import importlib, json, os, runpy, sys, sysconfig, time
reading, writing = os.pipe()
if not os.fork():
    runpy.run_path("app.py", run_name="app")
    installed = (sysconfig.get_path("purelib"), sysconfig.get_path("stdlib"))
    named = [name for name, one in sys.modules.items() if getattr(getattr(one, "__spec__", None), "name", "") == name]
    names = [name for name in named if str(getattr(sys.modules[name], "__file__", "")).startswith(installed)]
    with open(writing, "w") as output:
        json.dump([name for name in names if name != "__main__"], output)
    os._exit(0)
os.close(writing)
for name in json.load(open(reading)):
    importlib.import_module(name)
begin = time.perf_counter()
runpy.run_path("app.py", run_name="app")
print(time.perf_counter() - begin)
"""


def _ready_rows(run: Run, broker: _Broker, plain: _Broker, restarts: int) -> None:
    """Measure the time to the next worker, as a fork and as a new process.

    :param plain: the broker whose workers are new processes.
    """
    times = Times()
    own = "import of the app's own modules"
    forked, new = "from SIGKILL to a new worker that is ready", "… with --no-preload"
    broker.wait_for_zygote()
    for _ in range(restarts):
        times[own, OURS].append(float(run.program("-c", _OWN_IMPORTS, cores=run.server_cores)))
        for killed, name in ((broker, forked), (plain, new)):
            killed.pause(_LONG)
            with times.of(name):
                killed.kill()
                killed.wait_for_another()
    alone = times.samples(own)[OURS].p50
    for name in (own, forked, new):
        samples = times.samples(name)
        goal = Goal("≤", 0.4, "+ the own modules") if name == forked else None
        run.row(name, samples, "s", goal, measured=samples[OURS].p50 - alone)


def _broker_rows(run: Run, client: Client) -> None:
    """Measure the memory of a broker with a hundred objects."""
    for number in range(99):
        client.call("small", number)
    info = client.get_server_info()
    resident = process_counts(info["pid"])["resident"]
    run.row(f"memory of the broker with {info['objects']} objects", resident, "bytes", Goal("≤", 40 << 20))
    maps = Path(f"/proc/{info['pid']}/maps").read_text()
    traces = sum(name in maps for name in ("libcuda", "libtorch", "/dev/nvidia"))
    run.row("… mapped libraries of CUDA or torch, and devices", traces, "number", Goal("≤", 0, "no GPU memory"))


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
