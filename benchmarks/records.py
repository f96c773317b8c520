"""Export and import of an object, to disk and from memory to memory, compared with its build.

Also measures loading a safetensors file of as many bytes, with this library and with others.
"""

from __future__ import annotations

import gc
import importlib.util
import subprocess
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import safetensors.torch
import torch
import typer

from benchmarks.runner import OURS, Device, Goal, Json, Run, Times, chosen
from shared_rpc import Client
from shared_rpc.extras.record_file import FileRecord, save
from shared_rpc.extras.safetensors import load
from shared_rpc.memory.mapping import MAPPINGS

#: The names of the rows, in the order of measurement.
_BUILD, _ATTACH = "build, and attach", "attach"
_EXPORT, _IMPORT = "export to a file", "import from the file in the page cache"
_ADOPT = "adopt from memory"
_LOAD = "load a safetensors file in the page cache"


def run(
    device: Device = "auto",
    megabytes: Annotated[int, typer.Option(help="MiB of the module.")] = 256,
    rounds: Annotated[int, typer.Option(help="Builds, exports and imports.")] = 5,
    folder: Annotated[Path | None, typer.Option(help="Folder of the file; by default the system's temporary folder.")] = None,
    json: Json = None,
) -> None:
    """Measure a warm start: reading a module from a file, compared with its build; and a move from memory to memory."""
    device, _ = chosen(device)
    loaders: dict[str, Callable[..., object]] = {OURS: load}
    if device != "cpu":  # on the host it only maps the file
        loaders["safetensors.torch.load_file"] = safetensors.torch.load_file
        if importlib.util.find_spec("fastsafetensors"):
            loaders["fastsafetensors"] = _fast_load
    title = f"Records of a module of {megabytes} MiB on {device}"
    times = Times()
    with (
        Run("records", title, list(loaders), device, json, pinned=False) as run,
        TemporaryDirectory(dir=folder, prefix="bench-") as place,
    ):
        file, weights = Path(place) / "module.record", Path(place) / "model.safetensors"
        with run.broker() as client:
            client.call("layers", 4).release()  # one-time costs
            for _ in range(rounds):
                _measure(client, megabytes, file, times)
        nbytes = file.stat().st_size
        kind = subprocess.run(["stat", "-f", "-c", "%T", place], capture_output=True, text=True, check=True).stdout.strip()
        run.note(f"the file has {nbytes:,} bytes, on {kind}")
        file.unlink()
        safetensors.torch.save_file({f"{n}.weight": torch.full((1024, 1024), float(n)) for n in range(megabytes // 4)}, weights)
        _measure_loads(loaders, weights, device, rounds, times)
        for name in (_BUILD, _EXPORT, _IMPORT, _ATTACH, _ADOPT, _LOAD):
            run.row(name, times.samples(name))
        loads = times.samples(_LOAD)
        run.row("the same, in GB/s", {name: nbytes / 1e9 / sample.p50 for name, sample in loads.items()}, "number")
        if device != "cpu":
            speed = loads[OURS].p50 / times.samples(_IMPORT)[OURS].p50
            run.row("the speed of the import, relative to the load", {OURS: speed}, "number", Goal("≥", 0.9))
        run.note(f"medians of {rounds} rounds; each builds, exports, imports, attaches and adopts in this order")


def _measure(client: Client, megabytes: int, file: Path, times: Times) -> None:
    client.invalidate_endpoint_cache("layers")
    with times.of(_BUILD):
        handle = client.call("layers", megabytes)
    with times.of(_EXPORT):
        save(client, handle.object_id, file)
    handle.release()
    client.invalidate_endpoint_cache("layers")
    with times.of(_IMPORT), FileRecord(file) as read:
        client.adopt(read)
    with times.of(_ATTACH):
        handle = client.call("layers", megabytes)
    with handle, client.export(handle) as record, times.of(_ADOPT):
        client.adopt(record)


def _fast_load(file: Path, device: str) -> object:
    from fastsafetensors import fastsafe_open

    with fastsafe_open([str(file)], nogds=True, device=f"cuda:{torch.cuda.current_device()}") as opened:
        return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118


def _measure_loads(loaders: dict[str, Callable[..., object]], file: Path, device: str, rounds: int, times: Times) -> None:
    """Load the file with each loader in turn, ``rounds`` times after a warm-up."""
    for number in range(rounds + 1):
        for name, loader in loaders.items():
            with (times if number else Times()).of(_LOAD, name):
                loaded = loader(file, device=device)
                if device != "cpu":
                    torch.cuda.synchronize()
            del loaded
            gc.collect()
            MAPPINGS.drain()
            if device != "cpu":
                torch.cuda.empty_cache()
