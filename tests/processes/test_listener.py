"""The listening socket: its directory, its permissions, and its owner when several servers compete for it."""

from __future__ import annotations

import os
import signal
import socket
import stat
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from shared_rpc import Client, Provider, Server
from shared_rpc.errors import ConfigurationError
from shared_rpc.protocol.election import Election
from shared_rpc.server.listener import bind_socket
from tests.kit.attacker import STRANGER, as_uid, common_directory, needs_another_uid, needs_namespaces
from tests.kit.processes import Child, sigstop
from tests.kit.world import World, at_once

pytestmark = pytest.mark.usefixtures("no_leaks")

#: A server without torch, which serves until it reads a line.
SERVER = """
import sys
from shared_rpc import Provider, Server

with Server(Provider(device="cpu")):
    print("serving")
    sys.stdin.readline()
"""


@pytest.fixture
def path(base_path: str) -> str:
    """The address of this test's servers."""
    return f"{base_path}-cpu.sock"


@pytest.fixture
def other_server(world: World) -> Child:
    """A server in another process."""
    child = world.process(SERVER)
    child.expect("serving")
    return child


def mode(path: str | Path) -> int:
    """Return the permissions of a file."""
    return stat.S_IMODE(os.lstat(path).st_mode)


# A path that is taken.


def test_a_live_server_is_not_disturbed(other_server: Child, world: World) -> None:
    """The second server fails, naming the first one's pid and the socket, even while the first one is suspended."""
    client = world.client()
    client.ping()
    sigstop(other_server.pid)
    with pytest.raises(ConfigurationError, match=f"is served by pid {other_server.pid}: stop that server") as caught:
        world.serve()
    assert client.socket_path in str(caught.value)
    os.kill(other_server.pid, signal.SIGCONT)
    with Client(world.base_path, device="cpu") as another:
        assert another.get_server_info()["pid"] == other_server.pid


def test_a_child_of_a_dead_server_does_not_keep_its_socket_alive(world: World) -> None:
    """A process forked by the server closes the listening socket."""
    parent = world.process(
        """
        import os, signal, sys
        from shared_rpc import Provider, Server

        Server(Provider(device="cpu")).start()
        if os.fork() == 0:
            print("forked")
            sys.stdin.readline()
            os._exit(0)
        signal.pause()
        """
    )
    parent.expect("forked")
    parent.process.kill()
    parent.process.wait()
    world.serve()
    assert world.client().get_server_info()["pid"] == os.getpid()
    parent.tell("end")


def test_other_files_are_not_replaced(path: str, world: World) -> None:
    """Only sockets are."""
    Path(path).write_text("precious")
    with pytest.raises(ConfigurationError, match=f"{path} exists and is no socket: remove the file"):
        world.serve()
    assert Path(path).read_text() == "precious"


# The end.


def test_stopping_again_leaves_the_next_server_alone(world: World) -> None:
    """A server removes its own socket, once, whatever inode number the next one's has."""
    first = world.serve()
    first.stop()
    world.serve()
    first.stop()
    world.client().ping()


def test_stop_removes_only_the_own_socket(path: str, world: World) -> None:
    """A file that has replaced it stays."""
    server = world.serve()
    os.unlink(path)
    Path(path).write_text("precious")
    server.stop()
    assert Path(path).read_text() == "precious"


# The directory.


def test_directory_and_socket_are_private(tmp_path: Path) -> None:
    """Whatever the umask: 0700 for every created directory, 0600 for the socket."""
    base = tmp_path / "a" / "b" / "s"
    before = os.umask(0)
    try:
        with Server(Provider(base, device="cpu")):
            assert [mode(tmp_path / "a"), mode(tmp_path / "a" / "b")] == [0o700, 0o700]
            assert [mode(f"{base}-cpu.sock"), mode(f"{base}-cpu.sock.lock")] == [0o600, 0o600]
    finally:
        os.umask(before)


@pytest.mark.parametrize("permissions", [0o770, 0o702], ids=oct)
def test_a_directory_writable_by_others_is_refused(tmp_path: Path, world: World, permissions: int) -> None:
    """They could replace the socket."""
    tmp_path.chmod(permissions)
    with pytest.raises(ConfigurationError, match=f"{tmp_path} has mode {permissions:04o}.*chmod 700"):
        world.serve()
    tmp_path.chmod(0o700)


def test_a_directory_behind_a_link_is_refused(tmp_path: Path) -> None:
    """The link could lead elsewhere later."""
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(ConfigurationError, match="link is no directory"):
        Server(Provider(tmp_path / "link" / "s", device="cpu")).start()


@needs_another_uid
def test_a_directory_of_another_user_is_refused(tmp_path: Path, world: World) -> None:
    """The error names the owner, and the remedy."""
    os.chown(tmp_path, STRANGER, STRANGER)
    with pytest.raises(ConfigurationError, match=f"belongs to uid {STRANGER}, not 0: set SHARED_TENSOR_BASE_PATH"):
        world.serve()
    os.chown(tmp_path, 0, 0)


# Other users.

CONNECT = """
try:
    BlockingLink.open(sys.argv[1], 5.0).close()
except Exception as error:
    print(type(error).__name__, error)
else:
    print("welcome")
"""


@needs_another_uid
def test_a_client_of_another_user_is_refused(world: World) -> None:
    """Even if directory and socket permit it: the server gets the user from the kernel."""
    with common_directory() as directory, Server(Provider(directory / "s", device="cpu")) as server:
        os.chmod(server.socket_path, 0o666)
        child = as_uid(world, CONNECT, server.socket_path, before="from shared_rpc.client.link import BlockingLink")
        assert child.expect("").startswith(
            f"ConfigurationError the server (pid {os.getpid()}) of uid 0 accepts only its own user, and this process is "
            f"of uid {STRANGER}: run both as one user"
        )


@needs_namespaces
def test_the_overflow_uid_matches_no_user(world: World) -> None:
    """A process without a uid in its user namespace does not match another such user."""
    code = "import os; from shared_rpc.protocol.peers import is_own; print(os.geteuid(), is_own(os.geteuid()))"
    child = world.start("-c", code, before=("unshare", "--user"))
    assert child.expect("").endswith("False")


def test_one_of_several_servers_gets_the_socket(path: str) -> None:
    """However their steps interleave."""
    for _ in range(25):
        start = threading.Barrier(4)

        def race(start: threading.Barrier = start) -> socket.socket:
            start.wait()
            return bind_socket(path)

        outcomes = at_once(*[race] * 4)
        (listener,) = (one for one in outcomes if isinstance(one, socket.socket))
        for lost in outcomes:
            assert lost is listener or (isinstance(lost, ConfigurationError) and "is served by" in str(lost))
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(path)
            listener.accept()[0].close()
        listener.close()  # its file stays, as after SIGKILL


# Elections.


@pytest.fixture
def elections(tmp_path: Path) -> Iterator[tuple[Election, Election]]:
    """Two processes' views of one lock."""
    with closing(Election(f"{tmp_path}/s")) as one, closing(Election(f"{tmp_path}/s")) as other:
        yield one, other


@pytest.mark.parametrize("lasting", [True, False])
def test_failures_are_reported_to_waiting_processes(
    elections: tuple[Election, Election], tmp_path: Path, lasting: bool
) -> None:
    """A permanent one also to later ones, until it expires."""
    one, other = elections
    one.record_failure("the reason", lasting)
    assert other.failure() == "the reason"
    with closing(Election(f"{tmp_path}/s")) as later:
        assert later.failure() == ""
        assert later.lasting_failure(since=0.0) == ("the reason" if lasting else "")
        assert later.lasting_failure(since=float("inf")) == ""
