"""The role ``spawn``: the first process that needs a server starts one, which outlives it; all others attach."""

from __future__ import annotations

import fcntl
import os
import select
import signal
import sys
import textwrap
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from shared_rpc import Client, Provider
from shared_rpc.errors import ConfigurationError, ConnectError
from tests.kit.brokers import broker_words, is_running
from tests.kit.processes import Child, eventually, links_of
from tests.kit.world import World

#: It needs torch for its results alone, and counts how often a server's worker loads it.
APP = """
import os, sys
from shared_rpc import Provider

provider = Provider(device="cpu")

if not __name__.endswith("main__"):
    with open("loads", "a") as file:
        print(os.getpid(), provider.execution_mode, file=file)

@provider.share
def weights():
    import torch
    return torch.zeros(4)
"""

#: A script's use of its server, or its error.
ATTACH = """
if __name__ == "__main__":
    from shared_rpc.errors import SharedRPCError
    try:
        found = provider.get_runtime_info()
        print("attached", found["execution_mode"], found["server"]["pid"], flush=True)
    except SharedRPCError as error:
        print(f"refused {type(error).__name__}", error, "that was all", flush=True)
"""

#: An app whose load takes as long as the test determines.
SLOW = """
import time
if __name__ != "__main__":
    while not os.path.exists("go"):
        time.sleep(0.005)
"""


class Scripts:
    """Script files of one directory, the processes that run them, and the server that they start."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.directory = Path(world.base_path).parent
        self.socket = f"{world.base_path}-cpu.sock"

    def write(self, *pieces: str, name: str = "app.py", app: str = APP) -> None:
        """Write a file: an app, followed by other code."""
        (self.directory / name).write_text(app + "".join(textwrap.dedent(piece) for piece in pieces))

    def run(
        self, *words: str, role: str | None = "spawn", cwd: Path | None = None, fresh: bool = False, **variables: str
    ) -> Child:
        """Start a process in that role."""
        environ = {**({"SHARED_TENSOR_ROLE": role} if role else {}), **variables}
        options: dict[str, Any] = {"cwd": cwd or self.directory, "fresh": fresh}
        return self.world.start(*(words or ("app.py",)), environ=environ, **options)

    def attached(self, *words: str, role: str | None = "spawn") -> int:
        """Run a process to its end; return the process id of the server that it attached to."""
        child = self.run(*words, role=role)
        pid = int(child.expect("attached").split()[-1])
        assert child.close() == (0, "")
        return pid

    def refused(self, child: Child) -> str:
        """Return the error that a process of :data:`ATTACH` reported."""
        assert child.process.stdout is not None
        text = child.process.stdout.read()
        assert text.startswith("refused"), text
        return text

    @property
    def loads(self) -> list[str]:
        """The workers that loaded the app, with their roles."""
        path = self.directory / "loads"
        return path.read_text().splitlines() if path.exists() else []

    @property
    def log(self) -> str:
        """The server's log."""
        return Path(f"{self.socket}.log").read_text()

    def waits(self, child: Child) -> bool:
        """Return whether a process takes part in the election."""
        for fd in os.listdir(f"/proc/{child.pid}/fd"):
            with suppress(FileNotFoundError):  # it was closed in the meantime
                if os.readlink(f"/proc/{child.pid}/fd/{fd}") == f"{self.socket}.spawn":
                    return True
        return False

    def nothing_runs(self) -> bool:
        """Return whether no server has the lock, in any state from its start to its end."""
        try:
            fd = os.open(f"{self.socket}.spawn", os.O_RDWR)
        except FileNotFoundError:
            return True
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        finally:
            os.close(fd)
        return True


def server_at(path: str) -> int | None:
    """Return the process id of the server there, None without one."""
    with Client(socket_path=path, connect_timeout=0) as client:
        try:
            return int(client.get_server_info()["pid"])
        except ConnectError:
            return None


@pytest.fixture
def scripts(world: World) -> Iterator[Scripts]:
    """A directory for scripts. At the end, all processes are ended."""
    scripts = Scripts(world)
    scripts.write(ATTACH)
    yield scripts
    (scripts.directory / "go").touch()
    for child in world.children:
        child.process.kill()
    workers = [int(line.split()[0]) for line in scripts.loads]
    pid = server_at(scripts.socket)
    if pid is not None:
        os.kill(pid, signal.SIGTERM)
    eventually(scripts.nothing_runs, what="the server that was started has ended")
    eventually(lambda: not any(map(is_running, workers)), what="its workers have ended")


def test_a_second_run_attaches(scripts: Scripts) -> None:
    """To objects of the first run, which has ended: its writes are visible."""
    scripts.write("""
        if __name__ == "__main__":
            found = weights()
            found += 1
            print("attached", found.tolist(), provider.get_runtime_info()["server"]["builds"], flush=True)
    """)
    assert scripts.run().expect("attached") == "attached [1.0, 1.0, 1.0, 1.0] 1"
    assert scripts.run().expect("attached") == "attached [2.0, 2.0, 2.0, 2.0] 1"
    assert [line.split()[1] for line in scripts.loads] == ["server"]


def test_the_server_is_detached(scripts: Scripts) -> None:
    """It has its own session, no input, and a log; its starter leaves no zombie."""
    scripts.write("""
        if __name__ == "__main__":
            print("attached", provider.get_runtime_info()["server"]["pid"], flush=True)
            sys.stdin.readline()
    """)
    child = scripts.run(fresh=True)
    server = int(child.expect("attached").split()[1])
    assert Path(f"/proc/{child.pid}/task/{child.pid}/children").read_text() == ""
    assert os.getsid(server) not in (os.getsid(0), os.getsid(child.pid))
    assert [os.readlink(f"/proc/{server}/fd/{fd}") for fd in range(3)] == ["/dev/null", *[f"{scripts.socket}.log"] * 2]
    child.tell("go on")
    assert child.close() == (0, "")
    assert server_at(scripts.socket) == server


def test_racing_processes_start_one_server(scripts: Scripts) -> None:
    """All attach to it, and the app is loaded once."""
    racing = [scripts.run() for _ in range(8)]
    assert len({child.expect("attached") for child in racing}) == 1
    assert len(scripts.loads) == 1


def test_a_killed_starter_does_not_stop_its_server(scripts: Scripts) -> None:
    """The server continues to load, others wait for it, and no second one is started."""
    scripts.write(SLOW, ATTACH)
    first = scripts.run()
    eventually(lambda: len(scripts.loads) == 1)
    first.kill()
    second = scripts.run()
    eventually(lambda: scripts.waits(second))
    (scripts.directory / "go").touch()
    second.expect("attached")
    assert (len(scripts.loads), scripts.log.count(" starts: ")) == (1, 1)


def test_a_server_killed_while_loading_is_replaced(scripts: Scripts) -> None:
    """Also if its starter was killed: a waiting process starts another one."""
    scripts.write(SLOW, ATTACH)
    first = scripts.run()
    eventually(lambda: len(scripts.loads) == 1)
    waiting = [scripts.run() for _ in range(2)]
    eventually(lambda: all(map(scripts.waits, waiting)))
    worker = int(scripts.loads[0].split()[0])
    broker = int(Path(f"/proc/{worker}/stat").read_text().rpartition(")")[2].split()[1])
    first.kill()
    os.kill(broker, signal.SIGKILL)
    (scripts.directory / "go").touch()
    assert len({child.expect("attached") for child in waiting}) == 1
    assert len(scripts.loads) == 2


def test_load_errors_reach_all_waiters(scripts: Scripts) -> None:
    """With the traceback instead of a timeout; waiters do not retry, later processes do."""
    scripts.write(SLOW, "\nif __name__ != '__main__': raise OSError('no such checkpoint')\n", ATTACH)
    racing = [scripts.run()]
    eventually(lambda: len(scripts.loads) == 1)
    racing += [scripts.run() for _ in range(2)]
    eventually(lambda: all(map(scripts.waits, racing)))
    (scripts.directory / "go").touch()
    for child in racing:
        text = scripts.refused(child)
        assert text.startswith("refused ConnectError the server for")
        assert "OSError: no such checkpoint" in text
        assert f"{scripts.socket}.log" in text
    assert len(scripts.loads) == 1
    assert "OSError: no such checkpoint" in scripts.log
    scripts.write(ATTACH)
    scripts.attached()
    assert len(scripts.loads) == 2


def test_a_slow_server_continues_after_a_timeout(scripts: Scripts) -> None:
    """The error names it, its log and the setting; a later call finds it."""
    slow = SLOW + "    print('half of it is there', flush=True)\n    while not os.path.exists('more'): time.sleep(0.005)\n"
    scripts.write(slow, ATTACH, app=APP.replace('device="cpu"', 'device="cpu", server_startup_timeout=4.0'))
    (scripts.directory / "go").touch()
    starter = scripts.run()
    eventually(lambda: len(scripts.loads) == 1)
    other = scripts.run()
    text = scripts.refused(starter)
    for part in ("does not listen yet", "server_startup_timeout (4 s)", "half of it is there"):
        assert part in text
    assert "another process began to start one, which did not listen within 4 s" in scripts.refused(other)
    (scripts.directory / "more").touch()
    eventually(lambda: server_at(scripts.socket) is not None)
    scripts.run().expect("attached")
    assert len(scripts.loads) == 1


def test_logs_are_rotated(scripts: Scripts) -> None:
    """A server starts a new log once the present one is large, and keeps the previous one."""
    log = Path(f"{scripts.socket}.log")
    log.write_text("x" * ((1 << 20) + 1))
    scripts.attached()
    eventually(lambda: "serving weights" in scripts.log)
    assert (len(scripts.log), log.with_name(f"{log.name}.1").stat().st_size) < (2000, (1 << 20) + 2)
    assert log.stat().st_mode & 0o777 == 0o600


def test_functions_without_a_file_are_refused(scripts: Scripts) -> None:
    """The error gives the remedy. With a server they attach like any client."""
    text = scripts.refused(scripts.run("-c", APP + ATTACH))
    assert text.startswith("refused ConfigurationError cannot start a server for functions without a .py file")
    assert "into a file, such as models.py, and import it here" in text
    pid = scripts.attached()
    assert scripts.run("-c", APP + ATTACH).expect("attached") == f"attached spawn {pid}"


def test_cells_of_a_notebook_are_refused(monkeypatch: pytest.MonkeyPatch, base_path: str, tmp_path: Path) -> None:
    """Although the program that runs them has a file."""
    main: Any = ModuleType("__main__")
    main.__file__ = str(tmp_path / "launcher.py")
    Path(main.__file__).touch()
    main.provider = Provider(device="cpu")
    exec(compile("@provider.share\ndef cell():\n    pass", "/tmp/ipykernel_1/2.py", "exec"), vars(main))
    monkeypatch.setitem(sys.modules, "__main__", main)
    monkeypatch.setenv("SHARED_TENSOR_ROLE", "spawn")
    with pytest.raises(ConfigurationError, match=r"functions without a \.py file"):
        main.provider.get_runtime_info()


@pytest.mark.parametrize(
    ("modules", "error"), [([], "not a global of a module"), (["base", "other"], "are in several files: base, other")]
)
def test_providers_without_one_module_are_refused(
    monkeypatch: pytest.MonkeyPatch, base_path: str, modules: list[str], error: str
) -> None:
    """No worker could find it, or the choice is ambiguous."""
    provider = Provider(device="cpu")
    for name in modules:
        module: Any = ModuleType(name)
        module.provider = provider
        exec(f"@provider.share\ndef in_{name}():\n    pass", vars(module))
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setenv("SHARED_TENSOR_ROLE", "spawn")
    with pytest.raises(ConfigurationError, match=error):
        provider.get_runtime_info()


def test_the_module_with_the_functions_is_served(scripts: Scripts) -> None:
    """Instead of the script that imports it; from any working directory."""
    scripts.write(name="models.py")
    scripts.write(app="from models import provider, weights\n" + ATTACH)
    elsewhere = scripts.directory / "elsewhere"
    elsewhere.mkdir()
    scripts.run("../app.py", cwd=elsewhere).expect("attached")
    assert "models:provider" in scripts.log
    assert len((elsewhere / "loads").read_text().splitlines()) == 2  # the script's own import, and the worker's


def test_a_package_run_with_m_is_served_by_name(scripts: Scripts) -> None:
    """So that it can import its neighbours."""
    package = scripts.directory / "shop"
    package.mkdir()
    scripts.write(name="shop/__init__.py", app="")
    scripts.write(name="shop/sizes.py", app="SIZE = 4\n")
    scripts.write("from .sizes import SIZE\n", ATTACH, name="shop/app.py")
    scripts.attached("-m", "shop.app")
    assert "shop.app:provider" in scripts.log


def test_functions_in_several_modules_are_served_by_the_script(scripts: Scripts) -> None:
    """The script that has imported them is served."""
    scripts.write(name="base.py")
    scripts.write(app="from base import provider\n@provider.share\ndef more():\n    pass\n", name="other.py")
    here = "import other\nfrom base import provider\n@provider.share\ndef here():\n    pass\n"
    scripts.write(app=here + ATTACH)
    scripts.attached()
    with Client(socket_path=scripts.socket) as client:
        assert sorted(client.list_endpoints()) == ["here", "more", "weights"]


def test_changed_base_path_and_device_apply_to_the_server(scripts: Scripts, tmp_path: Path) -> None:
    """A program may set them after importing a provider, so they are not in the served file."""
    base_path = scripts.socket.removesuffix("-cpu.sock")
    scripts.write(name="served.py", app=APP.replace('device="cpu"', ""))
    scripts.write(ATTACH, app=f"from served import provider\nprovider.base_path, provider.device = {base_path!r}, 'cpu'")
    child = scripts.run(SHARED_TENSOR_BASE_PATH=str(tmp_path / "elsewhere"))
    assert child.expect("attached").split()[1] == "spawn"
    assert child.close() == (0, "")
    assert server_at(scripts.socket) is not None


def test_a_server_started_by_hand_is_found(scripts: Scripts) -> None:
    """Its worker is the server too, whatever the source says; no other one is started."""
    scripts.write(ATTACH, app=APP.replace('device="cpu"', 'device="cpu", execution_mode="spawn"'))
    serving = scripts.run(*broker_words("app.py"), role="server")
    serving.expect("serving")
    assert scripts.attached(role=None) == serving.pid
    assert [line.split()[1] for line in scripts.loads] == ["server"]
    assert not Path(f"{scripts.socket}.spawn").exists()
    assert serving.close(signal.SIGTERM) == (0, "")


#: The code of a child of multiprocessing.
WORK = """
import multiprocessing

def work(queue):
    found = provider.get_runtime_info()
    queue.put((found["execution_mode"], found["server"]["pid"]))
"""


@pytest.mark.parametrize(("method", "expected"), [("fork", "client"), ("spawn", "spawn")])
def test_children_attach_to_their_parents_server(scripts: Scripts, method: str, expected: str) -> None:
    """To the server that their parent has started."""
    scripts.write(
        WORK,
        f"""
        if __name__ == "__main__":
            mine = provider.get_runtime_info()["server"]["pid"]
            context = multiprocessing.get_context({method!r})
            queue = context.Queue()
            child = context.Process(target=work, args=(queue,))
            child.start()
            role, pid = queue.get()
            child.join()
            print("children:", role, pid == mine)
        """,
    )
    assert scripts.run().expect("children:") == f"children: {expected} True"
    assert len(scripts.loads) == 1


def test_a_server_keeps_the_lock_until_it_has_ended(scripts: Scripts) -> None:
    """No other one is started before its memory is free."""
    server = scripts.attached()
    assert not scripts.nothing_runs()
    os.kill(server, signal.SIGTERM)
    eventually(scripts.nothing_runs)
    assert not links_of(server)


def test_clients_of_an_ending_server_start_the_next(scripts: Scripts) -> None:
    """They wait for its end: three times in a row no call is lost, and no two servers run at once."""
    scripts.write("""
        if __name__ == "__main__":
            from shared_rpc.provider.spawn import SpawnRuntime, target_of
            pids = []
            for _ in range(3):
                runtime = SpawnRuntime(provider.client_options, lambda: target_of(provider), 0.2, preload=False)
                runtime.describe(found := {})
                runtime.close()
                pids.append(found["server"]["pid"])
                while os.path.exists(found["socket_path"]):
                    pass
            print("found", *pids)
    """)
    assert len(set(scripts.run().expect("found").split()[1:])) == 3
    assert scripts.log.count("shared-rpc: no client, lease or task for 0.2 s: ends") >= 2


def test_calls_continue_with_the_next_server(scripts: Scripts) -> None:
    """The next call of a connected client after the kill starts another server."""
    scripts.write("""
        if __name__ == "__main__":
            for _ in range(2):
                print("attached", provider.get_runtime_info()["server"]["pid"], flush=True)
                sys.stdin.readline()
    """)
    child = scripts.run()
    first = int(child.expect("attached").split()[1])
    with_all_its_threads = os.pidfd_open(first)
    os.kill(first, signal.SIGKILL)
    assert select.select([with_all_its_threads], [], [], 10)[0]
    os.close(with_all_its_threads)
    child.tell("again")
    assert int(child.expect("attached").split()[1]) != first


def test_forked_children_release_the_lock(scripts: Scripts) -> None:
    """A child forked while its parent starts a server does not keep others from starting one later."""
    scripts.write(
        SLOW,
        """
        if __name__ == "__main__":
            import threading
            starting = threading.Thread(target=provider.get_runtime_info)
            starting.start()
            while not os.path.exists("loads"):
                pass
            if os.fork() == 0:
                sys.stdin.readline()
                os._exit(0)
            open("go", "w").close()
            starting.join()
            print("attached", provider.get_runtime_info()["server"]["pid"], flush=True)
            sys.stdin.readline()
    """,
    )
    os.kill(int(scripts.run().expect("attached").split()[1]), signal.SIGKILL)
    eventually(scripts.nothing_runs)
