"""What processes import: no torch where they start without it, and nothing from the working directory.

That directory may belong to another user.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.kit.brokers import BrokerApp, another_worker, worker_pids
from tests.kit.processes import Child, eventually, python
from tests.kit.world import World


def loaded_by(code: str) -> set[str]:
    """Return the modules of a process after ``code``."""
    child = python(f"{code}\nimport sys\nprint('loaded', *sys.modules)", fresh=True)
    loaded = set(child.expect("loaded").split())
    assert child.close() == (0, "")
    return loaded


#: Modules that take seconds.
SLOW = {"torch", "shared_rpc.codec", "shared_rpc.memory.backends.vmm"}
#: Modules of servers, and of event loops.
OTHERS = {f"shared_rpc.{room}" for room in ("server", "broker", "observability", "execution", "provider")}
OTHERS |= {"anyio", "asyncio", "shared_rpc.operations.channels"}


@pytest.mark.parametrize(
    ("code", "absent"),
    [
        ("from shared_rpc import Client, Handle, Provider, Server, errors", SLOW),
        ("import shared_rpc.cli.app", SLOW),
        ("from shared_rpc import Provider; provider = Provider(execution_mode='local'); provider.share('f')(id)", SLOW),
        ("import sys; from shared_rpc.cli.__main__ import main; sys.argv[1:] = ['ls']; main()", {*SLOW, "typer"}),
        ("from shared_rpc import Client; Client().close()", {*SLOW, *OTHERS}),
        ("import shared_rpc.codec.by_value", {"torch"}),  # an app is registered before its imports
    ],
    ids=["the names", "the command", "sharing", "a list of servers", "a client", "modules by value"],
)
def test_processes_load_only_what_they_use(code: str, absent: set[str]) -> None:
    """Sharing a function, connecting to a server and listing servers start at once; torch takes seconds."""
    assert not absent & loaded_by(code)


def test_importing_the_package_loads_no_submodules() -> None:
    """Every name is loaded on first use."""
    assert {name for name in loaded_by("import shared_rpc") if name.startswith("shared_rpc")} == {"shared_rpc"}


# The working directory.

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


def serve(hostile: Path, world: World, *words: str) -> Child:
    """Run ``shared-rpc serve`` in the hostile directory, in a process without previous imports."""
    child = world.start(*COMMAND, "serve", *words, cwd=hostile, fresh=True)
    child.expect("serving")
    return child


def zygote_ready(app: BrokerApp) -> None:
    """Wait until the broker's workers can be forks."""
    eventually(lambda: app.connect().get_server_info()["zygote"]["state"] == "ready", 90.0, "a zygote", every=0.1)


@pytest.mark.deep
def test_brokers_ignore_modules_of_the_working_directory(broker_app: BrokerApp, hostile: Path, world: World) -> None:
    """So do their zygotes and workers: the first, a fork, and one that restarts for an environment variable."""
    broker_app.write("import colorsys")
    serve(hostile, world, str(broker_app.file))
    zygote_ready(broker_app)
    broker_app.write("os.environ['LEVEL'] = '1'\nimport colorsys")
    client = broker_app.connect()
    (first,) = worker_pids(client)
    os.kill(first, signal.SIGKILL)
    another_worker(client, first)
    assert client.call("model").weight[0, 0] == 4
    assert imported(hostile) == ""


def test_apps_are_found_in_the_working_directory_as_a_fallback(tmp_path: Path, world: World) -> None:
    """An app that is found nowhere else is looked for there."""
    (tmp_path / "here_alone.py").write_text("from shared_rpc import Provider\nprovider = Provider(device='cpu')\n")
    serve(tmp_path, world, "here_alone")


def test_scripts_ignore_modules_of_the_working_directory(hostile: Path, tmp_path: Path, world: World) -> None:
    """So do the zygote that starts them, and shared-rpc run."""
    script = tmp_path / "script.py"
    script.write_text("import msgspec, torch\nprint('ran', msgspec.__file__)\n")
    for words in ((*COMMAND, "run", str(script)), (*COMMAND, "stop", "--all")):
        child = world.start(*words, cwd=hostile, fresh=True)
        assert child.close()[0] == 0
    assert imported(hostile) == ""
