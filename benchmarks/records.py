"""Export and import of an object, by a file and in memory, compared with its build and with loading a safetensors file."""

from __future__ import annotations

import gc
import importlib.util
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import safetensors.torch
import torch
import typer

from benchmarks.runner import OURS, Device, Json, Run, Times, chosen
from shared_rpc import Client
from shared_rpc.extras.record_file import FileRecord, save
from shared_rpc.extras.safetensors import load
from shared_rpc.memory.mapping import MAPPINGS


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
        Run("records", title, list(loaders), device, json, base=OURS, pinned=False) as run,
        TemporaryDirectory(dir=folder, prefix="bench-") as place,
    ):
        file = Path(place) / "file"
        with run.broker() as client:
            client.call("layers", 4).release()  # one-time costs
            for _ in range(rounds):
                _measure(client, megabytes, file, times)
        run.note(f"the file has {file.stat().st_size:,} bytes and is in {place}")
        file.unlink()
        safetensors.torch.save_file({f"{n}.weight": torch.full((1024, 1024), float(n)) for n in range(megabytes // 4)}, file)
        _measure_loads(loaders, file, device, rounds, times)
        run.rows_of(times)


def _measure(client: Client, megabytes: int, file: Path, times: Times) -> None:
    client.invalidate_endpoint_cache("layers")
    with times.of("build, and attach"):
        handle = client.call("layers", megabytes)
    with times.of("export to a file"):
        save(client, handle.object_id, file)
    handle.release()
    for measured in (Times(), times):  # after a warm-up, as with the loaders: the first reading of a new file takes longer
        client.invalidate_endpoint_cache("layers")
        client.create_buffer((1,), "uint8").release()  # allocations wait until dropped memory is free
        with measured.of("import from the file in the page cache"), FileRecord(file) as read:
            client.adopt(read)
    with times.of("attach"):
        handle = client.call("layers", megabytes)
    with handle, client.export(handle) as record, times.of("adopt from memory"):
        client.adopt(record)


def _fast_load(file: Path, device: str) -> object:
    from fastsafetensors import fastsafe_open

    with fastsafe_open([str(file)], nogds=True, device=f"{device}:{torch.cuda.current_device()}") as opened:
        return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118


def _measure_loads(loaders: dict[str, Callable[..., object]], file: Path, device: str, rounds: int, times: Times) -> None:
    """Load the file with each loader in turn, ``rounds`` times after a warm-up."""
    for number in range(rounds + 1):
        for name, loader in loaders.items():
            with (times if number else Times()).of("load a safetensors file in the page cache", name):
                loaded = loader(file, device=device)
                if device != "cpu":
                    torch.cuda.synchronize()
            del loaded
            gc.collect()
            MAPPINGS.drain()
            torch.cuda.empty_cache()
