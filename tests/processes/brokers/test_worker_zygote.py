"""A broker's workers as forks of a zygote: equivalent to new processes, which replace them where forking fails.

Broker, zygote and the first workers begin as forks of the tests' own zygote, but where it matters how they do.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shared_rpc import Client
from tests.kit.brokers import BrokerApp, another_worker, is_running, worker_pids
from tests.kit.processes import PYTHONPATH, Child, eventually, links_of, sigstop

#: Several processes, one after the other, import torch.
pytestmark = [pytest.mark.timeout(240)]


def zygote_of(client: Client) -> dict[str, Any]:
    """Return the server's description of its zygote."""
    facts: dict[str, Any] = client.get_server_info()["zygote"]
    return facts


def zygote_ready(client: Client, earlier: int = 0) -> int:
    """Wait for a zygote other than an earlier one; return its process id."""
    eventually(lambda: zygote_of(client).get("pid", earlier) != earlier, 90.0, "a zygote")
    return int(zygote_of(client)["pid"])


def replaced(client: Client) -> int:
    """Kill the worker; return the process id of the next one."""
    earlier = worker_pids(client)[0]
    os.kill(earlier, signal.SIGKILL)
    return another_worker(client, earlier)


def is_fork(pid: int) -> bool:
    """Return whether a worker is a fork."""
    return b"--forked" in Path(f"/proc/{pid}/cmdline").read_bytes()


def text(client: Client, name: str) -> str:
    """Return the text that an endpoint returns as bytes."""
    return bytes(client.call(name).tolist()).decode()


#: An endpoint that returns an expression's value as bytes.
SAYS = """
    def as_bytes(text):
        return torch.tensor(list(str(text).encode()), dtype=torch.uint8)
"""


#: Before a broker that makes its zygote as soon as the imports are known, without a delay of two seconds, or of more after
#: each kill.
IMPATIENT = """
from shared_rpc.broker import supervisor, zygote
zygote._SETTLE = 0.05
supervisor._FIRST_PAUSE = 0.0
"""


Start = Callable[..., Child]


@pytest.fixture
def start(app: BrokerApp) -> Start:
    """``start(**options)`` starts a broker of the app, which finds the packages installed in ``site``."""

    def start(*, site: Path | None = None, fresh: bool = False, **options: Any) -> Child:
        environ = {} if site is None else {"PYTHONPATH": f"{PYTHONPATH}{os.pathsep}{site}"}
        return app.start_program(app.program(IMPATIENT, **options), fresh=fresh, environ=environ)

    return start


@pytest.fixture
def client(app: BrokerApp, start: Start) -> Client:
    """A client of a broker whose next worker is a fork."""
    start()
    client = app.connect()
    zygote_ready(client)
    return client


def sockets_of(pid: int) -> set[str]:
    """Return the sockets of a process."""
    return {link for link in links_of(pid) if link.startswith("socket:")}


def test_later_workers_are_forks(app: BrokerApp, start: Start) -> None:
    """The first ones are new processes, and report the imports. No fork has a connection of the broker or of another worker."""
    broker = start(workers=2, fresh=True)
    client = app.connect()
    assert not any(map(is_fork, worker_pids(client)))
    zygote_ready(client)
    about = zygote_of(client)
    assert (about["state"], about["dropped"]) == ("ready", {})
    assert about["modules"] > 100 and about["rss"] > 1 << 20
    client.reload()
    one, other = worker_pids(client)
    assert is_fork(one) and is_fork(other)
    assert not (sockets_of(one) & sockets_of(other) or sockets_of(broker.pid) & (sockets_of(one) | sockets_of(other)))
    assert client.call("model").weight[0, 0] == 4


def test_the_exit_of_a_fork_is_reported(client: Client) -> None:
    """Its signal, and its last output, like those of a new process."""
    pid = replaced(client)
    with pytest.raises(Exception, match=rf"the worker \(pid {pid}\) was killed by SIGSEGV.*its last words") as crash:
        client.call("end", "segfault")
    assert "its last words" in crash.value.stderr


def test_no_preload_disables_the_zygote(app: BrokerApp, start: Start) -> None:
    """With ``--no-preload`` every worker is a new process."""
    start(preload=False)
    client = app.connect()
    assert zygote_of(client) == {"state": "off", "why": "--no-preload"}
    assert not is_fork(replaced(client))


def test_a_killed_watcher_ends_its_worker(client: Client) -> None:
    """The kernel kills the worker, which is replaced."""
    pid = replaced(client)
    watcher = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(watcher, signal.SIGKILL)
    assert is_fork(another_worker(client, pid))
    assert not is_running(pid)


# When something happens to the zygote.


def test_a_killed_zygote_is_replaced(app: BrokerApp, client: Client) -> None:
    """The workers stay, and a worker needed in between is a new process."""
    zygote = int(zygote_of(client)["pid"])
    worker = replaced(client)
    os.kill(zygote, signal.SIGKILL)
    app.world.children[0].expect_error(f"the zygote (pid {zygote}) was killed by SIGKILL")
    assert worker_pids(client) == [worker]
    assert client.call("model").weight[0, 0] == 4
    zygote_ready(client, zygote)
    assert is_fork(replaced(client))


def test_a_stopped_zygote_is_replaced(app: BrokerApp, start: Start) -> None:
    """After a short wait, in which attaching continues."""
    broker = start()
    client = app.connect()
    client.call("model")
    zygote = zygote_ready(client)
    sigstop(zygote)
    earlier = worker_pids(client)[0]
    os.kill(earlier, signal.SIGKILL)
    assert app.connect().call("model").weight[0, 0] == 4
    assert not is_fork(another_worker(client, earlier))
    broker.expect_error("did not answer")
    eventually(lambda: not is_running(zygote), what="it has been ended")


def test_a_killed_broker_leaves_nothing(app: BrokerApp, start: Start) -> None:
    """Neither zygote nor forks, although they are not notified."""
    broker = start(workers=2)
    client = app.connect()
    zygote = zygote_ready(client)
    client.reload()
    processes = [zygote, *worker_pids(client)]
    broker.kill()
    eventually(lambda: not any(map(is_running, processes)))


def test_the_end_of_the_zygote_with_its_broker_is_no_error(app: BrokerApp, start: Start) -> None:
    """Nothing is said about it."""
    broker = start()
    zygote = zygote_ready(app.connect())
    code, errors = broker.close(signal.SIGTERM)
    assert code in (0, -signal.SIGTERM) and not is_running(zygote) and "zygote" not in errors


# When a zygote would be wrong.


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A directory of installed packages."""
    folder = tmp_path / "environment" / "site-packages"
    folder.mkdir(parents=True)
    return folder


def test_packages_that_change_on_disk_are_reloaded(app: BrokerApp, start: Start, site: Path) -> None:
    """The next worker has the new version, followed by a new zygote."""
    (site / "versioned.py").write_text("VERSION = 1\n")
    app.write(SAYS, "import versioned\n@provider.share(cache=False)\ndef version(): return as_bytes(versioned.VERSION)")
    start(site=site)
    client = app.connect()
    zygote = zygote_ready(client)
    (site / "versioned.py").write_text("VERSION = 22\n")
    assert not is_fork(replaced(client))
    assert text(client, "version") == "22"
    zygote_ready(client, zygote)
    assert is_fork(replaced(client))
    assert text(client, "version") == "22"


def test_the_users_own_modules_are_never_preloaded(app: BrokerApp, start: Start, tmp_path: Path) -> None:
    """A fork reads their present version."""
    (tmp_path / "own.py").write_text("VALUE = 1\n")
    app.write(SAYS, "import own\n@provider.share(cache=False)\ndef value(): return as_bytes(own.VALUE)")
    start()
    client = app.connect()
    zygote = zygote_ready(client)
    assert str(tmp_path / "own.py") not in Path(f"/proc/{zygote}/maps").read_text()
    (tmp_path / "own.py").write_text("VALUE = 22\n")
    client.reload()
    assert is_fork(worker_pids(client)[0])
    assert text(client, "value") == "22"


def test_apps_that_set_variables_have_new_processes(app: BrokerApp, start: Start, site: Path) -> None:
    """Imports may depend on the variable, which the server names."""
    (site / "reads.py").write_text("import os\nSEEN = os.environ.get('LEVEL')\n")
    level = "import reads\n@provider.share(cache=False)\ndef level(): return as_bytes(reads.SEEN)"
    app.write(SAYS, level)
    start(site=site)
    client = app.connect()
    zygote_ready(client)
    assert is_fork(replaced(client))
    app.write(SAYS, "os.environ['LEVEL'] = '2'\n", level)
    client.reload()
    assert text(client, "level") == "2"
    assert zygote_of(client)["state"] == "off"
    assert "the app sets LEVEL while it is loaded" in zygote_of(client)["why"]


def test_apps_that_fail_in_forks_have_new_processes(app: BrokerApp, start: Start) -> None:
    """After a new process has loaded the app, no further forks are tried."""
    app.write("""
        if "--forked" in sys.argv:
            os.kill(os.getpid(), 11)
    """)
    start()
    client = app.connect()
    zygote_ready(client)
    earlier = worker_pids(client)[0]
    os.kill(earlier, signal.SIGKILL)
    assert not is_fork(another_worker(client, earlier))
    assert client.call("model").weight[0, 0] == 4
