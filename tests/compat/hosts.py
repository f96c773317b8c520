"""A server of the app in either way that people start one, and the visitor that goes there."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.kit.processes import PYTHONPATH, ROOT

APP = str(Path(__file__).with_name("app.py"))
#: The command of each host, and what it adds to the environment.
HOSTS: dict[str, tuple[list[str], dict[str, str]]] = {
    "python app.py": ([sys.executable, APP], {"SHARED_TENSOR_ROLE": "server"}),
    "shared-rpc serve app.py": ([sys.executable, "-m", "shared_rpc.cli", "serve", APP], {}),
}
#: Of a visitor of one library, in seconds; and of a server's end, on a machine that does much else.
LIMIT = 900.0
ENDS = 120.0


def _environment(folder: Path, process: str, device: str) -> dict[str, str]:
    """Return the environment of a server or client of the tests: offline, and deterministic."""
    ours = {name: value for name, value in os.environ.items() if not name.startswith("SHARED_TENSOR_")}
    return {
        **ours,
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).with_name("site")), PYTHONPATH]),
        "PYTHONUNBUFFERED": "1",
        "SHARED_TENSOR_BASE_PATH": str(folder / "s"),
        "COMPAT_DEVICE": device,
        "HF_HOME": str(folder / process / "hub"),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        # Libraries keep what they took from a set, in its order.
        "PYTHONHASHSEED": "0",
        "OMP_NUM_THREADS": "1",
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "TORCHINDUCTOR_CACHE_DIR": str(folder / process / "inductor"),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
    }


def report_of(library: str, host: str, device: str, heavy: bool, names: Sequence[str]) -> dict[str, Any]:
    """Serve a library's cases, and visit those of these names: ``{"cases": …, "found": …, "ended": …, "log": …, …}``."""
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="compat-") as name:
        folder = Path(name)
        command, added = HOSTS[host]
        environ = {**_environment(folder, "server", device), **added}
        with open(folder / "server.log", "w+b") as log:
            server = subprocess.Popen(command, env=environ, cwd=folder, stdout=log, stderr=log)
            try:
                visited = _visit(server, library, host, device, heavy, names, folder)
            finally:
                server.send_signal(signal.SIGINT)
                try:
                    ended = server.wait(ENDS)
                except subprocess.TimeoutExpired:
                    server.kill()
                    ended = f"did not end within {ENDS} s of SIGINT, and was killed: {server.wait()}"
        words = (folder / "server.log").read_text(errors="replace")
    return {**visited, "ended": ended, "log": words[-4000:], "seconds": round(time.monotonic() - begin, 1)}


def _visit(
    server: subprocess.Popen[bytes], library: str, host: str, device: str, heavy: bool, names: Sequence[str], folder: Path
) -> dict[str, Any]:
    program = [sys.executable, "-X", "faulthandler", "-m", "tests.compat.visitor"]
    arguments = [library, host, device, "heavy" if heavy else "light", *names]
    environ = {**_environment(folder, "client", device), "SHARED_TENSOR_ROLE": "client"}
    with open(folder / "cases", "wb") as cases, open(folder / "errors", "wb") as errors:
        visitor = subprocess.Popen([*program, *arguments], env=environ, cwd=ROOT, stdout=cases, stderr=errors)
        deadline = time.monotonic() + LIMIT
        while visitor.poll() is None:
            # Without a server a visitor waits for one: what has ended it is in the server's log.
            if server.poll() is not None or time.monotonic() > deadline:
                visitor.kill()
            time.sleep(0.2)
    lines = (folder / "cases").read_text(errors="replace").splitlines()
    found = [json.loads(line) for line in lines if line.startswith('{"case"') and line.endswith("}")]
    return {
        "cases": {case["case"]: case["checks"] for case in found},
        "found": {case["case"]: case["found"] for case in found},
        "visitor": visitor.returncode
        and f"ended with {visitor.returncode}: {(folder / 'errors').read_text(errors='replace')[-3000:]}",
    }
