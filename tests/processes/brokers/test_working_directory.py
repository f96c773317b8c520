"""No process of the library imports modules from the working directory, which may belong to another user."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.kit.brokers import BrokerApp, another_worker, worker_pids
from tests.kit.processes import Child, eventually

#: In place of modules that every process of the library imports: each writes down who imported it, and fails.
HOSTILE = """
import pathlib, sys
with (pathlib.Path(__file__).parent / "imported").open("a") as file:
    print(__name__, sys.orig_argv, file=file)
raise ImportError("from the working directory")
"""

#: The console script, whose folder is the first on the path.
COMMAND = ("-P", "-m", "shared_rpc.cli")


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    """A directory with modules that shadow those imported by processes of the library."""
    folder = tmp_path / "hostile"
    folder.mkdir()
    for name in ("msgspec", "anyio", "torch", "numpy", "cloudpickle", "argparse", "colorsys"):
        (folder / f"{name}.py").write_text(HOSTILE)
    return folder


def imported(folder: Path) -> str:
    """Return the modules imported from the directory, and the importing processes."""
    file = folder / "imported"
    return file.read_text() if file.exists() else ""


def serve(hostile: Path, children: list[Child], *words: str) -> Child:
    """Run ``shared-rpc serve`` in the hostile directory, in a process without previous imports."""
    child = Child(*COMMAND, "serve", *words, cwd=hostile, fresh=True)
    children.append(child)
    child.expect("serving")
    return child


def zygote_ready(app: BrokerApp) -> None:
    """Wait until the broker's workers can be forks."""
    eventually(lambda: app.connect().get_server_info()["zygote"]["state"] == "ready", 90.0, "a zygote", every=0.1)


@pytest.mark.deep
def test_brokers_zygotes_and_workers_do_not_import_from_it(broker_app: BrokerApp, hostile: Path, children: list[Child]) -> None:
    """Neither the first worker, nor a fork, nor one that restarts for an environment variable."""
    broker_app.write("import colorsys")
    serve(hostile, children, str(broker_app.file))
    zygote_ready(broker_app)
    broker_app.write("os.environ['LEVEL'] = '1'\nimport colorsys")
    client = broker_app.connect()
    (first,) = worker_pids(client)
    os.kill(first, signal.SIGKILL)
    another_worker(client, first)
    assert client.call("model").weight[0, 0] == 4
    assert imported(hostile) == ""


def test_apps_are_found_in_it_as_a_fallback(base_path: str, tmp_path: Path, children: list[Child]) -> None:
    """An app that is found nowhere else is looked for there."""
    (tmp_path / "here_alone.py").write_text("from shared_rpc import Provider\nprovider = Provider(device='cpu')\n")
    serve(tmp_path, children, "here_alone")


def test_zygotes_of_scripts_do_not_import_from_it(base_path: str, hostile: Path, tmp_path: Path, children: list[Child]) -> None:
    """Nor does shared-rpc run."""
    script = tmp_path / "script.py"
    script.write_text("import msgspec, torch\nprint('ran', msgspec.__file__)\n")
    for words in ((*COMMAND, "run", str(script)), (*COMMAND, "stop", "--all")):
        child = Child(*words, cwd=hostile, fresh=True)
        children.append(child)
        assert child.close()[0] == 0
    assert imported(hostile) == ""
