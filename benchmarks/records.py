"""An object that leaves a broker and enters it: on disk and back, against its build, and from memory to memory."""

from __future__ import annotations

import subprocess
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer

from benchmarks.options import Device, Json, chosen
from benchmarks.report import Report, Row
from benchmarks.servers import Servers, broker
from benchmarks.stats import Sample
from shared_rpc import Client
from shared_rpc.extras.record_file import FileRecord, save

__all__ = ["run"]

OURS = "shared_rpc"
#: Seconds that anything here may take.
_PATIENCE = 300.0

#: Layers of 4 MiB with torch's own initial values, as code builds them before it loads weights.
APP = """
import torch
from shared_rpc import Provider

provider = Provider(device={device!r})

@provider.share(managed=True)
def module(mebibytes):
    layers = [torch.nn.Linear(1024, 1024, bias=False, device={device!r}) for _ in range(mebibytes // 4)]
    return torch.nn.Sequential(*layers).requires_grad_(False)
"""

#: The names of the rows, in the order in which they are measured.
_BUILD, _ATTACH = "build, and attach", "attach"
_EXPORT, _IMPORT = "export to a file", "import from the file, which is in the page cache"
_ADOPT, _PROMOTE = "adopt from memory", "promote a candidate"


def run(
    device: Device = "auto",
    megabytes: Annotated[int, typer.Option(help="MiB of the module.")] = 256,
    rounds: Annotated[int, typer.Option(help="Builds, exports and imports.")] = 5,
    folder: Annotated[Path | None, typer.Option(help="Where the file is; the system's temporary folder.")] = None,
    json: Json = None,
) -> None:
    """Measure a warm start: a module that is read from a file, against its build; and a move from memory to memory."""
    device = chosen(device)
    report = Report("records", f"Records of a module of {megabytes} MiB on {device}", [OURS])
    times: defaultdict[str, list[float]] = defaultdict(list)
    with Servers(device) as servers, TemporaryDirectory(dir=folder, prefix="bench-") as place:
        file = Path(place) / "module.record"
        with broker(servers, APP.format(device=device)) as socket, Client(socket_path=socket, timeout=_PATIENCE) as client:
            client.call("module", 4).release()  # the first of everything
            for _ in range(rounds):
                _measure(client, megabytes, file, times)
            report.note(f"the file has {file.stat().st_size:,} bytes, on {_kind_of(place)}")
    for name in (_BUILD, _EXPORT, _IMPORT, _ATTACH, _ADOPT, _PROMOTE):
        sample = Sample([times[name]])
        report.add(Row(name, {OURS: sample.p50}, samples={OURS: sample}))
    report.add(
        Row("import, as a part of the build", {OURS: Sample([times[_IMPORT]]).p50 / Sample([times[_BUILD]]).p50}, "ratio")
    )
    report.note(f"medians of {rounds} rounds; each builds, exports, imports, attaches and adopts, one after the other")
    report.finish(json)


def _measure(client: Client, megabytes: int, file: Path, times: defaultdict[str, list[float]]) -> None:
    @contextmanager
    def timed(name: str) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        times[name].append(time.perf_counter() - begin)

    client.invalidate_endpoint_cache("module")
    with timed(_BUILD):
        handle = client.call("module", megabytes)
    with timed(_EXPORT):
        save(client, handle.object_id, file)
    handle.release()
    client.invalidate_endpoint_cache("module")
    with timed(_IMPORT), FileRecord(file) as read:
        client.adopt(read)
    with timed(_ATTACH):
        handle = client.call("module", megabytes)
    with handle, client.export(handle) as record:
        with timed(_ADOPT):
            client.adopt(record)
        # The earlier generation is held, as by those who serve it: freeing its memory is no part of this.
        with client.adopt_candidate(record) as candidate, client.call("module", megabytes), timed(_PROMOTE):
            client.promote(candidate)


def _kind_of(folder: str) -> str:
    """Return the type of the file system that a folder is on."""
    found = subprocess.run(["stat", "-f", "-c", "%T", folder], capture_output=True, text=True, check=False).stdout.strip()
    return found or "an unknown file system"
