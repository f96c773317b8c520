"""Rings: the order of use of a channel's slots, in a page mapped by its processes.

A sender fills slots in turn, and each of its readers acknowledges them in turn. The page has a counter for each side: the
slots published by the sender, and those acknowledged by each reader. A slot can be refilled when every reader has
acknowledged its content. The counters wrap around at 32 bits.

::

    offset          size
        128 + 64 * n    4     the counter of side n: of the sender, number 0, or of a reader; waiting is for this word
                    4     0 before the side is taken, 1 while a process has it, 2 once that has closed it
                    4     the pid of that process, in its own pid namespace

The creator of the ring has its own side, number 61, until it closes it: it may become the missing sender or reader. A
process that has a side holds a lock of fcntl(2) (F_OFD_SETLK) on one byte of the page, which ends with the process in any
way: a side in state 1 without a lock belongs to a killed process. See
:mod:`shared_rpc.memory.revisions` for the page, whose first words are for revisions.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import time
from typing import Literal

from shared_rpc.errors import ChannelClosed, ConfigurationError, DeadlineExceeded
from shared_rpc.forks import after_fork
from shared_rpc.memory import futex
from shared_rpc.memory.backends.liveness import is_locked, lock
from shared_rpc.memory.revisions import SLICE, Page
from shared_rpc.memory.segments import Descriptor

#: Maximum number of readers, for which the page has space, and the number of the creator's side.
MOST_READERS, _CREATOR = 60, 61
_BEGIN, _STRIDE = 128, 64
_ABSENT, _PRESENT, _CLOSED = range(3)
#: Nanoseconds. Peers that are about to answer have done so by then; to sleep and to be woken takes as long.
_SPIN = 100_000 if len(os.sched_getaffinity(0)) > 1 else 0
_WORD = 0xFFFFFFFF


class _Side:
    """The words of one side."""

    def __init__(self, page: Page, number: int) -> None:
        self.number = number
        #: The byte of the page whose lock shows that the side's process lives.
        self.byte = _BEGIN + number
        self.address = page.address + _BEGIN + _STRIDE * number
        self._words = (ctypes.c_uint32 * 3).from_address(self.address)

    @property
    def count(self) -> int:
        """The number of slots published or acknowledged."""
        return int(self._words[0])

    def advance(self, slots: int = 1) -> None:
        """Add to the counter, after this process's earlier writes, and wake its waiters."""
        futex.fence()
        self._words[0] = (self._words[0] + slots) & _WORD
        futex.wake(self.address)

    @property
    def state(self) -> int:
        return int(self._words[1])

    @property
    def pid(self) -> int:
        return int(self._words[2])

    def become(self, state: int) -> None:
        """Change the state, for this process."""
        self._words[2] = os.getpid()
        futex.fence()
        self._words[1] = state
        futex.wake(self.address)


class Ring:
    """One process's view of a ring. Use it in one thread at a time.

    :param page: the page of the ring's counters.
    :param what: the channel, for errors.
    """

    def __init__(self, page: Page, slots: int, readers: int, what: str) -> None:
        self.slots = slots
        self._page = page
        self._what = what
        self._sides = [_Side(page, number) for number in range(readers + 1)]
        self._creator = _Side(page, _CREATOR)
        #: The side by which this process sends or receives.
        self._own: _Side | None = None
        #: The sides of this process, and the locks that represent them.
        self._locks: dict[_Side, Descriptor] = {}
        self._over = False

    def take(self, role: Literal["creator", "sender", "reader"]) -> None:
        """Take a side of the ring: the creator's, the sender's, or a missing reader's.

        In place of a reader that has closed its side, this one begins with the slots not acknowledged by that one.

        :raises ConfigurationError: if other processes have all such sides, or this one has another.
        :raises ChannelClosed: if a process that had one was killed.
        """
        if self._over:
            raise ConfigurationError(f"{self._what} was closed here: open it again")
        if any(holder.number < 0 for holder in self._locks.values()):
            raise ConfigurationError(f"{self._what} was opened by the parent of this process: open it here too")
        sides = {"creator": [self._creator], "sender": self._sides[:1], "reader": self._sides[1:]}[role]
        if self._own is not None:
            if self._own not in sides:
                raise ConfigurationError(f"this object sends or receives in {self._what}, and not both: open the channel again")
            return
        for side in sides:
            holder = Descriptor(os.open(f"/proc/self/fd/{self._page.fileno()}", os.O_RDWR | os.O_CLOEXEC))
            if not lock(holder.number, side.byte, 1):
                continue
            if side.state == _PRESENT:
                holder.close()  # the error's traceback may keep this frame, and the others must see the end
                raise self._closed(side, "ended")
            after_fork(holder.close)  # a child's copy would keep the lock of a killed parent
            self._locks[side] = holder
            side.become(_PRESENT)
            self._own = side if role != "creator" else None
            return
        raise ConfigurationError(
            f"{self._what} has a sender already, pid {self._sides[0].pid}"
            if role == "sender"
            else f"{self._what} has {len(self._sides) - 1} readers already: create it with more readers="
        )

    def leave(self) -> None:
        """Close this process's sides, visibly for the others."""
        self._over = True
        while self._locks:
            side, holder = self._locks.popitem()
            if holder.number >= 0:
                side.become(_CLOSED)
                lock(holder.number, side.byte, 1, fcntl.F_UNLCK)
                holder.close()

    @property
    def sender_pid(self) -> int:
        """The pid of the sender, in its own pid namespace."""
        return self._sides[0].pid

    @property
    def _taken(self) -> _Side:
        assert self._own is not None, "a side was taken"
        return self._own

    @property
    def turn(self) -> int:
        """The next slot for this side."""
        return self._taken.count % self.slots

    def advance(self) -> None:
        """Publish the slot to the readers, or acknowledge it."""
        self._taken.advance()

    def check_readers(self) -> None:
        """Check that all readers are present.

        :raises ChannelClosed: if one has closed its side, or its process has ended.
        """
        for side in self._sides[1:]:
            if self._is_over(side):
                raise self._closed(side, "closed" if side.state == _CLOSED else "ended")

    def given(self) -> bool:
        """Return True if this reader's slot is published. Later reads of the slot are at least as new."""
        given = self._sides[0].count != self._taken.count
        futex.fence()
        return given

    def acknowledged(self, pending: int) -> bool:
        """Return True if each reader has acknowledged all published slots except the last ``pending``.

        Later writes to the other slots come after the readers' reads.
        """
        behind = self._behind(pending)
        futex.fence()
        return behind is None

    def _behind(self, pending: int) -> tuple[_Side, int] | None:
        """Return a reader with more than ``pending`` slots to acknowledge, and its counter."""
        given = self._sides[0].count
        for side in self._sides[1:]:
            count = side.count
            if (given - count) & _WORD > pending:
                return side, count
        return None

    # Waits are brief, so that callers can do other work in between.

    def wait_acknowledged(self, pending: int, until: float) -> None:
        """Wait briefly until a reader acknowledges more, if one has to, see :meth:`acknowledged`.

        :param until: the deadline, on the clock of time.monotonic().
        :raises DeadlineExceeded: if that passes first.
        :raises ChannelClosed: if that reader has closed its side, or its process has ended.
        """
        behind = self._behind(pending)
        if behind is not None:
            self._wait(*behind, until)

    def wait_given(self, until: float) -> None:
        """Wait briefly until the sender publishes this reader's slot. Otherwise like :meth:`wait_acknowledged`."""
        seen = self._sides[0].count
        if seen == self._taken.count:
            self._wait(self._sides[0], seen, until)

    def _wait(self, side: _Side, seen: int, until: float) -> None:
        spun = time.perf_counter_ns() + _SPIN
        while time.perf_counter_ns() < spun:
            if side.count != seen:
                return
        state = side.state
        if state == _ABSENT and self._creator.state == _PRESENT and self._is_over(self._creator):
            raise self._closed(self._creator, "ended")  # it may be the missing peer
        if self._is_over(side):
            futex.fence()
            if side.count == seen:  # no progress before its end
                raise self._closed(side, "closed" if side.state == _CLOSED else "ended")
        left = until - time.monotonic()
        if left <= 0:
            role = "the sender" if side.number == 0 else f"reader {side.number}"
            has = "has not come yet" if state == _ABSENT else f"(pid {side.pid}) has not given or acknowledged a slot"
            raise DeadlineExceeded(f"{role} of {self._what} {has} in time")
        futex.wait(side.address, seen, min(left, SLICE))

    def _closed(self, side: _Side, reason: str) -> ChannelClosed:
        role = {0: "the sender", _CREATOR: "the creator"}.get(side.number, f"reader {side.number}")
        how = "has closed its side" if reason == "closed" else "was killed, or ended without closing its side"
        return ChannelClosed(f"{role} of {self._what} (pid {side.pid}) {how}", reason=reason, pid=side.pid)

    def _is_over(self, side: _Side) -> bool:
        """Return True if a side was closed, or its process has ended."""
        if side.state != _PRESENT:
            return side.state == _CLOSED
        return not is_locked(self._page.fileno(), side.byte, 1)
