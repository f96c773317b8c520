"""The part of a service manager that a broker uses: sockets, starts, notifications, stored descriptors. See sd_notify(3)."""

from __future__ import annotations

import os
import socket
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from shared_rpc.broker.fd_store import STATE, StateFile, StoredEntry, StoredState
from tests.kit.brokers import ROLE, BrokerApp, BrokerProgram
from tests.kit.processes import Child, eventually

#: Runs in the child before its program: the descriptors must begin at 3, and LISTEN_PID must be its own.
_LAUNCH = """
import fcntl, os, sys
given = [int(fd) for fd in sys.argv[1].split(",") if fd]
fds = [fcntl.fcntl(fd, fcntl.F_DUPFD, 500) for fd in given]
for fd in given:
    os.close(fd)
for number, fd in enumerate(fds):
    os.dup2(fd, 3 + number)
    os.close(fd)
os.environ["LISTEN_PID"] = str(os.getpid())
del sys.argv[1]
"""


class ServiceManager:
    """Runs ``shared-rpc serve`` of an app.

    :param capacity: FileDescriptorStoreMax=; further descriptors are dropped silently.
    :param listen: False to leave the socket to the broker.
    """

    def __init__(self, app: BrokerApp, directory: Path, *, capacity: int = 1000, listen: bool = True) -> None:
        self.app = app
        self.capacity = capacity
        #: The stored descriptors by name.
        self.store: list[tuple[str, int]] = []
        #: All received lines, in order.
        self.received: list[str] = []
        self.environ: dict[str, str] = {}
        self._lock = threading.Lock()
        self._notified = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._notified.bind(str(directory / "notify"))
        self.listener: socket.socket | None = None
        if listen:
            self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self.listener.bind(self.path)
            self.listener.listen(100)
        self._thread = threading.Thread(target=self._receive, daemon=True)
        self._thread.start()

    @property
    def path(self) -> str:
        """The socket path."""
        return f"{self.app.base_path}-cpu.sock"

    def start(self, *, wait_for: str = "serving", program: BrokerProgram | None = None, **options: Any) -> Child:
        """Start a process of the service, with the sockets first and then the stored descriptors, in no particular order.

        :param program: replaces a broker with these options of :class:`ServeOptions`.
        """
        self._hear_all()
        with self._lock:
            passed = [("shared-rpc.socket", self.listener.fileno())] if self.listener is not None else []
            passed += sorted(self.store, key=lambda entry: entry[0][::-1])
            environ = {
                "LISTEN_FDS": str(len(passed)),
                "LISTEN_FDNAMES": ":".join(name for name, _ in passed),
                "NOTIFY_SOCKET": self._notified.getsockname(),
                **ROLE,
                **self.environ,
            }
            fds = [fd for _, fd in passed]
            code, words = program or self.app.program("", **options)
            child = self.app.world.start(
                "-c",
                _LAUNCH + code,
                ",".join(str(fd) for fd in fds),
                *words,
                environ=environ,
                cwd=self.app.file.parent,
                pass_fds=fds,
            )
        if wait_for:
            child.expect(wait_for)
        return child

    def _hear_all(self) -> None:
        """Receive pending notifications, as a manager does before it starts the next process. See sd_notify_barrier(3)."""
        reading, writing = os.pipe()
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.connect(self._notified.getsockname())
            socket.send_fds(sender, [b"BARRIER=1"], [writing])
        os.close(writing)
        assert os.read(reading, 1) == b""
        os.close(reading)

    def names(self, kind: str = "") -> list[str]:
        """The names in the store, after all pending notifications."""
        self._hear_all()
        with self._lock:
            return [name for name, _ in self.store if name.startswith(kind)]

    def fd(self, name: str) -> int:
        """The descriptor under a name."""
        with self._lock:
            return dict(self.store)[name]

    @property
    def state(self) -> StoredState:
        """The state that the broker describes in the memfd that it writes to."""
        self._hear_all()
        with self._lock:
            kept = dict(self.store)
            fd = os.dup(kept[STATE]) if STATE in kept else None
        if fd is None:
            return StoredState()
        data = StateFile(fd).data
        os.close(fd)
        return msgspec.msgpack.decode(data, type=StoredState) if data else StoredState()

    def entry(self, object_id: str) -> StoredEntry:
        """The description of an object."""
        return msgspec.msgpack.decode(self.state.objects[object_id], type=StoredEntry)

    def objects(self) -> list[str]:
        """The ids of the described objects."""
        return list(self.state.objects)

    def replace(self, name: str, fd: int) -> None:
        """Replace the descriptor under a name by one that the manager then owns."""
        with self._lock:
            for index, (kept, earlier) in enumerate(self.store):
                if kept == name:
                    self.store[index] = name, fd
                    os.close(earlier)

    def remove(self, name: str) -> None:
        """Remove the descriptor under a name."""
        with self._lock:
            store(self.store, self.capacity, {"FDSTOREREMOVE": "1", "FDNAME": name}, [])

    def has_received(self, line: str) -> bool:
        """Return whether a line with a prefix has been received."""
        return any(received.startswith(line) for received in self.received)

    def expect(self, condition: Callable[[], bool]) -> None:
        """Wait for a line from the broker."""
        eventually(condition, what=f"received {self.received[-5:]}, kept {self.names()}")

    def close(self) -> None:
        """Close everything."""
        self._notified.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._notified.close()
        for _, fd in self.store:
            os.close(fd)
        if self.listener is not None:
            self.listener.close()

    def _receive(self) -> None:
        while True:
            data, fds, _, _ = socket.recv_fds(self._notified, 1 << 16, 64, socket.MSG_CMSG_CLOEXEC)
            if not data:
                return
            lines = data.decode().split("\n")
            fields = dict(line.split("=", 1) for line in lines)
            with self._lock:
                store(self.store, self.capacity, fields, fds)
                self.received += [line for line in lines if line != "BARRIER=1"]


def store(entries: list[tuple[str, int]], capacity: int, fields: dict[str, str], fds: list[int]) -> None:
    """Apply a notification to a manager's store."""
    name = fields.get("FDNAME", "stored")
    if fields.get("FDSTOREREMOVE") == "1":
        for entry in [entry for entry in entries if entry[0] == name]:
            entries.remove(entry)
            os.close(entry[1])
    for fd in fds:
        # It recognises an open file that it has already, under whatever name.
        # A GPU's memory has no files of its own: the driver's device is one inode for all of it.
        plain = stat.S_ISREG(os.fstat(fd).st_mode)
        known = plain and any(os.path.sameopenfile(fd, kept) for _, kept in entries)
        if fields.get("FDSTORE") == "1" and len(entries) < capacity and not known:
            entries.append((name, fd))
        else:
            os.close(fd)
