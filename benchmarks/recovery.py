"""The worker of a broker is killed: who attaches meanwhile, how soon there is another one, and what the broker itself takes."""

from __future__ import annotations

import hashlib
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from benchmarks import models  # noqa: F401  the classes of what is attached
from benchmarks.memory import used
from benchmarks.options import Device, Json, Shape, chosen
from benchmarks.ours import load_lazy_modules
from benchmarks.processes import Process, configuration, environ, next_command, say
from benchmarks.report import Report, Row
from benchmarks.servers import Servers
from benchmarks.stats import Sample
from benchmarks.targets import GOALS
from shared_rpc import Client

__all__ = ["run"]

OURS = "shared_rpc"
#: Seconds that anything here may take.
_PATIENCE = 120.0
#: The pace's multiple where a restart is timed: after a worker that lived for less than 10 s the next one is started later.
_LONG = 1.75
#: How many of the longest attaches of a turn are kept.
_SLOWEST = 20

APP = """
import torch
from benchmarks.workload import Workload
from shared_rpc import Provider

workload = Workload({device!r})
provider = Provider(device={device!r})
provider.share(managed=True)(workload.model)


@provider.share
def numbered(number):
    return torch.full((1024,), float(number), device={device!r})
"""


def run(
    device: Device = "auto",
    shape: Shape = None,
    attaches: Annotated[int, typer.Option(help="Attaches across the kill.")] = 1000,
    rate: Annotated[float, typer.Option(help="Attaches a second.")] = 200.0,
    processes: Annotated[int | None, typer.Option(help="Processes that attach; half a core each, up to 4.")] = None,
    kills: Annotated[int, typer.Option(help="Times that so many attaches are made and the worker is killed.")] = 3,
    restarts: Annotated[int, typer.Option(help="Workers killed to see how soon there is another one.")] = 3,
    pace: Annotated[float, typer.Option(help="Seconds from one kill to the next: a few in a short time are a loop.")] = 8.0,
    json: Json = None,
) -> None:
    """Measure a broker whose worker is killed: attaches across the kill, the next worker, and the broker's own memory."""
    device = chosen(device)
    shape = shape or ("llama-3-8b" if device == "cuda" else "small")
    report = Report("recovery", f"The worker is killed ({shape} on {device})", [OURS])
    with Servers(device) as servers:
        clients = processes or max(1, min(4, len(servers.cores) // 2))
        (servers.folder / "app.py").write_text(APP.format(device=device))
        call = ["model", shape]
        config: dict[str, Any] = {"socket": f"{servers.base_path}-bench.sock", "device": device, "call": call}
        attaching = [servers.client("recovery", **config) for _ in range(clients)]
        for process in attaching:
            process.read()
        before = attaching[0].ask(used=True)["used"]
        plain = f"{servers.base_path}-plain.sock"
        with (
            _broker(servers, config["socket"]) as broker,
            Client(socket_path=config["socket"], timeout=_PATIENCE) as client,
        ):
            with client.call(*call) as handle:
                nbytes = handle.get_object_info()["nbytes"]
            killer = _Killer(client, pace)
            _kill_rows(report, killer, attaching, attaches, rate, kills)
            _digest_rows(report, servers, killer, config, attaching, before, nbytes, device)
            with _broker(servers, plain, "--no-preload"), Client(socket_path=plain, timeout=_PATIENCE) as other:
                _ready_rows(report, servers, killer, _Killer(other, pace), restarts)
            _broker_rows(report, client, broker, device)
    report.finish(json)


@contextmanager
def _broker(servers: Servers, socket: str, *options: str) -> Iterator[subprocess.Popen[str]]:
    """Start ``shared-rpc serve`` on the cores of a run's servers."""
    own = os.sched_getaffinity(0)
    os.sched_setaffinity(0, servers.server_cores)
    try:
        broker = subprocess.Popen(
            [sys.executable, "-m", "shared_rpc.cli", "serve", "app.py", "--socket", socket, *options],
            cwd=servers.folder,
            env=environ(),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
    finally:
        os.sched_setaffinity(0, own)
    assert broker.stdout is not None, "stdout is a pipe"
    if "serving" not in broker.stdout.readline():
        raise RuntimeError(
            f"the broker ended with exit code {broker.wait()}: run 'shared-rpc serve' on {servers.folder}/app.py"
        )
    try:
        yield broker
    finally:
        broker.terminate()
        broker.wait(_PATIENCE)


class _Killer:
    """Kills the worker of a broker, and knows when the next one is there."""

    def __init__(self, client: Client, pace: float) -> None:
        self._client = client
        self._pace = pace
        self._earlier = 0
        self._last = 0.0

    def pause(self, times: float = 1.0) -> None:
        """Wait until a kill is the pace's seconds after the one before, or a multiple of them."""
        time.sleep(max(self._last + times * self._pace - time.monotonic(), 0))

    def kill(self) -> None:
        """Kill the ready worker by SIGKILL."""
        self._earlier = self._client.get_server_info()["workers"][0]["pid"]
        self._last = time.monotonic()
        os.kill(self._earlier, signal.SIGKILL)

    def wait_for_zygote(self) -> int:
        """Wait until the next worker is a fork: bytes of what it is a fork of."""
        deadline = time.monotonic() + _PATIENCE
        while time.monotonic() < deadline:
            facts = self._client.get_server_info()["zygote"]
            if facts["state"] == "ready":
                return int(facts["pss"])
            if facts["state"] == "off":
                break
            time.sleep(0.1)
        raise RuntimeError(f"the broker has no zygote: {facts}")

    def wait_for_another(self) -> None:
        """Wait for a worker that is ready and not the one that was killed."""
        deadline = time.monotonic() + _PATIENCE
        while time.monotonic() < deadline:
            workers = self._client.get_server_info()["workers"]
            if any(worker["state"] == "ready" and worker["pid"] != self._earlier for worker in workers):
                return
            time.sleep(0.001)
        raise RuntimeError("no worker came in place of the one that was killed")


def _kill_rows(report: Report, killer: _Killer, attaching: list[Process], attaches: int, rate: float, kills: int) -> None:
    """Measure attaches from several processes, halfway through which the worker is killed, in several rounds."""
    for process in attaching:
        process.ask(attaches=10, rate=50)  # what is loaded with the first one
    turns = [_attach_across_a_kill(killer, attaching, attaches, rate) for _ in range(kills)]
    before, after = Sample(turn.before for turn in turns), Sample(turn.after for turn in turns)
    errors = [error for turn in turns for error in turn.errors]
    report.add(
        Row(
            f"{attaches:,} attaches at {rate:g} a second, worker killed halfway, {kills} times: failed",
            {OURS: float(len(errors))},
            unit="number",
            goal=GOALS["attach_gap"],
            judged=float(len(errors)),
            extra={
                "errors": errors[:10],
                "before": [len(turn.before) for turn in turns],
                "after": [len(turn.after) for turn in turns],
                "slowest": [turn.slowest for turn in turns],
            },
        )
    )
    report.add(Row("… p50 before the kill", {OURS: before.p50}, samples={OURS: before}))
    report.add(Row("… p50 from the kill on", {OURS: after.p50}, samples={OURS: after}))
    report.add(Row("… p99 before the kill", {OURS: before.p99}))
    ratio = after.p99 / before.p99
    report.add(Row("… p99 from the kill on", {OURS: after.p99}, goal=GOALS["attach_p99"], judged=ratio, judged_unit="ratio"))


@dataclass(frozen=True)
class _Turn:
    """Seconds that attaches took until the worker was killed and from then on; what failed."""

    before: list[float]
    after: list[float]
    errors: list[str]
    #: The longest ones: seconds after the kill at which they began (negative: before it), and what they took.
    slowest: list[tuple[float, float]]


def _attach_across_a_kill(killer: _Killer, attaching: list[Process], attaches: int, rate: float) -> _Turn:
    each, share = attaches // len(attaching), rate / len(attaching)
    killer.pause()
    for process in attaching:
        process.tell(attaches=each, rate=share)
    time.sleep(attaches / rate / 2)
    killer.kill()
    killed = time.time()
    answers = [process.read() for process in attaching]
    killer.wait_for_another()
    times = [(answer["began"] + offset - killed, seconds) for answer in answers for offset, seconds in answer["times"]]
    return _Turn(
        before=[seconds for since, seconds in times if since < 0],
        after=[seconds for since, seconds in times if since >= 0],
        errors=[error for answer in answers for error in answer["errors"]],
        slowest=sorted(times, key=lambda time: time[1])[-_SLOWEST:],
    )


def _digest_rows(
    report: Report,
    servers: Servers,
    killer: _Killer,
    config: dict[str, Any],
    attaching: list[Process],
    before: int,
    nbytes: int,
    device: str,
) -> None:
    """Check that the object of a dead worker computes the same bits, in a later process."""
    first = attaching[0].ask(digest=True)["digest"]
    killer.pause()
    killer.kill()
    late = servers.client("recovery", **config)
    late.read()
    same = late.ask(digest=True)["digest"] == first
    report.add(
        Row(
            "forward pass of a process that attached after its maker's death: differing bits",
            {OURS: 0.0 if same else 1.0},
            unit="number",
            goal=GOALS["killed"],
            judged=0.0 if same else 1.0,
        )
    )
    late.close()
    killer.wait_for_another()
    if device == "cuda":
        # Its own context, and that of the process that came late, are gone; what the forward passes allocated is not.
        held = attaching[1].ask(used=True)["used"] - before
        report.add(Row("GPU memory in use beyond before, with the model alone", {OURS: float(held)}, unit="bytes"))
        report.add(Row("… the model", {OURS: float(nbytes)}, unit="bytes"))


#: Prints the seconds that the app's own modules take to be imported, where all that they import from packages is there.
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


def _ready_rows(report: Report, servers: Servers, killer: _Killer, plain: _Killer, restarts: int) -> None:
    """Measure the time to the next worker, as a fork and as a new process, beside that of importing the app.

    :param plain: of a broker whose workers are new processes.
    """
    whole = [sys.executable, "-c", "import runpy; runpy.run_path('app.py', run_name='app')"]
    own_imports = [sys.executable, "-c", _OWN_IMPORTS]
    imports: list[float] = []
    own: list[float] = []
    forked: list[float] = []
    new: list[float] = []
    nbytes = killer.wait_for_zygote()
    for _ in range(restarts):
        begin = time.perf_counter()
        _on_server_cores(servers, whole)
        imports.append(time.perf_counter() - begin)
        own.append(float(_on_server_cores(servers, own_imports)))
        for one, times in ((killer, forked), (plain, new)):
            one.pause(_LONG)
            begin = time.perf_counter()
            one.kill()
            one.wait_for_another()
            times.append(time.perf_counter() - begin)
    report.add(Row("a process that imports the app, from start to end", {OURS: statistics.median(imports)}))
    report.add(Row("… of that the app's own modules", {OURS: statistics.median(own)}))
    beyond = statistics.median(forked) - statistics.median(own)
    name = "from SIGKILL to a new worker that is ready"
    report.add(Row(name, {OURS: statistics.median(forked)}, goal=GOALS["worker"], judged=beyond))
    report.add(Row("… with --no-preload", {OURS: statistics.median(new)}))
    report.add(Row("memory of the zygote (PSS)", {OURS: float(nbytes)}, unit="bytes"))


def _on_server_cores(servers: Servers, words: list[str]) -> str:
    """Return the output of a process on the servers' cores."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, servers.server_cores)
    try:
        return subprocess.run(words, cwd=servers.folder, env=environ(), check=True, stdout=subprocess.PIPE, text=True).stdout
    finally:
        os.sched_setaffinity(0, cores)


def _broker_rows(report: Report, client: Client, broker: subprocess.Popen[str], device: str) -> None:
    """Measure the costs of a hundred objects."""
    for number in range(99):
        client.call("numbered", number)
    status = Path(f"/proc/{broker.pid}/status").read_text()
    resident = float(int(next(line for line in status.splitlines() if line.startswith("VmRSS")).split()[1]) << 10)
    objects = client.get_server_info()["objects"]
    report.add(
        Row(
            f"memory of the broker with {objects} objects",
            {OURS: resident},
            unit="bytes",
            goal=GOALS["broker"],
            judged=resident,
        )
    )
    links = [os.readlink(entry) for entry in Path(f"/proc/{broker.pid}/fd").iterdir()]
    maps = Path(f"/proc/{broker.pid}/maps").read_text()
    opened = sum("/dev/nvidia" in link for link in links) if device == "cpu" else sum("nvidiactl" in link for link in links)
    traces = float(sum(name in maps for name in ("libcuda", "libtorch", "/dev/nvidia")))
    report.add(
        Row(
            "… libraries of CUDA or torch, and devices, that it has mapped",
            {OURS: traces},
            unit="number",
            goal=GOALS["broker_gpu"],
            judged=traces,
            extra={"control_devices": opened},
        )
    )


# The client process: it attaches again and again, at a steady rate, and computes with what it has.


def attach_at_a_rate(path: str, call: list[Any], count: int, rate: float) -> dict[str, Any]:
    """Attach with a new client: a connection, a session, the model, and the end of all of them."""
    began = time.time()
    start, times, errors = time.perf_counter(), [], []
    for number in range(count):
        time.sleep(max(start + number / rate - time.perf_counter(), 0))
        begin = time.perf_counter()
        try:
            with Client(socket_path=path, timeout=30.0, connect_timeout=0) as client, client.call(*call) as handle:
                assert handle.value is not None
                times.append((begin - start, time.perf_counter() - begin))
        except Exception as error:
            errors.append(f"{type(error).__name__}: {error}")
    return {"began": began, "times": times, "errors": errors}


def digest(path: str, call: list[Any], device: str) -> str:
    """Hash the bits of a forward pass through every feed-forward layer of a model that is attached for it."""
    with Client(socket_path=path) as client, client.call(*call) as handle, torch.inference_mode():
        module: Any = handle.value
        hidden = module.embed_tokens(torch.arange(64, device=device))
        for layer in module.layers:
            normed = layer.post_attention_layernorm(hidden)
            gated = torch.nn.functional.silu(layer.mlp.gate_proj(normed)) * layer.mlp.up_proj(normed)
            hidden = hidden + layer.mlp.down_proj(gated) + layer.self_attn.o_proj(layer.self_attn.q_proj(normed))
        logits = module.lm_head(module.norm(hidden))
        return hashlib.sha256(logits.cpu().view(torch.uint8).numpy().tobytes()).hexdigest()


def main() -> None:
    """Answer commands until stdin is closed."""
    config = configuration()
    path, call, device = config["socket"], config["call"], config["device"]
    if device != "cpu":
        torch.zeros(1, device=device)
    load_lazy_modules(device)
    say(ready=True)
    while (command := next_command()) is not None:
        if "attaches" in command:
            say(**attach_at_a_rate(path, call, command["attaches"], command["rate"]))
        elif "digest" in command:
            say(digest=digest(path, call, device))
        else:
            say(used=used(device))


if __name__ == "__main__":
    main()
