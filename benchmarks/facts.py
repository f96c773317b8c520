"""Facts of a run: machine, versions and time."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import shlex
import shutil
import subprocess
import sys
from typing import Any

__all__ = ["facts"]

_PACKAGES = ("torch", "shared-rpc", "shared-tensor", "uvloop", "cuda-bindings", "ray")


def facts() -> dict[str, Any]:
    """Return ``date`` (UTC), ``command``, and ``host``: cores, load, versions, GPU and driver (None without one)."""
    gpu, driver = _gpu()
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["python", "-m", "benchmarks", *sys.argv[1:]]),
        "host": {
            "cores": len(os.sched_getaffinity(0)),
            # Of the last minute: what else ran shows here.
            "load": os.getloadavg()[0],
            "kernel": platform.release(),
            "machine": platform.machine(),
            "python": platform.python_version(),
            **{name.replace("-", "_"): _version(name) for name in _PACKAGES},
            "gpu": gpu,
            "driver": driver,
        },
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _gpu() -> tuple[str | None, str | None]:
    command = shutil.which("nvidia-smi")
    if command is None:
        return None, None
    query = [command, "--query-gpu=name,driver_version", "--format=csv,noheader"]
    answer = subprocess.run(query, capture_output=True, text=True, check=False)
    name, _, driver = answer.stdout.partition("\n")[0].partition(", ")
    return (name, driver) if answer.returncode == 0 and name else (None, None)
