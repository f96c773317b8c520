"""References of this process to chunks of another one's pool.

A chunk is in use until the tensors over it have ended **and** the work that this process has queued on its GPU is complete, on
all streams. The end of a tensor is detected in a finaliser, which enqueues; the safe point
:meth:`ChunkReferences.poll` marks the GPU's work with an event, and later checks that it has passed. Nothing blocks.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable

from shared_rpc.errors import CodecError
from shared_rpc.lifecycle.finalizer import FINALIZER
from shared_rpc.memory.mapping import MAPPINGS, Mapping, MappingHold
from shared_rpc.memory.segments import Backend

#: Marking GPU work first checks every stream of torch for the capture of a CUDA graph: up to this many chunks, or bytes, are
#: marked together, or those of so many seconds: a small pool is full before.
_BATCH, _BATCH_BYTES, _BATCH_SECONDS = 32, 16 << 20, 1.0


class _ChunkPin:
    """The object held by the tensors over one chunk."""

    __slots__ = ("__weakref__", "hold")

    def __init__(self, hold: MappingHold) -> None:
        self.hold = hold


#: The attribute of an object that holds its pin.
_HELD = "_shared_rpc_chunk"


class ChunkReference(weakref.ref[_ChunkPin]):
    """A weak reference to a pin, with the chunk and the bytes used of it."""

    __slots__ = ("backend", "nbytes", "number")

    number: int
    nbytes: int
    backend: Backend

    # A weak reference gets its attributes after construction; see ChunkReferences.acquire().


class ChunkReferences:
    """References of one session. Thread-safe.

    :param dropped: called, in a finaliser, when a chunk is unused, or soon will be. It must only enqueue.
    """

    def __init__(self, dropped: Callable[[], object] = lambda: None) -> None:
        self._notify = dropped
        self._lock = threading.RLock()  # a signal handler may close the client of the thread that has it
        self._closed = False
        #: Holds that keep the arenas of earlier chunks mapped, by the segments' ids.
        self.holds: dict[str, MappingHold] = {}
        self._references: set[ChunkReference] = set()
        #: References without a pin, until :meth:`poll` processes them.
        self.dropped: deque[ChunkReference] = deque()
        ended = self.dropped

        def enqueue(reference: ChunkReference) -> None:  # without a reference to this object, which has those of its chunks
            ended.append(reference)
            dropped()

        self._enqueue = enqueue
        #: The time at which GPU work was last marked (time.monotonic()).
        self._marked = time.monotonic()
        #: True if no chunk is on a GPU, so that there is no GPU work to wait for.
        self._cheap = True
        #: The backend and numbers of dropped chunks, and a function that returns True once the GPU work that may use them is
        #: complete. They wait only for the GPU and the next :meth:`poll`.
        self.fenced: deque[tuple[Backend, Callable[[], bool], list[int]]] = deque()
        #: Chunks for :meth:`returned` to return.
        self.free: list[int] = []

    def acquire(self, number: int, nbytes: int, mapping: Mapping, users: Iterable[object]) -> None:
        """Keep a chunk until the last object is collected, then release it. The objects keep the reference as an attribute.

        :param mapping: that of its arena, which this process keeps from now on until :meth:`close`.
        :raises CodecError: if it is not an arena.
        """
        if not FINALIZER.started:
            FINALIZER.start()
        if not mapping.pooled:
            raise CodecError(f"chunk {number} is announced in segment {mapping.info.id}, which belongs to no pool")
        hold = self.holds.get(mapping.info.id)
        if hold is None or hold.mapping is not mapping:
            hold = MAPPINGS.hold(mapping)
            if not self._closed:
                self.holds[mapping.info.id] = hold
        pin = _ChunkPin(hold)
        reference = ChunkReference(pin, self._enqueue)
        reference.number, reference.nbytes, reference.backend = number, nbytes, mapping.backend
        self._references.add(reference)
        if self._cheap:
            self._cheap = mapping.backend.unmaps_in_background
        for user in users:
            setattr(user, _HELD, pin)

    def release(self, numbers: Iterable[int]) -> None:
        """Release received chunks that were not used here."""
        self.requeue(numbers)
        self._notify()

    def requeue(self, numbers: Iterable[int]) -> None:
        """Take back numbers from :meth:`pop_returned` that could not be sent."""
        with self._lock:
            self.free.extend(numbers)

    def poll(self, *, background: bool = False, check_only: bool = False) -> None:
        """Find unused chunks: a safe point, which does not block.

        :param background: only check, on a GPU that must not be disturbed here.
        :param check_only: only check, without time to mark a GPU's work.
        """
        if not self.dropped:
            pass
        elif self._cheap:
            with self._lock:
                users = [self.dropped.popleft() for _ in range(len(self.dropped))]
                self._references.difference_update(users)
                self.free += [reference.number for reference in users]
        elif not check_only and (
            len(self.dropped) >= _BATCH
            or sum([reference.nbytes for reference in [*self.dropped]]) >= _BATCH_BYTES
            or time.monotonic() - self._marked >= _BATCH_SECONDS
        ):
            with self._lock:
                ended: dict[Backend, list[ChunkReference]] = {}
                for _ in range(len(self.dropped)):
                    reference = self.dropped.popleft()
                    ended.setdefault(reference.backend, []).append(reference)
                for backend, references in ended.items():
                    self._fence(backend, references, background)
        if not self.fenced:
            return
        with self._lock:
            for _ in range(len(self.fenced)):
                backend, passed, numbers = self.fenced.popleft()
                if passed():
                    self.free += numbers
                else:
                    self.fenced.append((backend, passed, numbers))

    def _fence(self, backend: Backend, references: list[ChunkReference], background: bool) -> None:
        passed = backend.fence() if backend.unmaps_in_background or not background else None
        if passed is None:
            self.dropped.extend(references)
            return
        self._marked = time.monotonic()
        self._references.difference_update(references)
        self.fenced.append((backend, passed, [reference.number for reference in references]))

    def pop_returned(self) -> list[int]:
        """Pop the chunks to report to their pool now."""
        if not self.free:
            return []
        with self._lock:
            numbers, self.free = self.free, []
        return numbers

    @property
    def in_use(self) -> int:
        """The number of chunks with tensors over them, or dropped and not polled."""
        return len(self._references)

    def close(self) -> None:
        """End the session: mappings end with the tensors over them."""
        self._closed = True
        self.holds = {}
