"""A service manager's store during a move: a broker that starts after any message has all objects."""

from __future__ import annotations

import errno
import os
import select
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from unittest.mock import Mock

import pytest

from shared_rpc.broker.fd_store import FdStore, StateFile
from shared_rpc.broker.systemd import Notifier, Passed
from shared_rpc.errors import ServerBusy
from shared_rpc.execution.endpoints import Registry
from shared_rpc.memory.backends.host import HOST
from shared_rpc.memory.copies import LowerCopy
from shared_rpc.memory.records import Record
from shared_rpc.memory.segments import Segment
from shared_rpc.memory.spill import SpillDirectory
from shared_rpc.protocol import worker as w
from shared_rpc.protocol.peers import peer_of
from shared_rpc.protocol.records import Mechanism, SegmentInfo, Tier
from shared_rpc.server.core import Core
from shared_rpc.server.remote import RemoteClient
from shared_rpc.server.state.objects import StoredObject
from tests.kit.service_manager import store as store_entry

GPU = "GPU-fa4e0000-0000-0000-0000-000000000000"
CONTENTS = {"gpu": b"of the GPU", "host": b"of the host"}


#: They share their memory; the last one is made when that has moved already.
OBJECTS = ["0" * 24, "1" * 24, "2" * 24]

#: See :meth:`Moving.recovered`.
Serving = Callable[[w.Serve, Mock, FdStore], object]


class Moving:
    """Objects of a GPU's memory and of the host's, and the messages that describe their tiers to a service manager."""

    def __init__(self, directory: Path, stack: ExitStack) -> None:
        self._spill = SpillDirectory(str(directory))
        self._stack = stack
        address = str(directory / "notify")
        self._socket = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
        self._socket.bind(address)
        self._socket.setblocking(False)
        self.notifier = notifier = Notifier(address)
        stack.callback(notifier._socket.close)
        #: Writes of the state that are due at the end of the turn.
        self.due: list[Callable[[], None]] = []
        self.entries: list[tuple[str, int]] = []
        #: The names that were stored.
        self.stored: list[str] = []
        #: Called after each message to the service manager.
        self.check: Callable[[], None] = lambda: None
        self._notify = notifier.notify
        notifier.notify = self._tell  # type: ignore[method-assign]
        self.store = FdStore(notifier, soon=self.due.append)
        core = Mock(server_id="server", **{"registry.all.return_value": []})
        self.store.keep_service(w.Serve("key", "socket", GPU, [], {"name": "vmm", "reason": "", "mps": False}, [], {}), core)
        #: The memory as it is on its devices, and on the host.
        self._segments = {
            "gpu": self._made(SegmentInfo("gpu", 4096, GPU, mechanism="vmm")),
            "host": self._made(SegmentInfo("host", 4096, "cpu")),
        }

    def _made(self, info: SegmentInfo) -> Segment:
        segment = HOST.create(4096) if info.mechanism != "file" else self._spill.create(4096)
        self._stack.callback(segment.close)
        segment.info = info
        os.pwrite(segment.fileno(), CONTENTS[info.name], 0)
        return segment

    def _copy(self, name: str, tier: Tier, number: int) -> LowerCopy:
        if tier == "host" and name == "host":  # its own copy
            return LowerCopy(self._segments["host"], tier)
        mechanism: Mechanism = "file" if tier == "file" else "host_vmm"
        return LowerCopy(self._made(SegmentInfo(name, 4096, "cpu", mechanism=mechanism)), tier, str(number).encode())

    def put(self, tier: Tier, number: int) -> None:
        """Store them in a tier, with the incarnations of that number, and end the turn."""
        self.keep(tier, number)
        self.end_turn()

    def keep(self, tier: Tier, number: int) -> None:
        """Store them in a tier, with the incarnations of that number."""
        infos = {name: segment.info.incarnation(number) for name, segment in self._segments.items()}
        made = {"gpu": self._made(infos["gpu"]), "host": self._segments["host"]}
        copies = {info.id: [self._copy(name, tier, number)] for name, info in infos.items()} if tier != "device" else {}
        for object_id in OBJECTS[: 2 + (number > 1)]:
            segments = [made[name].duplicate() if tier == "device" else Segment(info) for name, info in infos.items()]
            for segment, info in zip(segments, infos.values(), strict=True):
                segment.info = info
                self._stack.callback(segment.close)
            record = Record(b"skeleton", b"table", segments, 8192)
            stored = StoredObject(object_id, "get", f"get({object_id})", record, 1, None, 1.0, 1.0, listed=True, tier=tier)
            core = Mock(**{"registry.find.return_value": None, "objects.copies.of": copies.__getitem__})
            self.store.keep("key", core, stored)

    def end_turn(self) -> None:
        """Send the changes."""
        due, self.due[:] = list(self.due), []
        for write in due:
            write()

    def _tell(self, *lines: str, fd: int | None = None) -> None:
        self._notify(*lines, fd=fd)
        for fields, fds in self._heard():
            self.stored += [fields["FDNAME"]] if fds else []
            store_entry(self.entries, 100, fields, fds)
        self.check()

    def _heard(self) -> Iterator[tuple[dict[str, str], list[int]]]:
        while True:
            try:
                data, fds, _, _ = socket.recv_fds(self._socket, 1 << 16, 1)
            except BlockingIOError:
                return
            yield dict(line.split("=", 1) for line in data.decode().split("\n")), fds

    def recovered(self, notifier: Notifier | None = None, serving: Serving = lambda *_: None) -> list[dict[str, bytes]]:
        """Return the bytes that a broker would recover now, by the names of their segments.

        :param serving: called for each provider with its message, its new core and the store.
        """
        store = FdStore(notifier or Notifier(), soon=self.due.append)
        core = Mock(server_id="another", **{"registry.all.return_value": []})

        def serve(message: w.Serve, server_id: str) -> Mock:
            serving(message, core, store)
            return core

        store.recover([Passed(name, os.dup(fd)) for name, fd in self.entries], serve)
        if store._file is not None:
            os.close(store._file.fd)
        recovered = []
        for stored, _, copies in [call.args for call in core.recover.call_args_list]:
            parts = [(info.name, copy.segment) for info, copy in copies]
            parts = parts or [(segment.info.name, segment) for segment in stored.record.segments]
            recovered.append({name: os.pread(segment.fileno(), 4096, 0).rstrip(b"\0") for name, segment in parts})
            for _, segment in parts:
                segment.close()
        return recovered


@pytest.fixture
def moving(tmp_path: Path) -> Iterator[Moving]:
    """Objects before any message."""
    with ExitStack() as stack:
        moving = Moving(tmp_path, stack)
        yield moving
        for _, fd in moving.entries:
            os.close(fd)
        if moving.store._file is not None:
            os.close(moving.store._file.fd)


def test_objects_survive_a_kill_between_two_messages_of_a_move(moving: Moving) -> None:
    """The next broker has them, with all bytes; finally, there is an entry for each part and for each object."""
    tiers: list[Tier] = ["device", "host", "device", "host", "file", "device", "file", "device"]
    there = 0

    def check() -> None:
        nonlocal there
        recovered = moving.recovered()
        assert recovered == [CONTENTS] * len(recovered) and len(recovered) >= there, (number, tier, moving.stored)
        there = len(recovered)

    moving.check = check
    for number, tier in enumerate(tiers):
        moving.put(tier, number)
        check()
        assert there == 2 + (number > 1)
        assert len(moving.entries) == 3 + there, [name for name, _ in moving.entries]


@pytest.mark.parametrize("part", [0.0, 0.5])
@pytest.mark.parametrize("whole", [0, 1])
def test_objects_survive_a_kill_during_the_writing_of_the_state(
    moving: Moving, monkeypatch: pytest.MonkeyPatch, whole: int, part: float
) -> None:
    """Before or in the middle of the data or of the head: the next broker has the earlier objects."""
    moving.put("device", 0)
    moving.put("device", 1)  # both halves are in use
    writes: list[int] = []
    pwrite = os.pwrite

    def cut(fd: int, data: bytes, offset: int) -> int:
        writes.append(fd)
        if len(writes) <= whole:
            return pwrite(fd, data, offset)
        pwrite(fd, data[: int(len(data) * part)], offset)
        raise OSError(errno.EINTR, "killed")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", cut)
        moving.store.remove(OBJECTS[0])
        moving.end_turn()
    assert len(writes) == whole + 1
    assert moving.recovered() == [CONTENTS] * 2
    moving.put("device", 3)
    assert moving.recovered() == [CONTENTS] * 3


def test_all_changes_before_a_reply_are_written_at_once(moving: Moving, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the reply, and not again at the end of the turn."""
    written: list[bytes] = []
    write = StateFile.write
    monkeypatch.setattr(StateFile, "write", lambda file, data: (written.append(data), write(file, data)))
    moving.keep("device", 1)
    moving.keep("device", 2)
    moving.store.write()
    assert moving.recovered() == [CONTENTS] * 3
    moving.end_turn()
    assert len(written) == 1


@pytest.mark.asyncio
async def test_replies_follow_the_state() -> None:
    """A client that has a reply may attach to the object after the broker's death."""
    core = Core(Registry(), Mock(), "cpu")
    ours, theirs = socket.socketpair()
    received: list[bool] = []

    def before() -> None:
        received.append(select.select([theirs], [], [], 0)[0] != [])

    core.before_replies = before
    with theirs:
        RemoteClient(ours, peer_of(theirs), core, lambda client: None).refuse(ServerBusy("full"))
        assert received == [False] and theirs.recv(1)
    core.stop()


def test_objects_survive_a_kill_during_recovery(moving: Moving) -> None:
    """Serving a provider changes the state before any object is recovered."""
    moving.put("device", 0)
    seen = []

    def serving(message: w.Serve, core: Mock, store: FdStore) -> None:
        store.keep_service(message, core)
        seen.append(moving.recovered())

    assert moving.recovered(moving.notifier, serving) == [CONTENTS] * 2
    assert seen == [[CONTENTS] * 2]


def test_failed_writes_of_the_state_are_retried(
    moving: Moving, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With a log line; descriptors named by the earlier state stay stored, and the next change writes all."""
    moving.put("device", 0)
    with monkeypatch.context() as patch:
        patch.setattr(StateFile, "write", Mock(side_effect=OSError(errno.ENOSPC, "no space")))
        moving.put("host", 1)
    assert "cannot store the broker's state with the service manager: [Errno 28]" in caplog.text
    assert moving.recovered() == [CONTENTS] * 2
    moving.put("device", 2)
    assert moving.recovered() == [CONTENTS] * 3
    assert len(moving.entries) == 6
