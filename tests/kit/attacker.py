"""Attackers: code that runs as another user of the host or in a container's namespaces, and clients that exhaust resources.

Each function of the second kind is one attack on the server at a path; the stack holds its resources.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import textwrap
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from shared_rpc import Client
from shared_rpc.errors import SharedRPCError
from shared_rpc.protocol import generations as g
from shared_rpc.protocol import messages as m
from shared_rpc.protocol.catalogue import NUMBERS
from shared_rpc.protocol.frames import encode_frame
from tests.kit.processes import Child
from tests.kit.raw import Raw, frame_of, sealed_memory
from tests.kit.world import World

#: A uid without an account, different from the kernel's overflow uid.
STRANGER = 23456

_DROP = f"""\
import encodings.idna, logging, os, sys, tests.kit.raw
os.setgroups([])
os.setresgid({STRANGER}, {STRANGER}, {STRANGER})
os.setresuid({STRANGER}, {STRANGER}, {STRANGER})
"""

CONTAINER = ("unshare", "--user", "--map-current-user", "--pid", "--fork", "--kill-child", "--mount", "--mount-proc")


def _can_unshare() -> bool:
    if shutil.which("unshare") is None:
        return False
    return subprocess.run([*CONTAINER, "true"], capture_output=True, check=False).returncode == 0


needs_another_uid = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")
needs_namespaces = pytest.mark.skipif(not _can_unshare(), reason="this machine does not allow user, pid and mount namespaces")


def as_uid(world: World, code: str, *arguments: str, before: str = "") -> Child:
    """Run code as another user. See :func:`common_directory` for files that it is to reach.

    :param before: code that runs as this user, for imports: the other one may not be able to read where the interpreter lies.
    """
    return world.start("-c", "\n".join([textwrap.dedent(before), _DROP, textwrap.dedent(code)]), *arguments)


def in_namespaces(world: World, code: str, *arguments: str) -> Child:
    """Run code as this user, in user, pid and mount namespaces of its own with its own /proc: another container."""
    return world.start("-c", textwrap.dedent(code), *arguments, before=CONTAINER)


@contextmanager
def common_directory() -> Iterator[Path]:
    """Make a directory that all users reach: sticky and writable for everybody, as /tmp is."""
    directory = Path(tempfile.mkdtemp())
    directory.chmod(0o1777)
    try:
        yield directory
    finally:
        shutil.rmtree(directory)


class Bystander:
    """A client that pings continuously during attacks; records its longest wait and its errors."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.worst = 0.0
        self.errors: list[SharedRPCError] = []

    def _run(self) -> None:
        while not self._end.is_set():
            begin = time.monotonic()
            try:
                self._client.ping()
            except SharedRPCError as error:
                self.errors.append(error)
            self.worst = max(self.worst, time.monotonic() - begin)
            self._end.wait(0.01)

    def __enter__(self) -> Bystander:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()


def _connections(stack: ExitStack, path: str, count: int) -> Iterator[Raw]:
    """Connect to the server, until it refuses."""
    with suppress(AssertionError, OSError, SharedRPCError):
        for _ in range(count):
            yield stack.enter_context(Raw(path))


def half_frames(stack: ExitStack, path: str) -> None:
    """Send most of a large frame on each connection, and never its end."""
    begin = encode_frame(NUMBERS[m.Call], 1, b"", bytes(512 << 20))[0][:24]
    for raw in _connections(stack, path, 8):
        with suppress(OSError):
            raw.send(begin)
            raw.send(bytes(64 << 20))


def descriptors_of_half_frames(stack: ExitStack, path: str) -> None:
    """Send as many descriptors on each connection as an incomplete frame can carry."""
    fd = sealed_memory()
    stack.callback(os.close, fd)
    begin = frame_of(m.Call("none"), fds=1012)[:24]
    for raw in _connections(stack, path, 4):
        for number in range(4):
            with suppress(OSError):
                raw.send(begin[number : number + 1], [fd] * 253)


def unread_answers(stack: ExitStack, path: str) -> None:
    """Make calls of ``each``, whose results have descriptors, and read no answer."""
    raw = stack.enter_context(Raw(path))
    raw.sock.settimeout(1.0)
    with suppress(OSError):
        for number in range(1, 9001):
            raw.sock.sendall(frame_of(m.Call("each", [number]), number))


def waiters(stack: ExitStack, path: str) -> None:
    """Make the maximum number of pending requests in two clients, then disconnect both at once."""
    made = [stack.enter_context(Raw(path)) for _ in range(2)]
    for raw in made:
        _, after, _ = raw.query(g.AwaitRefreshes())
        raw.send(b"".join(frame_of(g.AwaitRefreshes(after), number) for number in range(2, 10_000)))
        raw.query(m.Ping(), 10_000)
    for raw in made:
        raw.close()
