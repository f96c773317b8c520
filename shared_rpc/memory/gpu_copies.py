"""Copies by a GPU's driver: between a GPU, host memory and files.

Allocating and mapping overlaps with copying. Host memory stays mapped until the copy is reported as dropped: mapping it takes
as long as copying it (measured on an H200: 0.3 s for 8 GiB).
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import msgspec
from cuda.bindings import driver

from shared_rpc.errors import CapabilityError, RecordError
from shared_rpc.memory.backends.choice import backend_for
from shared_rpc.memory.backends.cuda import DriverError
from shared_rpc.memory.backends.host import HOST
from shared_rpc.memory.copies import (
    CopyOrder,
    Steps,
    Written,
    closing_all,
    parts_of,
    read_files,
    write_files,
)
from shared_rpc.memory.file_parts import Part, carrier_of
from shared_rpc.memory.gpu_streams import PORTABLE, STREAMS, Stream, gpu, streams_of
from shared_rpc.memory.segments import Segment
from shared_rpc.protocol.records import Mechanism, SegmentInfo

#: Mechanisms of host memory, which stays mapped.
_KEPT: frozenset[Mechanism] = frozenset({"host_vmm", "memfd"})


class _Mapped(msgspec.Struct, eq=False):
    """Host memory mapped for a GPU, for current and later copies."""

    address: int
    unmap: Callable[[], None]
    users: int = 0
    #: True if the copy was dropped, so that the last user unmaps it.
    forgotten: bool = False


class GpuCopies:
    """Copies of objects of this process's GPUs. From any thread; copies of several threads run concurrently."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._mapped: dict[tuple[str, str], _Mapped] = {}
        #: GPUs whose driver cannot allocate host memory.
        self._without: set[str] = set()

    def copy(self, orders: Sequence[CopyOrder], steps: Steps) -> list[Written]:
        """Make the ordered segments, those of each GPU in sequence.

        :raises CapabilityError: if there is too little memory, or the driver fails.
        :raises RecordError: with reason ``"damaged"`` if a file differs from the written bytes, or ``"unreadable"`` if a copy
            cannot be read or mapped.
        :raises CopyCancelled: on cancellation.
        """
        by_gpu: dict[str, list[CopyOrder]] = {}
        for order in orders:
            by_gpu.setdefault(_gpu_of(order), []).append(order)
        made: dict[int, Written] = {}
        with closing_all(made.values()):
            try:
                for uuid, some in by_gpu.items():
                    self._copy_all(some, uuid, made, steps)
            except BaseException:
                self.forget([one.segment.info.id for one in made.values()])
                raise
        return [made[id(order)] for order in orders]

    def _copy_all(self, orders: Sequence[CopyOrder], uuid: str, made: dict[int, Written], steps: Steps) -> None:
        """Make the segments of one GPU."""
        try:
            with streams_of(uuid) as streams:
                reads = [order for order in orders if order.source.info.mechanism == "file"]
                read_files(self._parts(reads, uuid, streams[0], made, steps), carrier_of(uuid), steps)
                writes = [order for order in orders if order.wanted.mechanism == "file"]
                write_files(self._parts(writes, uuid, streams[0], made, steps), made, carrier_of(uuid), steps)
                others = [order for order in orders if order not in (*reads, *writes)]
                for number, order in enumerate(others):
                    self._copy(order, uuid, streams[number % STREAMS], made, steps)
                for number in range(STREAMS):
                    streams[(len(others) + number) % STREAMS].finish()
        except DriverError as error:
            raise CapabilityError(f"cannot copy memory of GPU {uuid}: {error}") from error

    def _copy(self, order: CopyOrder, uuid: str, stream: Stream, made: dict[int, Written], steps: Steps) -> None:
        """Make one segment, and queue the copy of its bytes."""
        stream.finish()
        steps.check()
        target = self._target(order, uuid, made)
        with _mapping_a_copy(order):
            source = self._map(order.source, uuid, stream, keep=True)
        into = self._map(target, uuid, stream, keep=True)
        stream.copy(into, source, order.wanted.nbytes)
        stream.then(functools.partial(steps.count, order.wanted.nbytes))

    def _parts(
        self, orders: Sequence[CopyOrder], uuid: str, stream: Stream, made: dict[int, Written], steps: Steps
    ) -> dict[Part, CopyOrder]:
        """Make the segments copied from or to files; return the parts, whose memory is mapped until the stream finishes."""
        parts: dict[Part, CopyOrder] = {}
        for order in orders:
            steps.check()
            target = self._target(order, uuid, made)
            memory = order.source if order.wanted.mechanism == "file" else target
            parts |= dict.fromkeys(parts_of(order, target, self._map(memory, uuid, stream, keep=False)), order)
        return parts

    def _target(self, order: CopyOrder, uuid: str, made: dict[int, Written]) -> Segment:
        """Return the target segment of an order."""
        target = order.target.duplicate() if order.target is not None else self._create(order.wanted, uuid)
        made[id(order)] = Written(target, b"")
        return target

    def _create(self, wanted: SegmentInfo, uuid: str) -> Segment:
        if wanted.mechanism == "host_vmm":
            return self._create_host_memory(wanted, uuid)
        segment = backend_for(wanted.device, wanted.mechanism).create(wanted.nbytes)
        segment.info = wanted
        return segment

    def _create_host_memory(self, wanted: SegmentInfo, uuid: str) -> Segment:
        """Allocate host memory by the driver, or by the kernel if the driver cannot."""
        if uuid not in self._without:
            try:
                backend = backend_for(uuid, "host_vmm")
                if wanted.nbytes % backend.granularity == 0:
                    segment = backend.create(wanted.nbytes)
                    segment.info = wanted
                    return segment
            except (CapabilityError, DriverError) as error:
                problem = error if isinstance(error, DriverError) else error.__cause__
                if isinstance(problem, DriverError) and problem.code == driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
                    raise  # the kernel would make it, and end a process for it when it is written
                self._without.add(uuid)
        segment = HOST.create(wanted.nbytes)
        segment.info = msgspec.structs.replace(wanted, device="cpu", mechanism="memfd", nbytes=segment.info.nbytes)
        return segment

    def _map(self, segment: Segment, uuid: str, stream: Stream, *, keep: bool) -> int:
        """Map a segment until the stream's copy has ended, and return its address.

        :param keep: True to keep host memory mapped until its copy is dropped.
        """
        info = segment.info
        if info.mechanism not in _KEPT:
            backend = backend_for(info.device, info.mechanism)
            address = backend.map(segment.fileno(), info.nbytes, "read_write")
            stream.holds(functools.partial(backend.unmap, address, info.nbytes))
            return address
        key = info.id, uuid
        with self._lock:
            mapped = self._mapped.get(key)
            if mapped is None:
                mapped = _map_host_memory(segment, uuid)
                mapped.forgotten = not keep
                if keep:
                    self._mapped[key] = mapped
            mapped.users += 1
        stream.holds(functools.partial(self._leave, mapped))
        return mapped.address

    def _leave(self, mapped: _Mapped) -> None:
        with self._lock:
            mapped.users -= 1
            unused = mapped.forgotten and not mapped.users
        if unused:
            mapped.unmap()

    def forget(self, copies: Sequence[str]) -> None:
        """Unmap host memory of dropped copies; this may take as long as mapping it."""
        gone = set(copies)
        with self._lock:
            found = [(key, mapped) for key, mapped in self._mapped.items() if key[0] in gone]
            for key, mapped in found:
                del self._mapped[key]
                mapped.forgotten = True
            unused = [mapped for _, mapped in found if not mapped.users]
        for mapped in unused:
            mapped.unmap()

    def __len__(self) -> int:
        return len(self._mapped)


def _gpu_of(order: CopyOrder) -> str:
    devices = [info.device for info in (order.source.info, order.wanted) if info.device != "cpu"]
    if not devices:
        raise CapabilityError(f"segment {order.source.info.id} of {order.source.info.mechanism!r} memory is on no GPU")
    return devices[0]


#: Codes of a driver for a descriptor of the wrong kind of memory; driver 580 answers UNKNOWN to any other file.
_STRANGE = (
    driver.CUresult.CUDA_ERROR_INVALID_VALUE,
    driver.CUresult.CUDA_ERROR_INVALID_HANDLE,
    driver.CUresult.CUDA_ERROR_UNKNOWN,
)


@contextmanager
def _mapping_a_copy(order: CopyOrder) -> Iterator[None]:
    """Convert the error for a copy that no process can map to one that reports its loss.

    Lack of memory, or a failed driver, does not indicate a lost copy.
    """
    try:
        yield
    except CapabilityError as error:
        info, cause = order.source.info, error.__cause__
        try:
            if info.mechanism == "memfd":
                HOST.check(order.source.fileno(), info.nbytes)
            strange = info.mechanism == "host_vmm" and isinstance(cause, DriverError) and cause.code in _STRANGE
        except CapabilityError:
            strange = True
        if not strange:
            raise
        raise RecordError(
            f"cannot map the copy of {info.nbytes} bytes in host memory, segment {info.id}: {error}", reason="unreadable"
        ) from error


def _map_host_memory(segment: Segment, uuid: str) -> _Mapped:
    """Map host memory for copies by the GPU, whose context is current."""
    fd, nbytes = segment.fileno(), segment.info.nbytes
    if segment.info.mechanism == "host_vmm":
        backend = backend_for(uuid, "host_vmm")
        address = backend.map(fd, nbytes, "read_write")
        return _Mapped(address, functools.partial(backend.unmap, address, nbytes))
    address = HOST.map(fd, nbytes, "read_write")
    # If the driver does not pin it, the driver copies through memory of its own.
    pinned = driver.cuMemHostRegister(address, nbytes, PORTABLE)[0] == driver.CUresult.CUDA_SUCCESS

    def unmap() -> None:
        if pinned:
            with gpu(uuid).current():
                driver.cuMemHostUnregister(address)
        HOST.unmap(address, nbytes)

    return _Mapped(address, unmap)
