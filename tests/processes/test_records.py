"""Records: an object of one server becomes an object of another one, as if built there."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest
import torch
from torch import nn

from shared_rpc import Client, ExportedRecord, Generation, Provider, RecordHeader, Server
from shared_rpc.errors import (
    BufferNotFound,
    CapabilityError,
    ConfigurationError,
    EndpointNotFound,
    RecordError,
    StaleHandleError,
)
from shared_rpc.extras import record_file
from shared_rpc.extras.record_file import FileRecord, save
from shared_rpc.memory.backends.host import HOST
from tests.kit.comparing import differences
from tests.kit.deep import deep
from tests.kit.models import Tied
from tests.kit.payloads import PAYLOADS
from tests.kit.processes import eventually
from tests.kit.world import World

on_the_host = pytest.mark.parametrize("device", ["cpu"], indirect=True)


class Site:
    """A server with the endpoints common to all sites, a client of it, and its builds."""

    def __init__(self, base_path: str, device: str) -> None:
        self.built: list[str] = []
        self.device = device
        provider = Provider(base_path, device=device)
        provider.share("all", tensors="all")(self.named)
        provider.share("read", access="read")(self.named)
        provider.share("load", managed=True)(self.load)
        provider.share("other", managed=True)(self.other)
        provider.share("uncached", managed=True, cache=False)(self.load)
        provider.share("model", managed=True)(self.model)
        self.server = Server(provider).start()
        self.client = Client(base_path, device=device, timeout=30, connect_timeout=0)

    def named(self, name: str) -> Any:
        """Return a payload of the kit."""
        self.built.append(name)
        return PAYLOADS[name](self.device)

    def load(self, size: int = 4) -> nn.Module:
        """Return a layer with the number of its build."""
        self.built.append(f"load {size}")
        layer = nn.Linear(size, size, device=self.device).requires_grad_(False)
        return layer.apply(lambda one: one.weight.fill_(len(self.built)))

    def other(self, size: int = 4) -> nn.Module:
        """Another endpoint, with its own code."""
        raise AssertionError("this is never built")

    def model(self, size: int = 200) -> nn.Module:
        """A model to be written to disk."""
        self.built.append(f"model {size}")
        torch.manual_seed(size)
        return nn.Sequential(nn.Linear(size, size), nn.BatchNorm1d(size), Tied()).to(self.device).requires_grad_(False)

    def close(self) -> None:
        """Close both."""
        self.client.close()
        self.server.stop()


@pytest.fixture
def here(base_path: str, device: str, no_leaks: None) -> Iterator[Site]:
    """The site that builds objects."""
    with closing(Site(f"{base_path}-here", device)) as site:
        yield site


@pytest.fixture
def there(here: Site, base_path: str, device: str) -> Iterator[Site]:
    """The site that adopts objects."""
    with closing(Site(f"{base_path}-there", device)) as site:
        yield site


def carried(client: Client, record: ExportedRecord) -> ExportedRecord:
    """Return memory allocated by a client, with a record's bytes, after transport: its header as bytes, and its segments."""
    allocated = client.allocate(RecordHeader.from_bytes(record.header.to_bytes()))
    for target, source in zip(allocated.segments, record.segments, strict=True):
        if record.header.device == "cpu":
            target.buffer()[:] = bytes(source.buffer())
        else:
            target.tensor().copy_(source.tensor().cpu() if target.info.device == "cpu" else source.tensor())
    return allocated


def adopted(here: Site, there: Site, endpoint: str, *args: Any) -> Generation:
    """Adopt the result of a call from one site in another, through allocated memory."""
    here.client.call(endpoint, *args)
    (listed,) = [info for info in here.client.list_objects() if info["endpoint"] == endpoint]
    with here.client.export(listed["object_id"]) as record, carried(there.client, record) as allocated:
        return there.client.adopt(allocated)


# Adopted objects.


@pytest.mark.parametrize("name", PAYLOADS)
def test_records_round_trip(here: Site, there: Site, name: str) -> None:
    """Every bit, flag, stride and tie; and nothing was built."""
    made = adopted(here, there, "all", name)
    original, arrived = here.client.call("all", name), there.client.call("all", name)
    assert differences(original, arrived) == []
    assert (there.built, made.endpoint, made.generation) == ([], "all", 1)
    one, other = (site.client.get_object_info(site.client.list_objects()[0]["object_id"]) for site in (here, there))
    assert all(one[fact] == other[fact] for fact in ("nbytes", "private_nbytes", "cache_key"))  # type: ignore[literal-required]


@on_the_host
def test_read_only_records_are_sealed(here: Site, there: Site) -> None:
    """The kernel refuses a writable mapping of an adopted object's host memory."""
    adopted(here, there, "read", "views")
    (stored,) = there.server.engine.ask(lambda core: list(core.objects))
    for segment in stored.record.segments:
        with pytest.raises(CapabilityError, match="shared read-only"):
            HOST.map(segment.fileno(), segment.info.nbytes, "read_write")
    assert stored.record.segments


# The record.


def test_a_record_is_the_object_s_own_memory(here: Site) -> None:
    """The holder's writes are visible in it, without a copy; and it holds the object."""
    handle = here.client.call("load", 3)
    with here.client.export(handle) as record:
        flat = record.segments[0].tensor()
        handle.value.weight.data.fill_(-1)
        handle.release()
        here.client.invalidate_endpoint_cache("load")
        assert len(here.client.list_objects()) == 1
    eventually(lambda: here.client.list_objects() == [])
    assert -1 in flat.view(torch.float32)[:64]  # a tensor keeps the memory
    with pytest.raises(StaleHandleError, match="was closed"):
        record.segments[0].tensor()


def test_buffers_are_exported_on_their_terms(here: Site, there: Site) -> None:
    """Without a call of its own, a buffer is adopted under a given one. An unavailable buffer cannot be exported."""
    with here.client.create_buffer((3, 4), "float32") as buffer:
        buffer.value.fill_(7)
        with here.client.export(buffer) as record:
            with pytest.raises(EndpointNotFound):
                there.client.adopt(record)
            there.client.adopt(record, "load", 4)
        here.client.free_buffer(buffer)
        with pytest.raises(BufferNotFound, match="was freed"):
            here.client.export(buffer)
    with there.client.call("load", 4) as handle:
        assert (handle.value == 7).all() and handle.value.shape == (3, 4)


# The allocated.


def test_allocated_records_consist_of_buffers(here: Site, there: Site) -> None:
    """They are listed, counted and held until the record is closed or adopted; the object is their memory, not a copy."""
    handle = here.client.call("load", 300)
    with here.client.export(handle) as record:
        allocated = there.client.allocate(record.header)
        assert (allocated.allocated, record.allocated) == (True, False)
        assert there.client.get_server_info()["buffers"] == len(record.segments) == 1
        allocated.close()
        eventually(lambda: there.client.list_objects() == [])
        allocated = carried(there.client, record)
        kept = allocated.segments[0].tensor()
        there.client.adopt(allocated)
        assert allocated.closed
        with pytest.raises(RecordError, match="adopted already"):
            there.client.adopt(allocated)
        with pytest.raises(StaleHandleError):
            allocated.segments[0].tensor()
    (listed,) = there.client.list_objects()
    assert (listed["kind"], listed["holders"]) == ("result", [])
    there.client.call("load", 300).value.weight.data.fill_(5)
    assert int((kept.view(torch.float32) == 5).sum()) == 300 * 300


def test_adopted_buffers_lose_their_names(here: Site, there: Site) -> None:
    """Even if they were kept: no other process gets an object's memory as a buffer."""
    with here.client.export(here.client.call("load", 3)) as record, there.client.allocate(record.header, ttl=60) as allocated:
        names = [lease.object_id for lease in allocated._leases]
        with there.client.get_buffer(names[0]) as other:
            record.segments[0].copy_to(allocated.segments[0])
            there.client.adopt(allocated)
            assert other.value.numel() == allocated.segments[0].nbytes
        for name in names:
            with pytest.raises(BufferNotFound, match="it was freed"):
                there.client.get_buffer(name)


def test_mismatched_buffers_are_refused(here: Site, there: Site) -> None:
    """Too small or too few, or a result, whose memory has other users: the allocated record is unchanged."""
    kept = there.client.call("load", 3)
    with (
        here.client.export(here.client.call("load", 3)) as one,
        here.client.export(here.client.call("load", 900)) as other,
        carried(there.client, one) as allocated,
    ):
        twice = msgspec.structs.replace(one.header, segments=one.header.segments * 2)
        for header, text in ((other.header, "is not for segment 0"), (twice, "2 segments, and 1 buffers")):
            allocated.header = header
            with pytest.raises(RecordError, match=text):
                there.client.adopt(allocated)
        with pytest.raises(BufferNotFound, match=r"does not hold .* Allocate the record again"):
            there.client.adopt(ExportedRecord(one.header, allocated.segments, [kept], allocated=True))
        allocated.header = one.header
        assert there.client.adopt(allocated).generation == 2


# Generations.


def test_an_adopted_object_is_the_next_generation(here: Site, there: Site) -> None:
    """Of the object cached under the key, with the news of a refresh; holders keep the earlier one."""
    earlier = there.client.call("load", 3)
    handle = here.client.call("load", 3)
    handle.value.weight.data.fill_(9)
    with there.client.refreshes() as news, here.client.export(handle) as record:
        made = there.client.adopt(record)
        assert next(news) == made
    assert (made.generation, made.previous_id, made.cache_key) == (2, earlier.object_id, "load(size=3)")
    assert not earlier.is_current()
    assert (earlier.value.weight == 1).all()
    assert (earlier.latest().value.weight == 9).all()
    assert there.client.refresh("load", 3).generation == 3


def test_uncached_objects_need_a_call(here: Site, there: Site) -> None:
    """They have no key; and an endpoint without a cache adopts nothing."""
    with here.client.export(here.client.call("uncached", 3)) as record:
        for error, match, call in (
            (ConfigurationError, "'uncached' are not cached", ()),
            (ConfigurationError, "not cached", ("uncached", 3)),
            (ConfigurationError, "tensor or a module among its arguments", ("load", torch.ones(1, device=there.device))),
        ):
            with pytest.raises(error, match=match):
                there.client.adopt(record, *call)
        assert there.client.adopt(record, "load", 3).generation == 1


@on_the_host
def test_every_role_adopts(here: Site, world: World, role: str) -> None:
    """Including providers; the process of the endpoints attaches to adopted objects like any other."""
    built: list[int] = []
    world.share("mine")(lambda size: built.append(size) or nn.Linear(size, size))
    with here.client.export(here.client.call("load", 3)) as record:
        assert world.provider.adopt(record, "mine", 3).generation == 1
        with world.provider.allocate(record.header) as allocated:
            record.segments[0].copy_to(allocated.segments[0])
            assert world.provider.adopt(allocated, "mine", 3).generation == 2
    value = world.provider.call("mine", 3)
    assert (type(value), built, bool((value.weight == 1).all())) == (nn.Linear, [], True)
    assert world.provider.call("mine", 3) is value


def test_the_local_role_has_neither_records_nor_tiers(base_path: str) -> None:
    """Its results are not in shared memory, as the error explains."""
    with closing(Provider(base_path, execution_mode="local", device="cpu")) as provider:
        provider.share("load", managed=True)(lambda: torch.ones(3))
        with provider.call("load") as handle, pytest.raises(CapabilityError, match=r"local role.*SHARED_TENSOR_ROLE=server"):
            provider.export(handle)
        with pytest.raises(CapabilityError, match="local role"):
            provider.evict("load")


# Files of records: an object is on disk, and a server imports it without building it.


#: Bytes of a part in these tests.
PART = 1 << 16


@pytest.fixture
def path(here: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of an object, in several parts."""
    monkeypatch.setattr(record_file, "PART", PART)
    path = tmp_path / "model.record"
    with here.client.call("model") as handle:
        save(here.client, handle.object_id, path)
    return path


def test_saved_objects_are_restored(here: Site, there: Site, path: Path) -> None:
    """By a server that never built them; the file is private."""
    with FileRecord(path) as record:
        made = there.client.adopt(record)
    with here.client.call("model") as original, there.client.call("model") as arrived:
        assert differences(original.value, arrived.value) == []
    assert (there.built, made.generation, made.cache_key) == ([], 1, "model(size=200)")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert path.stat().st_size < record.header.nbytes + (4 << 20)  # a GPU's memory is in pieces of 2 MiB
    assert list(path.parent.glob("*.part")) == []


# Files that are damaged.


def test_files_truncated_while_read_are_refused(there: Site, path: Path) -> None:
    """No read ends the process, and nothing is left."""
    with FileRecord(path) as record:
        os.truncate(path, path.stat().st_size // 2)
        with pytest.raises(RecordError, match="damaged") as caught:
            there.client.adopt(record)
    assert caught.value.reason == "damaged"
    eventually(lambda: there.client.list_objects() == [])


def test_any_damaged_byte_is_detected(there: Site, path: Path) -> None:
    """In the header, in a digest, at the beginning and the end of parts; but not in the padding."""
    data = path.read_bytes()
    with FileRecord(path) as whole:
        layout = whole._layout
    inside = [part.offset for part in layout.parts] + [part.offset + part.nbytes - 1 for part in layout.parts]
    for place in (25, 40, 60, layout.head // 2, layout.head - 1, *inside):
        path.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
        with pytest.raises(RecordError, match="damaged") as caught, FileRecord(path) as record:
            there.client.adopt(record)
        assert caught.value.reason == "damaged", place
    eventually(lambda: there.client.list_objects() == [])


@pytest.mark.parametrize(
    ("change", "reason", "message"),
    [
        (Path.unlink, "unreadable", "No such file"),
        (lambda path: (path.unlink(), os.mkfifo(path)), "unreadable", "no regular file"),
        (lambda path: path.write_text("not a record, but " * 9), "malformed", "is no record: it begins with b'not a record"),
        (lambda path: os.truncate(path, 0), "malformed", "is no record"),
        (lambda path: os.truncate(path, 60), "damaged", "model.record"),
        (lambda path: os.truncate(path, path.stat().st_size - 1), "damaged", "model.record"),
        (lambda path: path.chmod(0o620), "untrusted", "has mode 0620"),
        (
            lambda path: path.write_bytes((data := path.read_bytes())[:18] + b"2\n" + data[20:]),
            "version",
            "has format 2, and this release of shared-rpc reads format 1",
        ),
    ],
)
def test_invalid_files_are_refused(path: Path, change: Callable[[Path], Any], reason: str, message: str) -> None:
    """Before any memory is allocated, with the reason: they contain a pickle."""
    change(path)
    with pytest.raises(RecordError, match=message) as caught:
        FileRecord(path)
    assert caught.value.reason == reason


# Files that cannot be written.


@pytest.mark.parametrize("step", ["pwrite", "fsync", "link", *deep("posix_fallocate", "replace")])
def test_failing_disks_leave_the_earlier_file(here: Site, path: Path, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    """At any time, and no other one."""
    before = path.read_bytes()
    with monkeypatch.context() as patched, here.client.call("model", 300) as handle:
        patched.setattr(os, step, Mock(side_effect=OSError(errno.ENOSPC, "full")))
        with pytest.raises(RecordError, match="full"):
            save(here.client, handle.object_id, path)
    assert (path.read_bytes(), sorted(one.name for one in path.parent.glob("model*"))) == (before, ["model.record"])


def test_saved_objects_are_of_one_revision(here: Site, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An update in the middle of an export is an error, and the earlier file is unchanged."""
    handle = here.client.call("model")
    write_parts, before = record_file._write_parts, path.read_bytes()

    def write(*arguments: Any) -> list[bytes]:
        with here.client.update(handle) as value:
            value[0].weight.fill_(7)
        return write_parts(*arguments)

    monkeypatch.setattr(record_file, "_write_parts", write)
    with handle, pytest.raises(RecordError, match="was written to in place while it was exported"):
        save(here.client, handle.object_id, path)
    assert path.read_bytes() == before
