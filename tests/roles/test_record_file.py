"""Files of records: an object is on disk, and a server has it again without building it."""

from __future__ import annotations

import errno
import os
import stat
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import xxhash
from torch import nn

from shared_rpc import Client, Provider, RecordHeader, Server
from shared_rpc.errors import RecordError, StaleHandleError, UpdateInterrupted
from shared_rpc.extras import record_file
from shared_rpc.extras.record_file import FileRecord, save
from tests.kit.deep import deep
from tests.kit.models import Tied
from tests.kit.payloads import aliases, described
from tests.kit.processes import eventually

#: Bytes of a part in these tests.
PART = 1 << 16


class Site:
    """A server on a device, and a client of it."""

    def __init__(self, base_path: str, device: str, **options: Any) -> None:
        self.base_path, self.device, self.built = base_path, device, 0
        self.provider = Provider(base_path, device=device)
        self.provider.share("model", managed=True)(self.model)
        self.provider.share("read", managed=True, access="read")(self.model)
        self.server = Server(self.provider, **options)
        self.server.start()
        self.client = Client(base_path, device=device, timeout=30, connect_timeout=0)

    def model(self, size: int = 200) -> nn.Module:
        """Something to write to disk."""
        self.built += 1
        torch.manual_seed(size)
        return nn.Sequential(nn.Linear(size, size), nn.BatchNorm1d(size), Tied()).to(self.device).requires_grad_(False)

    def close(self) -> None:
        """End both."""
        self.client.close()
        self.server.stop()


@pytest.fixture
def sites(base_path: str, device: str, no_leaks: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Site]]:
    """Makes servers with the same endpoints."""
    monkeypatch.setattr(record_file, "PART", PART)
    made: list[Site] = []

    def make(**options: Any) -> Site:
        made.append(Site(f"{base_path}-{len(made)}", device, **options))
        return made[-1]

    yield make
    for site in made:
        site.close()


@pytest.fixture
def here(sites: Callable[..., Site]) -> Site:
    """Where objects are built."""
    return sites()


@pytest.fixture
def there(sites: Callable[..., Site], here: Site) -> Site:
    """Where they are read."""
    return sites()


@pytest.fixture
def path(here: Site, tmp_path: Path) -> Path:
    """The file of an object."""
    path = tmp_path / "model.record"
    with here.client.call("model") as handle:
        save(here.client, handle.object_id, path)
    return path


def test_an_object_is_on_disk(here: Site, there: Site, path: Path) -> None:
    """It is read by a server that never built it, and is what it was; the file is for one user."""
    with FileRecord(path) as record:
        made = there.client.adopt(record)
    with here.client.call("model") as original, there.client.call("model") as arrived:
        assert described(arrived.value) == described(original.value)
        assert aliases(arrived.value) == aliases(original.value)
    assert (there.built, made.generation, made.cache_key) == (0, 1, "model(size=200)")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert path.stat().st_size < record.header.nbytes + (4 << 20)  # a GPU's memory is in pieces of 2 MiB
    assert list(path.parent.glob("*.part")) == []


def test_the_segments_are_at_pages(here: Site, path: Path) -> None:
    """As a reader that maps the file would have them."""
    header, layout = read(path)
    assert [part.offset % 4096 for part in layout.parts if part.start == 0] == [0] * len(header.segments)
    assert len(layout.parts) == sum(-(-info.nbytes // PART) for info in header.segments) > 1
    assert layout.nbytes == path.stat().st_size


def test_a_file_is_replaced_as_a_whole(here: Site, there: Site, path: Path) -> None:
    """By the one of a later generation."""
    path.chmod(0o644)
    with here.client.call("model", 300) as handle:
        save(here.client, handle.object_id, path)
    with FileRecord(path) as record:
        assert there.client.adopt(record).cache_key == "model(size=300)"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def read(path: Path) -> tuple[RecordHeader, Any]:
    """What is in a file."""
    with FileRecord(path) as record:
        return record.header, record._layout


# Damage.


@pytest.mark.parametrize("left", [0, 20, 60, 0.9, -1])
def test_a_truncated_file(there: Site, path: Path, left: float) -> None:
    """Wherever it ends, it is refused before any memory is made."""
    size = path.stat().st_size
    os.truncate(path, size - 1 if left < 0 else int(left * size) if isinstance(left, float) else int(left))
    with pytest.raises(RecordError) as caught:
        FileRecord(path)
    assert caught.value.reason == ("damaged" if left else "malformed")
    assert there.client.list_objects() == []


def test_a_file_that_is_cut_while_it_is_read(there: Site, path: Path) -> None:
    """What was there when it was opened is gone: no read ends the process, and nothing is left."""
    with FileRecord(path) as record:
        os.truncate(path, path.stat().st_size // 2)
        with pytest.raises(RecordError, match="damaged") as caught:
            there.client.adopt(record)
    assert caught.value.reason == "damaged"
    eventually(lambda: there.client.list_objects() == [])


def test_any_damaged_byte_is_noticed(there: Site, path: Path) -> None:
    """In the header, in a digest, at the beginning and the end of parts; but not in the space between."""
    header, layout = read(path)
    data = path.read_bytes()
    inside = [part.offset for part in layout.parts] + [part.offset + part.nbytes - 1 for part in layout.parts]
    for place in (25, 40, 60, layout.head // 2, layout.head - 1, *inside):
        path.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
        with pytest.raises(RecordError, match="damaged") as caught, FileRecord(path) as record:
            there.client.adopt(record)
        assert caught.value.reason == "damaged", place
    eventually(lambda: there.client.list_objects() == [])
    assert header.nbytes > 0


def test_no_record_at_all(tmp_path: Path) -> None:
    """A missing file, an empty one, a directory, a pipe, and something else."""
    other = tmp_path / "notes.txt"
    other.write_text("not a record, but long enough to be read as one, were its beginning what it is not")
    other.chmod(0o600)
    os.mkfifo(tmp_path / "pipe")
    for name, reason, told in (
        ("missing", "unreadable", "No such file"),
        (".", "unreadable", "no regular file"),
        ("pipe", "unreadable", "no regular file"),
        ("notes.txt", "malformed", "is no record: it begins with b'not a record"),
    ):
        with pytest.raises(RecordError, match=told) as caught:
            FileRecord(tmp_path / name)
        assert caught.value.reason == reason


@pytest.mark.parametrize("mode", [0o620, 0o602])
def test_what_others_may_have_written_is_not_read(path: Path, mode: int) -> None:
    """It holds a pickle. The error names the mode."""
    path.chmod(mode)
    with pytest.raises(RecordError, match=f"has mode {mode:04o}") as caught:
        FileRecord(path)
    assert caught.value.reason == "untrusted"


def test_what_another_user_has_written_is_not_read(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only this user's files are, and root's."""
    uid = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: uid + 7)
    if uid == 0:
        path_stat = os.stat_result((stat.S_IFREG | 0o600, 0, 0, 1, 1234, 0, 10, 0, 0, 0))
        monkeypatch.setattr(os, "fstat", lambda fd: path_stat)
    with pytest.raises(RecordError, match="belongs to uid") as caught:
        FileRecord(path)
    assert caught.value.reason == "untrusted"


def rewritten(path: Path, **fields: Any) -> None:
    """Give the header of a file other fields, and the digest that it has then."""
    header, layout = read(path)
    data = path.read_bytes()
    encoded = msgspec.structs.replace(header, **fields).to_bytes()
    begin = data[:20] + struct.pack(">QQ", len(encoded), len(layout.parts))
    digests = data[layout.head - 16 * len(layout.parts) : layout.head]
    head = begin + xxhash.xxh3_128(begin + encoded + digests).digest() + encoded + digests
    assert -(-len(head) // 4096) == -(-layout.head // 4096), "the segments stay where they are"
    path.write_bytes(head + b"\0" * (-len(head) % 4096) + data[-(-layout.head // 4096) * 4096 :])


def test_other_versions_are_named(there: Site, path: Path) -> None:
    """Of the file's format, and of what made the object."""
    rewritten(path, torch="1.2.3")
    with FileRecord(path) as record, pytest.raises(RecordError, match=r"torch 1\.2\.3, and this server runs torch") as caught:
        there.client.adopt(record)
    assert caught.value.reason == "version"
    data = path.read_bytes()
    path.write_bytes(data[:18] + b"2\n" + data[20:])
    with pytest.raises(RecordError, match="has format 2, and this release of shared-rpc reads format 1") as caught:
        FileRecord(path)
    assert caught.value.reason == "version"
    assert there.client.list_objects() == []


def test_a_file_with_changed_fields_is_still_checked(there: Site, path: Path) -> None:
    """A digest says that bytes are those that were written, and not that they are good."""
    header, _ = read(path)
    rewritten(path, nbytes=header.nbytes * 1000)
    with FileRecord(path) as record, pytest.raises(RecordError, match="it announces") as caught:
        there.client.adopt(record)
    assert caught.value.reason == "malformed"


@pytest.mark.parametrize("nbytes", [1 << 62])
def test_a_segment_that_is_larger_than_the_file(path: Path, monkeypatch: pytest.MonkeyPatch, nbytes: int) -> None:
    """It is refused before a place is worked out for each of its parts, of which there would be millions."""
    header, _ = read(path)
    rewritten(path, segments=tuple(msgspec.structs.replace(info, nbytes=nbytes) for info in header.segments))
    monkeypatch.setattr(record_file, "_Layout", None)
    with pytest.raises(RecordError, match="and its segments alone have") as caught:
        FileRecord(path)
    assert caught.value.reason == "damaged"


# Bad luck.


def test_an_unknown_object(here: Site, tmp_path: Path) -> None:
    """No file is made of it."""
    with pytest.raises(StaleHandleError):
        save(here.client, "0" * 24, tmp_path / "model.record")
    assert list(tmp_path.glob("*.record*")) == []


def test_a_folder_that_is_not_there(here: Site, tmp_path: Path) -> None:
    """The error names the file."""
    with here.client.call("model") as handle, pytest.raises(RecordError, match=r"record .*/no/model\.record: No such file"):
        save(here.client, handle.object_id, tmp_path / "no" / "model.record")


@pytest.mark.parametrize("step", ["pwrite", "fsync", "link", *deep("posix_fallocate", "replace")])
def test_a_disk_that_fails(here: Site, path: Path, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    """Whenever it does, the earlier file is as it was, and no other one is left."""
    before = path.read_bytes()

    def fail(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched, here.client.call("model", 300) as handle:
        patched.setattr(os, step, fail)
        with pytest.raises(RecordError, match=r"No space left on device: it needs \d+ bytes") as caught:
            save(here.client, handle.object_id, path)
    assert caught.value.reason == "unreadable"
    assert (path.read_bytes(), sorted(one.name for one in path.parent.glob("model*"))) == (before, ["model.record"])


def test_a_file_system_without_nameless_files(here: Site, there: Site, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft stands beside the file until it is whole."""
    original = os.open

    def refuse(name: Any, flags: int, *rest: Any, **more: Any) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
        return original(name, flags, *rest, **more)

    monkeypatch.setattr(os, "open", refuse)
    with here.client.call("model", 300) as handle:
        save(here.client, handle.object_id, path)
    with FileRecord(path) as record:
        assert there.client.adopt(record).cache_key == "model(size=300)"
    assert sorted(one.name for one in path.parent.glob("model*")) == ["model.record"]


def test_an_object_that_is_written_to_is_of_one_revision(
    here: Site, there: Site, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An update in the middle of an export begins it anew; one that never rests is an error."""
    handle = here.client.call("model")
    write_parts, updates = record_file._write_parts, iter(range(10))
    times = 1

    def write(*arguments: Any) -> list[bytes]:
        number = next(updates)
        if number < times:
            with here.client.update(handle) as value:
                value[0].weight.fill_(7 + number)
        return write_parts(*arguments)

    monkeypatch.setattr(record_file, "_write_parts", write)
    save(here.client, handle.object_id, path)
    with FileRecord(path) as record:
        there.client.adopt(record)
    with there.client.call("model") as arrived:
        assert (arrived.value[0].weight == 7).all()
    updates, times = iter(range(10)), 10
    before = path.read_bytes()
    with handle, pytest.raises(RecordError, match="was written to in place while it was exported, 3 times"):
        save(here.client, handle.object_id, path)
    assert path.read_bytes() == before
    monkeypatch.undo()


def test_an_object_that_was_left_half_written(here: Site, tmp_path: Path) -> None:
    """It is not put on disk: the error is that of every reader of it."""
    handle = here.client.call("model")
    with pytest.raises(ZeroDivisionError), here.client.update(handle):
        raise ZeroDivisionError
    with pytest.raises(UpdateInterrupted):
        save(here.client, handle.object_id, tmp_path / "model.record")
