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

import msgspec
import torch
import typer

from benchmarks.runner import OURS, Device, Json, Run, Times, chosen
from shared_rpc import Client
from shared_rpc.extras import safetensors
from shared_rpc.extras.record_file import FileRecord, save
from shared_rpc.memory.mapping import MAPPINGS

#: Layers of 4 MiB with torch's own initial values, like a model before its weights are loaded.
APP = """
import torch
from shared_rpc import Provider

provider = Provider(device={device!r})

@provider.share(managed=True)
def module(mebibytes):
    layers = [torch.nn.Linear(1024, 1024, bias=False, device={device!r}) for _ in range(mebibytes // 4)]
    return torch.nn.Sequential(*layers).requires_grad_(False)
"""

#: The names of the rows, in the order of measurement.
_BUILD, _ATTACH = "build, and attach", "attach"
_EXPORT, _IMPORT = "export to a file", "import from the file in the page cache"
_ADOPT, _PROMOTE = "adopt from memory", "promote a candidate"
_LOAD = "load a safetensors file in the page cache"

_Loaders = dict[str, Callable[[Path, str], object]]


def run(
    device: Device = "auto",
    megabytes: Annotated[int, typer.Option(help="MiB of the module.")] = 256,
    rounds: Annotated[int, typer.Option(help="Builds, exports and imports.")] = 5,
    folder: Annotated[Path | None, typer.Option(help="Folder of the file; by default the system's temporary folder.")] = None,
    json: Json = None,
) -> None:
    """Measure a warm start: reading a module from a file, compared with its build; and a move from memory to memory."""
    device, _ = chosen(device)
    loaders = _loaders(device)
    title = f"Records of a module of {megabytes} MiB on {device}"
    times = Times()
    with (
        Run("records", title, list(loaders), device, json) as run,
        TemporaryDirectory(dir=folder, prefix="bench-") as place,
    ):
        file, weights = Path(place) / "module.record", Path(place) / "model.safetensors"
        with run.broker(APP) as client:
            client.call("module", 4).release()  # one-time costs
            for _ in range(rounds):
                _measure(client, megabytes, file, times)
        nbytes = file.stat().st_size
        kind = subprocess.run(["stat", "-f", "-c", "%T", place], capture_output=True, text=True, check=False).stdout.strip()
        run.note(f"the file has {nbytes:,} bytes, on {kind or 'an unknown file system'}")
        file.unlink()
        _write_weights(weights, megabytes // 4)
        _measure_loads(loaders, weights, device, rounds, times)
        for name in (_BUILD, _EXPORT, _IMPORT, _ATTACH, _ADOPT, _PROMOTE, _LOAD):
            run.row(name, times.samples(name))
        loads = times.samples(_LOAD)
        built, read = (times.samples(name)[OURS].p50 for name in (_BUILD, _IMPORT))
        run.row("the same, in GB/s", {name: nbytes / 1e9 / sample.p50 for name, sample in loads.items()}, "number")
        run.row("speed of import relative to load", loads[OURS].p50 / read, "ratio")
        run.row("time of import relative to the build", read / built, "ratio")
        run.note(f"medians of {rounds} rounds; each builds, exports, imports, attaches and adopts in this order")


def _measure(client: Client, megabytes: int, file: Path, times: Times) -> None:
    client.invalidate_endpoint_cache("module")
    with times.of(_BUILD):
        handle = client.call("module", megabytes)
    with times.of(_EXPORT):
        save(client, handle.object_id, file)
    handle.release()
    client.invalidate_endpoint_cache("module")
    with times.of(_IMPORT), FileRecord(file) as read:
        client.adopt(read)
    with times.of(_ATTACH):
        handle = client.call("module", megabytes)
    with handle, client.export(handle) as record:
        with times.of(_ADOPT):
            client.adopt(record)
        # The earlier generation is held, as in production, so that freeing its memory is not measured.
        with client.adopt_candidate(record) as candidate, client.call("module", megabytes), times.of(_PROMOTE):
            client.promote(candidate)


def _loaders(device: str) -> _Loaders:
    """Return our loader, and for a GPU other installed ones, which on the host would only map the file."""
    found: _Loaders = {OURS: safetensors.load}
    if device != "cpu" and importlib.util.find_spec("safetensors"):
        from safetensors.torch import load_file

        found["safetensors.torch.load_file"] = load_file
    if device != "cpu" and importlib.util.find_spec("fastsafetensors"):
        found["fastsafetensors"] = _fast_load
    return found


def _fast_load(file: Path, device: str) -> object:
    from fastsafetensors import fastsafe_open

    with fastsafe_open([str(file)], nogds=True, device=f"cuda:{torch.cuda.current_device()}") as opened:
        return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118


def _write_weights(file: Path, count: int) -> None:
    """Write a safetensors file of tensors of 4 MiB, like those of the module."""
    length = 4 << 20
    entries = {
        f"{n}.weight": {"dtype": "F32", "shape": [1024, 1024], "data_offsets": [n * length, (n + 1) * length]}
        for n in range(count)
    }
    header = msgspec.json.encode(entries)
    with file.open("wb") as opened:
        opened.write(len(header).to_bytes(8, "little") + header)
        for n in range(count):
            opened.write(torch.full((1 << 20,), float(n)).numpy().tobytes())


def _measure_loads(loaders: _Loaders, file: Path, device: str, rounds: int, times: Times) -> None:
    """Load the file with each loader in turn, ``rounds`` times after a warm-up."""
    for number in range(rounds + 1):
        for name, load in loaders.items():
            with (times if number else Times()).of(_LOAD, name):
                loaded = load(file, device)
                if device != "cpu":
                    torch.cuda.synchronize()
            del loaded
            gc.collect()
            MAPPINGS.drain()
            if device != "cpu":
                torch.cuda.empty_cache()
