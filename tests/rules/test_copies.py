"""Copies of memory in lower tiers, and back: the same bytes, or an error that leaves nothing behind.

A GPU's memory is that of CUDA's driver, and that of one which is made of host memory.
"""

from __future__ import annotations

import gc
import os
import resource
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import msgspec
import pytest

from shared_rpc.errors import CapabilityError, ConfigurationError, RecordError
from shared_rpc.execution.device_memory import DeviceMemory
from shared_rpc.memory.backends.choice import backend_for
from shared_rpc.memory.backends.host import HOST
from shared_rpc.memory.copies import LowerCopy
from shared_rpc.memory.file_parts import DIGEST
from shared_rpc.memory.segments import Segment
from shared_rpc.memory.spill import SpillDirectory
from tests.kit import fake_driver
from tests.kit.blocking_memory import BlockingMemory
from tests.kit.gpu_memory import bytes_of, settle, write
from tests.kit.processes import eventually, open_fds

Filled = Callable[..., Segment]

PAGE = HOST.granularity
MIB = 1 << 20
#: Bytes of a part and of a step of it, in place of 64 and 4 MiB.
PART, STEP = 16 * MIB, MIB
CUDA = pytest.param("cuda", marks=pytest.mark.gpu)
on_host = pytest.mark.parametrize("device", ["cpu"], indirect=True)
on_gpus = pytest.mark.parametrize("device", ["fake", CUDA], indirect=True)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts that are copied quickly; each is a segment of other tests here."""
    monkeypatch.setattr("shared_rpc.memory.copies.PART", PART)
    monkeypatch.setattr("shared_rpc.memory.file_parts.STEP", STEP)


@pytest.fixture
def fake() -> Iterator[fake_driver.Driver]:
    """The driver of host memory, as seen by the library's modules."""
    with fake_driver.installed() as state:
        yield state


@pytest.fixture(params=["cpu", "fake", CUDA])
def device(request: pytest.FixtureRequest) -> str:
    """The host, or a GPU of a driver."""
    if request.param == "cpu":
        return "cpu"
    if request.param == "fake":
        request.getfixturevalue("fake")
    from shared_rpc.memory.backends.cuda import visible_gpus

    return visible_gpus()[0]


@pytest.fixture
def spill(tmp_path: Path) -> SpillDirectory:
    """A directory for files."""
    return SpillDirectory(str(tmp_path))


def create(device: str, nbytes: int) -> Segment:
    """Make memory of a device that can be copied."""
    return backend_for(device, *(["vmm"] if device != "cpu" else [])).create(nbytes)


@pytest.fixture
def memory(device: str, spill: SpillDirectory) -> BlockingMemory:
    """The memory of a server of the device."""
    made = BlockingMemory(DeviceMemory(device))
    # Resources that a driver keeps from the first copy on must exist before a test counts.
    with closing(create(device, 1)) as segment:
        for to in ("host", "file") if device != "cpu" else ("file",):
            [copy] = made.lower([segment], to, spill)
            made.raise_([copy], [segment.info])[0].close()
            copy.close()
    settle()
    return made


@pytest.fixture
def nothing_left(memory: BlockingMemory) -> Iterator[None]:
    """Fail if descriptors or mappings remain. Request it before fixtures that open any."""

    def known() -> dict[str, int]:
        gc.collect()
        settle()
        return fake_driver.STATE.counts()  # those of CUDA's driver are not counted

    before, fds = known(), open_fds()
    yield
    assert known() == before
    assert open_fds() <= fds


@pytest.fixture
def filled(device: str, nothing_left: None) -> Iterator[Filled]:
    """``filled(nbytes)`` makes memory of the device with unique bytes."""
    with ExitStack() as stack:

        def filled(nbytes: int) -> Segment:
            segment = stack.enter_context(closing(create(device, nbytes)))
            write(segment, os.urandom(nbytes))
            return segment

        yield filled


WAYS = [("cpu", "file"), ("fake", "host"), ("fake", "file")]
WAYS += [pytest.param("cuda", to, marks=pytest.mark.gpu) for to in ("host", "file")]


@pytest.mark.parametrize(("device", "to"), WAYS, indirect=["device"])
def test_copies_round_trip(memory: BlockingMemory, filled: Filled, spill: SpillDirectory, to: str) -> None:
    """From host memory and from a file, to separate memory, repeatedly: the copies are unchanged. Progress counts all bytes."""
    progress: list[tuple[int, int]] = []
    segments = [filled(nbytes) for nbytes in (2 * MIB, PART + 2 * MIB, 4 * MIB)]
    expected, total = [bytes_of(segment) for segment in segments], PART + 8 * MIB
    copies = memory.lower(segments, to, spill, lambda done, of: progress.append((done, of)))
    assert progress == sorted(set(progress)) and progress[-1] == (total, total)
    for segment, copy in zip(segments, copies, strict=True):
        assert (copy.tier, copy.segment.info.nbytes) == (to, segment.info.nbytes)
        assert copy.segment.info.mechanism == {"file": "file", "host": "host_vmm"}[to]
        assert copy.segment.info.id != segment.info.id
        write(segment, b"changed")
    for number in (1, 2):
        infos = [segment.info.incarnation(number) for segment in segments]
        again = memory.raise_(copies, infos)
        assert [one.info for one in again] == infos
        assert [bytes_of(one) for one in again] == expected
        for one in again:
            write(one, b"changed")
            one.close()
    for copy in copies:
        copy.close()


@pytest.mark.parametrize(("device", "to"), WAYS, indirect=["device"])
def test_cancelled_copies_stop(memory: BlockingMemory, filled: Filled, spill: SpillDirectory, to: str) -> None:
    """Between two steps, and nothing is left or mapped."""
    segments = [filled(2 * MIB) for _ in range(4)]
    assert memory.cancelled(segments, to, spill) == [2 * MIB]
    assert to == "file" or len(memory.gpu_copies) == 0


@on_host
def test_short_host_memory_is_refused(memory: BlockingMemory, filled: Filled, spill: SpillDirectory, tmp_path: Path) -> None:
    """Host memory from another process may be smaller than claimed: the error names the segment."""
    segment = filled(2 * MIB)
    segment.info = msgspec.structs.replace(segment.info, nbytes=3 * MIB)
    with pytest.raises(RecordError, match=f"segment {segment.info.id}: it ends after") as caught:
        memory.lower([segment], "file", spill)
    assert caught.value.reason == "unreadable"
    assert list(tmp_path.iterdir()) == []


def test_damage_is_detected(memory: BlockingMemory, filled: Filled, spill: SpillDirectory) -> None:
    """The error names the place; nothing is made of a damaged file."""
    segment, place = filled(PART + 2 * MIB), PART + 2 * MIB - 1
    [copy] = memory.lower([segment], "file", spill)
    os.pwrite(copy.segment.fileno(), bytes([os.pread(copy.segment.fileno(), 1, place)[0] ^ 1]), place)
    with closing(copy), pytest.raises(RecordError, match=f"bytes {PART} to {PART + 2 * MIB} are not") as caught:
        memory.raise_([copy], [segment.info.incarnation(1)])
    assert caught.value.reason == "damaged"


# Of the host.


@on_host
def test_restored_memory_is_sealed(memory: BlockingMemory, filled: Filled, spill: SpillDirectory) -> None:
    """Memory that is shared for reading cannot be mapped for writing after its restore either."""
    made = filled(PAGE)
    HOST.seal(made.fileno())
    segment = made.duplicate("read")
    [copy] = memory.lower([segment], "file", spill)
    [again] = memory.raise_([copy], [segment.info.incarnation(1)])
    with closing(segment), closing(again), closing(copy), pytest.raises(CapabilityError, match="shared read-only"):
        HOST.map(again.fileno(), PAGE, "read_write")


@on_host
def test_a_full_disk_is_reported(memory: BlockingMemory, filled: Filled, spill: SpillDirectory) -> None:
    """Before anything of a segment is copied; earlier copies are closed, and the error gives the remedy."""
    segments = [filled(PAGE), filled(2 * PAGE)]
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (PAGE, hard))
    try:
        with pytest.raises(CapabilityError, match=rf"{spill.path} has no space.*--spill-dir"):
            memory.lower(segments, "file", spill)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@on_host
def test_files_have_no_name(memory: BlockingMemory, filled: Filled, spill: SpillDirectory, tmp_path: Path) -> None:
    """Other processes can neither open them nor link them."""
    [copy] = memory.lower([filled(PAGE)], "file", spill)
    assert os.listdir(tmp_path) == []
    fd = copy.segment.fileno()
    with closing(copy), pytest.raises(OSError, match="No such file"):
        os.link(f"/proc/self/fd/{fd}", tmp_path / "named", src_dir_fd=fd, follow_symlinks=True)
    assert len(copy.digest) == DIGEST


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("/proc", "its file system has no files without a name|Permission denied"),  # by root, and by others
        ("missing", "it is no directory: create it first"),
    ],
)
def test_an_unusable_directory_is_refused(tmp_path: Path, path: str, why: str) -> None:
    """At once, with the reason."""
    with pytest.raises(ConfigurationError, match=why):
        SpillDirectory(str(tmp_path / path))


# Of a GPU.


def mapped(memory: BlockingMemory, count: int) -> None:
    """Check the number of mapped copies, once closed ones are unmapped."""
    eventually(lambda: len(memory.gpu_copies) <= count, what=f"{count} copies mapped")
    assert len(memory.gpu_copies) == count


@pytest.fixture(params=["driver", "kernel"])
def host_memory(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Host memory of a driver, and of the kernel, if the driver neither has nor pins any."""
    if request.param == "driver":
        return
    from cuda.bindings import driver

    create = driver.cuMemCreate

    def refuse(size: int, allocation: Any, flags: int) -> tuple[Any, ...]:
        if allocation.location.type == driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_HOST_NUMA:
            return driver.CUresult.CUDA_ERROR_NOT_SUPPORTED, None
        return create(size, allocation, flags)

    monkeypatch.setattr(driver, "cuMemCreate", refuse)
    monkeypatch.setattr(driver, "cuMemHostRegister", lambda *_: (driver.CUresult.CUDA_ERROR_NOT_SUPPORTED,))


@on_gpus
def test_memory_of_an_earlier_copy_is_reused(memory: BlockingMemory, filled: Filled, host_memory: None) -> None:
    """In place: the second copy allocates nothing."""
    segment = filled(PART + 2 * MIB)
    [copy] = memory.lower([segment], "host")
    write(segment, os.urandom(2 * MIB))
    mapped(memory, 1)
    [later] = memory.lower([segment], "host", into={segment.info.id: copy.segment})
    assert later.segment.info == copy.segment.info
    mapped(memory, 1)
    copy.close()
    [again] = memory.raise_([later], [segment.info.incarnation(1)])
    with closing(again), closing(later):
        assert bytes_of(again) == bytes_of(segment)


@on_gpus
def test_copies_of_another_process_are_mapped(memory: BlockingMemory, filled: Filled) -> None:
    """As after a restart: on demand, and unmapped with the copy."""
    segment = filled(2 * MIB)
    [copy] = memory.lower([segment], "host")
    kept = LowerCopy(Segment.owning(copy.segment.info, os.dup(copy.segment.fileno())), "host")
    copy.close()
    mapped(memory, 0)
    memory.raise_([kept], [segment.info.incarnation(1)])[0].close()
    mapped(memory, 1)
    kept.close()
    mapped(memory, 0)


@pytest.mark.parametrize("device", ["fake"], indirect=True)
@pytest.mark.parametrize("call", ["cuMemCreate", "cuMemcpyAsync", "cuMemMap"])
def test_errors_of_the_driver_are_reported(fake: fake_driver.Driver, memory: BlockingMemory, filled: Filled, call: str) -> None:
    """With the GPU. Memory of the kernel replaces no full one: it would have to kill a process later, when it is written."""
    segment = filled(2 * MIB)
    fake.refuses[call] = fake_driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY
    with pytest.raises(CapabilityError, match=rf"{segment.info.device}.*CUDA_ERROR_OUT_OF_MEMORY"):
        memory.lower([segment], "host")
    fake.refuses.clear()
    assert len(memory.gpu_copies) == 0
