"""Parts of files that are read into shared memory and written from it, in several threads, with digests.

Files are read with read(2), and not mapped: a truncated file is an error here, and would end the process there (SIGBUS). Host
memory is written with write(2): for untouched pages it takes half the time of stores, for which the kernel first clears
each page in a fault.
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

from shared_rpc.memory.backends.host import HOST, write_exactly
from shared_rpc.memory.segments import gpu_support

if TYPE_CHECKING:
    from shared_rpc.memory.mapping import Mapping

#: Bytes that a thread copies to or from a GPU at a time, and bytes that it reads and hashes at a time: these are still in the
#: core's cache when they are hashed (16 GB to an H200: 0.64 s, and 0.75 s with 4 MiB). Smaller steps take longer, because the
#: threads wait for the interpreter's lock.
STEP = 4 << 20
_HASHED = 2 << 20
#: Bytes of a part, which has its own digest; and bytes of a digest.
PART = 64 << 20
DIGEST = 16
#: Bytes after which a thread waits until its parts are in their places, and reports them: waiting for each small one would end
#: the overlap of reading and copying.
_FINISHED = 16 << 20
#: Number of threads: reading with digests is limited by the cores, waiting for a disk is not, and more than 12 threads
#: wait for the interpreter's lock (measured with 16 cores and a GPU).
_THREADS = min(max(8, len(os.sched_getaffinity(0))), 12)


class Part(NamedTuple):
    """A range of a file, and its place in memory.

    :param file: descriptor of the file.
    :param offset: offset of the range in the file.
    :param place: an address; or the offset in host memory with a descriptor.
    :param memory: that descriptor, -1 for none.
    :param digest: xxh3_128 of the bytes, if known.
    """

    file: int
    offset: int
    nbytes: int
    place: int
    memory: int = -1
    digest: bytes | None = None


class PartError(Exception):
    """A part whose file cannot be read or written, or whose bytes do not match the digest.

    :param problem: None for a wrong digest; its ``errno`` is 0 if the file ends too early.
    """

    def __init__(self, part: Part, problem: OSError | None) -> None:
        super().__init__(part, problem)
        self.part = part
        self.problem = problem


class SourceError(PartError):
    """A part that cannot be written, because its source memory cannot be read."""


class Carrier(Protocol):
    """Transfers between files and memory of one kind, for one thread."""

    def buffer(self) -> memoryview:
        """Return memory for the next bytes of a file; its earlier content was transferred."""

    def store(self, place: int, memory: int, data: memoryview, /) -> None:
        """Write bytes in the buffer to their place, see :class:`Part`."""

    def finish(self) -> None:
        """Wait until all bytes are in their places."""

    def pieces(self, place: int, memory: int, nbytes: int, /) -> Iterator[memoryview]:
        """Yield bytes in memory piece by piece. A piece is valid until the next one."""


class _HostCarrier:
    """Transfers between files and host memory."""

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
    """Yield a carrier for host memory."""
    yield _HostCarrier()


def carrier_of(device: str) -> Callable[[], AbstractContextManager[Carrier]]:
    """Return the factory of a thread's carrier for the memory of a device.

    :param device: ``"cpu"`` or a GPU's id.
    """
    if device == "cpu":
        return host_carrier
    with gpu_support("carrying files from and to a GPU's memory"):
        from shared_rpc.memory.gpu_streams import gpu_carrier
    return functools.partial(gpu_carrier, device, STEP)


def place_in(mapping: Mapping, offset: int) -> tuple[int, int]:
    """Return a :class:`Part`'s ``place`` and ``memory`` for an offset in a mapping, which must outlive the transfer."""
    if mapping.info.device == "cpu" and mapping.descriptor is not None:
        return offset, mapping.descriptor.fileno()
    return mapping.address + offset, -1


def read_parts(
    parts: Sequence[Part],
    carrier: Callable[[], AbstractContextManager[Carrier]],
    done: Callable[[Part], None],
) -> None:
    """Read parts of files into memory.

    No thread reads any more on return or error.

    :param carrier: creates a thread's carrier, in that thread.
    :param done: called in this thread for each transferred part, in the order of completion; its exception ends the
        reading after each thread's step.
    :raises PartError: if a part cannot be read, or is damaged.
    :raises OSError: if host memory cannot be written to, because there is too little.
    """
    _carry(parts, carrier, _read, lambda part, _: done(part))


def write_parts(
    parts: Sequence[Part],
    carrier: Callable[[], AbstractContextManager[Carrier]],
    done: Callable[[Part, bytes], None],
) -> None:
    """Write bytes in memory to parts of files; ``digest`` of the parts is ignored. Otherwise like :func:`read_parts`.

    :param done: called with each written part, and the digest of its written bytes.
    :raises PartError: if a part cannot be written; :class:`SourceError` if its memory cannot be read.
    """
    _carry(parts, carrier, _write, done)


def _carry(
    parts: Sequence[Part],
    carrier: Callable[[], AbstractContextManager[Carrier]],
    carry: Callable[[Part, Carrier, threading.Event], bytes | None],
    done: Callable[[Part, bytes], None],
) -> None:
    """Transfer parts in several threads.

    :param carry: transfers one, and returns the digest of its bytes, or None if it was stopped before the end.
    """
    todo, carried = deque(parts), SimpleQueue[tuple[Part, bytes] | BaseException]()
    stop = threading.Event()

    def work() -> None:
        coming: list[tuple[Part, bytes]] = []  # their last bytes may still be transferred

        def finish(way: Carrier) -> None:
            way.finish()
            while coming:
                carried.put(coming.pop())

        try:
            with carrier() as way:
                while todo and not stop.is_set():
                    try:
                        part = todo.popleft()
                    except IndexError:  # another thread has taken it
                        break
                    digest = carry(part, way, stop)
                    if digest is None:
                        return
                    coming.append((part, digest))
                    if sum(part.nbytes for part, _ in coming) >= _FINISHED:
                        finish(way)
                finish(way)
        except BaseException as error:  # it is raised by the thread that waits for the parts
            carried.put(error)

    threads = [
        threading.Thread(target=work, name=f"shared-rpc-carrier-{number}", daemon=True)
        for number in range(min(_THREADS, len(parts)))
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
    """Read one part; compute its digest if one is expected."""
    found = xxhash.xxh3_128() if part.digest is not None else None
    for start in range(0, part.nbytes, STEP):
        if stop.is_set():
            return None
        buffer = carrier.buffer()[: min(STEP, part.nbytes - start)]
        for at in range(0, len(buffer), _HASHED):
            piece = buffer[at : at + _HASHED]
            try:
                read_exactly(part.file, piece, part.offset + start + at)
            except OSError as error:
                raise PartError(part, error) from error
            if found is not None:
                found.update(piece)
        carrier.store(part.place + start, part.memory, buffer)
    if found is None:
        return b""
    if found.digest() != part.digest:
        raise PartError(part, None)
    return found.digest()


def _write(part: Part, carrier: Carrier, stop: threading.Event) -> bytes | None:
    """Write one part. The digest is that of the bytes written: other processes may write to the memory at the same time."""
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
    """Fill a buffer from a file.

    :raises OSError: also if the file is too short, with errno 0.
    """
    done = 0
    while done < len(piece):
        count = os.preadv(fd, [piece[done:]], offset + done)
        if not count:
            raise OSError(0, f"it ends after {offset + done} bytes")
        done += count


def digest(*pieces: bytes | memoryview) -> bytes:
    """Return the xxh3_128 of concatenated bytes."""
    found = xxhash.xxh3_128()
    for piece in pieces:
        found.update(piece)
    return found.digest()
