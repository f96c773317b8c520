"""The page of an object: its revision, processes that wait for it, and processes that may write to it."""

from __future__ import annotations

import fcntl
import functools
import math
import os
import struct
import threading
import time
from collections.abc import Iterator

import pytest

from shared_rpc.errors import (
    CapabilityError,
    UpdateInterrupted,
)
from shared_rpc.memory import revisions
from shared_rpc.memory.backends.choice import backend_for
from shared_rpc.memory.backends.host import HOST
from shared_rpc.memory.revisions import Page, new_page, read_only, settled_revision
from shared_rpc.protocol.records import SegmentInfo
from tests.kit import fake_driver
from tests.kit.world import at_once


@pytest.fixture
def page() -> Iterator[Page]:
    """A page of revision 0."""
    yield Page(new_page(), [], "one")


class Device:
    """A GPU that records the revision at each synchronisation; ``ready`` is its result."""

    def __init__(self) -> None:
        self.ready = True
        self.waits: list[int] = []
        self.page = Page(new_page(), [SegmentInfo("a", 4096, "GPU-1", mechanism="vmm")], "one")

    def synchronize(self) -> bool:
        """Synchronise like a backend."""
        self.waits.append(self.page.revision)
        return self.ready


def test_the_device_is_waited_for_before_the_number_is_even(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once, at the end of the block; if that is impossible now, the update is interrupted, and the next one repairs it."""
    device = Device()
    monkeypatch.setattr(revisions, "backend_for", lambda uuid, mechanism: {("GPU-1", "vmm"): device}[uuid, mechanism])
    page = device.page
    with page.update(math.inf):
        assert device.waits == []
    assert (device.waits, page.revision) == ([1], 2)
    device.ready = False
    with pytest.raises(CapabilityError, match="the wait for GPU GPU-1 failed, because a CUDA graph"), page.update(math.inf):
        pass
    with pytest.raises(UpdateInterrupted):
        page.wait(2, math.inf)
    device.ready = True
    with page.update(math.inf):
        pass
    assert (device.waits, page.wait(2, math.inf)) == ([1, 3, 5], 6)


def _update(page: Page) -> None:
    with page.update(time.monotonic() + 5):
        pass


def test_a_reader_s_page_cannot_be_mapped_for_writing() -> None:
    """Its descriptor does not allow a writable mapping."""
    with new_page("read") as segment, read_only(segment) as sealed:
        assert sealed.info.access == "read"
        with pytest.raises(CapabilityError, match="cannot map"):
            HOST.map(sealed.fileno(), sealed.info.nbytes, "read_write")
        reader = Page(sealed.duplicate(), [], "one")
        _update(Page(segment.duplicate(), [], "one"))
        assert reader.wait(1, time.monotonic() + 5) == 2
        with pytest.raises(CapabilityError, match="access='read'"):
            _update(reader)


def test_a_reader_s_page_cannot_be_written_otherwise() -> None:
    """A second description of the page, opened for writing, neither maps it nor writes to it."""
    with new_page("read") as segment, read_only(segment) as sealed:
        again = os.open(f"/proc/self/fd/{sealed.fileno()}", os.O_RDWR | os.O_CLOEXEC)
        try:
            with pytest.raises(CapabilityError, match="access='read'"):
                HOST.map(again, sealed.info.nbytes, "read_write")
            with pytest.raises(PermissionError):
                os.pwrite(again, b"7", 0)
        finally:
            os.close(again)


def test_a_reader_cannot_lock_its_page() -> None:
    """The page's writer has the lock from the beginning: no reader can stop its updates, or claim to be the writer."""
    with new_page("read") as segment, read_only(segment) as sealed:
        lock = struct.pack("hhqqi4x", fcntl.F_RDLCK, os.SEEK_SET, 0, 0, 0)
        with pytest.raises(BlockingIOError):
            fcntl.fcntl(sealed.fileno(), fcntl.F_OFD_SETLK, lock)
        _update(Page(segment.duplicate(), [], "one"))
        assert settled_revision(segment) == 2


def test_writers_of_a_reader_s_page_take_turns() -> None:
    """The server's threads update the object one after the other, each with its own page object."""
    with new_page("read") as segment:
        pages = [Page(segment.duplicate(), [], "one") for _ in range(4)]
        assert at_once(*[functools.partial(_update, page) for page in pages]) == [None] * 4
        assert settled_revision(segment) == 8


def test_readers_detect_an_abandoned_update() -> None:
    """Although the process that abandoned it continues, and has the lock of the page."""
    with new_page("read") as segment, read_only(segment) as sealed:
        reader, writer = Page(sealed.duplicate(), [], "one"), Page(segment.duplicate(), [], "one")
        with pytest.raises(ZeroDivisionError), writer.update(math.inf):
            assert settled_revision(sealed) is None
            raise ZeroDivisionError
        with pytest.raises(UpdateInterrupted):
            reader.wait(2, time.monotonic() + 5)
        assert settled_revision(sealed) == 1
        _update(writer)
        assert reader.wait(2, time.monotonic() + 5) == 4


def test_readers_detect_their_server_s_end() -> None:
    """The lock ends with the server, so an active update was interrupted."""
    with new_page("read") as segment:
        reader, writer = Page(read_only(segment), [], "one"), Page(segment.duplicate(), [], "one")
        assert writer.try_begin() is not None
        del writer
    with pytest.raises(UpdateInterrupted):
        reader.wait(2, time.monotonic() + 5)


@pytest.mark.parametrize("ends", ["well", "badly"])
def test_waiters_are_woken_by_the_end_of_an_update(
    page: Page, monkeypatch: pytest.MonkeyPatch, go: threading.Event, begun: threading.Event, ends: str
) -> None:
    """Without polling."""
    monkeypatch.setattr(revisions, "SLICE", 20.0)

    def write() -> None:
        with page.update(math.inf):
            begun.set()
            assert go.wait(30)
            if ends == "badly":
                raise ZeroDivisionError

    def wait() -> tuple[int, float]:
        assert begun.wait(10)
        threading.Timer(0.1, go.set).start()
        begin = time.monotonic()
        try:
            return page.wait(1, math.inf), time.monotonic() - begin
        except UpdateInterrupted as error:
            return error.revision, time.monotonic() - begin

    (revision, seconds), _ = at_once(wait, write)
    assert (revision, seconds < 5) == (2 if ends == "well" else 1, True)


# MPS.


@pytest.fixture(params=[False, True], ids=["without", "under"])
def mps(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[bool]:
    """Whether MPS is in use for the GPUs."""
    with fake_driver.installed():
        monkeypatch.setitem(fake_driver._ATTRIBUTES, 133, int(request.param))
        yield request.param


def test_the_first_protected_mapping_warns(mps: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Once, and only if a write ends other processes too."""
    backend = backend_for(fake_driver.GPUS[0])
    with backend.create(1) as segment:
        for access in ("read_write", "read", "read"):
            address = backend.map(segment.fileno(), segment.info.nbytes, access)
            backend.unmap(address, segment.info.nbytes)
    assert [("Multi-Process Service" in record.getMessage()) for record in caplog.records] == [True] * mps
