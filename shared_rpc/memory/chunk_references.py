"""References of this process to chunks of another one's pool.

A chunk is in use until the tensors over it are gone **and** the work that this process has queued on its GPU is done, on
whichever stream it was queued. The end of a tensor is noticed in a finaliser, which enqueues; the safe point
:meth:`ChunkReferences.poll` marks the GPU's work with an event, and later asks whether it has passed. Nothing waits.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable

from shared_rpc.errors import CodecError
from shared_rpc.lifecycle.finalizer import FINALIZER, weakly
from shared_rpc.memory.mapping import MAPPINGS, Mapping, MappingHold
from shared_rpc.memory.segments import Backend

__all__ = ["ChunkReference", "ChunkReferences", "chunk_of", "keep"]

#: Before the work on a GPU is marked, every stream of torch is asked whether a CUDA graph is being captured on it: so it is
#: done for that many chunks, or bytes, together.
_BATCH, _BATCH_BYTES = 32, 16 << 20


class _ChunkPin:
    """The object that the tensors over one chunk hold."""

    __slots__ = ("__weakref__", "hold", "number", "reference")

    reference: ChunkReference

    def __init__(self, hold: MappingHold, number: int) -> None:
        self.hold = hold
        self.number = number


#: The attribute by which an object holds its pin.
_HELD = "_shared_rpc_chunk"


def keep(user: object, pin: object) -> None:
    """Have one more object keep a chunk, by the pin that its :class:`ChunkReference` gave."""
    setattr(user, _HELD, pin)


def chunk_of(user: object) -> int:
    """Return the number of the chunk that an object keeps, 0 for none."""
    pin = getattr(user, _HELD, None)
    return pin.number if isinstance(pin, _ChunkPin) else 0


class ChunkReference(weakref.ref[_ChunkPin]):
    """Weak reference to a pin, with the chunk, of which ``nbytes`` are used. Called, it gives the pin, see :func:`keep`."""

    __slots__ = ("backend", "mapping", "nbytes", "number")

    number: int
    nbytes: int
    backend: Backend
    mapping: Mapping

    # A weak reference takes its attributes after it is made; see ChunkReferences.acquire().


class ChunkReferences:
    """References of one session. Thread-safe.

    :param dropped: called, in a finaliser, when a chunk is not used any more, or soon will not be. It may only enqueue.
    """

    def __init__(self, dropped: Callable[[], object]) -> None:
        self._notify = dropped
        self._told = weakly(self._pin_gone)
        self._lock = threading.Lock()
        self._closed = False
        self._holds: dict[str, MappingHold] = {}
        self._references: set[ChunkReference] = set()
        self._dropped: deque[ChunkReference] = deque()
        #: About how many bytes that are; threads may disturb each other's count.
        self._dropped_bytes = 0
        #: Whether none of them lie on a GPU.
        self._cheap = True
        #: Dropped, and the work that may still use them: whether it has been done, by what is asked.
        self._fenced: deque[tuple[Callable[[], bool], list[int]]] = deque()
        self._returned: list[int] = []

    def acquire(self, number: int, nbytes: int, mapping: Mapping, users: Iterable[object]) -> None:
        """Keep a chunk while one of the objects lives, which take an attribute; then release it.

        :param mapping: of the arena that it lies in, which this process keeps from now on until :meth:`close`.
        :raises CodecError: if it is no arena.
        """
        FINALIZER.start()
        if not mapping.pooled:
            raise CodecError(f"chunk {number} is said to lie in segment {mapping.info.id}, which belongs to no pool")
        pin = _ChunkPin(self._hold(mapping), number)
        reference = ChunkReference(pin, self._told)
        reference.number, reference.nbytes, reference.backend, reference.mapping = number, nbytes, mapping.backend, mapping
        pin.reference = reference
        self._references.add(reference)
        self._cheap = self._cheap and mapping.backend.unmaps_in_background
        for user in users:
            setattr(user, _HELD, pin)

    def _hold(self, mapping: Mapping) -> MappingHold:
        hold = self._holds.get(mapping.info.id)
        if hold is None or hold.mapping is not mapping:
            hold = MAPPINGS.hold(mapping)
            if not self._closed:
                self._holds[mapping.info.id] = hold
        return hold

    def arena(self, segment_id: str) -> MappingHold | None:
        """Return what keeps an arena mapped, if a chunk of it was acquired before."""
        return self._holds.get(segment_id)

    def _pin_gone(self, reference: ChunkReference) -> None:
        # Runs in a finaliser: enqueue, nothing else.
        self._dropped_bytes += reference.nbytes
        self._dropped.append(reference)
        self._notify()

    def reference_of(self, user: object) -> ChunkReference | None:
        """Return the reference by which an object uses a chunk, if it does."""
        pin = getattr(user, _HELD, None)
        return pin.reference if isinstance(pin, _ChunkPin) and pin.reference in self._references else None

    def release(self, numbers: Iterable[int]) -> None:
        """Release chunks that came, and that nothing here has used."""
        self.requeue(numbers)
        self._notify()

    def requeue(self, numbers: Iterable[int]) -> None:
        """Take back numbers that :meth:`pop_returned` gave, and that could not be sent."""
        with self._lock:
            self._returned.extend(numbers)

    def poll(self, *, background: bool = False, look: bool = False) -> None:
        """Find chunks that nobody uses any more: a safe point, which does not wait.

        :param background: leave a GPU alone that may be disturbed here, and only look.
        :param look: only look, because there is no time to mark a GPU's work.
        """
        if (
            self._dropped
            and (self._cheap or not look)
            and (self._cheap or len(self._dropped) >= _BATCH or self._dropped_bytes >= _BATCH_BYTES)
        ):
            with self._lock:
                gone: dict[Backend, list[ChunkReference]] = {}
                self._dropped_bytes = 0
                for _ in range(len(self._dropped)):
                    reference = self._dropped.popleft()
                    gone.setdefault(reference.backend, []).append(reference)
                for backend, references in gone.items():
                    self._fence(backend, references, background)
        if not self._fenced:
            return
        with self._lock:
            for _ in range(len(self._fenced)):
                passed, numbers = self._fenced.popleft()
                if passed():
                    self._returned += numbers
                else:
                    self._fenced.append((passed, numbers))

    def _fence(self, backend: Backend, references: list[ChunkReference], background: bool) -> None:
        passed = backend.fence() if backend.unmaps_in_background or not background else None
        if passed is None:
            self._dropped_bytes += sum(reference.nbytes for reference in references)
            self._dropped.extend(references)
            return
        self._references.difference_update(references)
        self._fenced.append((passed, [reference.number for reference in references]))

    def drain(self) -> None:
        """Poll, after waiting for the GPU: where the memory is needed now."""
        waiting = [*self._dropped]
        done = {backend for backend in {reference.backend for reference in waiting} if backend.synchronize()}
        with self._lock:
            for reference in waiting:
                if reference.backend in done and reference in self._references:
                    self._dropped.remove(reference)
                    self._references.remove(reference)
                    self._returned.append(reference.number)
        self.poll()

    def pop_returned(self) -> list[int]:
        """Return the chunks that their pool is to be told of now."""
        if not self._returned:
            return []
        with self._lock:
            numbers, self._returned = self._returned, []
        return numbers

    @property
    def has_returned(self) -> bool:
        """Whether :meth:`pop_returned` has something."""
        return bool(self._returned)

    @property
    def has_fenced(self) -> bool:
        """Whether chunks wait for nothing but the GPU, and for a poll."""
        return bool(self._fenced)

    @property
    def in_use(self) -> int:
        """Chunks with tensors over them, or dropped and not polled."""
        return len(self._references)

    def close(self) -> None:
        """End the session: mappings go with the tensors over them."""
        self._closed = True
        self._holds = {}
