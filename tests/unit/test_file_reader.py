"""Parts of files that are read into memory by several threads."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from shared_rpc.memory.backends.host import HOST
from shared_rpc.memory.file_reader import STEP, Part, host_sink, read_parts

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
        read_parts([Part(file, n * STEP, STEP, address + n * STEP) for n in range(COUNT)], host_sink, lambda _: None)
        assert [HOST.view(address + n * STEP, STEP)[-1] for n in range(COUNT)] == list(range(COUNT))
        HOST.unmap(address, COUNT * STEP)


def test_an_exception_of_the_progress_callback_ends_the_reading(file: int) -> None:
    """What it raises is raised, once no thread reads any more."""

    def enough(_: Part) -> None:
        raise TimeoutError

    with closing(HOST.create(COUNT * STEP)) as segment:
        parts = [Part(file, n * STEP, STEP, n * STEP, segment.fileno()) for n in range(COUNT)]
        with pytest.raises(TimeoutError):
            read_parts(parts, host_sink, enough, readers=2)
    assert readers() == []


def test_memory_that_cannot_be_written_to(file: int) -> None:
    """The error of a thread is raised."""
    with closing(HOST.create(STEP)) as segment:
        HOST.seal(segment.fileno())
        with pytest.raises(PermissionError):
            read_parts([Part(file, 0, STEP, 0, segment.fileno())], host_sink, lambda _: None)
    assert readers() == []
