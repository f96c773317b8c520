"""Parts of files that are read into shared memory and written from it, in several threads, digests computed on the way.

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

#: Bytes that a thread carries at a time: they are in the processor's cache still when they are hashed and copied.
STEP = 4 << 20
#: Bytes of a part, which has a digest of its own; and bytes of a digest.
PART = 64 << 20
DIGEST = 16
#: Threads that carry parts, where the caller does not say how many.
THREADS = 8


class Part(NamedTuple):
    """Bytes of a file, and their place in memory.

    :param file: descriptor of the file.
    :param offset: of the bytes in it.
    :param place: an address; or the offset in host memory that has a descriptor.
    :param memory: that descriptor, -1 for none.
    :param digest: xxh3_128 of the bytes, if it is known.
    """

    file: int
    offset: int
    nbytes: int
    place: int
    memory: int = -1
    digest: bytes | None = None


class PartError(Exception):
    """A part whose file cannot be read or written, or whose bytes are not those of its digest.

    :param problem: None for a wrong digest; its ``errno`` is 0 where the file ends too early.
    """

    def __init__(self, part: Part, problem: OSError | None) -> None:
        super().__init__(part, problem)
        self.part = part
        self.problem = problem


class SourceError(PartError):
    """A part that cannot be written, because the memory that it is to have the bytes of cannot be read."""


class Carrier(Protocol):
    """The way between files and memory of one kind, for one thread."""

    def buffer(self) -> memoryview:
        """Return memory for the next bytes of a file; what was in it earlier is where it was to be."""

    def store(self, place: int, memory: int, data: memoryview, /) -> None:
        """Have bytes that are in the buffer written to their place, see :class:`Part`."""

    def finish(self) -> None:
        """Wait until all bytes are in their places."""

    def pieces(self, place: int, memory: int, nbytes: int, /) -> Iterator[memoryview]:
        """Yield bytes in memory piece by piece. A piece is valid until the next one."""


class _HostCarrier:
    """The way between files and host memory."""

    def __init__(self) -> None:
        self._buffer = memoryview(bytearray(STEP))

    def buffer(self) -> memoryview:
        return self._buffer

    def store(self, place: int, memory: int, data: memoryview, /) -> None:
        if memory >= 0:
            write_exactly(memory, data, place)
        else:
            HOST.view(place, len(data))[:] = data

    def finish(self) -> None:
        pass

    def pieces(self, place: int, memory: int, nbytes: int, /) -> Iterator[memoryview]:
        for start in range(0, nbytes, STEP):
            piece = self._buffer[: min(STEP, nbytes - start)]
            if memory >= 0:
                read_exactly(memory, piece, place + start)
            else:
                piece[:] = HOST.view(place + start, len(piece))
            yield piece


@contextmanager
def host_carrier() -> Iterator[Carrier]:
    """Yield the way to host memory."""
    yield _HostCarrier()


def carrier_of(device: str) -> Callable[[], AbstractContextManager[Carrier]]:
    """Return what makes a thread's way to the memory of a device.

    :param device: ``"cpu"`` or a GPU's id.
    """
    if device == "cpu":
        return host_carrier
    with gpu_support("carrying files from and to a GPU's memory"):
        from shared_rpc.memory.gpu_streams import gpu_carrier
    return functools.partial(gpu_carrier, device, STEP)


def place_in(mapping: Mapping, offset: int) -> tuple[int, int]:
    """Return a :class:`Part`'s ``place`` and ``memory`` for an offset in a mapping, which is to outlive the carrying."""
    if mapping.info.device == "cpu" and mapping.descriptor is not None:
        return offset, mapping.descriptor.fileno()
    return mapping.address + offset, -1


def read_parts(
    parts: Sequence[Part],
    carrier: Callable[[], AbstractContextManager[Carrier]],
    done: Callable[[Part], None],
    threads: int = THREADS,
) -> None:
    """Read parts of files into memory.

    No thread reads any more when this returns or raises.

    :param carrier: makes the way of a thread to the memory, in that thread.
    :param done: called in this thread for each part whose bytes are in their place, in the order in which they came to be
        there; what it raises ends the reading after each thread's step.
    :raises PartError: if a part cannot be read, or is damaged.
    :raises OSError: if host memory cannot be written to, because there is too little.
    """
    _carry(parts, carrier, _read, lambda part, _: done(part), threads)


def write_parts(
    parts: Sequence[Part],
    carrier: Callable[[], AbstractContextManager[Carrier]],
    done: Callable[[Part, bytes], None],
    threads: int = THREADS,
) -> None:
    """Write bytes in memory to parts of files; ``digest`` of the parts is ignored. The rest is as with :func:`read_parts`.

    :param done: called with each part that is written, and the digest of the bytes that were.
    :raises PartError: if a part cannot be written; :class:`SourceError` if its memory cannot be read.
    """
    _carry(parts, carrier, _write, done, threads)


def _carry(
    parts: Sequence[Part],
    carrier: Callable[[], AbstractContextManager[Carrier]],
    carry: Callable[[Part, Carrier, threading.Event], bytes | None],
    done: Callable[[Part, bytes], None],
    count: int,
) -> None:
    """Carry parts in several threads.

    :param carry: carries one, and returns the digest of its bytes, or None if it was to stop before the end.
    """
    todo, carried = deque(parts), SimpleQueue[tuple[Part, bytes] | BaseException]()
    stop = threading.Event()

    def work() -> None:
        try:
            with carrier() as way:
                while todo and not stop.is_set():
                    try:
                        part = todo.popleft()
                    except IndexError:  # another thread has taken it
                        return
                    digest = carry(part, way, stop)
                    if digest is not None:
                        carried.put((part, digest))
        except BaseException as error:  # it is raised where the parts are waited for
            carried.put(error)

    threads = [
        threading.Thread(target=work, name=f"shared-rpc-carrier-{number}", daemon=True)
        for number in range(min(count, len(parts)))
    ]
    started: list[threading.Thread] = []
    try:
        for thread in threads:
            thread.start()
            started.append(thread)
        for _ in parts:
            result = carried.get()
            if isinstance(result, BaseException):
                raise result
            done(*result)
    finally:
        stop.set()
        for thread in started:
            thread.join()


def _read(part: Part, carrier: Carrier, stop: threading.Event) -> bytes | None:
    """Read one part; its digest is computed where one is expected."""
    found = xxhash.xxh3_128() if part.digest is not None else None
    for start in range(0, part.nbytes, STEP):
        if stop.is_set():
            return None
        piece = carrier.buffer()[: min(STEP, part.nbytes - start)]
        try:
            read_exactly(part.file, piece, part.offset + start)
        except OSError as error:
            raise PartError(part, error) from error
        if found is not None:
            found.update(piece)
        carrier.store(part.place + start, part.memory, piece)
    carrier.finish()
    if found is None:
        return b""
    if found.digest() != part.digest:
        raise PartError(part, None)
    return found.digest()


def _write(part: Part, carrier: Carrier, stop: threading.Event) -> bytes | None:
    """Write one part. The digest is that of the very bytes that are written: others may write to the memory meanwhile."""
    found, offset = xxhash.xxh3_128(), part.offset
    pieces = carrier.pieces(part.place, part.memory, part.nbytes)
    while True:
        try:
            piece = next(pieces, None)
        except OSError as error:
            raise SourceError(part, error) from error
        if piece is None:
            return found.digest()
        if stop.is_set():
            return None
        found.update(piece)
        try:
            write_exactly(part.file, piece, offset)
        except OSError as error:
            raise PartError(part, error) from error
        offset += len(piece)


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
