"""Copies of host memory in files, and back: the same bytes, or an error that leaves nothing behind."""

from __future__ import annotations

import gc
import os
import resource
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
import xxhash

from shared_rpc.errors import CapabilityError, ConfigurationError, RecordError
from shared_rpc.execution.device_memory import DeviceMemory
from shared_rpc.memory.backends.host import HOST
from shared_rpc.memory.copies import LowerCopy
from shared_rpc.memory.file_parts import DIGEST, PART, STEP, Part, host_carrier, read_parts
from shared_rpc.memory.segments import Segment
from shared_rpc.memory.spill import SpillDirectory
from tests.kit.blocking_memory import BlockingMemory
from tests.kit.processes import open_fds

Filled = Callable[..., Segment]

Spilled = Callable[..., tuple[Segment, LowerCopy]]

PAGE = HOST.granularity
MEMORY = BlockingMemory(DeviceMemory("cpu"))


@pytest.fixture
def spill(tmp_path: Path) -> SpillDirectory:
    """A directory for files."""
    return SpillDirectory(str(tmp_path))


@pytest.fixture
def filled() -> Iterator[Callable[..., Segment]]:
    """``filled(nbytes, access)`` is host memory with bytes that no other has."""
    with ExitStack() as stack:

        def filled(nbytes: int, access: str = "read_write") -> Segment:
            segment = HOST.create(nbytes)
            stack.callback(segment.close)
            os.pwrite(segment.fileno(), os.urandom(nbytes), 0)
            if access != "read_write":
                HOST.seal(segment.fileno())
            return segment.duplicate(access)

        yield filled


@pytest.fixture
def spilled(filled: Filled, spill: SpillDirectory) -> Iterator[Callable[..., tuple[Segment, LowerCopy]]]:
    """``spilled(nbytes)`` is host memory, and its copy in a file."""
    with ExitStack() as stack:

        def spilled(nbytes: int, access: str = "read_write") -> tuple[Segment, LowerCopy]:
            segment = filled(nbytes, access)
            stack.callback(segment.close)
            [copy] = MEMORY.lower([segment], "file", spill)
            stack.callback(copy.close)
            return segment, copy

        yield spilled


@pytest.fixture
def nothing_left() -> Iterator[None]:
    """Fails if descriptors remain. Request it before what opens them."""
    gc.collect()
    before = open_fds()
    yield
    gc.collect()
    assert open_fds() == before


def bytes_of(segment: Segment) -> bytes:
    """Those of host memory or of a file."""
    return os.pread(segment.fileno(), segment.info.nbytes, 0)


def digests_of(data: bytes) -> bytes:
    """The digests of the parts, as the library has them."""
    return b"".join(xxhash.xxh3_128_digest(data[start : start + PART]) for start in range(0, len(data), PART))


@pytest.mark.parametrize("nbytes", [PAGE, PART, PART + 3 * PAGE])
def test_bytes_come_back(nothing_left: None, spilled: Spilled, nbytes: int) -> None:
    """Those of a last part that is smaller too."""
    segment, copy = spilled(nbytes)
    assert (copy.tier, copy.segment.info.mechanism, copy.segment.info.nbytes) == ("file", "file", nbytes)
    assert copy.digest == digests_of(bytes_of(segment))
    [again] = MEMORY.raise_([copy], [segment.info.incarnation(1)])
    with closing(again):
        assert again.info == segment.info.incarnation(1)
        assert bytes_of(again) == bytes_of(segment)
        assert not os.path.sameopenfile(again.fileno(), segment.fileno())


def test_segments_come_back_in_their_order(nothing_left: None, filled: Filled, spill: SpillDirectory) -> None:
    """And each is what it is told to be."""
    segments = [filled(count * PAGE) for count in (3, 1, 2)]
    copies = MEMORY.lower(segments, "file", spill)
    infos = [segment.info.incarnation(number) for number, segment in enumerate(segments)]
    again = MEMORY.raise_(copies, infos)
    assert [one.info for one in again] == infos
    assert [bytes_of(one) for one in again] == [bytes_of(one) for one in segments]
    for one in (*copies, *again, *segments):
        one.close()


@pytest.mark.parametrize(("access", "writable"), [("read_write", True), ("read", False), ("copy", False)])
def test_memory_is_sealed_as_it_was(nothing_left: None, spilled: Spilled, access: str, writable: bool) -> None:
    """What is shared for reading cannot be mapped for writing after it has come back either."""
    segment, copy = spilled(PAGE, access)
    [again] = MEMORY.raise_([copy], [segment.info.incarnation(1)])
    with closing(again):
        if writable:
            HOST.unmap(HOST.map(again.fileno(), PAGE, "read_write"), PAGE)
        else:
            with pytest.raises(CapabilityError, match="shared read-only"):
                HOST.map(again.fileno(), PAGE, "read_write")


def test_a_copy_comes_back_twice(nothing_left: None, spilled: Spilled) -> None:
    """It stays as it is: memory that was made of it can be written to."""
    segment, copy = spilled(PAGE)
    [first] = MEMORY.raise_([copy], [segment.info.incarnation(1)])
    os.pwrite(first.fileno(), b"changed", 0)
    [second] = MEMORY.raise_([copy], [segment.info.incarnation(2)])
    with closing(first), closing(second):
        assert bytes_of(second) == bytes_of(segment) != bytes_of(first)


def test_host_memory_is_its_own_copy_on_the_host(nothing_left: None, filled: Filled) -> None:
    """For objects of a GPU with something in host memory: nothing is copied."""
    segment = filled(PAGE)
    [copy] = MEMORY.lower([segment], "host")
    [again] = MEMORY.raise_([copy], [segment.info.incarnation(1)])
    with closing(again), closing(copy.segment):
        assert copy.tier == "host"
        assert again.info == segment.info.incarnation(1)
        assert os.path.sameopenfile(again.fileno(), segment.fileno())
    segment.close()


def test_progress_is_told_in_bytes(nothing_left: None, filled: Filled, spill: SpillDirectory) -> None:
    """Of all segments together, up to their sum."""
    told: list[tuple[int, int]] = []
    segments = [filled(PART + PAGE), filled(PAGE)]
    total = PART + 2 * PAGE
    for copy in MEMORY.lower(segments, "file", spill, lambda done, of: told.append((done, of))):
        copy.close()
    for segment in segments:
        segment.close()
    done = [done for done, of in told if of == total]
    assert len(done) == 3 and done == sorted(done) and done[-1] == total


def test_a_copy_that_is_not_wanted_any_more(nothing_left: None, filled: Filled, spill: SpillDirectory, tmp_path: Path) -> None:
    """It ends between two steps, and leaves nothing."""
    with closing(filled(2 * PART)) as segment:
        assert MEMORY.cancelled([segment], "file", spill) == [PART]


@pytest.mark.parametrize("place", [0, PART, 2 * PART - 1], ids=["first", "second", "last-byte"])
def test_damage_is_noticed(nothing_left: None, spilled: Spilled, place: int) -> None:
    """The error says where; nothing is made of a damaged file."""
    segment, copy = spilled(2 * PART)
    os.pwrite(copy.segment.fileno(), bytes([os.pread(copy.segment.fileno(), 1, place)[0] ^ 1]), place)
    start = place // PART * PART
    with pytest.raises(RecordError, match=f"{segment.info.name}.*bytes {start} to {start + PART} are not") as caught:
        MEMORY.raise_([copy], [segment.info.incarnation(1)])
    assert caught.value.reason == "damaged"


def test_a_file_that_is_too_short(nothing_left: None, spilled: Spilled) -> None:
    """As after an error of its disk."""
    segment, copy = spilled(2 * PAGE)
    os.ftruncate(copy.segment.fileno(), PAGE)
    with pytest.raises(RecordError, match=f"ends after {PAGE} bytes") as caught:
        MEMORY.raise_([copy], [segment.info.incarnation(1)])
    assert caught.value.reason == "unreadable"


@pytest.mark.parametrize("sizes", [[2 * PAGE], [PAGE, 2 * PAGE]], ids=["first", "later"])
def test_no_space_for_a_file(nothing_left: None, filled: Filled, spill: SpillDirectory, sizes: list[int]) -> None:
    """It is noticed before anything of a segment is copied, the copies of those before it are closed, and the error says what
    to do.
    """
    segments = [filled(nbytes) for nbytes in sizes]
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (PAGE, hard))
    try:
        with pytest.raises(CapabilityError, match=rf"{spill.path} has no space.*--spill-dir"):
            MEMORY.lower(segments, "file", spill)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        for segment in segments:
            segment.close()


def test_no_directory(nothing_left: None, filled: Filled) -> None:
    """The error names the option."""
    with closing(filled(PAGE)) as segment, pytest.raises(CapabilityError, match="--spill-dir"):
        MEMORY.lower([segment], "file")


def test_files_have_no_name(nothing_left: None, spilled: Spilled, tmp_path: Path) -> None:
    """Nobody else can open them, or give them one."""
    _, copy = spilled(PAGE)
    assert os.listdir(tmp_path) == []
    fd = copy.segment.fileno()
    with pytest.raises(OSError, match="No such file"):
        os.link(f"/proc/self/fd/{fd}", tmp_path / "named", src_dir_fd=fd, follow_symlinks=True)
    assert len(copy.digest) == DIGEST


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("/proc", r"its file system \(proc\) has no files without a name"),
        ("missing", "it is no directory: create it first"),
    ],
)
def test_a_directory_that_cannot_be_used(nothing_left: None, tmp_path: Path, path: str, why: str) -> None:
    """It is refused at once, with the reason."""
    with pytest.raises(ConfigurationError, match=why):
        SpillDirectory(str(tmp_path / path))


# The reader of files.


COUNT = 12


@pytest.fixture
def file(tmp_path: Path) -> Iterator[int]:
    """The descriptor of a file of :data:`COUNT` parts, each of its number."""
    path = tmp_path / "file"
    path.write_bytes(b"".join(bytes([number]) * STEP for number in range(COUNT)))
    fd = os.open(path, os.O_RDONLY)
    yield fd
    os.close(fd)


def readers() -> list[str]:
    """The names of the threads that read."""
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("shared-rpc-reader")]


def test_memory_without_a_descriptor(file: int) -> None:
    """It is written to at its address."""
    with closing(HOST.create(COUNT * STEP)) as segment:
        address = HOST.map(segment.fileno(), COUNT * STEP, "read_write")
        read_parts([Part(file, n * STEP, STEP, address + n * STEP) for n in range(COUNT)], host_carrier, lambda _: None)
        assert [HOST.view(address + n * STEP, STEP)[-1] for n in range(COUNT)] == list(range(COUNT))
        HOST.unmap(address, COUNT * STEP)


def test_an_exception_of_the_progress_callback_ends_the_reading(file: int) -> None:
    """What it raises is raised, once no thread reads any more."""

    def enough(_: Part) -> None:
        raise TimeoutError

    with closing(HOST.create(COUNT * STEP)) as segment:
        parts = [Part(file, n * STEP, STEP, n * STEP, segment.fileno()) for n in range(COUNT)]
        with pytest.raises(TimeoutError):
            read_parts(parts, host_carrier, enough, threads=2)
    assert readers() == []


def test_memory_that_cannot_be_written_to(file: int) -> None:
    """The error of a thread is raised."""
    with closing(HOST.create(STEP)) as segment:
        HOST.seal(segment.fileno())
        with pytest.raises(PermissionError):
            read_parts([Part(file, 0, STEP, 0, segment.fileno())], host_carrier, lambda _: None)
    assert readers() == []
