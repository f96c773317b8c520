"""Streams of a GPU for copies, separate from torch's: by the driver alone, for processes without
torch."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import NamedTuple

from cuda.bindings import driver

from shared_rpc.memory.backends.cuda import CudaBackend, DriverError, check, relaxed_captures
from shared_rpc.memory.backends.host import HOST

#: Number of queued copies: while one runs, the next one is prepared or read.
STREAMS = 2
#: CU_MEMHOSTREGISTER_PORTABLE and CU_MEMHOSTALLOC_PORTABLE (cuda.h): every context of the process may use the memory.
PORTABLE = 1


@functools.cache
def gpu(uuid: str) -> CudaBackend:
    """Return a GPU, whose context this process has."""
    return CudaBackend(uuid)


class _Buffer(NamedTuple):
    """Host memory pinned by the driver, between a GPU and a file."""

    address: int
    view: memoryview


class Stream:
    """A stream of a GPU, with the resources of its queued copy. The GPU's context is current.

    :param nbytes: size of its buffer.
    """

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self.handle = check(driver.cuStreamCreate(driver.CUstream_flags.CU_STREAM_NON_BLOCKING))
        self._held: list[Callable[[], None]] = []
        self._then: Callable[[], None] | None = None
        self._buffer: _Buffer | None = None

    @property
    def buffer(self) -> _Buffer:
        """Memory between the GPU and a file."""
        if self._buffer is None:
            address = int(check(driver.cuMemHostAlloc(self._nbytes, PORTABLE)))
            self._buffer = _Buffer(address, HOST.view(address, self._nbytes))
        return self._buffer

    def copy(self, target: int, source: int, nbytes: int) -> None:
        """Queue a copy between any two kinds of memory."""
        check(driver.cuMemcpyAsync(target, source, nbytes, self.handle))

    def wait(self) -> None:
        """Wait for the queued copies."""
        check(driver.cuStreamSynchronize(self.handle))

    def holds(self, release: Callable[[], None]) -> None:
        """Call a function when the queued copies have ended."""
        self._held.append(release)

    def then(self, call: Callable[[], None]) -> None:
        """Call a function when the queued copies have succeeded."""
        self._then = call

    def finish(self) -> None:
        """Wait for the queued copies, and release their resources."""
        self.wait()
        self._release()
        then, self._then = self._then, None
        if then is not None:
            then()

    def _release(self) -> None:
        while self._held:
            self._held.pop()()

    def close(self) -> None:
        """End the stream, whether or not its copies succeeded."""
        with suppress(DriverError):  # of the copies, or of a broken context
            self.wait()
        while self._held:
            with suppress(DriverError):
                self._release()
        if self._buffer is not None:
            driver.cuMemFreeHost(self._buffer.address)
        driver.cuStreamDestroy(self.handle)


@contextmanager
def streams_of(uuid: str, nbytes: int = 0) -> Iterator[list[Stream]]:
    """Yield streams of a GPU, whose context is current in the block, with buffers of ``nbytes`` bytes."""
    with gpu(uuid).current(), relaxed_captures(), ExitStack() as stack:
        streams = []
        for _ in range(STREAMS):
            streams.append(Stream(nbytes))
            stack.callback(streams[-1].close)
        yield streams


class _GpuCarrier:
    """Transfers between files and a GPU, double-buffered: the GPU copies one buffer while the other one is in use."""

    def __init__(self, streams: list[Stream], step: int) -> None:
        self._streams = deque(streams)
        self._step = step

    def buffer(self) -> memoryview:
        self._streams.rotate()
        self._streams[0].wait()
        return self._streams[0].buffer.view

    def store(self, place: int, _: int, data: memoryview, /) -> None:
        self._streams[0].copy(place, self._streams[0].buffer.address, len(data))

    def finish(self) -> None:
        for stream in self._streams:
            stream.wait()

    def pieces(self, place: int, _: int, nbytes: int, /) -> Iterator[memoryview]:
        coming: deque[tuple[Stream, int]] = deque()
        for start in range(0, nbytes, self._step):
            self._streams.rotate()
            stream, size = self._streams[0], min(self._step, nbytes - start)
            stream.copy(stream.buffer.address, place + start, size)
            coming.append((stream, size))
            if len(coming) == STREAMS:
                yield self._copied(*coming.popleft())
        while coming:
            yield self._copied(*coming.popleft())

    def _copied(self, stream: Stream, nbytes: int) -> memoryview:
        stream.wait()
        return stream.buffer.view[:nbytes]


@contextmanager
def gpu_carrier(uuid: str, step: int) -> Iterator[_GpuCarrier]:
    """Yield a carrier for a GPU, whose memory is mapped, writable for reading files.

    :param step: bytes transferred at a time.
    """
    with streams_of(uuid, step) as streams:
        yield _GpuCarrier(streams, step)
