"""Rings: whose turn it is with the slots of a channel, in a page that its processes map.

A sender fills slots in turn, and each of its readers acknowledges them in turn. The page has a count for each side: how many
slots the sender has given, and how many each reader has acknowledged. A slot can be filled again when every reader has
acknowledged what was in it. The counts wrap around at 32 bits.

::

    offset          size
    128 + 64 * n    4     the count of side n: of the sender, which is number 0, or of a reader; waiting is for this word
                    4     0 before the side is taken, 1 while a process has it, 2 once that has closed it
                    4     the pid of that process, in its own pid namespace

Whoever has made the ring has a side of its own, number 61, until it closes it: while the sender or a reader has not come, it
may be that. A process that has a side holds a lock of fcntl(2) (F_OFD_SETLK) on one byte of the page, which ends with the
process, however that ends: a side in state 1 without a lock is one whose process was killed. See
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
from shared_rpc.memory.revisions import FLOCK, SLICE, Page
from shared_rpc.memory.segments import Descriptor

#: The most readers, whose words the page has space for, and the number of the maker's side.
MOST_READERS, _MAKER = 60, 61
_BEGIN, _STRIDE = 128, 64
_ABSENT, _PRESENT, _CLOSED = range(3)
_WORD = 0xFFFFFFFF


class _Side:
    """The words of one side."""

    def __init__(self, page: Page, number: int) -> None:
        self.number = number
        self.address = page.address + _BEGIN + _STRIDE * number
        self._words = (ctypes.c_uint32 * 3).from_address(self.address)

    @property
    def count(self) -> int:
        """How many slots it has given or acknowledged. Later reads of a slot are at least as new."""
        count = int(self._words[0])
        futex.fence()
        return count

    def advance(self, slots: int = 1) -> None:
        """Add to the count, after what this process wrote before, and wake who waits for it."""
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

    def flock(self, kind: int) -> bytes:
        """Return the argument of fcntl(2) for this side's byte."""
        return FLOCK.pack(kind, os.SEEK_SET, _BEGIN + self.number, 1, 0)


class Ring:
    """One process's view of a ring. A thread at a time may use it.

    :param page: the page of the ring's counts.
    :param what: the channel, for errors.
    """

    def __init__(self, page: Page, slots: int, readers: int, what: str) -> None:
        self.slots = slots
        self._page = page
        self._what = what
        self._sides = [_Side(page, number) for number in range(readers + 1)]
        self._maker = _Side(page, _MAKER)
        #: The side by which this process sends or receives.
        self._own: _Side | None = None
        #: The sides that this process has, and the locks that say so.
        self._locks: dict[_Side, Descriptor] = {}
        self._over = False

    def take(self, role: Literal["maker", "sender", "reader"]) -> None:
        """Have a side of the ring from here on: that of its maker, of its sender, or of a reader that is not there.

        In place of a reader that has closed its side, this one begins with what that one has not acknowledged.

        :raises ConfigurationError: if other processes have all such sides, or this one has another.
        :raises ChannelClosed: if a process that had one was killed.
        """
        if self._over:
            raise ConfigurationError(f"{self._what} was closed here: open it again")
        if any(lock.number < 0 for lock in self._locks.values()):
            raise ConfigurationError(f"{self._what} was opened by the parent of this process: open it here too")
        sides = {"maker": [self._maker], "sender": self._sides[:1], "reader": self._sides[1:]}[role]
        if self._own is not None:
            if self._own not in sides:
                raise ConfigurationError(f"this object sends or receives in {self._what}, and not both: open the channel again")
            return
        for side in sides:
            lock = Descriptor.opened(os.open, f"/proc/self/fd/{self._page.fileno()}", os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.fcntl(lock.number, fcntl.F_OFD_SETLK, side.flock(fcntl.F_WRLCK))
            except (BlockingIOError, PermissionError):
                continue
            if side.state == _PRESENT:
                raise self._closed(side, "ended")
            after_fork(lock.close)  # a child's copy would keep the lock of a killed parent
            self._locks[side] = lock
            side.become(_PRESENT)
            self._own = side if role != "maker" else None
            return
        raise ConfigurationError(
            f"{self._what} has a sender already, pid {self._sides[0].pid}"
            if role == "sender"
            else f"{self._what} has {len(self._sides) - 1} readers already: create it with more readers="
        )

    def leave(self) -> None:
        """Give this process's sides back. The others see that they were closed."""
        self._over = True
        while self._locks:
            side, lock = self._locks.popitem()
            if lock.number >= 0:
                side.become(_CLOSED)
                fcntl.fcntl(lock.number, fcntl.F_OFD_SETLK, side.flock(fcntl.F_UNLCK))
                lock.close()

    @property
    def sender_pid(self) -> int:
        """The pid of the sender, in its own pid namespace."""
        return self._sides[0].pid

    @property
    def turn(self) -> int:
        """The slot that is next for this side."""
        assert self._own is not None, "a side was taken"
        return self._own.count % self.slots

    def advance(self) -> None:
        """Give the slot to the readers, or acknowledge it."""
        assert self._own is not None, "a side was taken"
        self._own.advance()

    def check_readers(self) -> None:
        """Check that no reader has gone.

        :raises ChannelClosed: if one has closed its side, or its process has ended.
        """
        for side in self._sides[1:]:
            if self._is_over(side):
                raise self._closed(side, "closed" if side.state == _CLOSED else "ended")

    def given(self) -> bool:
        """Return whether this reader's slot is given."""
        assert self._own is not None, "a side was taken"
        return self._sides[0].count != self._own.count

    def acknowledged(self, pending: int) -> bool:
        """Return whether each reader has acknowledged what the sender gave, but for the last ``pending`` slots."""
        return self._behind(pending) is None

    def _behind(self, pending: int) -> tuple[_Side, int] | None:
        """Return a reader that has more than so many slots to acknowledge, and its count."""
        given = self._sides[0].count
        for side in self._sides[1:]:
            count = side.count
            if (given - count) & _WORD > pending:
                return side, count
        return None

    # Waits end after a moment, so that other things can happen in between.

    def wait_acknowledged(self, pending: int, until: float) -> None:
        """Wait for a moment until a reader acknowledges more, if one has to, see :meth:`acknowledged`.

        :param until: when to give up, in terms of time.monotonic().
        :raises DeadlineExceeded: if that passes first.
        :raises ChannelClosed: if that reader has closed its side, or its process has ended.
        """
        behind = self._behind(pending)
        if behind is not None:
            self._wait(*behind, until)

    def wait_given(self, until: float) -> None:
        """Wait for a moment until the sender gives this reader's slot. For the rest see :meth:`wait_acknowledged`."""
        assert self._own is not None, "a side was taken"
        seen = self._sides[0].count
        if seen == self._own.count:
            self._wait(self._sides[0], seen, until)

    def _wait(self, side: _Side, seen: int, until: float) -> None:
        state = side.state
        if state == _ABSENT and self._maker.state == _PRESENT and self._is_over(self._maker):
            raise self._closed(self._maker, "ended")  # it may be who was to come
        if self._is_over(side) and side.count == seen:  # it did nothing more before its end
            raise self._closed(side, "closed" if side.state == _CLOSED else "ended")
        left = until - time.monotonic()
        if left <= 0:
            role = "the sender" if side.number == 0 else f"reader {side.number}"
            has = "has not come yet" if state == _ABSENT else f"(pid {side.pid}) has not given or acknowledged a slot"
            raise DeadlineExceeded(f"{role} of {self._what} {has} in time")
        futex.wait(side.address, seen, min(left, SLICE))

    def _closed(self, side: _Side, reason: str) -> ChannelClosed:
        role = {0: "the sender", _MAKER: "the maker"}.get(side.number, f"reader {side.number}")
        how = "has closed its side" if reason == "closed" else "was killed, or ended without closing its side"
        return ChannelClosed(f"{role} of {self._what} (pid {side.pid}) {how}", reason=reason, pid=side.pid)

    def _is_over(self, side: _Side) -> bool:
        """Return whether a side was closed, or its process has ended."""
        if side.state != _PRESENT:
            return side.state == _CLOSED
        asked = fcntl.fcntl(self._page.fileno(), fcntl.F_OFD_GETLK, side.flock(fcntl.F_WRLCK))
        return bool(FLOCK.unpack(asked)[0] == fcntl.F_UNLCK)
