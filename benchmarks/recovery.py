"""The worker of a broker is killed: attaches across the kill, the time to the next worker, and the broker's own memory."""

from __future__ import annotations

import hashlib
import os
import signal
import statistics
import time
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer

from benchmarks import workload  # noqa: F401  the classes of what is attached
from benchmarks.runner import OURS, Device, Json, Report, Sample, Shape, chosen
from benchmarks.servers import Process, Servers
from benchmarks.sides import load_lazy_modules
from shared_rpc import Client

#: Seconds that anything here may take.
_PATIENCE = 120.0
#: The pace's multiple where a restart is timed: after a worker that lived for less than 10 s the next one is started later.
_LONG = 1.75

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
    device, shape = chosen(device, shape)
    report = Report("recovery", f"The worker is killed ({shape} on {device})", [OURS])
    app, call = APP.format(device=device), ["model", shape]
    with (
        Servers(device) as servers,
        servers.broker(app) as (socket, pid),
        Client(socket_path=socket, timeout=_PATIENCE) as client,
    ):
        config: dict[str, Any] = {"socket": socket, "device": device, "call": call}
        clients = processes or max(1, min(4, len(servers.cores) // 2))
        started = [servers.client("recovery:Attacher", **config) for _ in range(clients)]
        attaching = [process.ready() for process in started]
        client.call(*call).release()
        killer = _Killer(client, pace)
        _kill_rows(report, killer, attaching, attaches, rate, kills)
        _digest_row(report, servers, killer, config, attaching[0])
        with (
            servers.broker(app, "--no-preload", name="plain") as (plain, _),
            Client(socket_path=plain, timeout=_PATIENCE) as other,
        ):
            _ready_rows(report, servers, killer, _Killer(other, pace), restarts)
        _broker_rows(report, client, pid, device)
    report.finish(json)


class _Killer:
    """Kills the worker of a broker, and knows when the next one is ready."""

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
        """Wait until the next worker is a fork; return the bytes of its zygote."""
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


class _Turn(NamedTuple):
    """Seconds that attaches took until the worker was killed and from then on, and the errors."""

    before: list[float]
    after: list[float]
    errors: list[str]


def _kill_rows(report: Report, killer: _Killer, attaching: list[Process], attaches: int, rate: float, kills: int) -> None:
    """Measure attaches from several processes, halfway through which the worker is killed, in several rounds."""
    for process in attaching:
        process.ask("attach", count=10, rate=50)  # modules are loaded with the first one
    turns = [_attach_across_a_kill(killer, attaching, attaches, rate) for _ in range(kills)]
    before, after = Sample(turn.before for turn in turns), Sample(turn.after for turn in turns)
    errors = [error for turn in turns for error in turn.errors]
    report.row(
        f"{attaches:,} attaches at {rate:g} a second, worker killed halfway, {kills} times: failed",
        {OURS: float(len(errors))},
        "number",
        "attach_gap",
        float(len(errors)),
        errors=errors[:10],
        before=[len(turn.before) for turn in turns],
        after=[len(turn.after) for turn in turns],
    )
    report.row("… p50 before the kill", {OURS: before})
    report.row("… p50 from the kill on", {OURS: after})
    report.row("… p99 before the kill", {OURS: before.p99})
    report.row("… p99 from the kill on", {OURS: after.p99}, "s", "attach_p99", after.p99 / before.p99)


def _attach_across_a_kill(killer: _Killer, attaching: list[Process], attaches: int, rate: float) -> _Turn:
    each, share = attaches // len(attaching), rate / len(attaching)
    killer.pause()
    for process in attaching:
        process.tell("attach", count=each, rate=share)
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
    )


def _digest_row(report: Report, servers: Servers, killer: _Killer, config: dict[str, Any], attached: Process) -> None:
    """Check that the object of a dead worker computes the same bits, in a later process."""
    first = attached.ask("digest")
    killer.pause()
    killer.kill()
    with servers.client("recovery:Attacher", **config) as late:
        differ = float(late.ask("digest") != first)
    name = "forward pass of a process that attached after its maker's death: differing bits"
    report.row(name, {OURS: differ}, "number", "killed", differ)
    killer.wait_for_another()


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
    imports: list[float] = []
    own: list[float] = []
    forked: list[float] = []
    new: list[float] = []
    nbytes = killer.wait_for_zygote()
    for _ in range(restarts):
        begin = time.perf_counter()
        servers.run("-c", "import runpy; runpy.run_path('app.py', run_name='app')")
        imports.append(time.perf_counter() - begin)
        own.append(float(servers.run("-c", _OWN_IMPORTS)))
        for one, times in ((killer, forked), (plain, new)):
            one.pause(_LONG)
            begin = time.perf_counter()
            one.kill()
            one.wait_for_another()
            times.append(time.perf_counter() - begin)
    report.row("a process that imports the app, from start to end", {OURS: statistics.median(imports)})
    report.row("… of that the app's own modules", {OURS: statistics.median(own)})
    ready = statistics.median(forked)
    report.row("from SIGKILL to a new worker that is ready", {OURS: ready}, "s", "worker", ready - statistics.median(own))
    report.row("… with --no-preload", {OURS: statistics.median(new)})
    report.row("memory of the zygote (PSS)", {OURS: float(nbytes)}, "bytes")


def _broker_rows(report: Report, client: Client, pid: int, device: str) -> None:
    """Measure the costs of a hundred objects."""
    for number in range(99):
        client.call("numbered", number)
    status = Path(f"/proc/{pid}/status").read_text()
    resident = float(int(next(line for line in status.splitlines() if line.startswith("VmRSS")).split()[1]) << 10)
    objects = client.get_server_info()["objects"]
    report.row(f"memory of the broker with {objects} objects", {OURS: resident}, "bytes", "broker", resident)
    links = [os.readlink(entry) for entry in Path(f"/proc/{pid}/fd").iterdir()]
    maps = Path(f"/proc/{pid}/maps").read_text()
    opened = sum(("/dev/nvidia" if device == "cpu" else "nvidiactl") in link for link in links)
    traces = float(sum(name in maps for name in ("libcuda", "libtorch", "/dev/nvidia")))
    name = "… libraries of CUDA or torch, and devices, that it has mapped"
    report.row(name, {OURS: traces}, "number", "broker_gpu", traces, control_devices=opened)


class Attacher:
    """A client process, which attaches again and again, at a steady rate, and computes with the model."""

    def __init__(self, socket: str, device: str, call: list[Any]) -> None:
        self._socket, self._device, self._call = socket, device, call
        if device != "cpu":
            torch.zeros(1, device=device)
        load_lazy_modules(device)

    def attach(self, count: int, rate: float) -> dict[str, Any]:
        """Attach with a new client: a connection, a session, the model, and the end of all of them."""
        began = time.time()
        start, times, errors = time.perf_counter(), [], []
        for number in range(count):
            time.sleep(max(start + number / rate - time.perf_counter(), 0))
            begin = time.perf_counter()
            try:
                client = Client(socket_path=self._socket, timeout=30.0, connect_timeout=0)
                with client, client.call(*self._call) as handle:
                    assert handle.value is not None
                    times.append((begin - start, time.perf_counter() - begin))
            except Exception as error:
                errors.append(f"{type(error).__name__}: {error}")
        return {"began": began, "times": times, "errors": errors}

    def digest(self) -> str:
        """Hash the bits of a forward pass of a model that is attached for it."""
        with Client(socket_path=self._socket) as client, client.call(*self._call) as handle, torch.inference_mode():
            logits = handle.value(torch.arange(64, device=self._device))
            return hashlib.sha256(logits.cpu().view(torch.uint8).numpy().tobytes()).hexdigest()
