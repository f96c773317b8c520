"""The units of ``examples/deploy`` under systemd itself, booted in its own namespaces.

:mod:`tests.processes.brokers.test_systemd` uses a stand-in; here the units run under the manager that they are for. This needs
root, ``unshare`` and systemd, and seconds for each boot: ``nox -s deep``.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from shared_rpc import Client, errors
from tests.kit.brokers import APP
from tests.kit.deep import repetitions
from tests.kit.processes import eventually

SYSTEMD = next((path for path in ("/usr/lib/systemd/systemd", "/lib/systemd/systemd") if os.path.exists(path)), "")
UNITS = Path(__file__).parents[3] / "examples" / "deploy"

pytestmark = pytest.mark.skipif(
    not repetitions(0, 1) or os.geteuid() != 0 or not SYSTEMD or shutil.which("unshare") is None,
    reason="a systemd is booted in 'nox -s deep', as root",
)

UNSHARE = ("unshare", "--pid", "--fork", "--mount", "--kill-child", "--cgroup")
BOOT = """
set -e
mount --make-rprivate /
mount -t proc proc /proc
mount -t tmpfs -o mode=755 tmpfs /run
mkdir -p /run/systemd
cp -r "$1" /run/systemd/system
exec env -i PATH="$PATH" container=test "$2" --system --unit=mini.target --log-target=console --show-status=0
"""
#: For units of a system that has nothing else.
ALONE = "[Unit]\nDefaultDependencies=no\n"


class System:
    """A systemd with the app's units."""

    def __init__(self, folder: Path) -> None:
        self.base_path = str(folder / "run" / "shared-rpc" / "app")
        self._units = folder / "units"
        app, etc = folder / "app.py", folder / "etc" / "shared-rpc"
        app.write_text(APP)
        etc.mkdir(parents=True)
        (folder / "run" / "shared-rpc").mkdir(parents=True, mode=0o700)
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        (etc / "app.conf").write_text(f"APP={app}\nPATH={path}\nPYTHONPATH={UNITS.parent.parent}\n")
        for name in ("shared-rpc@.service", "shared-rpc@.socket"):
            text = (UNITS / name).read_text().replace("%E", str(folder / "etc")).replace("%t", str(folder / "run"))
            self._write(name, text.replace("RuntimeDirectory=shared-rpc\n", ""))  # it is under /run, which is not seen here
            self._write(f"{name}.d/alone.conf", ALONE)
        self._write("mini.target", ALONE)
        self.log = folder / "console"
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                [*UNSHARE, "sh", "-c", BOOT, "sh", str(self._units), SYSTEMD],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        eventually(lambda: self.run("is-active", "mini.target") == "active", 30.0, f"systemd: {self.log.read_text()}")

    def _write(self, name: str, text: str) -> None:
        path = self._units / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def _first(self) -> str:
        """The process id of systemd in this namespace."""
        return Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text().split()[0]

    def run(self, *words: str) -> str:
        """Run ``systemctl``; return its output."""
        try:
            command = ["nsenter", "-t", self._first(), "-m", "-p", "systemctl", *words]
        except (OSError, IndexError):
            return ""
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60).stdout.strip()

    def kill(self) -> None:
        """Kill the broker, and wait for its successor."""
        before = self.run("show", "-P", "MainPID", "shared-rpc@app.service")
        self.run("kill", "--kill-who=main", "-s", "KILL", "shared-rpc@app.service")
        eventually(
            lambda: self.run("show", "-P", "MainPID", "shared-rpc@app.service") not in (before, "0"), 30.0, "it starts again"
        )

    def close(self) -> None:
        """End it and all its processes."""
        os.kill(int(self._first()), signal.SIGKILL)
        self._process.wait(30)


@pytest.fixture
def system(tmp_path: Path) -> Iterator[System]:
    """A systemd whose socket unit listens."""
    system = System(tmp_path)
    try:
        system.run("start", "shared-rpc@app.socket")
        yield system
    finally:
        system.close()
        print(system.log.read_text())


@pytest.fixture
def connect(system: System) -> Iterator[Callable[[], Client]]:
    """Makes clients of the app."""
    clients: list[Client] = []

    def make() -> Client:
        clients.append(Client(system.base_path, device="cpu", timeout=60.0, connect_timeout=30.0))
        return clients[-1]

    yield make
    for client in clients:
        client.close()


def test_the_first_client_starts_the_service(system: System, connect: Callable[[], Client]) -> None:
    """The socket is the manager's; the service is ready when the app is loaded, and stops on request."""
    assert system.run("is-active", "shared-rpc@app.service") == "inactive"
    client = connect()
    assert client.call("model").weight[0, 0] == 4
    assert system.run("is-active", "shared-rpc@app.service") == "active"
    assert system.run("show", "-P", "StatusText", "shared-rpc@app.service").endswith("the app is loaded")
    assert system.run("reload", "shared-rpc@app.service") == ""
    assert client.call("model").weight[0, 0] == 4
    system.run("stop", "shared-rpc@app.socket", "shared-rpc@app.service")
    assert system.run("show", "-P", "Result", "shared-rpc@app.service") == "success"
    with pytest.raises(errors.SharedRPCError), Client(system.base_path, device="cpu", connect_timeout=0.2) as late:
        late.ping()


def test_objects_survive_a_kill(system: System, connect: Callable[[], Client]) -> None:
    """The successor has the same object, over one memory."""
    handle = connect().call("held")
    handle.value.fill_(5.0)
    stored = ("show", "-P", "NFileDescriptorStore", "shared-rpc@app.service")
    eventually(lambda: int(system.run(*stored)) >= 3, what="the state, the object and its memory are stored")
    system.kill()
    successor = connect()
    again = successor.call("held")
    assert again.object_id == handle.object_id and not handle.is_stale()
    assert again.value.tolist() == [5.0] * 4
    assert successor.get_server_info()["builds"] == 0
    assert system.run("show", "-P", "NRestarts", "shared-rpc@app.service") == "1"
