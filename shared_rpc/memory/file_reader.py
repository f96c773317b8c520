"""Parts of files that are read into shared memory, in several threads, with their digests computed on the way.

Files are read with read(2), and not mapped: a file that is truncated during the read is an error here, and would end the
process there (SIGBUS). Host memory is written with write(2): to pages that have not been touched it takes half the time of a
store, for which the kernel first clears each page in a fault of its own.
"""

from __future__ import annotations

import functools
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from queue import SimpleQueue
from typing import TYPE_CHECKING, NamedTuple, Protocol

import xxhash

from shared_rpc.memory.backends.host import HOST
from shared_rpc.memory.segments import gpu_support

if TYPE_CHECKING:
    from shared_rpc.memory.mapping import Mapping

#: Bytes that a thread reads at a time: they are in the processor's cache still when they are hashed and copied.
STEP = 4 << 20
#: Bytes of a part, which has a digest of its own; and bytes of a digest.
PART = 64 << 20
DIGEST = 16
#: Threads that read, where the caller does not say how many.
READERS = 8


class Part(NamedTuple):
    """Bytes of a file, and their place in memory.

    :param file: descriptor of the file.
    :param offset: of the bytes in it.
    :param target: an address; or the offset in host memory that has a descriptor.
    :param into: that descriptor, -1 for none.
    :param digest: xxh3_128 of the bytes, if it is known.
    """

    file: int
    offset: int
    nbytes: int
    target: int
    into: int = -1
    digest: bytes | None = None


class PartError(Exception):
    """A part that cannot be read, or whose bytes are not those of its digest.

    :param problem: None for a wrong digest; its ``errno`` is 0 where the file ends too early.
    """

    def __init__(self, part: Part, problem: OSError | None) -> None:
        super().__init__(part, problem)
        self.part = part
        self.problem = problem


class Sink(Protocol):
    """The way to memory of one kind, for one thread."""

    def buffer(self) -> memoryview:
        """Return memory for the next bytes; what was in it earlier is where it was to be."""

    def write(self, target: int, into: int, data: memoryview, /) -> None:
        """Have bytes that are in the buffer written to their place, see :class:`Part`."""

    def finish(self) -> None:
        """Wait until all bytes are in their places."""


class _HostSink:
    """Sink to host memory."""

    def __init__(self) -> None:
        self._buffer = memoryview(bytearray(STEP))

    def buffer(self) -> memoryview:
        return self._buffer

    def write(self, target: int, into: int, data: memoryview, /) -> None:
        if into >= 0:
            write_exactly(into, data, target)
        else:
            HOST.view(target, len(data))[:] = data

    def finish(self) -> None:
        pass


@contextmanager
def host_sink() -> Iterator[Sink]:
    """Yield a sink to host memory."""
    yield _HostSink()


def sink_to(device: str) -> Callable[[], AbstractContextManager[Sink]]:
    """Return what makes a thread's sink to the memory of a device.

    :param device: ``"cpu"`` or a GPU's id.
    """
    if device == "cpu":
        return host_sink
    with gpu_support("reading files into a GPU's memory"):
        from shared_rpc.memory.gpu_streams import gpu_sink
    return functools.partial(gpu_sink, device, STEP)


def place_in(mapping: Mapping, offset: int) -> tuple[int, int]:
    """Return a :class:`Part`'s ``target`` and ``into`` for an offset in a mapping, which is to outlive the reading."""
    if mapping.info.device == "cpu" and mapping.descriptor is not None:
        return offset, mapping.descriptor.fileno()
    return mapping.address + offset, -1


def read_parts(
    parts: Sequence[Part],
    sink: Callable[[], AbstractContextManager[Sink]],
    done: Callable[[Part], None],
    readers: int = READERS,
) -> None:
    """Read parts into memory.

    No thread reads any more when this returns or raises.

    :param sink: makes the sink of a thread, in that thread.
    :param done: called in this thread for each part whose bytes are in their place, in the order in which they came to be
        there; what it raises ends the reading after each thread's step.
    :raises PartError: if a part cannot be read, or is damaged.
    :raises OSError: if host memory cannot be written to, because there is too little.
    """
    todo, read = deque(parts), SimpleQueue[Part | BaseException]()
    stop = threading.Event()

    def work() -> None:
        try:
            with sink() as target:
                while todo and not stop.is_set():
                    try:
                        part = todo.popleft()
                    except IndexError:  # another thread has taken it
                        return
                    if _read(part, target, stop):
                        read.put(part)
        except BaseException as error:  # it is raised where the parts are waited for
            read.put(error)

    threads = [
        threading.Thread(target=work, name=f"shared-rpc-reader-{number}", daemon=True)
        for number in range(min(readers, len(parts)))
    ]
    started: list[threading.Thread] = []
    try:
        for thread in threads:
            thread.start()
            started.append(thread)
        for _ in parts:
            result = read.get()
            if isinstance(result, BaseException):
                raise result
            done(result)
    finally:
        stop.set()
        for thread in started:
            thread.join()


def _read(part: Part, sink: Sink, stop: threading.Event) -> bool:
    """Read one part; return False if the reading was to stop before its end."""
    found = xxhash.xxh3_128() if part.digest is not None else None
    start = 0
    while start < part.nbytes:
        if stop.is_set():
            return False
        buffer = sink.buffer()
        piece = buffer[: min(len(buffer), part.nbytes - start)]
        try:
            read_exactly(part.file, piece, part.offset + start)
        except OSError as error:
            raise PartError(part, error) from error
        if found is not None:
            found.update(piece)
        sink.write(part.target + start, part.into, piece)
        start += len(piece)
    sink.finish()
    if found is not None and found.digest() != part.digest:
        raise PartError(part, None)
    return True


def read_exactly(fd: int, piece: memoryview, offset: int) -> None:
    """Read so many bytes as are wanted.

    :raises OSError: also if there are fewer, with the number 0.
    """
    done = 0
    while done < len(piece):
        count = os.preadv(fd, [piece[done:]], offset + done)
        if not count:
            raise OSError(0, f"it ends after {offset + done} bytes")
        done += count


def write_exactly(fd: int, piece: memoryview, offset: int) -> None:
    """Write all bytes."""
    done = 0
    while done < len(piece):
        done += os.pwrite(fd, piece[done:], offset + done)


def digest(*pieces: bytes | memoryview) -> bytes:
    """Return the xxh3_128 of some bytes after one another."""
    found = xxhash.xxh3_128()
    for piece in pieces:
        found.update(piece)
    return found.digest()
