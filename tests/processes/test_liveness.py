"""Export descriptors and their server: a maker of memory detects its last user, and users detect the end of the maker."""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import closing

import pytest

from shared_rpc.errors import CapabilityError
from shared_rpc.memory.backends import fd_server as fd_server_module
from shared_rpc.memory.backends import liveness
from shared_rpc.memory.backends.fd_server import FD_SERVER, fetch
from shared_rpc.memory.backends.host import HOST
from shared_rpc.memory.records import Record
from shared_rpc.protocol.records import EMPTY_TABLE
from shared_rpc.protocol.specs import EndpointSpec
from shared_rpc.server.core import Core
from tests.kit.bound_host import BoundHost
from tests.kit.processes import eventually, open_fds
from tests.kit.world import World

#: A process that issues an export descriptor and sends it, with a child, which outlives it.
MAKER = """
    import os, socket, sys
    from shared_rpc.memory.backends import liveness
    fd = liveness.issue(b"from afar", lambda: None)
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect({path!r})
        socket.send_fds(sock, [b"x"], [fd])
    os.fork() and os.wait()
    print("child", os.getpid())
    sys.stdin.readline()
"""


@pytest.fixture
def ended() -> threading.Event:
    """Set once the last copy of an export descriptor is closed."""
    return threading.Event()


@pytest.fixture
def listener(tmp_path: str) -> Iterator[socket.socket]:
    """A socket for other processes."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(f"{tmp_path}/listener.sock")
        sock.listen()
        yield sock


def received(listener: socket.socket) -> int:
    """Return the descriptor that the next process sends."""
    connection, _ = listener.accept()
    with connection:
        _, (fd,), _, _ = socket.recv_fds(connection, 1, 1)
    return int(fd)


def stays_unset(event: threading.Event) -> bool:
    """Return whether the event is still unset after a time in which the end of another descriptor is detected."""
    other = threading.Event()
    os.close(liveness.issue(b"beside it", other.set))
    return other.wait(10) and not event.is_set()


# The last copy.


def test_the_close_of_the_last_copy_is_noticed(ended: threading.Event) -> None:
    """Duplicates are copies; nothing is left open."""
    before = open_fds()
    fd = liveness.issue(b"content", ended.set)
    other = os.dup(fd)
    os.close(fd)
    assert stays_unset(ended)
    os.close(other)
    assert ended.wait(10)
    eventually(lambda: open_fds() <= before, what=f"{before} open descriptors")


# The content.


def test_an_export_descriptor_is_immutable() -> None:
    """No holder can change its content."""
    fd = liveness.issue(b"content", lambda: None)
    assert liveness.read(fd) == b"content"
    assert not os.get_inheritable(fd)
    for change in (lambda: os.pwrite(fd, b"forged", 0), lambda: os.ftruncate(fd, 0), lambda: os.ftruncate(fd, 1 << 20)):
        with pytest.raises(PermissionError):
            change()
    os.close(fd)


@pytest.mark.parametrize("seals", [0, 0x2 | 0x4])
def test_a_mutable_memfd_is_refused(seals: int) -> None:
    """Its content could change before the next read."""
    fd = os.memfd_create("forged", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.write(fd, b"shared-rpc export descriptor 1\ncontent")
    fcntl.fcntl(fd, 1033, seals)
    with pytest.raises(CapabilityError, match="no export descriptor"):
        liveness.read(fd)
    os.close(fd)


# The end of the maker.


def test_a_forked_child_keeps_no_memory(world: World) -> None:
    """It closes inherited segments: the memory is freed although the child lives."""
    child = world.process(
        """
        import os, signal
        from tests.kit.bound_host import BACKEND
        from tests.kit.processes import eventually

        segment = BACKEND.create(1)
        pid = os.fork()
        if pid == 0:
            signal.pause() if segment.closed else os._exit(1)
        segment.close()
        eventually(lambda: BACKEND.freed)
        os.kill(pid, signal.SIGTERM)
        print("the child ended by", os.waitpid(pid, 0)[1])
        """
    )
    assert child.expect("the child ended by") == "the child ended by 15"


def test_a_forked_child_does_not_represent_the_maker(listener: socket.socket, world: World) -> None:
    """A child that outlives its parent does not make the parent look alive."""
    child = world.process(MAKER.format(path=listener.getsockname()))
    fd = received(listener)
    grandchild = int(child.expect("child").split()[1])
    assert liveness.maker_lives(fd)
    os.kill(child.pid, signal.SIGKILL)
    child.process.wait()
    assert not liveness.maker_lives(fd)
    assert liveness.read(fd) == b"from afar"
    os.kill(grandchild, signal.SIGKILL)
    os.close(fd)


# Memory behind export descriptors.


def test_memory_is_not_freed_while_the_device_cannot_be_waited_for() -> None:
    """During a capture freeing is postponed; the next allocation does it."""
    backend = BoundHost()
    backend.waits_for = False
    segment = backend.create(1)
    segment.close()
    eventually(lambda: len(backend._to_free) == 1)
    assert backend.freed == []
    backend.waits_for = True
    with closing(backend.create(1)):
        assert len(backend.freed) == 1


@pytest.fixture
def fd_server() -> None:
    """The descriptor server of this process, which stays open from its first descriptor on."""
    token = os.urandom(16)
    FD_SERVER.register(token, os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
    FD_SERVER.withdraw(token)


def test_objects_end_with_the_process_that_made_their_memory(fd_server: None, world: World) -> None:
    """Named by their descriptors."""
    server = world.serve()

    def left(core: Core, pid: int) -> int:
        core.drop_bound(pid)
        return len(core.objects)

    def add(core: Core) -> None:
        for segment in (BoundHost().create(1), HOST.create(1)):
            record = Record(b"", EMPTY_TABLE, [segment], 1)
            core.objects.add(EndpointSpec("f"), f"f({segment.info.mechanism})", record)

    server.engine.ask(add)
    assert server.engine.ask(lambda core: left(core, os.getpid() + 1)) == 2
    assert server.engine.ask(lambda core: left(core, os.getpid())) == 1


# The descriptor server.


@pytest.fixture
def left() -> Iterator[tuple[bytes, int]]:
    """A token for which the descriptor server sends the reading end of a pipe, and the writing end."""
    token = os.urandom(16)
    read, write = os.pipe()
    FD_SERVER.register(token, read)
    yield token, write
    FD_SERVER.withdraw(token)
    os.close(write)


def test_the_server_sends_descriptors(left: tuple[bytes, int]) -> None:
    """A new one to each peer with the token, until it is withdrawn."""
    token, write = left
    one, other = fetch(FD_SERVER.address, token), fetch(FD_SERVER.address, token)
    os.write(write, b"ab")
    assert (os.read(one, 1), os.read(other, 1)) == (b"a", b"b")
    assert not os.get_inheritable(one)
    FD_SERVER.withdraw(token)
    with pytest.raises(CapabilityError, match="its maker released it"):
        fetch(FD_SERVER.address, token)
    os.close(one)
    os.close(other)


def test_a_silent_peer_is_disconnected(left: tuple[bytes, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """After a timeout; it delays no other peer."""
    token, _ = left
    monkeypatch.setattr(fd_server_module, "_ASKING", 0.05)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as silent:
        silent.connect("\0" + FD_SERVER.address)
        os.close(fetch(FD_SERVER.address, token))
        assert silent.recv(1) == b""


def test_a_missing_server_is_reported() -> None:
    """Its process has ended, or is in another network namespace."""
    with pytest.raises(CapabilityError, match="network namespace"):
        fetch("shared-rpc-fds-that-never-was", bytes(16))
