"""The service manager's protocol, without a broker: the values that are read, and the notifications that are sent."""

from __future__ import annotations

import socket
import struct
from pathlib import Path

import pytest

from shared_rpc.broker.systemd import inherit
from tests.kit.world import World

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
        sock = socket.socket(socket.AF_UNIX)
        if kind == "listens":
            sock.bind(sys.argv[3])
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


def test_inherited_sockets_and_descriptors_are_taken(world: World, tmp_path: Path) -> None:
    """Sockets by their path, stored descriptors by name; children inherit neither them nor the variables."""
    path = str(tmp_path / "socket")
    child = world.process(TAKES, "listens memory memory", "", path)
    assert child.expect("took") == f"took [{path!r}] [Passed(name='memory', fd=4), Passed(name='memory', fd=5)]"
    assert child.expect("left") == "left []"
    assert child.expect("inheritable") == "inheritable []"
    assert child.expect("blocking") == "blocking [False]"


def test_descriptors_for_another_pid_are_left_alone(world: World, tmp_path: Path) -> None:
    """``LISTEN_PID`` is not this process: nothing is touched."""
    child = world.process(TAKES, "listens memory", "1", str(tmp_path / "socket"))
    assert child.expect("took") == "took [] []"
    assert child.expect("inheritable") == "inheritable [3, 4]"


@pytest.mark.parametrize(
    ("kinds", "why"),
    [
        ("mute", "socket 'mute' is no listening Unix stream socket: use ListenStream= with a path"),
        ("memory nothing", "LISTEN_FDS=2, but descriptor 4 is not open"),
    ],
)
def test_unusable_descriptors_are_configuration_errors(world: World, kinds: str, why: str) -> None:
    """The error names the socket or descriptor."""
    assert why in world.process(TAKES, kinds, "").expect("refused")


def test_a_stuck_manager_does_not_block(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Its queue is full: lost messages are logged after a moment, and the broker continues."""
    address = str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(address)
        notifier = inherit({"NOTIFY_SOCKET": address}).notifier
        notifier._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", 0, 10_000))
        for _ in range(5000):
            notifier.notify("STATUS=again")
            if caplog.records:
                break
        notifier._socket.close()
    assert "cannot send STATUS=again to the service manager" in caplog.text
