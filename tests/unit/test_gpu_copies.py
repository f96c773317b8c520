"""Copies of a GPU's memory in host memory and in files, by CUDA's driver and by one that is made of host memory."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

from shared_rpc.errors import CapabilityError, RecordError
from shared_rpc.execution.device_memory import DeviceMemory
from shared_rpc.memory.backends.choice import backend_for
from shared_rpc.memory.copies import LowerCopy
from shared_rpc.memory.file_parts import PART
from shared_rpc.memory.segments import Segment
from shared_rpc.memory.spill import SpillDirectory
from tests.kit import fake_driver
from tests.kit.blocking_memory import BlockingMemory
from tests.kit.gpu_memory import bytes_of, settle, write
from tests.kit.processes import eventually, open_fds

Filled = Callable[..., Segment]

MIB = 1 << 20


@pytest.fixture
def fake() -> Iterator[fake_driver.Driver]:
    """The driver of host memory, as the library's modules meet it."""
    with fake_driver.installed() as state:
        yield state


@pytest.fixture(params=["fake", pytest.param("cuda", marks=pytest.mark.gpu)])
def gpus(request: pytest.FixtureRequest) -> tuple[str, ...]:
    """The ids of the GPUs."""
    if request.param == "fake":
        request.getfixturevalue("fake")
    from shared_rpc.memory.backends.cuda import visible_gpus

    return visible_gpus()


@pytest.fixture
def memory(gpus: tuple[str, ...], spill: SpillDirectory) -> BlockingMemory:
    """The memory of a server of the first GPU."""
    made = BlockingMemory(DeviceMemory(gpus[0]))
    # What a driver opens for the first copy, and keeps, is there before a test counts.
    for gpu in gpus[:2]:
        with closing(backend_for(gpu, "vmm").create(1)) as segment:
            for to in ("host", "file"):
                [copy] = made.lower([segment], to, spill)
                made.raise_([copy], [segment.info])[0].close()
                copy.close()
    settle()
    return made


@pytest.fixture
def spill(tmp_path: Path) -> SpillDirectory:
    """A directory for files."""
    return SpillDirectory(str(tmp_path))


@pytest.fixture
def nothing_left(memory: BlockingMemory) -> Iterator[None]:
    """Fails if descriptors or mappings remain. Request it before what opens them."""

    def known() -> dict[str, int]:
        gc.collect()
        settle()
        return fake_driver.STATE.counts()  # of CUDA's driver nobody counts

    before, fds = known(), open_fds()
    yield
    assert known() == before
    assert open_fds() <= fds


@pytest.fixture
def filled(gpus: tuple[str, ...], nothing_left: None) -> Iterator[Callable[..., Segment]]:
    """``filled(nbytes, gpu)`` is memory of a GPU with bytes that no other has."""
    with ExitStack() as stack:

        def filled(nbytes: int, gpu: int = 0) -> Segment:
            segment = backend_for(gpus[gpu], "vmm").create(nbytes)
            stack.callback(segment.close)
            write(segment, os.urandom(nbytes))
            return segment

        yield filled


@pytest.mark.parametrize("to", ["host", "file"])
@pytest.mark.parametrize("nbytes", [2 * MIB, PART + 2 * MIB, 2 * PART + 4 * MIB])
def test_bytes_come_back(memory: BlockingMemory, filled: Filled, spill: SpillDirectory, to: str, nbytes: int) -> None:
    """From host memory and from a file, to memory of its own."""
    segment = filled(nbytes)
    [copy] = memory.lower([segment], to, spill)
    assert (copy.tier, copy.segment.info.nbytes) == (to, segment.info.nbytes)
    assert to == "file" or (copy.segment.info.mechanism, copy.segment.info.device) == ("host_vmm", segment.info.device)
    assert copy.segment.info.id != segment.info.id
    expected = bytes_of(segment)
    write(segment, b"changed")
    [again] = memory.raise_([copy], [segment.info.incarnation(1)])
    with closing(again):
        assert again.info == segment.info.incarnation(1)
        assert bytes_of(again) == expected
    copy.close()


def test_host_memory_of_an_earlier_copy_is_written_again(memory: BlockingMemory, filled: Filled) -> None:
    """Where it is mapped: the second copy is the first one's memory, and makes none."""
    segments = [filled(2 * MIB), filled(4 * MIB)]
    copies = memory.lower(segments, "host")
    for segment in segments:
        write(segment, os.urandom(segment.info.nbytes))
    into = {segment.info.id: copy.segment for segment, copy in zip(segments, copies, strict=True)}
    mapped = len(memory.gpu_copies)
    later = memory.lower(segments, "host", into=into)
    assert [one.segment.info for one in later] == [one.segment.info for one in copies]
    assert len(memory.gpu_copies) == mapped
    for one in copies:
        one.close()
    again = memory.raise_(later, [segment.info.incarnation(1) for segment in segments])
    assert [bytes_of(one) for one in again] == [bytes_of(segment) for segment in segments]
    for one in (*later, *again):
        one.close()


def test_up_in_two_steps(memory: BlockingMemory, filled: Filled, spill: SpillDirectory) -> None:
    """A file becomes host memory, and that a segment."""
    segment = filled(PART + 2 * MIB)
    [host] = memory.lower([segment], "host")
    [file] = memory.lower([host.segment], "file", spill)
    [up] = memory.raise_([file], [host.segment.info.incarnation(1)])
    back = LowerCopy(up, "host")
    [again] = memory.raise_([back], [segment.info.incarnation(1)])
    assert bytes_of(again) == bytes_of(segment)
    for one in (host, file, back, again):
        one.close()


def test_many_segments(memory: BlockingMemory, filled: Filled) -> None:
    """Each comes back as itself, and progress is told of all."""
    told: list[tuple[int, int]] = []
    segments = [filled(2 * MIB * count) for count in (1, 3, 2, 1, 4)]
    total = sum(segment.info.nbytes for segment in segments)
    copies = memory.lower(segments, "host", None, lambda done, of: told.append((done, of)))
    infos = [segment.info.incarnation(1) for segment in segments]
    again = memory.raise_(copies, infos)
    assert [one.info for one in again] == infos
    assert [bytes_of(one) for one in again] == [bytes_of(one) for one in segments]
    assert [of for _, of in told] == [total] * 5
    assert [done for done, _ in told] == sorted({done for done, _ in told})
    assert told[-1] == (total, total)
    for one in (*copies, *again):
        one.close()


def test_segments_of_two_gpus_and_of_the_host(
    gpus: tuple[str, ...], memory: BlockingMemory, filled: Filled, spill: SpillDirectory
) -> None:
    """As an object has them that is on several devices: each is copied in its own way."""
    if len(gpus) < 2:
        pytest.skip("needs two GPUs")
    with closing(backend_for("cpu").create(4096)) as on_host:
        write(on_host, b"host")
        segments = [filled(2 * MIB), on_host, filled(4 * MIB, gpu=1)]
        for to in ("host", "file"):
            copies = memory.lower(segments, to, spill)
            again = memory.raise_(copies, [segment.info.incarnation(1) for segment in segments])
            assert [bytes_of(one) for one in again] == [bytes_of(one) for one in segments]
            for one in (*copies, *again):
                one.close()


def mapped(memory: BlockingMemory, count: int) -> None:
    """Check how many copies are mapped, as soon as those that are closed are unmapped."""
    eventually(lambda: len(memory.gpu_copies) <= count, what=f"{count} copies mapped")
    assert len(memory.gpu_copies) == count


def test_host_memory_stays_mapped_until_its_copy_is_closed(memory: BlockingMemory, filled: Filled) -> None:
    """Mapping takes as long as copying. Whoever else has the copy may close it before."""
    segment = filled(2 * MIB)
    [copy] = memory.lower([segment], "host")
    mapped(memory, 1)
    for _ in range(2):
        lent = LowerCopy(copy.segment.duplicate(), "host")
        memory.raise_([lent], [segment.info.incarnation(1)])[0].close()
        lent.close()
        settle()
        mapped(memory, 1)
    copy.close()
    mapped(memory, 0)


def test_a_copy_that_another_process_has_made(memory: BlockingMemory, filled: Filled) -> None:
    """As after a restart: it is mapped when it is needed, and unmapped with the copy."""
    segment = filled(2 * MIB)
    [copy] = memory.lower([segment], "host")
    kept = LowerCopy(Segment.owning(copy.segment.info, os.dup(copy.segment.fileno())), "host")
    copy.close()
    mapped(memory, 0)
    memory.raise_([kept], [segment.info.incarnation(1)])[0].close()
    mapped(memory, 1)
    kept.close()
    mapped(memory, 0)


@pytest.mark.parametrize("to", ["host", "file"])
def test_a_copy_that_is_not_wanted_any_more(memory: BlockingMemory, filled: Filled, spill: SpillDirectory, to: str) -> None:
    """It ends between two steps, and nothing is left or mapped."""
    segments = [filled(2 * MIB) for _ in range(4)]
    assert memory.cancelled(segments, to, spill) == [2 * MIB]
    assert len(memory.gpu_copies) == 0


def test_damage_is_noticed(memory: BlockingMemory, filled: Filled, spill: SpillDirectory) -> None:
    """Before a GPU's segment is made of it."""
    segment = filled(PART + 2 * MIB)
    [copy] = memory.lower([segment], "file", spill)
    found = os.pread(copy.segment.fileno(), 1, PART + 7)
    os.pwrite(copy.segment.fileno(), bytes([found[0] ^ 1]), PART + 7)
    with pytest.raises(RecordError, match=f"bytes {PART} to {PART + 2 * MIB} are not"), closing(copy):
        memory.raise_([copy], [segment.info.incarnation(1)])


def test_a_full_gpu(memory: BlockingMemory, filled: Filled) -> None:
    """The copy is as it was, and the next attempt can succeed."""
    import msgspec

    segment = filled(2 * MIB)
    [copy] = memory.lower([segment], "host")
    large = msgspec.structs.replace(segment.info, id="0", nbytes=1 << 50)
    with pytest.raises(CapabilityError, match=rf"cannot allocate {1 << 50} bytes on GPU {segment.info.device}"):
        memory.raise_([copy], [large])
    [again] = memory.raise_([copy], [segment.info.incarnation(1)])
    with closing(again), closing(copy):
        assert bytes_of(again) == bytes_of(segment)


@pytest.mark.parametrize("pinned", [True, False])
def test_where_the_driver_makes_no_host_memory(
    memory: BlockingMemory, filled: Filled, monkeypatch: pytest.MonkeyPatch, pinned: bool
) -> None:
    """The kernel's is a copy like any other, also where the driver does not pin it."""
    from cuda.bindings import driver

    create = driver.cuMemCreate

    def refuse(size: int, allocation: Any, flags: int) -> tuple[Any, ...]:
        if allocation.location.type == driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_HOST_NUMA:
            return driver.CUresult.CUDA_ERROR_NOT_SUPPORTED, None
        return create(size, allocation, flags)

    monkeypatch.setattr(driver, "cuMemCreate", refuse)
    if not pinned:
        monkeypatch.setattr(driver, "cuMemHostRegister", lambda *_: (driver.CUresult.CUDA_ERROR_NOT_SUPPORTED,))
    segment = filled(PART + 2 * MIB)
    [copy] = memory.lower([segment], "host")
    assert (copy.segment.info.mechanism, copy.segment.info.device) == ("memfd", "cpu")
    assert len(memory.gpu_copies) == 1
    [again] = memory.raise_([copy], [segment.info.incarnation(1)])
    with closing(again):
        assert bytes_of(again) == bytes_of(segment)
    write(segment, os.urandom(2 * MIB))
    [later] = memory.lower([segment], "host", into={segment.info.id: copy.segment})
    assert (later.segment.info, later.segment.fileno()) == (copy.segment.info, copy.segment.fileno())
    [again] = memory.raise_([later], [segment.info.incarnation(2)])
    with closing(again):
        assert bytes_of(again) == bytes_of(segment)
    later.close()
    copy.close()


def test_a_host_without_memory_is_told(fake: fake_driver.Driver, memory: BlockingMemory, filled: Filled) -> None:
    """The kernel is not asked then: it would have to end a process for memory that is written later."""
    segment = filled(2 * MIB)
    fake.refuses["cuMemCreate"] = fake_driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY
    with pytest.raises(CapabilityError, match=r"in host memory of GPU .*CUDA_ERROR_OUT_OF_MEMORY"):
        memory.lower([segment], "host")
    fake.refuses.clear()


@pytest.mark.parametrize("call", ["cuMemcpyAsync", "cuStreamSynchronize", "cuMemMap"])
def test_a_driver_that_fails(fake: fake_driver.Driver, memory: BlockingMemory, filled: Filled, call: str) -> None:
    """The error names it and the GPU; nothing is left."""
    segment = filled(2 * MIB)
    fake.refuses[call] = fake_driver.CUresult.CUDA_ERROR_INVALID_VALUE
    with pytest.raises(CapabilityError, match=rf"{segment.info.device}.*CUDA_ERROR_INVALID_VALUE"):
        memory.lower([segment], "host")
    fake.refuses.clear()
    assert len(memory.gpu_copies) == 0
