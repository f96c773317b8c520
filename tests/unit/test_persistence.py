"""What a service manager has while a broker tells it of a move: a broker that begins after any message has the objects."""

from __future__ import annotations

import array
import errno
import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from shared_rpc.broker.persistence import Persistence
from shared_rpc.broker.service_manager import ServiceManager
from shared_rpc.broker.systemd import Inherited, Notifier, Passed
from shared_rpc.execution.endpoints import Registry
from shared_rpc.memory.backends.host import HOST
from shared_rpc.memory.copies import LowerCopy
from shared_rpc.memory.records import Record
from shared_rpc.memory.segments import Segment
from shared_rpc.memory.spill import SpillDirectory
from shared_rpc.protocol import worker as w
from shared_rpc.protocol.records import Mechanism, SegmentInfo, Tier
from shared_rpc.server.state.objects import StoredObject
from tests.kit.service_manager import store

GPU = "GPU-fa4e0000-0000-0000-0000-000000000000"
CONTENTS = {"gpu": b"of the GPU", "host": b"of the host"}


#: They share their memory; the last one is made when that has moved already.
OBJECTS = ["0" * 24, "1" * 24, "2" * 24]


class Moving:
    """Objects of a GPU's memory and of the host's, and the messages that tell a service manager where they are."""

    def __init__(self, directory: Path, stack: ExitStack) -> None:
        self._spill = SpillDirectory(str(directory))
        self._stack = stack
        address = str(directory / "notify")
        self._socket = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
        self._socket.bind(address)
        self._socket.setblocking(False)
        notifier = Notifier(address)
        stack.callback(notifier._socket.close)
        self._persistence = Persistence(notifier)
        self._persistence.keep_service("server", w.Serve("key", "socket", GPU, [], {"name": "vmm", "reason": ""}, [], {}))
        #: The memory as it is on its devices, and on the host.
        self._segments = {
            "gpu": self._made(SegmentInfo("gpu", 4096, GPU, mechanism="vmm")),
            "host": self._made(SegmentInfo("host", 4096, "cpu")),
        }
        self.entries: list[tuple[str, int]] = []

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

    def put(self, tier: Tier, number: int) -> list[tuple[dict[str, str], list[int]]]:
        """Keep them in a tier, with the incarnations of that number: the messages."""
        infos = {name: segment.info.incarnation(number) for name, segment in self._segments.items()}
        made = {"gpu": self._made(infos["gpu"]), "host": self._segments["host"]}
        copies = {info.id: [self._copy(name, tier, number)] for name, info in infos.items()} if tier != "device" else {}
        for object_id in OBJECTS[: 2 + (number > 1)]:
            segments = [made[name].duplicate() if tier == "device" else Segment(info) for name, info in infos.items()]
            for segment, info in zip(segments, infos.values(), strict=True):
                segment.info = info
                self._stack.callback(segment.close)
            record = Record(b"skeleton", b"table", segments, 8192)
            stored = StoredObject(object_id, "get", f"get({object_id})", record, 1, None, 1.0, 1.0, tier=tier)
            self._persistence.keep("key", stored, "", None, copies)
        return list(self._heard())

    def tell(self, tier: Tier, number: int) -> None:
        """Keep them in a tier, and let the service manager have all that it is told."""
        for fields, fds in self.put(tier, number):
            store(self.entries, 100, fields, fds)

    def _heard(self) -> Iterator[tuple[dict[str, str], list[int]]]:
        while True:
            try:
                data, ancillary, _, _ = self._socket.recvmsg(1 << 16, socket.CMSG_SPACE(4))
            except BlockingIOError:
                return
            fds = array.array("i")
            for _, _, content in ancillary:
                fds.frombytes(content)
            yield dict(line.split("=", 1) for line in data.decode().split("\n")), list(fds)

    def restored(self) -> list[dict[str, bytes]]:
        """What a broker has that begins now: the bytes of the objects, by their segments' names."""
        [service] = Persistence(Notifier()).restore([Passed(name, os.dup(fd)) for name, fd in self.entries])
        restored = []
        for found in service.objects:
            parts = [(info.name, copy.segment) for info, copy in found.copies]
            parts = parts or [(segment.info.name, segment) for segment in found.stored.record.segments]
            restored.append({name: os.pread(segment.fileno(), 4096, 0).rstrip(b"\0") for name, segment in parts})
            for _, segment in parts:
                segment.close()
        return restored


@pytest.fixture
def moving(tmp_path: Path) -> Iterator[Moving]:
    """Objects of which nothing was told."""
    with ExitStack() as stack:
        moving = Moving(tmp_path, stack)
        yield moving
        for _, fd in moving.entries:
            os.close(fd)


def test_a_broker_that_is_killed_between_two_messages_of_a_move(moving: Moving) -> None:
    """The next one has the objects, with all their bytes; in the end, there is an entry for each part and for each object."""
    tiers: list[Tier] = ["device", "host", "device", "host", "file", "device", "file", "device"]
    there = 0
    for number, tier in enumerate(tiers):
        for fields, fds in moving.put(tier, number):
            store(moving.entries, 100, fields, fds)
            restored = moving.restored()
            assert restored == [CONTENTS] * len(restored) and len(restored) >= there, (number, tier, fields)
            there = len(restored)
        assert there == 2 + (number > 1)
        assert len(moving.entries) == 3 + there, [name for name, _ in moving.entries]


def test_a_provider_that_could_not_be_stored(moving: Moving, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is stored with the next change, when there are descriptors again."""
    persistence = moving._persistence
    serve = w.Serve("another", "socket", GPU, [], {"name": "vmm", "reason": ""}, [], {})

    def refuse(name: str, flags: int = 0) -> int:
        raise OSError(errno.EMFILE, "too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(os, "memfd_create", refuse)
        with pytest.raises(OSError, match="too many open files"):
            persistence.keep_service("server", serve)
    before = len(persistence)
    persistence.keep_service("server", serve)
    assert len(persistence) == before + 1


def test_a_provider_that_cannot_be_stored_ends_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The broker serves it all the same, and the log says what is missing."""
    manager = ServiceManager(Inherited())

    def refuse(server_id: str, serve: w.Serve) -> None:
        raise OSError(errno.EMFILE, "too many open files")

    monkeypatch.setattr(manager._persistence, "keep_service", refuse)
    core: Any = SimpleNamespace(server_id="server", registry=Registry())
    manager.keep_service(w.Serve("key", "/socket", "cpu", [], {"name": "memfd", "reason": ""}, [], {}), core)
    assert "cannot store the provider at /socket with the service manager: [Errno 24]" in caplog.text


def test_an_object_that_cannot_be_stored(moving: Moving, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of it is left in the store, because an earlier entry is out of date; its next change is stored."""
    moving.tell("device", 0)
    with monkeypatch.context() as patch:
        patch.setattr("shared_rpc.broker.persistence._sealed", Mock(side_effect=OSError(errno.EMFILE, "too many open files")))
        moving.tell("host", 1)
    assert [name for name, _ in moving.entries if not name.startswith("service")] == []
    moving.tell("device", 2)
    assert moving.restored() == [CONTENTS] * 3
    assert len(moving.entries) == 6
