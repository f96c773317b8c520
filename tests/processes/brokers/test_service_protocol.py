"""The service manager's protocol, without a broker: the values that are read, and the notifications that are sent."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from shared_rpc.broker.systemd import Notifier, inherit
from shared_rpc.settings import take_service_variables
from tests.kit.deep import deep
from tests.kit.processes import Child

pytestmark = pytest.mark.usefixtures("no_leaks")

#: Moves its open descriptors to 3 and above, like a manager, and prints the resulting values.
TAKES = """
import fcntl, os, socket, sys
from shared_rpc.broker.systemd import inherit
from shared_rpc.errors import ConfigurationError
from shared_rpc.settings import take_service_variables

kinds, pid = sys.argv[1].split(), sys.argv[2]
for fd in range(3, 20):
    try:
        os.close(fd)
    except OSError:
        pass

for number, kind in enumerate(kinds):
    if kind == "memory":
        fd = os.memfd_create("stored", 0)
    elif kind != "nothing":
        sock = socket.socket(socket.AF_INET if kind == "internet" else socket.AF_UNIX)
        if kind == "listens":
            sock.bind(sys.argv[3])
        if kind in ("listens", "internet"):
            sock.listen()
        fd = sock.detach()
    if kind != "nothing":
        assert fd == 3 + number, fd
        os.set_inheritable(fd, True)
os.environ.update(LISTEN_PID=pid or str(os.getpid()), LISTEN_FDS=str(len(kinds)), LISTEN_FDNAMES=":".join(kinds))
try:
    inherited = inherit(take_service_variables())
except ConfigurationError as error:
    print("refused", error)
    sys.exit()
print("took", list(inherited.listeners), inherited.stored)
print("left", [name for name in os.environ if name.startswith("LISTEN_")])
print("inheritable", [fd for fd in range(3, 3 + len(kinds)) if os.get_inheritable(fd)])
print("blocking", [listener.getblocking() for listener in inherited.listeners.values()])
"""


def taken(children: list[Child], kinds: str, pid: str = "", path: str = "") -> Child:
    """Start a process that gets descriptors of some kinds."""
    child = Child("-c", TAKES, kinds, pid, path)
    children.append(child)
    return child


def test_inherited_sockets_and_descriptors_are_taken(children: list[Child], tmp_path: Path) -> None:
    """Sockets by their path, stored descriptors by name; children inherit neither them nor the variables."""
    path = str(tmp_path / "socket")
    child = taken(children, "listens memory memory", path=path)
    assert child.expect("took") == f"took [{path!r}] [Passed(name='memory', fd=4), Passed(name='memory', fd=5)]"
    assert child.expect("left") == "left []"
    assert child.expect("inheritable") == "inheritable []"
    assert child.expect("blocking") == "blocking [False]"


def test_descriptors_for_another_pid_are_left_alone(children: list[Child], tmp_path: Path) -> None:
    """``LISTEN_PID`` is not this process: nothing is touched."""
    child = taken(children, "listens memory", "1", str(tmp_path / "socket"))
    assert child.expect("took") == "took [] []"
    assert child.expect("inheritable") == "inheritable [3, 4]"


@pytest.mark.parametrize(
    ("kinds", "why"),
    [
        ("mute", "socket 'mute' is no listening Unix stream socket: use ListenStream= with a path"),
        ("internet", "socket 'internet' is no listening Unix stream socket"),
        ("memory nothing", "LISTEN_FDS=2, but descriptor 4 is not open"),
    ],
)
def test_unusable_descriptors_are_configuration_errors(children: list[Child], kinds: str, why: str) -> None:
    """The error names the socket or descriptor."""
    assert why in taken(children, kinds).expect("refused")


def test_the_variables_are_removed() -> None:
    """A process started later must not inherit them."""
    environ = {"LISTEN_FDS": "1", "LISTEN_PID": "7", "LISTEN_FDNAMES": "a", "NOTIFY_SOCKET": "@x", "FDSTORE": "9", "HOME": "/"}
    assert len(take_service_variables(environ)) == 5
    assert environ == {"HOME": "/"}


@pytest.fixture(params=["path", *deep("abstract")])
def notified(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[socket.socket, Notifier]]:
    """The manager's end, and the notifier."""
    address = str(tmp_path / "notify") if request.param == "path" else f"@shared-rpc-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(address.replace("@", "\0", 1) if request.param == "abstract" else address)
        sock.settimeout(5)
        notifier = inherit({"NOTIFY_SOCKET": address}).notifier
        yield sock, notifier
        notifier._socket.close()


def received(sock: socket.socket) -> tuple[list[str], list[int]]:
    """Receive one message: its lines, and its descriptors."""
    data, fds, _, _ = socket.recv_fds(sock, 1 << 16, 4, socket.MSG_CMSG_CLOEXEC)
    return data.decode().split("\n"), fds


@pytest.mark.parametrize(
    ("tell", "lines"),
    [
        (lambda notifier: notifier.ready("well"), ["READY=1", "STATUS=well"]),
        (lambda notifier: notifier.status("well"), ["STATUS=well"]),
        (lambda notifier: notifier.stopping(), ["STOPPING=1"]),
        (lambda notifier: notifier.remove("a-1"), ["FDSTOREREMOVE=1", "FDNAME=a-1"]),
    ],
)
def test_notifications_follow_sd_notify(
    notified: tuple[socket.socket, Notifier], tell: Callable[[Notifier], None], lines: list[str]
) -> None:
    """One message each, in the format of sd_notify(3)."""
    sock, notifier = notified
    tell(notifier)
    assert received(sock) == (lines, [])


def test_descriptors_are_stored_by_name(notified: tuple[socket.socket, Notifier]) -> None:
    """The sender keeps its copy, and the manager does not poll it for a hang-up."""
    sock, notifier = notified
    fd = os.memfd_create("memory", os.MFD_CLOEXEC)
    notifier.store("segment-0a", fd)
    lines, fds = received(sock)
    assert lines == ["FDSTORE=1", "FDNAME=segment-0a", "FDPOLL=0"]
    assert os.path.sameopenfile(fds[0], fd)
    for one in (fd, *fds):
        os.close(one)


def test_a_stuck_manager_does_not_block(notified: tuple[socket.socket, Notifier], caplog: pytest.LogCaptureFixture) -> None:
    """Its queue is full: lost messages are logged after a moment, and the broker continues."""
    _, notifier = notified
    notifier._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, b"\0" * 8 + (10_000).to_bytes(8, sys.byteorder))
    for _ in range(5000):
        notifier.status("again")
        if caplog.records:
            break
    assert "cannot send STATUS=again to the service manager" in caplog.text
