"""Base paths directly in a sticky directory such as /tmp, where every user may create files of those names."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from shared_rpc import Client, Provider, Server
from shared_rpc.client.starting import ServerStarter
from shared_rpc.errors import ConfigurationError, ConnectError
from shared_rpc.protocol.options import ServeOptions
from tests.kit.attacker import STRANGER, as_uid, common_directory, needs_another_uid
from tests.kit.deep import deep
from tests.kit.processes import Child
from tests.kit.world import World

LISTENING = """
listener = socket.socket(socket.AF_UNIX)
listener.bind(sys.argv[1])
os.chmod(sys.argv[1], 0o777)
listener.listen()
print("listening", flush=True)
while True:
    sock, _ = listener.accept()
    print("heard", sock.recv(100), flush=True)
"""


@pytest.fixture
def sticky(world: World, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory like /tmp, with the base paths of this process and of its children."""
    with common_directory() as directory:
        monkeypatch.setenv("SHARED_TENSOR_BASE_PATH", f"{directory}/s")
        yield directory


@pytest.fixture
def path(sticky: Path) -> str:
    """The address of this test's servers."""
    return f"{sticky}/s-cpu.sock"


@pytest.fixture
def squatter(path: str, world: World) -> Child:
    """Another user's program that listens at the address of this test's servers."""
    child = as_uid(world, LISTENING, path, before="import socket")
    child.expect("listening")
    return child


def server() -> Server:
    """A server of one endpoint at the base path of the environment."""
    provider = Provider(device="cpu")
    provider.share("ones")(lambda size: torch.ones((size,)))
    return Server(provider)


def open_file(path: str, suffix: str) -> None:
    """Have this process open a file of a socket: a server its lock, and a client that starts one the others."""
    if suffix == "lock":
        server().start()
    else:
        ServerStarter(lambda: "app.py", ServeOptions())(path, 5.0, float("inf"))


def client(**options: float) -> Client:
    """Make a client there that does not wait for a server."""
    return Client(device="cpu", **{"connect_timeout": 0.0, "timeout": 30.0, **options})


@needs_another_uid
def test_servers_work_in_roots_sticky_directory(sticky: Path, world: World) -> None:
    """Such as /tmp, for another user than root."""
    serving = """
from shared_rpc import Client, Provider, Server
with Server(Provider(device="cpu")), Client(device="cpu", connect_timeout=0) as client:
    client.ping()
    print("served by uid", os.lstat(client.socket_path).st_uid)
"""
    # As root first, elsewhere, which imports everything.
    elsewhere = "import os; environ = dict(os.environ); os.environ['SHARED_TENSOR_BASE_PATH'] += '-root'\n"
    child = as_uid(world, serving, before=f"{elsewhere}{serving}os.environ.update(environ)")
    assert child.expect("served") == "served by uid 0"
    assert child.expect("served") == f"served by uid {STRANGER}"


@needs_another_uid
def test_a_sticky_directory_of_a_third_user_is_refused(sticky: Path) -> None:
    """Its owner may remove the files in it."""
    os.chown(sticky, STRANGER, STRANGER)
    with pytest.raises(ConfigurationError, match=f"{sticky} .*uid {STRANGER}.*SHARED_TENSOR_BASE_PATH"):
        server().start()


# Another user's listener.


@needs_another_uid
def test_clients_send_nothing_to_a_squatter(path: str, squatter: Child) -> None:
    """If another user's process listens first, the error is immediate, and names it and the remedies."""
    text = rf"{path} belongs to uid {STRANGER}, not to you \(uid 0\): it is pid {squatter.pid}; choose another base_path"
    with client(connect_timeout=600.0) as mine, pytest.raises(ConnectError, match=text):
        mine.ping()
    assert squatter.expect("heard") == "heard b''"


#: A process of this user listens, as root's service manager may, and another user's answers like a server.
ANSWERS = """
import os, socket, sys
from shared_rpc.protocol import messages as m
from tests.kit.raw import Raw

listener = socket.socket(socket.AF_UNIX)
listener.bind(sys.argv[1])
os.chmod(sys.argv[1], 0o777)
listener.listen()
"""
ANSWERS_AS_STRANGER = """
print("listening", flush=True)
while True:
    sock, _ = listener.accept()
    with Raw(sock, hello=False) as raw:
        if sys.argv[2] == "asked":
            raw.hear()
        raw.say(m.Welcome("server", "cpu"), 0)
        raw.hear_end()
"""


@needs_another_uid
@pytest.mark.parametrize("when", ["asked", *deep("at once")])
def test_answers_of_another_user_are_refused(path: str, world: World, when: str) -> None:
    """Although a process of this user listens there: the sender counts. Earlier bytes have no known sender."""
    squatter = as_uid(world, ANSWERS_AS_STRANGER, path, when, before=ANSWERS)
    squatter.expect("listening")
    text = rf"{path} belongs to uid ({STRANGER}|65534).*, not to you \(uid 0\)"
    with client() as mine, pytest.raises(ConnectError, match=text):
        mine.ping()


@needs_another_uid
def test_servers_name_the_squatter(path: str, squatter: Child) -> None:
    """With its user, its process and the remedy."""
    text = rf"{path} belongs to uid {STRANGER}, not 0, and is served by pid {squatter.pid} .*SHARED_TENSOR_BASE_PATH"
    with pytest.raises(ConfigurationError, match=text):
        server().start()
    assert os.lstat(path).st_uid == STRANGER


# Files that are in the way.


@needs_another_uid
@pytest.mark.parametrize(
    ("kind", "suffix"),
    [("link", "lock"), ("pipe", "log"), ("file", "spawn")],
)
def test_files_of_another_user_are_refused(path: str, kind: str, suffix: str) -> None:
    """Neither they nor their link targets are opened: the error names the owner."""
    name, precious = f"{path}.{suffix}", Path(f"{path}.precious")
    precious.write_text("precious")
    if kind == "link":
        os.symlink(precious, name)
    elif kind == "pipe":
        os.mkfifo(name)
    else:
        Path(name).write_text("")
        os.chmod(name, 0o666)
    os.lchown(name, STRANGER, STRANGER)
    with pytest.raises(ConfigurationError, match=rf"{name} belongs to uid {STRANGER}"):
        open_file(path, suffix)
    assert precious.read_text() == "precious"


def test_hard_links_to_our_files_are_refused(path: str) -> None:
    """By them, another user could make this process write to an unrelated file."""
    precious = Path(f"{path}.precious")
    precious.write_text("7\nprecious")
    os.link(precious, f"{path}.lock")
    with pytest.raises(ConfigurationError, match=rf"{path}.lock .* has 2 names"):
        server().start()
    assert precious.read_text() == "7\nprecious"


@needs_another_uid
def test_links_of_another_user_are_refused(sticky: Path, path: str) -> None:
    """They could lead to another of our own servers than the intended one."""
    os.symlink(f"{sticky}/other.sock", path)
    os.lchown(path, STRANGER, STRANGER)
    # Where fs.protected_symlinks is set, the kernel does not follow it.
    refused = pytest.raises(ConnectError, match=f"(link of|belongs to) uid {STRANGER}")
    with Server(Provider(device="cpu"), socket_path=f"{sticky}/other.sock"), client() as mine, refused:
        mine.ping()
    with pytest.raises(ConfigurationError, match=f"{path} belongs to uid {STRANGER}"):
        server().start()
