"""Segments: pieces of memory, each of which exists as long as a process holds its file descriptor."""

from __future__ import annotations

import os
import warnings
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol, TypeVar

import msgspec

from shared_rpc.errors import CapabilityError
from shared_rpc.forks import after_fork
from shared_rpc.memory.closing import CLOSER, LARGE, THREAD
from shared_rpc.protocol.records import EXPORTER_OWNED, Access, SegmentInfo, SegmentRef

if TYPE_CHECKING:
    from shared_rpc.protocol.frames import Frame

T = TypeVar("T")

#: Slabs that a client keeps mapped, and whose descriptors a session keeps: those of two workers, with each access. Their memory
#: stays as long.
KEPT_SLABS = 4


def new_segment_id() -> str:
    """Return an id that is unique among the segments of this host."""
    return os.urandom(8).hex()


class Descriptor(msgspec.Struct, eq=False, weakref=True):
    """An open file descriptor, closed with the last reference to this object."""

    number: int
    #: The memory that it keeps, None for a descriptor of another kind.
    info: SegmentInfo | None = None
    #: True if another process made it, and describes its content.
    foreign: bool = False

    def close(self) -> None:
        """Close it now, regardless of other references to this object. Idempotent."""
        number, self.number = self.number, -1
        if number >= 0:
            os.close(number)

    def __del__(self) -> None:
        if self.number >= 0:
            info = self.info
            if self.foreign:
                CLOSER.discard([self.number])
            elif info is None or info.nbytes < LARGE or not THREAD.spared:
                os.close(self.number)
            else:
                CLOSER.submit(self.number, info.nbytes, info.device)


class Segment(msgspec.Struct, eq=False, weakref=True):
    """A :class:`SegmentInfo` and the file descriptor that keeps its memory alive, None once it is closed.

    The object owns the descriptor, together with its duplicates: closing the last of them closes it. One that is dropped
    unclosed warns.
    """

    info: SegmentInfo
    descriptor: Descriptor | None = None

    @classmethod
    def owning(cls, info: SegmentInfo, fd: int, *, foreign: bool = False) -> Segment:
        """Create an owner of a descriptor.

        :param foreign: True if another process made it, and describes its content.
        """
        descriptor = Descriptor(fd, info, foreign)
        if info.mechanism in EXPORTER_OWNED:
            after_fork(descriptor.close)  # a forked child's copy would keep the memory until the child's end
        return cls(info, descriptor)

    @classmethod
    def received(cls, segments: Iterable[SegmentRef], frame: Frame) -> list[Segment]:
        """Return the segments of a frame's message, and remove their descriptors from the frame."""
        received: list[Segment] = []
        for number, segment in enumerate(segments):
            owner: Descriptor | None = frame.known.get(number)
            if owner is None:
                assert not isinstance(segment, str), "all known segments are in the frame"
                received.append(cls.owning(segment, frame.fds.pop(0)))
            else:
                assert owner.info is not None, "it is a segment's"
                received.append(cls(owner.info, owner))
        return received

    def fileno(self) -> int:
        """Return the descriptor's number, still owned by this object.

        :raises ValueError: if it is closed.
        """
        return self.owner.number

    @property
    def owner(self) -> Descriptor:
        """The descriptor, which stays open while this is referenced.

        :raises ValueError: if it is closed.
        """
        descriptor = self.descriptor
        if descriptor is None or descriptor.number < 0:
            raise ValueError(f"segment {self.info.id} is closed")
        return descriptor

    @property
    def closed(self) -> bool:
        """True if the descriptor was closed or given away."""
        return self.descriptor is None or self.descriptor.number < 0

    def duplicate(self, access: Access | None = None) -> Segment:
        """Return another owner of the same memory, by the same descriptor: a process may have few descriptors.

        :raises ValueError: if it is closed.
        """
        return Segment(self.info if access is None else msgspec.structs.replace(self.info, access=access), self.owner)

    def close(self) -> None:
        """Close the descriptor, unless a duplicate needs it. Idempotent."""
        self.descriptor = None

    def __enter__(self) -> Segment:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if self.descriptor is not None and self.descriptor.number >= 0:
            text = f"segment {self.info.id} was collected with its fd {self.fileno()} open: close the segment"
            warnings.warn(text, ResourceWarning, stacklevel=2)

    def __repr__(self) -> str:
        return f"Segment({self.info!r}, {'closed' if self.closed else f'fd={self.fileno()}'})"


class KnownSegments(dict[str, T]):
    """Segments whose descriptors the reader of a connection has, by id, for later replies: arenas, and the latest slabs.

    Both sides have one, and agree because both add to it in the order of the replies.
    """

    def __init__(self) -> None:
        super().__init__()
        self._slabs: deque[str] = deque()

    def add(self, info: SegmentInfo, value: T) -> None:
        """Add a new segment. Above the limit, the oldest slab is removed."""
        self[info.id] = value
        if info.slab:
            self._slabs.append(info.id)
            while len(self._slabs) > KEPT_SLABS:
                self.pop(self._slabs.popleft(), None)


def refer(segments: Iterable[Segment], known: Container[str]) -> tuple[list[SegmentRef], tuple[Descriptor, ...]]:
    """Return the segments for a message, and the descriptors to send with it.

    :param known: the ids of the segments that the reader has.
    :raises ValueError: if another segment is closed.
    """
    sent = [segment for segment in segments if segment.info.id not in known]
    refs = [segment.info.id if segment.info.id in known else segment.info for segment in segments]
    return refs, tuple([segment.owner for segment in sent])


class Backend(Protocol):
    """The contract of host memory and of one GPU's. Addresses are valid in this process only.

    Every implementation passes the conformance kit in ``tests/kit/conformance.py``.
    """

    @property
    def granularity(self) -> int:
        """Sizes are multiples of this many bytes."""

    def create(self, nbytes: int) -> Segment:
        """Allocate zeroed memory of at least ``nbytes`` bytes. The caller owns the segment.

        :raises CapabilityError: if the device has too little memory.
        """

    def map(self, fd: int, nbytes: int, access: Access, at: int | None = None) -> int:
        """Map a segment and return its address. The descriptor is borrowed, and may be closed afterwards.

        :param at: the address of a range of the same size left by :meth:`vacate`, which remains on failure. If the device
            :attr:`replaces`, also that of a mapping, which the new one replaces atomically.
        :raises CapabilityError: if this process cannot access the memory in that way.
        """

    @property
    def vacates(self) -> bool:
        """True if :meth:`vacate` is possible."""

    @property
    def replaces(self) -> bool:
        """True if :meth:`map` can replace another mapping in one step."""

    def vacate(self, address: int, nbytes: int) -> None:
        """Unmap like :meth:`unmap`, but reserve the range of addresses for a later :meth:`map`.

        An access to it ends this process, on a GPU its context.

        :raises CapabilityError: if addresses cannot be chosen with this mechanism; nothing has changed then.
        """

    def free_range(self, address: int, nbytes: int) -> None:
        """Free the range of a vacated mapping."""

    def seal(self, fd: int, access: Access = "read") -> None:
        """Forbid every later seal, if the device has seals; unless ``access`` is ``"read_write"``, also every later writable
        mapping. Existing mappings are unaffected.
        """

    @property
    def unmaps_in_background(self) -> bool:
        """True if a thread of the library may unmap at any time. On a GPU that would disturb the process's own work."""

    def synchronize(self) -> bool:
        """Wait until no queued work can access mapped memory; required before :meth:`unmap`.

        :returns: False if the device must not be waited for now, because it would break a CUDA graph's capture.
        """

    def copy(self, target: int, source: int, nbytes: int, stream: int = 0) -> None:
        """Copy bytes between two addresses on the device, in the order of a stream's work (a handle of CUDA's)."""

    def wait(self, stream: int = 0, seconds: float | None = None) -> bool:
        """Wait for a stream's work, for ``seconds`` at most; return True if it completed in time."""

    def fence(self) -> Callable[[], bool] | None:
        """Mark the presently queued work; return a function that returns True once all of it is complete.

        :returns: None if the device must not be marked now, because it would break a CUDA graph's capture.
        """

    def unmap(self, address: int, nbytes: int) -> None:
        """Undo :meth:`map`. The memory is freed with its last mapping and descriptor."""


@contextmanager
def gpu_support(what: str = "GPU memory") -> Iterator[None]:
    """Convert a failed import of the GPU bindings to an error that names the package to install.

    :param what: the purpose of the import.
    """
    try:
        yield
    except ImportError as error:
        raise CapabilityError(f"{what} needs cuda-bindings ({error}): pip install 'shared-rpc[cuda]'") from error
