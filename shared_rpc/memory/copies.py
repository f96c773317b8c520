"""Copies of objects in lower tiers: made from segments, and converted to segments again.

A copy is a segment too: its descriptor keeps it. Host memory and files are copied here, descriptor to descriptor; copies
that need a GPU driver are in :mod:`shared_rpc.memory.gpu_copies`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import NamedTuple

import msgspec

from shared_rpc.errors import CapabilityError, RecordError
from shared_rpc.memory.backends.host import HOST
from shared_rpc.memory.file_parts import (
    DIGEST,
    PART,
    Carrier,
    Part,
    PartError,
    SourceError,
    host_carrier,
    read_parts,
    write_parts,
)
from shared_rpc.memory.segments import Segment, new_segment_id
from shared_rpc.protocol.records import Mechanism, SegmentInfo, Tier

#: Mechanisms whose bytes are copied without a GPU.
ON_HOST: frozenset[Mechanism] = frozenset({"memfd", "file"})

#: Number of bytes after which a file is flushed to disk.
FLUSHED = 256 << 20

#: Called with the copied and the total bytes.
Progress = Callable[[int, int], None]
#: Called between the steps of a copy; returns True to cancel.
Cancelled = Callable[[], bool]


def ignore_progress(done: int, total: int) -> None:
    """Ignore the progress of a copy."""


class CopyCancelled(Exception):
    """The copy was cancelled and cleaned up."""


class LowerCopy(msgspec.Struct, eq=False):
    """The bytes of a segment in a lower tier. It owns the copy's descriptor.

    ``digest`` has the digests of its parts, for a file. ``revision`` is the number of the object's page before the bytes were
    copied, and is set by the owner.
    """

    segment: Segment
    tier: Tier
    digest: bytes = b""
    revision: int = 0

    def close(self) -> None:
        """Close the copy. Idempotent."""
        self.segment.close()


class CopyOrder(msgspec.Struct, eq=False):
    """One segment to be copied. Its segments are borrowed.

    :param wanted: the segment to make; for host memory of a GPU driver, another kind of host memory may be made.
    :param digest: the digests of the source's parts, for a file.
    :param target: the segment to write if it exists already, such as a file, or the memory of an earlier copy.
    """

    source: Segment
    wanted: SegmentInfo
    digest: bytes = b""
    target: Segment | None = None

    def duplicate(self) -> CopyOrder:
        """Return the same order with its own segments."""
        target = self.target.duplicate() if self.target is not None else None
        return CopyOrder(self.source.duplicate(), self.wanted, self.digest, target)

    def close(self) -> None:
        """Close the segments of an order that owns them."""
        self.source.close()
        if self.target is not None:
            self.target.close()


class Written(NamedTuple):
    """A segment with the bytes, and the digests of its parts if it is a file. The receiver owns the segment."""

    segment: Segment
    digest: bytes


class Steps:
    """Progress of a copy.

    :param total: total bytes to copy.
    """

    def __init__(self, total: int, progress: Progress, cancelled: Cancelled) -> None:
        self._total = total
        self._done = 0
        self._progress = progress
        self._cancelled = cancelled

    def check(self) -> None:
        """Check for cancellation.

        :raises CopyCancelled: if the copy was cancelled.
        """
        if self._cancelled():
            raise CopyCancelled

    def count(self, nbytes: int) -> None:
        """Report ``nbytes`` more copied bytes.

        :raises CopyCancelled: if the copy was cancelled.
        """
        self._done += nbytes
        self._progress(self._done, self._total)
        self.check()


def on_host(info: SegmentInfo) -> SegmentInfo:
    """Return the description for a new copy of a segment in host memory."""
    if info.mechanism in ("memfd", "host_vmm"):
        return info
    return msgspec.structs.replace(info, id=new_segment_id(), access="read_write", mechanism="host_vmm")


@contextmanager
def closing_all(made: Iterable[Written]) -> Iterator[None]:
    """Close the made segments if the block fails."""
    try:
        yield
    except BaseException:
        close_written(made)
        raise


def close_written(made: Iterable[Written]) -> None:
    """Close segments without a receiver."""
    for one in made:
        one.segment.close()


def copy_on_host(orders: Sequence[CopyOrder], steps: Steps) -> list[Written]:
    """Copy host memory to files, and files to host memory. From any thread; no step holds the interpreter's lock.

    :raises CapabilityError: if there is too little memory.
    :raises RecordError: with reason ``"damaged"`` if a file differs from the written bytes.
    :raises CopyCancelled: on cancellation.
    """
    made: dict[int, Written] = {}
    read: dict[Part, CopyOrder] = {}
    written: dict[Part, CopyOrder] = {}
    with closing_all(made.values()):
        for order in orders:
            target = order.target.duplicate() if order.target is not None else _host_segment(order.wanted)
            made[id(order)] = Written(target, b"")
            memory = order.source if order.wanted.mechanism == "file" else target
            parts = written if order.wanted.mechanism == "file" else read
            parts |= dict.fromkeys(parts_of(order, target, 0, memory.fileno()), order)
        write_files(written, made, host_carrier, steps)
        if read:
            with writing(next(iter(read.values())).wanted):
                read_files(read, host_carrier, steps)
        for order in orders:
            if order.wanted.mechanism == "memfd" and order.target is None:
                HOST.seal(made[id(order)].segment.fileno(), order.wanted.access)
    return [made[id(order)] for order in orders]


def _host_segment(wanted: SegmentInfo) -> Segment:
    segment = HOST.create(wanted.nbytes)
    segment.info = wanted
    return segment


@contextmanager
def reading(source: Segment) -> Iterator[None]:
    """Convert an error of the file system to one that names the unreadable source."""
    try:
        yield
    except OSError as error:
        raise RecordError(
            f"cannot read the copy of {source.info.nbytes} bytes, segment {source.info.id}: {error.strerror}",
            reason="unreadable",
        ) from error


@contextmanager
def writing(wanted: SegmentInfo) -> Iterator[None]:
    """Convert an error of the file system to one that names the unwritable target."""
    try:
        yield
    except OSError as error:
        place = "the spill directory" if wanted.mechanism == "file" else "host memory"
        raise CapabilityError(
            f"cannot write a copy of {wanted.nbytes} bytes, segment {wanted.id}, to {place}: {error.strerror}"
        ) from error


def parts_of(order: CopyOrder, target: Segment, place: int, memory: int = -1) -> list[Part]:
    """Return the parts of the file of an order, for a GPU's address or an offset in host memory."""
    nbytes = order.wanted.nbytes
    file = target if order.wanted.mechanism == "file" else order.source
    return [
        Part(
            file.fileno(),
            start,
            min(PART, nbytes - start),
            place + start,
            memory,
            order.digest[number * DIGEST : (number + 1) * DIGEST],
        )
        for number, start in enumerate(range(0, nbytes, PART))
    ]


def read_files(parts: Mapping[Part, CopyOrder], carrier: Callable[[], AbstractContextManager[Carrier]], steps: Steps) -> None:
    """Read the parts of copies in files, each with its order.

    :raises RecordError: if a copy cannot be read, or differs from the written bytes.
    :raises CopyCancelled: on cancellation.
    """
    try:
        read_parts(list(parts), carrier, lambda part: steps.count(part.nbytes))
    except PartError as error:
        part, order = error.part, parts[error.part]
        if error.problem is not None:
            with reading(order.source):
                raise error.problem from None
        raise RecordError(
            f"the copy of segment {order.wanted.name} in the spill directory is damaged: bytes {part.offset} to "
            f"{part.offset + part.nbytes} are not those that were written",
            reason="damaged",
        ) from None


def write_files(
    parts: Mapping[Part, CopyOrder],
    made: dict[int, Written],
    carrier: Callable[[], AbstractContextManager[Carrier]],
    steps: Steps,
) -> None:
    """Write copies to files, each part with its order, until they are on the disk.

    :param made: the files, by the id of their orders; they get their digests.
    :raises CapabilityError: if the disk refuses a write.
    :raises RecordError: if memory cannot be read.
    :raises CopyCancelled: on cancellation.
    """
    digests: dict[Part, bytes] = {}
    unflushed = 0

    def done(part: Part, digest: bytes) -> None:
        nonlocal unflushed
        digests[part] = digest
        unflushed += part.nbytes
        if unflushed >= FLUSHED:
            unflushed = 0
            flush(parts[part])
        steps.count(part.nbytes)

    def flush(order: CopyOrder) -> None:
        with writing(order.wanted):
            os.fdatasync(made[id(order)].segment.fileno())

    try:
        write_parts(list(parts), carrier, done)
    except PartError as error:
        order = parts[error.part]
        with reading(order.source) if isinstance(error, SourceError) else writing(order.wanted):
            raise error.problem or error from None
    by_order: dict[int, list[bytes]] = {}
    for part, order in parts.items():
        by_order.setdefault(id(order), []).append(digests[part])
    for number, found in by_order.items():
        made[number] = Written(made[number].segment, b"".join(found))
    for order in {id(order): order for order in parts.values()}.values():
        flush(order)  # errors of the disk are detected while the memory still exists
