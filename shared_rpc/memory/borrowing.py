"""What this process uses of another one's pool.

A chunk is borrowed until the tensors over it are gone **and** the work that this process has queued on its GPU is done, on
whichever stream it was queued. The end of a tensor is noticed in a finaliser, which enqueues; :meth:`Borrower.settle`, a safe
point, marks the GPU's work with an event, and later looks whether it has passed. Nothing waits.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable

from shared_rpc.errors import CodecError
from shared_rpc.lifecycle.finalizer import REAPER, weakly
from shared_rpc.memory.mapping import MAPPINGS, Mapping, MappingHold
from shared_rpc.memory.segments import Backend

__all__ = ["Borrower", "Loan", "chunk_of", "keep"]

#: Before the work on a GPU is marked, every stream of torch is asked whether a CUDA graph is being captured on it: so it is
#: done for that many chunks, or bytes, together.
_BATCH, _BATCH_BYTES = 32, 16 << 20


class _Pin:
    """What the tensors over one chunk hold."""

    __slots__ = ("__weakref__", "hold", "loan", "number")

    loan: Loan

    def __init__(self, hold: MappingHold, number: int) -> None:
        self.hold = hold
        self.number = number


#: The attribute by which an object holds its pin.
_HELD = "_shared_rpc_chunk"


def keep(user: object, pin: object) -> None:
    """Have one more object keep a chunk, by what its :class:`Loan` gave."""
    setattr(user, _HELD, pin)


def chunk_of(user: object) -> int:
    """The number of the chunk that an object was lent, 0 for none."""
    pin = getattr(user, _HELD, None)
    return pin.number if isinstance(pin, _Pin) else 0


class Loan(weakref.ref[_Pin]):
    """A pin's end, and the chunk it is about, of which ``nbytes`` are used.

    Called, it gives what keeps the chunk, see :func:`keep`; None once nothing does.
    """

    __slots__ = ("backend", "mapping", "nbytes", "number")

    number: int
    nbytes: int
    backend: Backend
    mapping: Mapping

    # A weak reference takes its attributes after it is made; see Borrower.lend().


class Borrower:
    """The chunks that this process has borrowed in one session. Thread-safe.

    :param dropped: called, in a finaliser, when a chunk is not used any more, or soon will not be. It may only enqueue.
    """

    def __init__(self, dropped: Callable[[], object]) -> None:
        self._notify = dropped
        self._told = weakly(self._pin_gone)
        self._lock = threading.Lock()
        self._closed = False
        self._holds: dict[str, MappingHold] = {}
        self._loans: set[Loan] = set()
        self._dropped: deque[Loan] = deque()
        #: About how many bytes that are; threads may disturb each other's count.
        self._dropped_bytes = 0
        #: Whether none of them lie on a GPU.
        self._cheap = True
        #: Dropped, and the work that may still use them: whether it has been done, by what is asked.
        self._fenced: deque[tuple[Callable[[], bool], list[int]]] = deque()
        self._returned: list[int] = []

    def lend(self, number: int, nbytes: int, mapping: Mapping, users: Iterable[object]) -> None:
        """Keep a chunk while one of the objects lives, which take an attribute; then it is given back.

        :param mapping: of the arena that it lies in, which this process keeps from now on until :meth:`close`.
        :raises CodecError: if it is no arena.
        """
        REAPER.start()
        if not mapping.pooled:
            raise CodecError(f"chunk {number} is said to lie in segment {mapping.info.id}, which belongs to no pool")
        pin = _Pin(self._hold(mapping), number)
        loan = Loan(pin, self._told)
        loan.number, loan.nbytes, loan.backend, loan.mapping = number, nbytes, mapping.backend, mapping
        pin.loan = loan
        self._loans.add(loan)
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
        """What keeps an arena mapped that something was borrowed of before."""
        return self._holds.get(segment_id)

    def _pin_gone(self, loan: Loan) -> None:
        # Runs in a finaliser: enqueue, nothing else.
        self._dropped_bytes += loan.nbytes
        self._dropped.append(loan)
        self._notify()

    def loan_of(self, user: object) -> Loan | None:
        """The loan by which an object uses a chunk, if it does."""
        pin = getattr(user, _HELD, None)
        return pin.loan if isinstance(pin, _Pin) and pin.loan in self._loans else None

    def unused(self, numbers: Iterable[int]) -> None:
        """Give back chunks that came, and that nothing here has used."""
        self.put_back(numbers)
        self._notify()

    def put_back(self, numbers: Iterable[int]) -> None:
        """What :meth:`returned` gave, and could not be told."""
        with self._lock:
            self._returned.extend(numbers)

    def settle(self, *, background: bool = False, look: bool = False) -> None:
        """A safe point: see which chunks nobody uses any more. Does not wait.

        :param background: leave a GPU alone that may be disturbed here, and only look.
        :param look: only look, because there is no time to mark a GPU's work.
        """
        if (
            self._dropped
            and (self._cheap or not look)
            and (self._cheap or len(self._dropped) >= _BATCH or self._dropped_bytes >= _BATCH_BYTES)
        ):
            with self._lock:
                gone: dict[Backend, list[Loan]] = {}
                self._dropped_bytes = 0
                for _ in range(len(self._dropped)):
                    loan = self._dropped.popleft()
                    gone.setdefault(loan.backend, []).append(loan)
                for backend, loans in gone.items():
                    self._fence(backend, loans, background)
        if not self._fenced:
            return
        with self._lock:
            for _ in range(len(self._fenced)):
                passed, numbers = self._fenced.popleft()
                if passed():
                    self._returned += numbers
                else:
                    self._fenced.append((passed, numbers))

    def _fence(self, backend: Backend, loans: list[Loan], background: bool) -> None:
        passed = backend.fence() if backend.unmaps_in_background or not background else None
        if passed is None:
            self._dropped_bytes += sum(loan.nbytes for loan in loans)
            self._dropped.extend(loans)
            return
        self._loans.difference_update(loans)
        self._fenced.append((passed, [loan.number for loan in loans]))

    def wait(self) -> None:
        """Settle everything, after waiting for the GPU: where somebody needs the memory now."""
        waiting = [*self._dropped]
        done = {backend for backend in {loan.backend for loan in waiting} if backend.synchronize()}
        with self._lock:
            for loan in waiting:
                if loan.backend in done and loan in self._loans:
                    self._dropped.remove(loan)
                    self._loans.remove(loan)
                    self._returned.append(loan.number)
        self.settle()

    def returned(self) -> list[int]:
        """The chunks to give back now; who takes them must tell their pool."""
        if not self._returned:
            return []
        with self._lock:
            numbers, self._returned = self._returned, []
        return numbers

    @property
    def has_returned(self) -> bool:
        """Whether :meth:`returned` has something."""
        return bool(self._returned)

    @property
    def has_fenced(self) -> bool:
        """Whether chunks wait for nothing but the GPU, and for somebody who asks it."""
        return bool(self._fenced)

    @property
    def in_use(self) -> int:
        """Chunks with tensors over them, or dropped and not settled."""
        return len(self._loans)

    def close(self) -> None:
        """The session ended: mappings go with the tensors over them."""
        self._closed = True
        self._holds = {}
